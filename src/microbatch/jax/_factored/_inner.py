"""Inner products of per-example values over some of their dimensions; a squared norm is one of them.

For ``G[b] = sum_c a[b, c] g[b, c]^T`` the inner product of two values is
``sum_cd (a[b, c] . a'[b, d]) (g[b, c] . g'[b, d])``: two Gram matrices of the tokens instead of the entries
(Goodfellow, arXiv 1510.01799, for one token; Li et al., arXiv 2110.05679, for many).
"""

from itertools import pairwise

import jax.numpy as jnp

from microbatch.jax._factored import _algebra as algebra
from microbatch.jax._factored import _joining as joining
from microbatch.jax._factored import _layout as layout
from microbatch.jax._factored._context import Context, working_dtype
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
    is_zero,
)


def reduce_product(ctx: Context, value: Product, axes: tuple[int, ...]):
    """The sum of a product's entries over `axes`, as ``[B, *rest]``; None where its entries are needed."""
    kept = tuple(d for d in range(len(value.shape)) if d not in axes)
    total = inner(ctx, value.left, value.right, kept)
    if total is None:
        return None
    return algebra.finish(total, value.scale, value.keep, total.dtype)


def inner(ctx: Context, left: Value, right: Value, kept: tuple[int, ...] = ()):
    """``sum(left * right)`` over all dimensions but `kept`: ``[B, *kept]`` in float32 or wider, or None."""
    if isinstance(left, Sum) or isinstance(right, Sum):
        return _inner_sums(ctx, left, right, kept)
    if isinstance(left, Blocks) or isinstance(right, Blocks):
        return _inner_blocks(ctx, left, right, kept)
    if is_zero(left) or is_zero(right):
        shape = tuple(left.shape[d] for d in kept)
        return jnp.zeros((ctx.batch_size, *shape), working_dtype(left.dtype))
    if isinstance(right, (Outer, Rows)) and not isinstance(left, (Outer, Rows)):
        left, right = right, left
    if isinstance(left, Outer) and isinstance(right, Outer):
        return _inner_outers(ctx, left, right, kept)
    if isinstance(left, Outer) and isinstance(right, (Dense, Shared)):
        return _inner_outer_array(ctx, left, right, kept)
    if kept:
        return None
    if isinstance(left, Rows) and isinstance(right, (Dense, Shared)):
        return _inner_rows_array(ctx, left, right)
    if isinstance(left, Rows) and isinstance(right, Rows):
        return _inner_rows(ctx, left, right)
    if isinstance(left, Rows) and isinstance(right, Outer):
        left, right = right, left
    if isinstance(left, Outer) and isinstance(right, Rows):
        return _inner_outer_rows(ctx, left, right)
    if isinstance(left, (Dense, Shared)) and isinstance(right, (Dense, Shared)):
        dtype = working_dtype(left.dtype)
        total = left.array.astype(dtype) * right.array.astype(dtype)
        if isinstance(left, Shared) and isinstance(right, Shared):
            return jnp.broadcast_to(jnp.sum(total), (ctx.batch_size,))
        return jnp.sum(total, tuple(range(total.ndim - len(left.shape), total.ndim)))
    return None


def _inner_sums(ctx, left, right, kept):
    ours = left.terms if isinstance(left, Sum) else (left,)
    theirs = right.terms if isinstance(right, Sum) else (right,)
    total = 0.0
    for i, a in enumerate(ours):
        for j, b in enumerate(theirs):
            if left is right and j < i:
                continue
            part = inner(ctx, a, b, kept)
            if part is None:
                return None
            total = total + (2 * part if left is right and j > i else part)
    return _clamp(total) if left is right else total


