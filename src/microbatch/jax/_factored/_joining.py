"""Sums of two values, and values cut and put side by side."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import jax.numpy as jnp

from microbatch.jax._factored import _layout as layout
from microbatch.jax._factored._algebra import entries, masked_factors
from microbatch.jax._factored._context import Context
from microbatch.jax._factored._values import (
    Blocks,
    Dense,
    Fill,
    Outer,
    Product,
    Rows,
    Shared,
    Sum,
    Value,
    is_factored,
    is_zero,
)


def add(ctx: Context, terms: Sequence[Value]) -> Value | None:
    """The sum of values of one shape, keeping factors; None if an array is simpler."""
    terms = [t for t in terms if not is_zero(t)]
    if len(terms) < 2:
        return terms[0] if terms else None
    if not any(map(is_factored, terms)):
        return None
    first, second = terms
    if isinstance(first, Blocks) and isinstance(second, Blocks) and first.axis == second.axis:
        return add_blocks(ctx, first, second)
    if isinstance(first, Outer) and isinstance(second, Outer):
        joined = join_tokens(first, second)
        if joined is not None:
            return joined
    flat = [t for term in terms for t in (term.terms if isinstance(term, Sum) else (term,))]
    if all(isinstance(t, (Outer, Rows, Product)) for t in flat):
        return Sum(tuple(flat))
    return None


def join_tokens(left: Outer, right: Outer) -> Outer | None:
    """The sum of two values as one with the tokens of both."""
    pair = layout.refine(left, right)
    if pair is None:
        return None
    shape, (left, right) = left.shape, pair
    left, right = layout.in_order(left), layout.in_order(right)
    if left.dims != right.dims or left.num_stack != right.num_stack:
        return None
    stack = left.num_stack
    (a, g), (b, h) = masked_factors(left), masked_factors(right)
    joined = dataclasses.replace(
        left,
        lhs=jnp.concatenate([a, b], stack + 1),
        rhs=jnp.concatenate([g, h], stack + 1),
        scale=None,
        keep=None,
        sites=tuple(dict.fromkeys((*left.sites, *right.sites))),
    )
    return layout.reshape(joined, shape)


def add_blocks(ctx: Context, left: Blocks, right: Blocks) -> Blocks | None:
    """Cuts both at each other's boundaries and adds the pieces."""
    cuts = sorted({*boundaries(left), *boundaries(right)})
    parts = []
    for start, limit in pairwise(cuts):
        a, b = cut(left, start, limit), cut(right, start, limit)
        if a is None or b is None:
            return None
        both = add(ctx, [a, b])
        if both is None:
            if not (is_zero(a) and is_zero(b)):
                both = Dense(entries(ctx, a) + entries(ctx, b))
            else:
                both = a
        parts.append(both)
    return parts[0] if len(parts) == 1 else Blocks(tuple(parts), left.axis)


def boundaries(value: Blocks) -> list[int]:
    """Where the parts start, and the end."""
    ends = [0]
    for part in value.parts:
        ends.append(ends[-1] + part.shape[value.axis])
    return ends


def cut(value: Blocks, start: int, limit: int) -> Value | None:
    """``value[start:limit]`` along its axis; None where a part cannot be cut."""
    parts, axis = [], value.axis
    for part, begin in zip(value.parts, boundaries(value), strict=False):
        low, high = max(start - begin, 0), min(limit - begin, part.shape[axis])
        if low >= high:
            continue
        piece = cut_part(part, axis, low, high)
        if piece is None:
            return None
        parts.append(piece)
    return parts[0] if len(parts) == 1 else Blocks(tuple(parts), axis) if parts else None


def cut_part(part: Value, axis: int, start: int, limit: int) -> Value | None:
    """``part[start:limit]`` along `axis` for any one value."""
    if (start, limit) == (0, part.shape[axis]):
        return part
    index = (slice(None),) * axis + (slice(start, limit),)
    if isinstance(part, Fill):
        shape = (*part.shape[:axis], limit - start, *part.shape[axis + 1 :])
        return dataclasses.replace(part, shape=shape)
    if isinstance(part, Dense):
        return Dense(part.array[(slice(None), *index)])
    if isinstance(part, Shared):
        return Shared(part.array[index])
    if isinstance(part, Outer):
        return layout.slice_dim(part, axis, start, limit, 1)
    return None
