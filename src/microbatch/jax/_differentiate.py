"""Derivatives of the loop in the memory of one microbatch.

The loop is one function with a derivative rule of its own. Real scalars that are summed or averaged have their gradients
made while their values are ("in_forward"): the tangent is the inner product with those gradients. Every other
output's tangent is a linear map whose transpose is another loop, which evaluates each microbatch again ("recompute").
Both loops are such functions again, so that higher derivatives are bounded, too.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from typing import Literal as OneOf

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

from microbatch._accumulation import EXTREMES
from microbatch._errors import MicrobatchError
from microbatch.jax._accumulators import Moment, Output, cast
from microbatch.jax._derivatives import (
    Active,
    divided,
    pullback_loop,
    runs_of,
    tangent_loop,
    with_gradients,
    with_winners,
    zero_tangent,
)
from microbatch.jax._fold import Arrays, Loop, divisor, only, static_count_apart
from microbatch.jax._linear import linear_map
from microbatch.jax._rows import take, varying_axes
from microbatch.jax._spread import fold
from microbatch.jax._together import together

Differentiate = OneOf["auto", "in_forward", "recompute", "store"]
Result = tuple[list[Any], list[Any]]


def evaluate(loop: Loop, arrays: Arrays, where: str, differentiate: Differentiate) -> Result:
    """Runs the loop so that its derivatives are bounded in memory; see `fold`."""
    if differentiate == "store":
        return fold(loop, arrays, reversible=True)
    if any(output.is_custom for output in loop.outputs):
        # A custom accumulator's derivative needs its carries: those are kept, the microbatches are evaluated again.
        step = jax.checkpoint(loop.step, prevent_cse=False)
        return fold(replace(loop, step=step), arrays, reversible=True)
    given, with_count = static_count_apart(arrays)

    @jax.custom_jvp
    def run(arrays: Arrays) -> Result:
        return _together(fold(loop, with_count(arrays)), arrays)

    def rule(primals: tuple[Arrays], tangents: tuple[Arrays]) -> tuple[Result, Result]:
        out, tangents_out = _jvp(loop, with_count(*primals), *tangents, where, differentiate)
        return _together(out, *primals), tangents_out

    run.defjvp(rule, symbolic_zeros=True)
    return run(given)


def _together(out: Result, arrays: Arrays) -> Result:
    """The results, mapped alike by the function and by its rule; see `together`."""
    leaves, treedef = jax.tree.flatten(out)
    return treedef.unflatten(together(leaves, jax.tree.leaves(arrays)))


def _jvp(
    loop: Loop, arrays: Arrays, tangents: Arrays, where: str, differentiate: Differentiate
) -> tuple[Result, Result]:
    """The loop's values and their tangents."""
    active = Active(_moving(tangents.shared), _moving(tangents.rows))
    moving = list(map(jnp.asarray, active.of(tangents.shared, tangents.rows)))
    if _moving(tangents.states):
        raise _through_carry(where)
    if not moving:
        values, states = fold(loop, arrays)
        return (values, states), (_zeros(values), _zeros(states))
    _check_states(loop, arrays, active, where)
    in_forward = differentiate in ("auto", "in_forward")
    # A scalar that differs between devices has a gradient of its own on each, where that of an array that is the
    # same on all is the sum over them.
    axes = [varying_axes(jax.typeof(x)) for x in only(arrays.shared, active.shared)]
    alike = lambda out: all(varying_axes(out.type) <= a for a in axes)
    scalars = [
        i
        for i, out in enumerate(loop.outputs)
        if out.is_linear_scalar and in_forward and alike(out)
    ]
    inexact = lambda output: jnp.issubdtype(output.type.dtype, jnp.inexact)
    others = [i for i, out in enumerate(loop.outputs) if i not in scalars and inexact(out)]

    extended = with_gradients(with_winners(loop), arrays, scalars, active)
    with _explained(where):
        results, states = evaluate(*extended, where, "recompute")
    winners = {i: results[i][1] for i, out in enumerate(loop.outputs) if out.kind in EXTREMES}
    values = [results[i][0] if i in winners else results[i] for i in range(len(loop.outputs))]
    gradients = iter(results[len(loop.outputs) :])

    out = _zeros(values)
    for i in scalars:
        mine = [next(gradients) for _ in moving]
        out[i] = _inner_product(loop, arrays, active, loop.outputs[i], mine, moving)
    if others:
        replayed = _Replay(loop, active, tuple(others), where, differentiate != "in_forward")
        for i, tangent in zip(others, replayed(arrays, winners, moving, values), strict=True):
            out[i] = tangent
    return (values, states), (out, _refusing_tangents(where, states, moving))