def _inner_blocks(ctx, left, right, kept):
    blocks = left if isinstance(left, Blocks) else right
    if blocks.axis in kept:
        return None
    total, ends = 0.0, joining.boundaries(blocks)
    for start, limit in pairwise(ends):
        if left is right:
            a = b = joining.cut(blocks, start, limit)
        else:
            a, b = (
                joining.cut(v, start, limit)
                if isinstance(v, Blocks)
                else joining.cut_part(v, blocks.axis, start, limit)
                for v in (left, right)
            )
        part = None if a is None or b is None else inner(ctx, _dense_fill(a), _dense_fill(b), kept)
        if part is None:
            return None
        total = total + part
    return total


def _dense_fill(value: Value) -> Value:
    if isinstance(value, Fill) and not value.is_zero:
        if value.per_example:
            return Dense(algebra.fill_entries(value, value.number.shape[0]))
        return Shared(algebra.fill_entries(value))
    return value


def _inner_outers(ctx: Context, left: Outer, right: Outer, kept: tuple[int, ...]):
    same = left is right
    shape = left.shape
    pair = layout.refine(left, right)
    if pair is None:
        return None
    left, right = map(layout.in_order, pair)
    if left.dims != right.dims:
        return None
    atoms = _atoms(shape, left.shape)
    names = algebra.letters(left)[2]
    out = "".join(names[i] for d in kept for i in atoms[d])
    first, second, _ = algebra.letters(left)
    stack, lhs, rhs = (
        first[: left.num_stack],
        first[left.num_stack + 2 :],
        second[left.num_stack + 2 :],
    )
    form = _form(ctx, left, right, same, set(out) & set(lhs), set(out) & set(rhs))
    if ctx.dry:
        kept_shape = (shape[d] for d in kept)
        return jnp.zeros((ctx.batch_size, *kept_shape), working_dtype(left.dtype))
    factors = [algebra.normalised(x, left.num_stack) for x in (left.lhs, left.rhs)]
    others = [algebra.normalised(x, right.num_stack) for x in (right.lhs, right.rhs)]
    others = factors if same else others
    (a, e1), (g, e2), (b, e3), (h, e4) = (*factors, *others)
    inside = "".join(n for n in lhs + rhs if n in out)
    total = _FORMS[form](a, g, b, h, stack, lhs, rhs, inside, left.precision)
    total = _finish_pair(total, e1 + e2 + e3 + e4, left, right)
    total = jnp.einsum(f"{stack}b{inside}->b{out}", total)
    total = total.reshape(ctx.batch_size, *(shape[d] for d in kept))
    return _clamp(total) if same else total


def _form(ctx: Context, left: Outer, right: Outer, same: bool, kept_lhs: set, kept_rhs: set) -> str:
    """How to compute it: for one token from the factors' own norms, else by Gram matrices or entries."""
    stack, m, n = left.widths
    c, d = left.tokens, right.tokens
    gram = 2.0 * c * d * (m + n)
    dense = 2.0 * (c if same else c + d) * m * n
    if c == d == 1:
        form, flops = "factored", 0.0
    elif dense < gram or ctx.norms == "safe" or (kept_lhs and kept_rhs):
        form, flops = "dense", dense
    else:
        form, flops = ("Gram of rhs" if kept_lhs else "Gram of lhs" if kept_rhs else "Gram"), gram
    many = ctx.batch_size * stack
    touched = many * (m * n if form == "dense" else c * m + d * n)
    statistic = "norm" if same else "dot"
    how = "dense" if left.is_array and right.is_array else form.split()[0]
    ctx.note(left, statistic, how, flops=many * flops, entries=touched)
    return form


def _one_token(a, g, b, h, stack, lhs, rhs, inside, precision):
    left = jnp.einsum(f"{stack}b{lhs}->{stack}b{_only(lhs, inside)}", _no_tokens(a * b, stack))
    right = jnp.einsum(f"{stack}b{rhs}->{stack}b{_only(rhs, inside)}", _no_tokens(g * h, stack))
    left = left.reshape(left.shape + (1,) * len(_only(rhs, inside)))
    lead = right.shape[: len(stack) + 1]
    right = right.reshape(lead + (1,) * len(_only(lhs, inside)) + right.shape[len(lead) :])
    return left * right


