"""Entries, sums over examples and inner products of factored values."""

import dataclasses
import math
from string import ascii_letters

import jax.numpy as jnp
from jax import lax

from microbatch.jax._factored import _layout as layout
from microbatch.jax._factored._context import (
    Context,
    ForcedDense,
    Recorder,
    preferred,
    working_dtype,
)
from microbatch.jax._factored._values import (
    Accumulating,
    Blocks,
    Dense,
    Fill,
    NonFinite,
    Outer,
    Product,
    Rows,
    Shared,
    Sum,
    Value,
    is_zero,
)


def per_example(number, ndim: int):
    """``[B]`` to ``[B, 1, ..]`` with `ndim` axes."""
    return number.reshape(number.shape + (1,) * (ndim - 1))


def with_scale(value: Value, scale) -> Value:
    """The value of each example times a number: ``scale [B]``."""
    if isinstance(value, (Outer, Rows, Product)):
        scale = scale.astype(working_dtype(value.dtype))
        return dataclasses.replace(
            value, scale=scale if value.scale is None else value.scale * scale
        )
    if isinstance(value, Blocks):
        return dataclasses.replace(value, parts=tuple(with_scale(p, scale) for p in value.parts))
    if isinstance(value, Sum):
        return Sum(tuple(with_scale(term, scale) for term in value.terms))
    if isinstance(value, Dense):
        scale = per_example(scale.astype(working_dtype(value.dtype)), value.array.ndim)
        return Dense((value.array * scale).astype(value.dtype))
    number = jnp.zeros((), value.dtype) if value.is_zero else value.number
    return Fill((number * scale).astype(value.dtype), value.shape, value.dtype, True)


def with_keep(value: Value, keep) -> Value:
    """Exactly zero for the examples where ``keep [B]`` is False, whatever the factors hold there."""
    if isinstance(value, (Outer, Rows, Product)):
        return dataclasses.replace(value, keep=keep if value.keep is None else value.keep & keep)
    if isinstance(value, Blocks):
        return dataclasses.replace(value, parts=tuple(with_keep(p, keep) for p in value.parts))
    if isinstance(value, Sum):
        return Sum(tuple(with_keep(term, keep) for term in value.terms))
    if isinstance(value, Dense):
        zeros = lax.full_like(value.array, 0)  # of a key's dtype, too
        return Dense(jnp.where(per_example(keep, value.array.ndim), value.array, zeros))
    if is_zero(value):
        return value
    return Fill(jnp.where(keep, value.number, 0), value.shape, value.dtype, True)


def linear(value: Value) -> bool:
    """Whether `with_scale` and `with_keep` apply."""
    if isinstance(value, (Blocks, Sum)):
        return all(map(linear, value.parts if isinstance(value, Blocks) else value.terms))
    return isinstance(value, (Outer, Rows, Product, Dense, Fill))


def entries(ctx: Context, value: Value):
    """The value as an array ``[B, *shape]``."""
    if isinstance(value, Dense):
        return value.array
    if isinstance(value, Shared):
        return jnp.broadcast_to(value.array, (ctx.batch_size, *value.shape))
    if isinstance(value, Fill):
        return fill_entries(value, ctx.batch_size)
    if isinstance(value, Accumulating):
        raise ForcedDense(value.slot)
    if ctx.strict:
        raise ForcedDense
    if isinstance(value, Outer):
        stack, lhs, rhs = value.widths
        flops = 2.0 * ctx.batch_size * stack * value.tokens * lhs * rhs
        ctx.note(value, "entries", "dense", flops=flops, entries=ctx.batch_size * stack * lhs * rhs)
        if ctx.dry:
            return jnp.zeros((ctx.batch_size, *value.shape), value.dtype)
        return outer_entries(value)
    if isinstance(value, Rows):
        ctx.note(value, "entries", "dense", entries=ctx.batch_size * math.prod(value.table))
        return _rows_entries(value)
    if isinstance(value, Blocks):
        return jnp.concatenate([entries(ctx, p) for p in value.parts], value.axis + 1)
    if isinstance(value, Sum):
        return sum(entries(ctx, term) for term in value.terms[1:]) + entries(ctx, value.terms[0])
    if isinstance(value, Product):
        left = entries(ctx, value.left)
        product = left * (left if value.right is value.left else entries(ctx, value.right))
        return finish(product, value.scale, value.keep, value.dtype)
    array = entries(ctx, value.of)
    hit = jnp.zeros(array.shape, bool)
    tests = {"nan": jnp.isnan, "finite": jnp.isfinite, "inf": jnp.isposinf, "-inf": jnp.isneginf}
    for kind in value.kinds:
        hit |= tests[kind](array)
    return hit if isinstance(value, NonFinite) else jnp.where(hit, 0, array)