def _inner_product(
    loop: Loop,
    arrays: Arrays,
    active: Active,
    output: Output,
    gradients: list[Any],
    moving: list[Any],
) -> jax.Array:
    """The tangent of a scalar: its gradients times the tangents of the inputs, summed."""

    def dot(gradient: jax.Array, tangent: jax.Array) -> jax.Array:
        product = lax.mul(gradient, cast(tangent, gradient.dtype))
        # The loss is real: its tangent is the real part, and JAX's gradients are not conjugated.
        product = lax.real(product) if jnp.iscomplexobj(product) else product
        return lax.reduce_sum(product, tuple(range(product.ndim)))

    products = [dot(g, t) for g, t in zip(gradients, moving, strict=True)]
    of_shared, of_rows = products[: len(active.shared)], products[len(active.shared) :]
    total = sum(of_shared, jnp.zeros((), output.dtype))
    if of_rows:
        # With a weight function they are divided already.
        weighted = arrays.weights is not None
        weight = 1 if weighted else divisor(loop, output, None, runs_of(loop, arrays))
        total = total + divided(sum(of_rows), weight)
    return total.astype(output.type.dtype)


@dataclass(frozen=True)
class _Replay:
    """The tangents of the outputs at `positions` as a linear map: forwards one loop, transposed another.

    Attributes:
      loop: the loop that is differentiated.
      active: its inputs that move.
      positions: which outputs.
      where: opens the messages.
      allowed: False refuses to evaluate it, because "in_forward" was asked for.
    """

    loop: Loop
    active: Active
    positions: tuple[int, ...]
    where: str
    allowed: bool

    def __call__(
        self, arrays: Arrays, winners: dict[int, Any], moving: list[Any], values: list[Any]
    ) -> list[Any]:
        leaves, treedef = jax.tree.flatten((arrays, winners))
        static = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, int)}
        count = len(leaves)
        types = [jax.typeof(tangent) for tangent in moving]

        def restored(residuals: list[Any]) -> tuple[Arrays, dict[int, Any]]:
            found = iter(residuals)
            all_leaves = [static[i] if i in static else next(found) for i in range(count)]
            return treedef.unflatten(all_leaves)

        def forward(residuals: list[Any], tangents: list[Any]) -> list[Any]:
            self._check()
            arrays, winners = restored(residuals)
            loops = tangent_loop(self.loop, arrays, self.active, self.positions, winners, tangents)
            return evaluate(*loops, self.where, "recompute")[0]

        def transposed(residuals: list[Any], cotangents: list[Any | None]) -> list[Any]:
            self._check()
            arrays, winners = restored(residuals)
            pairs = zip(self.positions, cotangents, strict=True)
            given = {i: ct for i, ct in pairs if ct is not None}
            loops = pullback_loop(self.loop, arrays, self.active, given, winners)
            with _explained(self.where):
                gradients, _ = evaluate(*loops, self.where, "recompute")
            return [g.astype(t.dtype) for g, t in zip(gradients, types, strict=True)]

        residuals = [leaf for i, leaf in enumerate(leaves) if i not in static]
        out_types = [jax.typeof(values[i]) for i in self.positions]
        return linear_map(forward, transposed, residuals, moving, out_types)

    def _check(self) -> None:
        if not self.allowed:
            raise MicrobatchError(
                f'{self.where}: differentiate="in_forward" makes the gradients of real scalars with SUM or '
                "MEAN, and another output is differentiated.\n"
                'Use differentiate="auto" or "recompute".'
            )


