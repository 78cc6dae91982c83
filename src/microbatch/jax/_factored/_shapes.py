"""Rules of the primitives that move entries without changing them."""

import dataclasses
import math
from itertools import pairwise

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from microbatch.jax._factored import _joining as joining
from microbatch.jax._factored import _layout as layout
from microbatch.jax._factored._context import Context
from microbatch.jax._factored._registry import rule
from microbatch.jax._factored._values import (
    Accumulating,
    Blocks,
    Cleaned,
    Dense,
    Fill,
    NonFinite,
    Outer,
    Product,
    Rows,
    Shared,
    Sum,
    Value,
    is_factored,
    is_zero,
)


def out_shape(eqn: JaxprEqn) -> tuple[int, ...]:
    """The shape of the equation's first output, as one example sees it."""
    return tuple(eqn.outvars[0].aval.shape)


def map_value(function, value: Value) -> Value | None:
    """Applies a function of single values to each term and operand of a value; None where it gives None."""
    if isinstance(value, Sum):
        terms = [map_value(function, term) for term in value.terms]
        return None if None in terms else Sum(tuple(terms))
    if isinstance(value, Product):
        left = map_value(function, value.left)
        right = left if value.right is value.left else map_value(function, value.right)
        if left is None or right is None:
            return None
        return dataclasses.replace(value, left=left, right=right)
    if isinstance(value, (NonFinite, Cleaned)):
        of = map_value(function, value.of)
        return None if of is None else dataclasses.replace(value, of=of)
    return function(value)