def fill_entries(value: Fill, batch_size: int | None = None):
    """The array of a `Fill`: ``[B, *shape]`` if a batch size is given, else the shared ``shape``."""
    lead = () if batch_size is None else (batch_size,)
    number = jnp.zeros((), value.dtype) if value.is_zero else value.number
    if value.per_example:
        number = per_example(number, 1 + len(value.shape))
    return jnp.broadcast_to(number, (*lead, *value.shape))


def sum_examples(ctx: Context, value: Value):
    """The value summed over the examples, ``[*shape]``: one matrix product for an `Outer`."""
    if isinstance(value, Dense):
        return weighted_sum(value.array, None, None, value.dtype)
    if isinstance(value, Shared):
        return value.array * ctx.batch_size
    if isinstance(value, Fill):
        number = jnp.zeros((), value.dtype) if value.is_zero else value.number
        total = jnp.sum(number) if value.per_example else number * ctx.batch_size
        return jnp.broadcast_to(total.astype(value.dtype), value.shape)
    if isinstance(value, Outer):
        stack, lhs, rhs = value.widths
        flops = 2.0 * ctx.batch_size * stack * value.tokens * lhs * rhs
        how = "dense" if value.is_array else "factored"
        ctx.note(value, "sum", how, flops=flops, entries=stack * lhs * rhs)
        if ctx.dry:
            return jnp.zeros(value.shape, value.dtype)
        return _outer_sum(value)
    if isinstance(value, Rows):
        ctx.note(value, "sum", "factored", entries=math.prod(value.update.shape))
        return _rows_sum(value)
    if isinstance(value, Blocks):
        return jnp.concatenate([sum_examples(ctx, p) for p in value.parts], value.axis)
    if isinstance(value, Sum):
        return sum(sum_examples(ctx, t) for t in value.terms[1:]) + sum_examples(
            ctx, value.terms[0]
        )
    if isinstance(value, Product):
        simple = multiply_out(value)
        if not isinstance(simple, Product):
            return sum_examples(ctx, simple)
        return _sum_products(ctx, value)
    return weighted_sum(entries(ctx, value), None, None, value.dtype)


def weighted_sum(array, scale, keep, dtype):
    """``sum_b scale[b] * array[b]`` where ``keep[b]``, as a matrix product where the dtype allows.

    On a CPU a reduction over the first axis is several times slower than a product with a row of ones.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.ndim == 1:
        return jnp.sum(finish(array, scale, keep, array.dtype), 0).astype(dtype)
    if keep is not None:
        array = jnp.where(per_example(keep, array.ndim), array, 0)
        scale = None if scale is None else jnp.where(keep, scale, 0)
    wide = preferred(array.dtype)
    scale = jnp.ones(array.shape[:1], wide) if scale is None else scale.astype(wide)
    total = jnp.einsum("b,b...->...", scale, array.astype(wide), precision=lax.Precision.HIGHEST)
    return total.astype(dtype)


def _sum_products(ctx: Context, value: Product):
    """Sums products of entries; the product's own scale weighs the examples in the sum."""
    scale, keep, arrays = value.scale, value.keep, []
    for operand in (value.left, value.right):
        if isinstance(operand, (Outer, Rows)):
            keep = both(keep, operand.keep)
            operand = dataclasses.replace(operand, keep=None)
        arrays.append(operand)
    if value.left is value.right:
        _note_squares(ctx, value.left)
        silent = dataclasses.replace(ctx, recorder=Recorder())
        array = entries(silent, arrays[0])
        return weighted_sum(array * array, scale, keep, value.dtype)
    if isinstance(arrays[1], Shared) and arrays[1].shape == arrays[0].shape:
        total = sum_examples(ctx, with_scale_and_keep(arrays[0], scale, keep))
        return (total * arrays[1].array).astype(value.dtype)
    return weighted_sum(entries(ctx, arrays[0]) * entries(ctx, arrays[1]), scale, keep, value.dtype)


def _note_squares(ctx: Context, value: Value) -> None:
    size = math.prod(value.shape)
    tokens = value.tokens if isinstance(value, Outer) else 0
    flops = 2.0 * ctx.batch_size * tokens * size
    ctx.note(value, "sum of squares", "dense", flops=flops, entries=2 * ctx.batch_size * size)