def _by_gram(a, g, b, h, stack, lhs, rhs, inside, precision):
    both = f"{stack}bc%s,{stack}bd%s->{stack}bcd"
    left = jnp.einsum(both % (lhs, lhs), a, b, precision=precision)
    right = jnp.einsum(both % (rhs, rhs), g, h, precision=precision)
    return jnp.sum(left * right, (-2, -1))


def _by_gram_of_rhs(a, g, b, h, stack, lhs, rhs, inside, precision):
    gram = jnp.einsum(f"{stack}bc{rhs},{stack}bd{rhs}->{stack}bcd", g, h, precision=precision)
    mixed = jnp.einsum(f"{stack}bcd,{stack}bd{lhs}->{stack}bc{lhs}", gram, b, precision=precision)
    return jnp.einsum(f"{stack}bc{lhs}->{stack}b{inside}", a * mixed)


def _by_gram_of_lhs(a, g, b, h, stack, lhs, rhs, inside, precision):
    return _by_gram_of_rhs(g, a, h, b, stack, rhs, lhs, inside, precision)


def _by_entries(a, g, b, h, stack, lhs, rhs, inside, precision):
    each = f"{stack}bc{lhs},{stack}bc{rhs}->{stack}b{lhs}{rhs}"
    left = jnp.einsum(each, a, g, precision=precision)
    right = left if a is b and g is h else jnp.einsum(each, b, h, precision=precision)
    return jnp.einsum(f"{stack}b{lhs}{rhs}->{stack}b{inside}", left * right)


_FORMS = {
    "factored": _one_token,
    "Gram": _by_gram,
    "Gram of rhs": _by_gram_of_rhs,
    "Gram of lhs": _by_gram_of_lhs,
    "dense": _by_entries,
}


def _inner_outer_array(ctx: Context, left: Outer, right: Dense | Shared, kept: tuple[int, ...]):
    shape, left = left.shape, layout.in_order(left)
    flat = layout.reshape(left, tuple(left.axis_size(a) for dim in left.dims for a in dim))
    atoms = _atoms(shape, flat.shape)
    first, second, names = algebra.letters(flat)
    out = "".join(names[i] for d in kept for i in atoms[d])
    dtype = working_dtype(left.dtype)
    lead = (ctx.batch_size,) if isinstance(right, Dense) else ()
    array = right.array.reshape(*lead, *flat.shape).astype(dtype)
    lhs, rhs = (x.astype(dtype) for x in algebra.masked_factors(flat))
    _, m, n = flat.widths
    ctx.note(left, "dot", "factored", flops=2.0 * ctx.batch_size * flat.tokens * m * n)
    kept_rhs = set(out) & set(second) - set(first)
    if kept_rhs:
        first, second, lhs, rhs = second, first, rhs, lhs
    # The side whose axes are kept stays outside: array x other factor first, then an entrywise product.
    mixed = jnp.einsum(f"{'b' * len(lead)}{names},{second}->{first}", array, rhs)
    return jnp.einsum(f"{first},{first}->b{out}", mixed, lhs).reshape(
        ctx.batch_size, *(shape[d] for d in kept)
    )


def _inner_rows(ctx: Context, left: Rows, right: Rows):
    if left.table != right.table:
        return None
    dtype = working_dtype(left.dtype)
    u, e1 = algebra.normalised(left.update.astype(dtype), 0)
    v, e2 = (u, e1) if left is right else algebra.normalised(right.update.astype(dtype), 0)
    u, v = (x.reshape(*x.shape[:2], -1) for x in (u, v))
    flops = 2.0 * u.shape[0] * u.shape[1] * v.shape[1] * u.shape[2]
    ctx.note(left, "norm" if left is right else "dot", "Gram", flops=flops)
    gram = jnp.einsum("bcx,bdx->bcd", u, v)
    meet = left.index[:, :, None] == right.index[:, None, :]
    total = jnp.sum(jnp.where(meet, gram, 0), (1, 2))
    total = _finish_pair(total, e1 + e2, left, right)
    return _clamp(total) if left is right else total