@rule("transpose")
def transpose(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """``[d0, d1, ..]`` to ``[d[p0], d[p1], ..]``."""
    permutation = eqn.params["permutation"]

    def one(value):
        if isinstance(value, Outer):
            return layout.transpose(value, permutation)
        if isinstance(value, Blocks):
            parts = tuple(map_value(one, part) for part in value.parts)
            return None if None in parts else Blocks(parts, permutation.index(value.axis))
        if isinstance(value, Dense):
            return Dense(jnp.transpose(value.array, (0, *(d + 1 for d in permutation))))
        if isinstance(value, Shared):
            return Shared(jnp.transpose(value.array, permutation))
        if isinstance(value, Fill):
            return dataclasses.replace(value, shape=tuple(value.shape[d] for d in permutation))
        return None

    return map_value(one, value)


@rule("reshape", "squeeze")
def reshape(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """Any shape of the same number of entries, where no stored axis is cut unevenly."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return None
    return reshaped(value, out_shape(eqn))


def reshaped(value: Value, shape: tuple[int, ...]) -> Value | None:
    """The value in another shape of the same entries."""

    def one(value):
        if isinstance(value, Outer):
            return layout.reshape(value, shape)
        if isinstance(value, (Rows, Fill)):
            return dataclasses.replace(value, shape=shape)
        if isinstance(value, Dense):
            return Dense(value.array.reshape(value.array.shape[0], *shape))
        if isinstance(value, Shared):
            return Shared(value.array.reshape(shape))
        if isinstance(value, Blocks):
            return _reshaped_blocks(value, shape)
        return None

    return map_value(one, value)


def _reshaped_blocks(value: Blocks, shape: tuple[int, ...]) -> Blocks | None:
    """Only dimensions of size 1 may come and go, or all dimensions behind the first of the blocks may merge."""
    full = [(d, s) for d, s in enumerate(value.shape) if s != 1 or d == value.axis]
    new = [(d, s) for d, s in enumerate(shape) if s != 1]
    if [s for _, s in full] == [s for _, s in new]:
        axis = new[[d for d, _ in full].index(value.axis)][0]
        parts = (
            reshaped(part, (*shape[:axis], part.shape[value.axis], *shape[axis + 1 :]))
            for part in value.parts
        )
    elif len(shape) == 1 and all(s == 1 for s in value.shape[: value.axis]):
        axis = 0
        parts = (reshaped(part, (_size(part),)) for part in value.parts)
    else:
        return None
    parts = tuple(parts)
    return None if None in parts else Blocks(parts, axis)


def _size(value: Value) -> int:
    return math.prod(value.shape)


@rule("broadcast_in_dim")
def broadcast_in_dim(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """A single number becomes a `Fill`; a factored value may only gain dimensions of size 1."""
    shape = out_shape(eqn)
    if is_factored(value):
        return reshaped(value, shape) if _size(value) == math.prod(shape) else None
    if isinstance(value, Fill):
        return dataclasses.replace(value, shape=shape)
    if _size(value) != 1 or math.prod(shape) == 1:
        return None
    if isinstance(value, Dense):
        return Fill(value.array.reshape(-1), shape, value.dtype, True)
    return Fill(jnp.reshape(value.array, ()), shape, value.dtype, False)


@rule("concatenate")
def concatenate(ctx: Context, eqn: JaxprEqn, *parts: Value) -> Value | None:
    """Values side by side stay what they are."""
    if not any(map(is_factored, parts)):
        return None
    axis = eqn.params["dimension"]
    flat = []
    for part in parts:
        if isinstance(part, (Product, NonFinite, Cleaned, Accumulating)):
            return None
        flat += part.parts if isinstance(part, Blocks) and part.axis == axis else [part]
    if any(isinstance(p, Blocks) for p in flat):
        return None
    return Blocks(tuple(flat), axis)


@rule("stack")
def stack(ctx: Context, eqn: JaxprEqn, *parts: Value) -> Value | None:
    """Blocks along a new dimension."""
    axis = eqn.params["axis"]
    apart = [reshaped(p, (*p.shape[:axis], 1, *p.shape[axis:])) for p in parts]
    plain = all(isinstance(p, (Outer, Rows, Dense, Shared, Fill)) for p in apart)
    return Blocks(tuple(apart), axis) if plain and any(map(is_factored, apart)) else None


@rule("unstack")
def unstack(ctx: Context, eqn: JaxprEqn, value: Value) -> list[Value] | None:
    """One value per index of a dimension."""
    axis = eqn.params["axis"]
    cut = joining.cut if isinstance(value, Blocks) and value.axis == axis else joining.cut_part
    shape = (*value.shape[:axis], *value.shape[axis + 1 :])
    pieces = [
        cut(value, i, i + 1) if cut is joining.cut else cut(value, axis, i, i + 1)
        for i in range(value.shape[axis])
    ]
    if None in pieces:
        return None
    pieces = [reshaped(piece, shape) for piece in pieces]
    return None if None in pieces else pieces


@rule("slice")
def slice_(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """``value[start:limit:stride, ..]``: of a factor's axis, or of blocks."""
    strides = eqn.params["strides"] or (1,) * len(value.shape)
    bounds = list(
        zip(eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    )

    def one(value):
        for dim, (start, limit, stride) in enumerate(bounds):
            if value is None:
                return None
            if isinstance(value, Outer):
                value = layout.slice_dim(value, dim, start, limit, stride)
            elif (start, limit, stride) != (0, value.shape[dim], 1):
                whole = isinstance(value, Blocks) and value.axis == dim and stride == 1
                value = joining.cut(value, start, limit) if whole else None
        return value

    if isinstance(value, Fill):
        return dataclasses.replace(value, shape=out_shape(eqn))
    return map_value(one, value)


@rule("split")
def split(ctx: Context, eqn: JaxprEqn, value: Value) -> list[Value] | None:
    """One value per size along an axis."""
    if isinstance(value, (Product, Sum, NonFinite, Cleaned)):
        return None
    axis, ends = eqn.params["axis"], [0]
    for size in eqn.params["sizes"]:
        ends.append(ends[-1] + size)
    cut = joining.cut if isinstance(value, Blocks) and value.axis == axis else None
    pieces = [
        cut(value, a, b) if cut else joining.cut_part(value, axis, a, b) for a, b in pairwise(ends)
    ]
    return None if None in pieces else pieces


@rule("pad")
def pad(ctx: Context, eqn: JaxprEqn, value: Value, padding: Value) -> Value | None:
    """Zeros before and after one dimension are blocks of zeros beside the value."""
    config = eqn.params["padding_config"]
    dims = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    if not is_zero(padding):
        return None
    if is_zero(value):
        return Fill(None, out_shape(eqn), value.dtype, False)
    if len(dims) != 1 or not isinstance(value, (Outer, Blocks)):
        return value if not dims and is_factored(value) else None
    low, high, interior = config[dims[0]]
    if interior or low < 0 or high < 0 or (isinstance(value, Blocks) and value.axis != dims[0]):
        return None

    def zeros(size):
        shape = (*value.shape[: dims[0]], size, *value.shape[dims[0] + 1 :])
        return [Fill(None, shape, value.dtype, False)] if size else []

    parts = value.parts if isinstance(value, Blocks) else (value,)
    return Blocks((*zeros(low), *parts, *zeros(high)), dims[0])


@rule("dynamic_update_slice")
def dynamic_update_slice(
    ctx: Context, eqn: JaxprEqn, operand: Value, update: Value, *starts: Value
):
    """A factored update at a fixed place in zeros: blocks, as `pad` makes."""
    dims = [d for d, (a, b) in enumerate(zip(operand.shape, update.shape, strict=True)) if a != b]
    if not is_zero(operand) or len(dims) != 1 or not isinstance(update, Outer):
        return None
    start = _static_index(starts[dims[0]])
    if start is None:
        return None
    dim = dims[0]
    start = min(max(start, 0), operand.shape[dim] - update.shape[dim])
    sizes = (start, operand.shape[dim] - update.shape[dim] - start)
    zeros = [
        [Fill(None, (*update.shape[:dim], s, *update.shape[dim + 1 :]), update.dtype, False)]
        * (s > 0)
        for s in sizes
    ]
    return Blocks((*zeros[0], update, *zeros[1]), dim)


def _static_index(value: Value) -> int | None:
    if is_zero(value):
        return 0
    try:
        return int(value.array) if isinstance(value, Shared) else None
    except TypeError:
        return None


@rule("convert_element_type")
def convert_element_type(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """Between floating dtypes the factors are kept, and the product is rounded to the new dtype."""
    return converted(value, jnp.dtype(eqn.outvars[0].aval.dtype))


def converted(value: Value, dtype) -> Value | None:
    """The value in another dtype; None where that takes its entries."""
    if is_zero(value):
        return Fill(None, value.shape, dtype, False)
    if not jnp.issubdtype(dtype, jnp.floating) or not jnp.issubdtype(value.dtype, jnp.floating):
        return None

    def one(value):
        if isinstance(value, (Outer, Rows)):
            return dataclasses.replace(value, dtype=dtype)
        if isinstance(value, Blocks):
            parts = tuple(map_value(one, part) for part in value.parts)
            return None if None in parts else dataclasses.replace(value, parts=parts)
        if isinstance(value, (Dense, Shared)):
            return type(value)(value.array.astype(dtype))
        if isinstance(value, Fill):
            number = None if value.is_zero else value.number.astype(dtype)
            return dataclasses.replace(value, number=number, dtype=dtype)
        return None

    made = map_value(one, value)
    return dataclasses.replace(made, dtype=dtype) if isinstance(made, Product) else made


@rule("copy", "stop_gradient", "sharding_constraint", "optimization_barrier")
def same(ctx: Context, eqn: JaxprEqn, *operands: Value):
    """The value itself."""
    return list(operands) if eqn.primitive.multiple_results else operands[0]


@rule("name")
def name(ctx: Context, eqn: JaxprEqn, value: Value) -> Value:
    """The value itself; its name is what `explain` calls it."""
    ctx.label(eqn.params["name"], value)
    return value
