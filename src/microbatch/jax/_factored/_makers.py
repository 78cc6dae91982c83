"""Where factored values come from: products of two per-example arrays, and rows added to tables of zeros."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from microbatch.jax._factored import _algebra as algebra
from microbatch.jax._factored import _layout as layout
from microbatch.jax._factored._context import Context
from microbatch.jax._factored._registry import maker
from microbatch.jax._factored._values import Dense, Outer, Rows, Value


def could_make(eqn: JaxprEqn, per_example: list[bool], zero: list[bool]) -> bool:
    """Whether the equation's maker could return a factored value, from what is known before anything is computed."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if not jnp.issubdtype(out.dtype, jnp.floating) or 0 in out.shape:
        return False
    if name == "dot_general":
        (lhs, rhs), (_, m, n) = eqn.invars, _dot_widths(eqn)
        floating = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (lhs, rhs))
        return all(per_example) and m > 1 and n > 1 and floating
    if name == "conv_general_dilated":
        return all(per_example) and eqn.params["feature_group_count"] == 1
    if name == "scatter-add":
        return zero[0] and per_example[2]
    if name == "dynamic_update_slice":
        return zero[0] and per_example[1]
    return False


@maker("dot_general")
def dot_general(ctx: Context, eqn: JaxprEqn, lhs: Dense, rhs: Dense) -> Value | None:
    """``lhs [B, *batch, *contract, *m]``, ``rhs [B, *batch, *contract, *n]`` (in any order) to ``[*batch, *m, *n]``.

    The contracted dimensions are the tokens, batch dimensions become stack axes.
    """
    if ctx.path in ctx.unused:
        return None
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lm = [d for d in range(len(lhs.shape)) if d not in (*lc, *lb)]
    rn = [d for d in range(len(rhs.shape)) if d not in (*rc, *rb)]
    value = layout.outer(
        _factor(lhs.array, lb, lc, lm),
        _factor(rhs.array, rb, rc, rn),
        tuple(
            ((group, i),)
            for group, count in (("stack", len(lb)), ("lhs", len(lm)), ("rhs", len(rn)))
            for i in range(count)
        ),
        eqn.outvars[0].aval.dtype,
        eqn.params["precision"],
        (ctx.path,),
    )
    return _as_chosen(ctx, _made(ctx, value))


def _as_chosen(ctx: Context, value: Outer) -> Outer:
    """The value, or its entries beside a factor of ones where arrays are cheaper: scales and masks still wait."""
    if ctx.path not in ctx.as_arrays:
        return value
    entries = algebra.outer_entries(value)
    ones = jnp.ones((ctx.batch_size, 1), entries.dtype)
    dims = tuple((("rhs", d),) for d in range(entries.ndim - 1))
    return layout.outer(
        ones, entries[:, None], dims, value.dtype, lax.Precision.HIGHEST, value.sites
    )


def _factor(array, stack, contract, rest):
    order = (*(d + 1 for d in stack), 0, *(d + 1 for d in contract), *(d + 1 for d in rest))
    array = jnp.transpose(array, order)
    lead, tail = array.shape[: len(stack) + 1], array.shape[len(stack) + 1 + len(contract) :]
    return array.reshape(*lead, -1, *tail) if contract else jnp.expand_dims(array, len(stack) + 1)


def _dot_widths(eqn: JaxprEqn) -> tuple[int, int, int]:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval.shape for v in eqn.invars)
    size = lambda shape, skip: math.prod(s for d, s in enumerate(shape) if d not in skip)
    return math.prod(lhs[d] for d in lb), size(lhs, (*lc, *lb)), size(rhs, (*rc, *rb))