def with_scale_and_keep(value: Value, scale, keep) -> Value:
    """`with_scale` and `with_keep`, either of which may be None."""
    value = value if scale is None else with_scale(value, scale)
    return value if keep is None else with_keep(value, keep)


def multiply_out(value: Value) -> Value:
    """A `Product` of values of one token each as an `Outer` of entrywise products; others unchanged."""
    if not isinstance(value, Product):
        return value
    left, right = value.left, value.right
    if isinstance(left, Blocks):
        pairs = _paired_blocks(left, right)
        if pairs is None:
            return value
        parts = (Product(a, b, value.scale, value.keep, value.dtype) for a, b in pairs)
        return Blocks(tuple(map(multiply_out, parts)), left.axis)
    if isinstance(left, Dense) and isinstance(right, Dense):
        array = left.array * right.array
        return Dense(finish(array, value.scale, value.keep, value.dtype))
    if not (isinstance(left, Outer) and isinstance(right, Outer)):
        return value
    if left.tokens != 1 or right.tokens != 1:
        return value
    pair = (left, left) if left is right else layout.refine(left, right)
    if pair is None:
        return value
    left, right = map(scale_in_factors, pair)
    product = dataclasses.replace(
        left,
        lhs=left.lhs * right.lhs,
        rhs=left.rhs * right.rhs,
        scale=value.scale,
        keep=both(both(left.keep, right.keep), value.keep),
        dtype=value.dtype,
    )
    return layout.reshape(product, value.shape) or value


def scale_in_factors(value: Outer) -> Outer:
    """The value without a scale, half of whose exponent is in each factor, in float32 or wider, to be raised to a power.

    A scale that undoes an exploding factor leaves the range together with it where both are squared alone.
    """
    dtype = working_dtype(value.dtype)
    lhs, rhs = value.lhs.astype(dtype), value.rhs.astype(dtype)
    if value.scale is not None:
        scale, exponent = normalised(value.scale.astype(dtype), 0)
        half = exponent // 2
        some = scale != 0  # of nothing there is nothing, in either factor
        powers = (jnp.where(some, power_of_two(e, dtype), 0) for e in (half, exponent - half))
        lhs = lhs * beside(scale * next(powers), lhs, value.num_stack)
        rhs = rhs * beside(next(powers), rhs, value.num_stack)
    return dataclasses.replace(value, lhs=lhs, rhs=rhs, scale=None)


def of_one_size(value: Outer) -> Outer:
    """The value without a scale, with factors that are equally large in each example: for powers that squares do not bound."""
    value = scale_in_factors(value)
    (lhs, e1), (rhs, e2) = (normalised(x, value.num_stack) for x in (value.lhs, value.rhs))
    half = (e1 + e2) // 2
    exponents = (jnp.clip(e, -120, 120) for e in (half, e1 + e2 - half))
    powers = [power_of_two(e, lhs.dtype) for e in exponents]
    lhs, rhs = (x * beside_stack(p, x) for x, p in zip((lhs, rhs), powers, strict=True))
    return dataclasses.replace(value, lhs=lhs, rhs=rhs)


def normalised(factor, num_stack: int):
    """The factor with its largest entry of each example in [1, 2), and the exponents ``[*stack, B]``.

    Products of squares of very small or large factors would leave the range of the dtype although their
    product would not.
    """
    factor = factor.astype(working_dtype(factor.dtype))
    lead = num_stack + 1
    largest = jnp.max(
        jnp.abs(lax.stop_gradient(factor)), tuple(range(lead, factor.ndim)), initial=0
    )
    exponent = jnp.frexp(largest)[1] - 1
    usable = (largest > 0) & jnp.isfinite(largest)
    exponent = jnp.where(usable, jnp.clip(exponent, -120, 120), 0)
    return factor * beside_stack(power_of_two(-exponent, factor.dtype), factor), exponent


def power_of_two(exponent, dtype):
    """``2 ** exponent`` to the last bit, which `exp2` of a compiler is not; exponents of normal numbers alone."""
    info = jnp.finfo(dtype)
    whole = exponent.astype(jnp.int32 if info.bits == 32 else jnp.int64)
    return lax.bitcast_convert_type((whole + info.maxexp - 1) << info.nmant, dtype)


