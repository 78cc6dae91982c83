"""Convolutions in canonical order, for loops on a CPU.

Inside any loop, XLA's CPU compiler leaves a convolution whose dimension numbers are not canonical (NHWC, HWIO, NHWC) on
a slow path; autodiff writes filter gradients so. The same convolution between transposes takes the fast path:
one filter gradient of 256 rows of 16 × 16 × 32 with a 3 × 3 × 64 filter took 2,001 ms in a loop as written and 27 ms so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params
from jax.extend.core.primitives import conv_general_dilated_p

from microbatch.jax._programs import bind


def has_convolution(jaxpr: Jaxpr) -> bool:
    """Whether the program, or a program inside it, convolves."""
    return any(
        eqn.primitive is conv_general_dilated_p
        or any(has_convolution(inner) for inner in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def canonical_convolutions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` with every convolution in canonical order where it is compiled for a CPU; the same values."""

    def rewritten(*args: Any) -> Any:
        closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        leaves = jax.tree.leaves(args)
        out = _run(closed, leaves)
        return jax.tree.unflatten(jax.tree.structure(out_shape), out)

    return rewritten


def _run(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates the program equation by equation, convolutions in canonical order."""
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "shard_map":
            # What runs on one device cannot be traced here; its maker has seen to it.
            out = bind(eqn, values)
        elif eqn.primitive is conv_general_dilated_p:
            out = [_on_cpu_canonical(values, eqn.params)]
        else:
            out = bind(eqn, values, _rewrite_inner(eqn.params))
        env |= zip(eqn.outvars, out, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _on_cpu_canonical(operands: list[Any], params: dict[str, Any]) -> jax.Array:
    as_written = lambda lhs, rhs: conv_general_dilated_p.bind(lhs, rhs, **params)
    if _is_canonical(params["dimension_numbers"]):
        return as_written(*operands)
    canonical = lambda lhs, rhs: _canonical(lhs, rhs, params)
    return lax.platform_dependent(*operands, cpu=canonical, default=as_written)


def _canonical(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """The convolution with features last, between transposes."""
    numbers = params["dimension_numbers"]
    features_last = lambda spec: (spec[0], *spec[2:], spec[1])
    out_first = lambda spec: (*spec[2:], spec[1], spec[0])
    rank = len(numbers.lhs_spec)
    space = tuple(range(1, rank - 1))
    plain = lax.ConvDimensionNumbers(
        lhs_spec=(0, rank - 1, *space),
        rhs_spec=(rank - 1, rank - 2, *(i - 1 for i in space)),
        out_spec=(0, rank - 1, *space),
    )
    out = conv_general_dilated_p.bind(
        lax.transpose(lhs, features_last(numbers.lhs_spec)),
        lax.transpose(rhs, out_first(numbers.rhs_spec)),
        **(params | {"dimension_numbers": plain}),
    )
    # Axis k of the wanted output is axis order[k] of the canonical one.
    order = [0] * rank
    for position, axis in enumerate(features_last(numbers.out_spec)):
        order[axis] = position
    return lax.transpose(out, order)


def _is_canonical(numbers: Any) -> bool:
    rank = len(numbers.lhs_spec)
    space = tuple(range(1, rank - 1))
    rows_first = (0, rank - 1, *space)
    filters = (rank - 1, rank - 2, *(i - 1 for i in space))
    return (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)) == (
        rows_first,
        filters,
        rows_first,
    )


def _rewrite_inner(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation, with the programs among them rewritten (loops, branches, calls)."""

    def rewrite(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr) and has_convolution(value.jaxpr):
            return jax.make_jaxpr(lambda *args: _run(value, args))(*value.in_avals)
        if isinstance(value, Jaxpr) and has_convolution(value) and not value.constvars:
            return rewrite(ClosedJaxpr(value, ())).jaxpr
        if isinstance(value, tuple) and any(isinstance(v, ClosedJaxpr) for v in value):
            return tuple(map(rewrite, value))
        return value

    return {key: rewrite(value) for key, value in params.items()}