def _check_states(loop: Loop, arrays: Arrays, active: Active, where: str) -> None:
    """Refuses a derivative that would flow from one microbatch's state into the next one's outputs."""
    inexact = [i for i, s in enumerate(arrays.states) if jnp.issubdtype(s.dtype, jnp.inexact)]
    if not inexact:
        return

    def first(shared: Any, states: Any, rows: Any) -> Result:
        taken = [take(x, cut, 0) for x, cut in zip(rows, loop.rows, strict=True)]
        return loop.step(Moment(jnp.int32(0), 1.0, 0.0), shared, states, taken)

    def outputs_of_states(*moving: Any) -> list[Any]:
        states = list(arrays.states)
        for i, state in zip(inexact, moving, strict=True):
            states[i] = state
        return first(arrays.shared, states, arrays.rows)[0]

    def states_of_active(*moving: Any) -> list[Any]:
        shared, rows = active.replaced(arrays.shared, arrays.rows, moving)
        return only(first(shared, arrays.states, rows)[1], inexact)

    if _moves(outputs_of_states, only(arrays.states, inexact)) and _moves(
        states_of_active, active.of(arrays.shared, arrays.rows)
    ):
        raise _through_carry(where)


def _moves(fun: Any, primals: list[Any]) -> bool:
    """Whether any output of `fun` has a tangent that depends on the inputs' tangents."""

    def tangents_out(tangents: list[Any]) -> list[Any]:
        return [
            t
            for t in jax.tree.leaves(jax.jvp(fun, primals, tangents)[1])
            if jnp.result_type(t) != jax.dtypes.float0
        ]

    jaxpr = jax.make_jaxpr(tangents_out)(list(map(jnp.zeros_like, primals))).jaxpr
    reached = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(not isinstance(atom, Literal) and atom in reached for atom in eqn.invars):
            reached |= set(eqn.outvars)
    return any(not isinstance(atom, Literal) and atom in reached for atom in jaxpr.outvars)


def _through_carry(where: str) -> MicrobatchError:
    return MicrobatchError(
        f"{where}: a derivative was asked through a Carry, and none flows there.\n"
        "Apply jax.lax.stop_gradient to the carried argument inside the function, or take the derivative inside it."
    )


def _refusing_tangents(where: str, states: list[Any], moving: list[Any]) -> list[Any]:
    """Tangents of the last states: never silently zero, refused when someone needs them."""

    def refuse(*_: Any) -> Any:
        raise _through_carry(where)

    tangents = _zeros(states)
    inexact = [i for i, s in enumerate(states) if jnp.issubdtype(s.dtype, jnp.inexact)]
    if inexact:
        types = [jax.typeof(states[i]) for i in inexact]
        for i, tangent in zip(inexact, linear_map(refuse, refuse, [], moving, types), strict=True):
            tangents[i] = tangent
    return tangents


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Tells the way out where the function has no reverse mode."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, MicrobatchError) or "everse-mode differentiation" not in str(error):
            raise
        raise MicrobatchError(
            f"{where}: the function has no reverse mode (a while_loop inside it, for example).\n"
            'Use differentiate="store", which keeps its forward mode.'
        ) from error


def _moving(tangents: list[Any]) -> tuple[int, ...]:
    """Which tangents are not statically zero."""
    return tuple(
        i
        for i, t in enumerate(tangents)
        if not isinstance(t, SymbolicZero) and jnp.result_type(t) != jax.dtypes.float0
    )


def _zeros(values: list[Any]) -> list[Any]:
    return [zero_tangent(value) for value in values]