def _paired_blocks(left: Blocks, right: Value):
    if left is right:
        return [(part, part) for part in left.parts]
    if not isinstance(right, Blocks) or left.axis != right.axis:
        return None
    if [p.shape for p in left.parts] != [p.shape for p in right.parts]:
        return None
    return list(zip(left.parts, right.parts, strict=True))


def masked_factors(value: Outer):
    """Both factors with the scale in one of them and zeros where `keep` is False (0 * nan would be nan)."""
    lhs, rhs, stack = value.lhs, value.rhs, value.num_stack
    if value.keep is not None:
        lhs = jnp.where(beside(value.keep, lhs, stack), lhs, 0)
        rhs = jnp.where(beside(value.keep, rhs, stack), rhs, 0)
    if value.scale is not None:
        scale = value.scale if value.keep is None else jnp.where(value.keep, value.scale, 0)
        if lhs.size < rhs.size:
            lhs = _scaled(lhs, beside(scale, lhs, stack), value.dtype)
        else:
            rhs = _scaled(rhs, beside(scale, rhs, stack), value.dtype)
    return lhs, rhs


def _scaled(factor, scale, dtype):
    """The factor times a scale, no narrower than the value that it is a factor of."""
    return (factor * scale).astype(jnp.promote_types(factor.dtype, dtype))


def masked_update(value: Rows):
    """The update with scale and zeros where `keep` is False, ``[B, T, ..]``."""
    return finish(value.update, value.scale, value.keep, value.update.dtype)


def letters(value: Outer) -> tuple[str, str, str]:
    """Names for the stored axes of the two factors and of the (flattened) dimensions: batch `b`, tokens `c`."""
    free = iter(ascii_letters.replace("b", "").replace("c", "").replace("d", ""))
    names = {axis: next(free) for axis in sorted(a for dim in value.dims for a in dim)}
    group = {
        g: "".join(n for (k, _), n in names.items() if k == g) for g in ("stack", "lhs", "rhs")
    }
    out = "".join(names[axis] for dim in value.dims for axis in dim)
    return f"{group['stack']}bc{group['lhs']}", f"{group['stack']}bc{group['rhs']}", out


def product_of_factors(lhs, rhs, value: Outer, out: str):
    """One einsum of the factors; the factor whose axes come first in the result is the first operand."""
    first, second, flat = letters(value)
    leading = next((n for n in flat if n not in first or n not in second), "")
    if leading and leading in second:
        first, second, lhs, rhs = second, first, rhs, lhs
    dtype = preferred(value.dtype)
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
    return jnp.einsum(
        f"{first},{second}->{out}",
        lhs,
        rhs,
        precision=value.precision,
        preferred_element_type=dtype,
    )


def outer_entries(value: Outer):
    lhs, rhs = masked_factors(value)
    out = product_of_factors(lhs, rhs, value, "b" + letters(value)[2])
    return out.reshape(out.shape[0], *value.shape).astype(value.dtype)


def _outer_sum(value: Outer):
    lhs, rhs = masked_factors(value)
    out = product_of_factors(lhs, rhs, value, letters(value)[2])
    return out.reshape(value.shape).astype(value.dtype)


def _rows_entries(value: Rows):
    update = masked_update(value)
    batch = update.shape[0]
    table = jnp.zeros((batch, *value.table), update.dtype)
    out = table.at[jnp.arange(batch)[:, None], value.index].add(update)
    return out.reshape(batch, *value.shape).astype(value.dtype)


def _rows_sum(value: Rows):
    update = masked_update(value).astype(working_dtype(value.dtype))
    rows = update.reshape(-1, *value.table[1:])
    table = jnp.zeros(value.table, rows.dtype).at[value.index.reshape(-1)].add(rows)
    return table.reshape(value.shape).astype(value.dtype)


def finish(array, scale, keep, dtype):
    if scale is not None:
        array = array * per_example(scale.astype(working_dtype(dtype)), array.ndim)
    if keep is not None:
        array = jnp.where(per_example(keep, array.ndim), array, 0)
    return array.astype(dtype)


def beside(number, factor, num_stack: int):
    """``[B]`` shaped to multiply a factor ``[*stack, B, ..]``."""
    shape = (1,) * num_stack + number.shape + (1,) * (factor.ndim - num_stack - 1)
    return number.reshape(shape)


def beside_stack(number, factor):
    """``[*stack, B]`` shaped to multiply a factor ``[*stack, B, ..]``."""
    return number.reshape(number.shape + (1,) * (factor.ndim - number.ndim))


def both(a, b):
    return b if a is None else a if b is None else a & b