@maker("conv_general_dilated")
def conv_general_dilated(ctx: Context, eqn: JaxprEqn, lhs: Dense, rhs: Dense) -> Value | None:
    """A convolution of two per-example arrays, which is what autodiff makes of a filter's gradient.

    ``lhs [N, I, *in]``, ``rhs [O, I, *window]`` to ``[N, O, *out]`` (axes in the equation's own order): a product over
    the tokens (I, window) of patches ``[*out, N]`` and ``rhs [O]``; groups of the batch become a stack axis.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    groups = params["batch_group_count"]
    spatial = len(params["window_strides"])
    # Channels last, as in memory for NHWC, so that patches are copies of contiguous rows.
    last = lambda array, spec: jnp.transpose(
        array, (0, *(d + 1 for d in (spec[1], *spec[2:], spec[0])))
    )
    x, g = last(lhs.array, numbers.lhs_spec), last(rhs.array, numbers.rhs_spec)
    out = tuple(eqn.outvars[0].aval.shape[d] for d in numbers.out_spec[2:])
    patches = _patches(x, params, out, g.shape[2:-1])
    b, n, o = x.shape[0], x.shape[-1], g.shape[-1]
    patches = patches.reshape(*patches.shape[:-1], groups, n // groups)
    patches = jnp.moveaxis(patches, -2, 0)
    g = jnp.moveaxis(g.reshape(b, -1, groups, o // groups), 2, 0)
    dims = (
        (("lhs", spatial),),
        (("stack", 0), ("rhs", 0)),
        *((("lhs", d),) for d in range(spatial)),
    )
    dtype = eqn.outvars[0].aval.dtype
    value = layout.outer(patches, g, dims, dtype, params["precision"], (ctx.path,))
    order = [numbers.out_spec.index(d) for d in range(spatial + 2)]
    value = _made(ctx, layout.transpose(value, order), extra=patches.size)
    # Under vmap this would be a convolution with one group per example, which compilers leave in a slow path.
    return Dense(algebra.outer_entries(value)) if ctx.path in ctx.unused else _as_chosen(ctx, value)


def _patches(x, params, out: tuple[int, ...], window: tuple[int, ...]):
    """``x [B, I, *in, N]`` to ``[B, tokens (I, window), *out, N]``: one slice for each entry of the smaller of the two."""
    config = [(0, 0, 0)] * 2
    config += [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [*config, (0, 0, 0)])
    by_out = math.prod(out) <= math.prod(window)
    slow, fast = (out, window) if by_out else (window, out)
    steps = (params["window_strides"], params["rhs_dilation"])
    slow_step, fast_step = steps if by_out else steps[::-1]
    b, i, n = x.shape[0], x.shape[1], x.shape[-1]
    pieces = []
    for at in np.ndindex(*slow):
        start = [a * step for a, step in zip(at, slow_step, strict=True)]
        limit = [
            s + (size - 1) * step + 1 for s, size, step in zip(start, fast, fast_step, strict=True)
        ]
        piece = lax.slice(x, (0, 0, *start, 0), (b, i, *limit, n), (1, 1, *fast_step, 1))
        pieces.append(piece.reshape(b, i, -1, n))
    stacked = jnp.stack(pieces, 3 if by_out else 2)
    return stacked.reshape(b, i * math.prod(window), *out, n)


@maker("scatter-add")
def scatter_add(
    ctx: Context, eqn: JaxprEqn, operand: Value, index: Value, update: Dense
) -> Value | None:
    """``zeros [V, *row]``, ``index [*T, 1]``, ``update [*T, *row]``: whole rows added to a table."""
    numbers = eqn.params["dimension_numbers"]
    table = eqn.invars[0].aval.shape
    whole_rows = (
        numbers.scatter_dims_to_operand_dims == (0,)
        and numbers.inserted_window_dims == (0,)
        and not numbers.operand_batching_dims
        and math.prod(table[1:]) > 1
    )
    tail = tuple(range(len(update.shape) - len(table) + 1, len(update.shape)))
    index_shape = eqn.invars[1].aval.shape
    if ctx.path in ctx.unused or not whole_rows or numbers.update_window_dims != tail:
        return None
    if update.shape[len(index_shape) - 1 :] != table[1:]:
        return None
    array = algebra.entries(ctx, index)[..., 0].reshape(ctx.batch_size, -1)
    rows = update.array.reshape(ctx.batch_size, -1, *table[1:])
    return _rows(ctx, eqn, array, rows, table)


@maker("dynamic_update_slice")
def dynamic_update_slice(
    ctx: Context, eqn: JaxprEqn, operand: Value, update: Dense, *starts: Value
) -> Value | None:
    """``zeros [V, *row]``, ``update [1, *row]`` at a row: the gradient of taking one row of a table."""
    table = eqn.invars[0].aval.shape
    if ctx.path in ctx.unused or len(table) < 2 or update.shape != (1, *table[1:]):
        return None
    if math.prod(table[1:]) == 1 or table[0] == 1:
        return None
    array = jnp.clip(algebra.entries(ctx, starts[0]), 0, table[0] - 1)[:, None]
    return _rows(ctx, eqn, array, update.array, table)


def _rows(ctx: Context, eqn: JaxprEqn, index, update, table: tuple[int, ...]) -> Rows:
    mode = eqn.params.get("mode")
    if mode is not None:
        inside = (index >= 0) & (index < table[0])
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            update = jnp.where(inside.reshape(inside.shape + (1,) * (len(table) - 1)), update, 0)
        index = jnp.clip(index, 0, table[0] - 1)
    value = Rows(
        index.astype(jnp.int32), update, None, None, table, table, update.dtype, (ctx.path,)
    )
    ctx.note(value, "made", "factored", entries=ctx.batch_size * math.prod(table))
    return value


def _made(ctx: Context, value: Outer, extra: int = 0) -> Outer:
    """Notes what the value would cost as an array: its products, and its entries beyond those of new factors."""
    stack, m, n = value.widths
    many = ctx.batch_size * stack
    ctx.note(
        value,
        "made",
        "patches" if extra else "factored",
        flops=2.0 * many * value.tokens * m * n,
        entries=many * m * n,
        factors=extra or many * value.tokens * (m + n),
    )
    return value
