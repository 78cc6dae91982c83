"""`lax.scan` of one example's program: outputs per step may stay factored, with the steps as a stack axis.

A carry that starts at zero and is only added to (the gradient of weights that every step uses) is not carried: what is
added in each step is an output, and the steps become tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from microbatch.jax._factored import _algebra as algebra
from microbatch.jax._factored import _joining as joining
from microbatch.jax._factored import _layout as layout
from microbatch.jax._factored._context import Context, ForcedDense, Recorder
from microbatch.jax._factored._values import (
    Accumulating,
    Blocks,
    Dense,
    Fill,
    Outer,
    Rows,
    Shared,
    Sum,
    Value,
    is_factored,
    is_per_example,
    is_zero,
)

_SHARED, _DENSE, _ADDED = "shared", "dense", "added"


def scan(run, ctx: Context, eqn: JaxprEqn, values: list[Value]) -> list[Value] | None:
    """The scan's outputs, or None if nothing in it stays factored."""
    params = eqn.params
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts = values[:num_consts]
    init = values[num_consts : num_consts + num_carry]
    steps = [_steps(ctx, v) for v in values[num_consts + num_carry :]]
    inside = dataclasses.replace(ctx, repeats=ctx.repeats * max(params["length"], 1))
    closed = params["jaxpr"]

    def body(context, modes, carry, step):
        raw, step = (
            iter(carry),
            [_begin(fixed, s) for (fixed, _), s in zip(steps, step, strict=True)],
        )
        begun = []
        for slot, (mode, value) in enumerate(zip(modes, init, strict=True)):
            if mode == _ADDED:
                begun.append(Accumulating((), value.shape, value.dtype, (*ctx.path, slot)))
            else:
                begun.append((Shared if mode == _SHARED else Dense)(next(raw)))
        outs = run(context, closed.jaxpr, closed.consts, [*consts, *begun, *step])
        return outs[:num_carry], outs[num_carry:]

    modes = [
        _ADDED if is_zero(v) and v.shape else _DENSE if is_per_example(v) else _SHARED for v in init
    ]
    xs = [s for _, s in steps]
    modes, results = _settle(body, ctx, inside, modes, init, xs)
    if not any(map(is_factored, [*values, *results])) and _ADDED not in modes:
        return None

    def loop(carry, step):
        after, ys = body(inside, modes, carry, step)
        kept = [
            _carried(inside, value, mode, begin)
            for mode, value, begin in zip(modes, after, init, strict=True)
            if mode != _ADDED
        ]
        added = [v.terms for v, mode in zip(after, modes, strict=True) if mode == _ADDED]
        added = [[_end(inside, term) for term in terms] for terms in added]
        return kept, (added, [_end(inside, y) for y in ys])

    start = _start(ctx, modes, init)
    loop_params = {k: params[k] for k in ("length", "reverse", "unroll")}
    final, (added, ys) = lax.scan(loop, start, xs, **loop_params)
    final, added = iter(final), iter(added)
    outs = []
    for mode in modes:
        if mode == _ADDED:
            outs.append(_total(ctx, next(added)))
        else:
            outs.append((Shared if mode == _SHARED else Dense)(next(final)))
    return [*outs, *map(_stacked, ys)]


def _settle(body, ctx, inside, modes, init, xs):
    """The modes of the carries that their own results agree with, and the outputs' kinds."""
    silent = dataclasses.replace(inside, recorder=Recorder(), dry=True)
    first = jax.eval_shape(lambda x: jax.tree.map(lambda a: a[0], x), xs)
    while True:
        kinds = None

        def probe(carry, step, modes=tuple(modes)):
            nonlocal kinds
            kinds = body(silent, modes, carry, step)
            return ()

        try:
            jax.eval_shape(
                probe, jax.eval_shape(lambda m=tuple(modes): _start(ctx, m, init)), first
            )
        except ForcedDense as forced:
            if forced.slot is None or forced.slot[:-1] != ctx.path:
                raise
            modes[forced.slot[-1]] = _SHARED
            continue
        after, ys = kinds
        settled = [_mode(mode, v) for mode, v in zip(modes, after, strict=True)]
        if settled == modes:
            return modes, ys
        modes = settled


def _mode(mode: str, value: Value) -> str:
    if mode == _ADDED:
        if isinstance(value, Accumulating) and value.terms and all(map(_has_factors, value.terms)):
            return _ADDED
        return _SHARED
    if mode == _SHARED and is_per_example(value):
        return _DENSE
    return mode


def _has_factors(value: Value) -> bool:
    return is_factored(value) and not (isinstance(value, Outer) and value.is_array)


def _start(ctx: Context, modes, init):
    return [
        _array(ctx, value, mode == _DENSE)
        for mode, value in zip(modes, init, strict=True)
        if mode != _ADDED
    ]


def _carried(ctx: Context, value: Value, mode: str, begin: Value):
    return _array(ctx, value, mode == _DENSE).astype(begin.dtype)


def _array(ctx: Context, value: Value, per_example: bool):
    if per_example:
        return algebra.entries(ctx, value)
    return algebra.fill_entries(value) if isinstance(value, Fill) else value.array