def _inner_rows_array(ctx: Context, left: Rows, right: Dense | Shared):
    table = right.array.reshape(
        *right.array.shape[: right.array.ndim - len(right.shape)], *left.table
    )
    if isinstance(right, Dense):
        met = table[jnp.arange(ctx.batch_size)[:, None], left.index]
    else:
        met = table[left.index]
    dtype = working_dtype(left.dtype)
    total = left.update.astype(dtype) * met.astype(dtype)
    total = jnp.sum(total, tuple(range(1, total.ndim)))
    ctx.note(left, "dot", "factored", entries=left.update.size)
    return algebra.finish(total, left.scale, left.keep, dtype)


def _inner_outer_rows(ctx: Context, left: Outer, right: Rows):
    table = layout.reshape(left, right.table)
    if table is None or table.num_stack or len(table.dims[0]) != 1:
        return None
    if table.dims[0][0][0] == "rhs":
        table = layout.swap(table)
    table = layout.in_order(table)
    if any(group == "lhs" for dim in table.dims[1:] for group, _ in dim):
        return None
    dtype = working_dtype(left.dtype)
    hit = jnp.take_along_axis(table.lhs, right.index[:, None, :], axis=2).astype(dtype)
    update = right.update.reshape(*right.update.shape[:2], -1).astype(dtype)
    rhs = table.rhs.reshape(*table.rhs.shape[:2], -1).astype(dtype)
    (hit, e1), (update, e2), (rhs, e3) = (algebra.normalised(x, 0) for x in (hit, update, rhs))
    flops = 2.0 * rhs.shape[0] * rhs.shape[1] * update.shape[1] * rhs.shape[2]
    ctx.note(Sum((left, right)), "dot", "Gram", flops=flops)
    total = jnp.sum(hit * jnp.einsum("bcx,btx->bct", rhs, update), (1, 2))
    return _finish_pair(total, e1 + e2 + e3, left, right)


def _finish_pair(total, exponent, left, right):
    """``total [*stack, B, ..]`` times ``2 ** exponent [*stack, B]``, both scales, and zeros where a `keep` is False.

    All exponents are added before they are applied: what leaves the range of the dtype in between need not do so at
    the end, as the norm of an exploding gradient that was scaled down.
    """
    stack = exponent.ndim - 1
    for value in (left, right):
        if value.scale is not None:
            scale, more = algebra.normalised(value.scale.astype(total.dtype), 0)
            total, exponent = total * algebra.beside(scale, total, stack), exponent + more
    total = _raised(total, exponent)
    keep = algebra.both(left.keep, right.keep)
    return total if keep is None else jnp.where(algebra.beside(keep, total, stack), total, 0)


def _raised(total, exponent):
    """``total [*stack, B, ..]`` times ``2 ** exponent [*stack, B]``, in quarters that are in range."""
    most = 4 * (jnp.finfo(total.dtype).maxexp - 4)
    exponent = jnp.clip(exponent, -most, most)
    quarter = exponent // 4
    for part in (quarter, quarter, quarter, exponent - 3 * quarter):
        power = algebra.power_of_two(part, total.dtype)
        total = total * power.reshape(power.shape + (1,) * (total.ndim - power.ndim))
    return total


def _atoms(shape: tuple[int, ...], flat: tuple[int, ...]) -> list[list[int]]:
    """For each dimension of `shape`, the positions in `flat` that make it."""
    positions, result = iter(range(len(flat))), []
    for size in shape:
        made, mine = 1, []
        while made < size:
            mine.append(next(positions))
            made *= flat[mine[-1]]
        result.append(mine)
    return result


def _only(names: str, chosen: str) -> str:
    return "".join(n for n in names if n in chosen)


def _no_tokens(array, stack: str):
    return jnp.squeeze(array, len(stack) + 1)


def _clamp(total):
    """A squared norm is not negative; rounding of nearly cancelling tokens may make it so."""
    return jnp.maximum(total, 0)