def _steps(ctx: Context, value: Value):
    """``(fixed, scanned)``: what the body makes of a step's arrays, and the arrays with the steps in front."""
    if isinstance(value, Fill):
        return dataclasses.replace(value, shape=value.shape[1:]), ()
    if isinstance(value, Shared):
        return Shared, value.array
    if isinstance(value, Outer) and len(value.dims[0]) == 1 and value.dims[0][0][0] == "stack":
        return Outer, _unstacked(value)
    return Dense, jnp.moveaxis(algebra.entries(ctx, value), 1, 0)


def _begin(fixed, step) -> Value:
    if isinstance(fixed, Fill):
        return fixed
    return step if fixed is Outer else fixed(step)


def _unstacked(value: Outer) -> Outer:
    """The first dimension's stack axis in front of all arrays, no longer named."""
    at = value.dims[0][0][1]
    lhs, rhs = algebra.masked_factors(value)
    shift = lambda axis: (axis[0], axis[1] - (axis[0] == "stack" and axis[1] > at))
    return dataclasses.replace(
        value,
        lhs=jnp.moveaxis(lhs, at, 0),
        rhs=jnp.moveaxis(rhs, at, 0),
        scale=None,
        keep=None,
        dims=tuple(tuple(map(shift, dim)) for dim in value.dims[1:]),
    )


def _end(ctx: Context, value: Value) -> Value:
    """A step's output as it will be stacked: without scales, and as arrays where no stack is known."""
    if isinstance(value, Outer):
        lhs, rhs = algebra.masked_factors(value)
        return dataclasses.replace(value, lhs=lhs, rhs=rhs, scale=None, keep=None)
    if isinstance(value, Rows) and value.shape == value.table:
        update = algebra.masked_update(value)
        return dataclasses.replace(value, update=update, scale=None, keep=None)
    if isinstance(value, Blocks) and all(
        isinstance(p, (Outer, Dense, Shared)) for p in value.parts
    ):
        return dataclasses.replace(value, parts=tuple(_end(ctx, p) for p in value.parts))
    if isinstance(value, Sum) and all(isinstance(t, Outer) for t in value.terms):
        return Sum(tuple(_end(ctx, t) for t in value.terms))
    if isinstance(value, Fill) and not value.per_example:
        return Shared(algebra.fill_entries(value))
    return value if isinstance(value, Shared) else Dense(algebra.entries(ctx, value))


def _stacked(value: Value) -> Value:
    """The value of all steps, from arrays with the steps in front."""
    if isinstance(value, Outer):
        shift = lambda axis: (axis[0], axis[1] + (axis[0] == "stack"))
        dims = ((("stack", 0),), *(tuple(map(shift, dim)) for dim in value.dims))
        return layout.drop_units(dataclasses.replace(value, dims=dims))
    if isinstance(value, Rows):
        steps, rows = value.index.shape[0], value.table[0]
        index = value.index + rows * jnp.arange(steps, dtype=value.index.dtype)[:, None, None]
        return dataclasses.replace(
            _steps_as_rows(dataclasses.replace(value, index=index)),
            table=(steps * rows, *value.table[1:]),
            shape=(steps, *value.table),
        )
    if isinstance(value, Blocks):
        return Blocks(tuple(map(_stacked, value.parts)), value.axis + 1)
    if isinstance(value, Sum):
        return Sum(tuple(map(_stacked, value.terms)))
    if isinstance(value, Shared):
        return value
    return Dense(jnp.moveaxis(value.array, 0, 1))


def _total(ctx: Context, terms: list[Value]) -> Value:
    """The sum over all steps of what each step added."""
    terms = [_as_tokens(term) for term in terms]
    total = terms[0]
    for term in terms[1:]:
        both = joining.add(ctx, [total, term])
        total = (
            Dense(algebra.entries(ctx, total) + algebra.entries(ctx, term))
            if both is None
            else both
        )
    return total


def _as_tokens(value: Value) -> Value:
    if isinstance(value, Outer):
        to = value.num_stack + 1
        lhs, rhs = (jnp.moveaxis(x, 0, to) for x in (value.lhs, value.rhs))
        merge = lambda x: x.reshape(*x.shape[:to], -1, *x.shape[to + 2 :])
        return dataclasses.replace(value, lhs=merge(lhs), rhs=merge(rhs))
    if isinstance(value, Rows):
        return _steps_as_rows(value)
    if isinstance(value, Sum):
        return Sum(tuple(map(_as_tokens, value.terms)))
    if isinstance(value, Blocks):
        return dataclasses.replace(value, parts=tuple(map(_as_tokens, value.parts)))
    return Dense(jnp.sum(value.array, 0))


def _steps_as_rows(value: Rows) -> Rows:
    """``index [L, B, T]`` to ``[B, L * T]``, and so the updates."""
    index, update = (jnp.moveaxis(x, 0, 1) for x in (value.index, value.update))
    return dataclasses.replace(
        value,
        index=index.reshape(index.shape[0], -1),
        update=update.reshape(update.shape[0], -1, *update.shape[3:]),
    )
