"""Rules of the primitives that compute with entries."""

import dataclasses

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from microbatch.jax._factored import _algebra as algebra
from microbatch.jax._factored import _inner, _layout
from microbatch.jax._factored import _joining as joining
from microbatch.jax._factored import _nonfinite as nonfinite
from microbatch.jax._factored._context import Context
from microbatch.jax._factored._registry import rule
from microbatch.jax._factored._shapes import out_shape
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
    is_factored,
    is_zero,
)


def number_of(ctx: Context, value: Value):
    """``[B]`` if the value is one number per example, else None."""
    if isinstance(value, Fill):
        number = jnp.zeros((), value.dtype) if value.is_zero else value.number
        return jnp.broadcast_to(number, (ctx.batch_size,))
    if isinstance(value, (Dense, Shared)) and all(size == 1 for size in value.shape):
        number = jnp.asarray(value.array).reshape(-1)
        return jnp.broadcast_to(number, (ctx.batch_size,))
    return None


@rule("mul")
def mul(ctx: Context, eqn: JaxprEqn, left: Value, right: Value) -> Value | None:
    """A number per example is a scale; a vector scales a factor; two values of one shape wait for their sum."""
    if not is_factored(left):
        left, right = right, left
    if not is_factored(left):
        return None
    if not is_factored(right):
        number = number_of(ctx, right)
        if number is not None:
            fits = left.shape == out_shape(eqn) and algebra.linear(left)
            return algebra.with_scale(left, number) if fits else None
        if isinstance(left, Outer) and len(left.shape) == len(right.shape):
            scaled = scale_factor(left, right)
            if scaled is not None:
                return scaled
    return product(left, right, eqn.outvars[0].aval.dtype)


@rule("square")
def square(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """``value * value``."""
    if is_zero(value):
        return value
    return product(value, value, eqn.outvars[0].aval.dtype)


@rule("integer_pow")
def integer_pow(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """The square, or any power of a value of one token."""
    power = eqn.params["y"]
    if is_zero(value):
        return value if power > 0 else None
    if power == 2:
        return square(ctx, eqn, value)
    if not isinstance(value, Outer) or value.tokens != 1 or power < 1:
        return None
    # A factor's power may leave the range of a dtype that holds the product's.
    value = algebra.of_one_size(value)
    return dataclasses.replace(value, lhs=value.lhs**power, rhs=value.rhs**power)


def product(left: Value, right: Value, dtype) -> Product | None:
    """The entrywise product of values of one shape."""
    kinds = (Outer, Rows, Blocks, Sum, Dense, Shared)
    if left.shape != right.shape or not (isinstance(left, kinds) and isinstance(right, kinds)):
        return None
    return Product(left, right, None, None, jnp.dtype(dtype))


def scale_factor(value: Outer, by: Dense | Shared) -> Outer | None:
    """Times an array with size 1 in all dimensions of one factor: ``a g^T * v[:, None]`` is ``(a * v) g^T``."""
    used = [axis for dim, size in enumerate(by.shape) if size != 1 for axis in value.dims[dim]]
    if any(s not in (1, d) for s, d in zip(by.shape, value.shape, strict=True)):
        return None
    groups = {group for group, _ in used}
    if {"lhs", "rhs"} <= groups or not used:
        return None
    group = "rhs" if "rhs" in groups else "lhs"
    stack = value.num_stack
    lead = 1 if isinstance(by, Dense) else 0
    array = by.array.reshape(*by.array.shape[:lead], *(value.axis_size(axis) for axis in used))
    factor = value.lhs if group == "lhs" else value.rhs
    shape = [1] * factor.ndim
    place = {axis: axis[1] if axis[0] == "stack" else stack + 2 + axis[1] for axis in used}
    order = sorted(range(len(used)), key=lambda i: place[used[i]])
    if lead:
        shape[stack] = array.shape[0]
        before = [i + 1 for i in order if place[used[i]] < stack]
        array = jnp.transpose(
            array, (*before, 0, *(i + 1 for i in order if place[used[i]] > stack))
        )
    else:
        array = jnp.transpose(array, order)
    for axis in used:
        shape[place[axis]] = value.axis_size(axis)
    scaled = (factor * array.reshape(shape)).astype(factor.dtype)
    return dataclasses.replace(value, **{group: scaled})


@rule("div")
def div(ctx: Context, eqn: JaxprEqn, left: Value, right: Value) -> Value | None:
    """By a number per example, or by a vector of one factor."""
    if not is_factored(left) or is_factored(right):
        return None
    number = number_of(ctx, right)
    if number is not None:
        fits = left.shape == out_shape(eqn) and algebra.linear(left)
        return (
            algebra.with_scale(
                left, 1 / number.astype(jnp.promote_types(number.dtype, jnp.float32))
            )
            if fits
            else None
        )
    if isinstance(left, Outer) and len(left.shape) == len(right.shape):
        scaled = scale_factor(left, type(right)(1 / right.array))
        if scaled is not None:
            return scaled
    if isinstance(right, (Dense, Shared)):
        return product(left, type(right)(1 / right.array), eqn.outvars[0].aval.dtype)
    return None


@rule("neg")
def neg(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """The scale changes its sign."""
    if is_zero(value):
        return value
    if not algebra.linear(value):
        return None
    return algebra.with_scale(value, jnp.full((ctx.batch_size,), -1, value.dtype))


@rule("add", "add_any")
def add(ctx: Context, eqn: JaxprEqn, left: Value, right: Value) -> Value | None:
    """Common factors are joined, others wait side by side."""
    shape = out_shape(eqn)
    if left.shape != shape or right.shape != shape:
        return None
    if isinstance(right, Accumulating):
        left, right = right, left
    if isinstance(left, Accumulating) and not isinstance(right, Accumulating):
        if is_zero(right):
            return left
        return dataclasses.replace(left, terms=(*left.terms, right))
    if is_zero(left):
        return right
    return joining.add(ctx, [left, right])


@rule("sub")
def sub(ctx: Context, eqn: JaxprEqn, left: Value, right: Value) -> Value | None:
    """``left + (-right)``."""
    if is_zero(right) and left.shape == out_shape(eqn):
        return left
    if not is_factored(right):
        return None
    negative = neg(ctx, eqn, right)
    return None if negative is None else add(ctx, eqn, left, negative)


@rule("reduce_sum")
def reduce_sum(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """A sum of products is an inner product; a sum of a factored value is a sum of its factors."""
    axes = tuple(eqn.params["axes"])
    if is_zero(value):
        return Fill(None, out_shape(eqn), value.dtype, False)
    total = _sum_over(ctx, value, axes)
    return Dense(total.astype(eqn.outvars[0].aval.dtype)) if total is not None else None


def _sum_over(ctx: Context, value: Value, axes: tuple[int, ...]):
    if isinstance(value, Product):
        return _inner.reduce_product(ctx, value, axes)
    if isinstance(value, Sum):
        totals = [_sum_over(ctx, term, axes) for term in value.terms]
        return None if any(t is None for t in totals) else sum(totals[1:]) + totals[0]
    if isinstance(value, Blocks) and value.axis in axes:
        totals = [_sum_over(ctx, part, axes) for part in value.parts]
        return None if any(t is None for t in totals) else sum(totals[1:]) + totals[0]
    if isinstance(value, Outer):
        return _sum_outer(value, axes)
    if isinstance(value, Dense):
        return jnp.sum(value.array, tuple(d + 1 for d in axes))
    if isinstance(value, Fill) and value.is_zero:
        return jnp.zeros((1,), value.dtype) if len(axes) == len(value.shape) else None
    return None


def _sum_outer(value: Outer, axes: tuple[int, ...]):
    """Sums the factors over `axes`; None where the rest still is a product of two factors."""
    gone = {axis for d in axes for axis in value.dims[d]}
    left = {axis[0] for dim in value.dims for axis in dim if axis not in gone}
    if {"lhs", "rhs"} <= left:
        return None
    lhs, rhs = algebra.masked_factors(value)
    first, second, out = algebra.letters(value)
    names = {a: n for a, n in zip((a for dim in value.dims for a in dim), out, strict=True)}
    for axis in sorted(gone, reverse=True):
        at = value.num_stack + 2 + axis[1]
        if axis[0] == "lhs":
            lhs, first = jnp.sum(lhs, at), first.replace(names[axis], "")
        elif axis[0] == "rhs":
            rhs, second = jnp.sum(rhs, at), second.replace(names[axis], "")
    rest = "".join(names[a] for dim in value.dims for a in dim if a not in gone)
    total = jnp.einsum(f"{first},{second}->b{rest}", lhs, rhs, precision=value.precision)
    kept = (value.shape[d] for d in range(len(value.shape)) if d not in axes)
    return total.reshape(total.shape[0], *kept)


@rule("dot_general")
def dot_general(ctx: Context, eqn: JaxprEqn, left: Value, right: Value) -> Value | None:
    """``vdot`` of two values; a factor times a matrix where one factor's dimensions are contracted."""
    (lc, rc), (lb, _) = eqn.params["dimension_numbers"]
    if lb:
        return None
    left, right = (
        Shared(algebra.fill_entries(v)) if isinstance(v, Fill) and not v.per_example else v
        for v in (left, right)
    )
    if len(lc) == len(left.shape) == len(right.shape):
        if any(isinstance(v, (Product, Fill, NonFinite, Accumulating)) for v in (left, right)):
            return None
        if tuple(lc) != tuple(rc):
            return None
        total = _inner.inner(ctx, left, right)
        return None if total is None else Dense(total.astype(eqn.outvars[0].aval.dtype))
    return _times_matrix(eqn, left, right, lc, rc)


def _times_matrix(eqn: JaxprEqn, left: Value, right: Value, lc, rc) -> Outer | None:
    """``(a g^T) W`` is ``a (W^T g)^T``."""
    flipped = not isinstance(left, Outer)
    value, array, vc, ac = (right, left, rc, lc) if flipped else (left, right, lc, rc)
    # Of two per-example operands the product is made anew, with one of them as entries.
    if not isinstance(value, Outer) or not isinstance(array, Shared):
        return None
    gone = [axis for d in vc for axis in value.dims[d]]
    groups = {group for group, _ in gone}
    if len(groups) != 1 or "stack" in groups:
        return None
    group = groups.pop()
    if any(axis[0] == group and axis not in gone for dim in value.dims for axis in dim):
        return None
    stack = value.num_stack
    factor = value.lhs if group == "lhs" else value.rhs
    order = [axis[1] for axis in gone]
    factor = jnp.transpose(factor, (*range(stack + 2), *(stack + 2 + i for i in order)))
    factor = factor.reshape(*factor.shape[: stack + 2], -1)
    rest = [d for d in range(len(array.shape)) if d not in ac]
    matrix = jnp.transpose(array.array, (*ac, *rest)).reshape(factor.shape[-1], -1)
    names = "stuvwxyz"[:stack]
    made = jnp.einsum(f"{names}bci,ij->{names}bcj", factor, matrix, precision=value.precision)
    made = made.reshape(*made.shape[:-1], *(array.shape[d] for d in rest))
    ours = tuple(value.dims[d] for d in range(len(value.shape)) if d not in vc)
    theirs = tuple(((group, i),) for i in range(len(rest)))
    return _layout.drop_units(
        dataclasses.replace(
            value,
            **{group: made},
            dims=(*theirs, *ours) if flipped else (*ours, *theirs),
            dtype=jnp.dtype(eqn.outvars[0].aval.dtype),
        )
    )


@rule("abs", "sign")
def of_each_factor(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """``f(a g^T) = f(a) f(g)^T`` for one token."""
    if is_zero(value):
        return value
    if not isinstance(value, Outer) or value.tokens != 1:
        return None
    function = jnp.abs if eqn.primitive.name == "abs" else jnp.sign
    scale = None if value.scale is None else function(value.scale)
    return dataclasses.replace(value, lhs=function(value.lhs), rhs=function(value.rhs), scale=scale)


@rule("reduce_max", "reduce_min")
def reduce_max(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """The extreme of ``a g^T`` for one token is one of four products of the factors' extremes."""
    all_axes = len(eqn.params["axes"]) == len(value.shape)
    if not isinstance(value, Outer) or value.tokens != 1 or value.num_stack or not all_axes:
        return None
    ends = []
    for factor in (value.lhs, value.rhs):
        axes = tuple(range(1, factor.ndim))
        ends.append((jnp.max(factor, axes), jnp.min(factor, axes)))
    corners = jnp.stack([a * g for a in ends[0] for g in ends[1]])
    if value.scale is not None:
        corners = corners * value.scale
    extreme = (jnp.max if eqn.primitive.name == "reduce_max" else jnp.min)(corners, 0)
    if value.keep is not None:
        extreme = jnp.where(value.keep, extreme, 0)
    return Dense(extreme.astype(eqn.outvars[0].aval.dtype))


@rule("select_n")
def select_n(ctx: Context, eqn: JaxprEqn, which: Value, *cases: Value) -> Value | None:
    """A choice per example masks the factors; zeros in place of non-finite entries clean them."""
    if isinstance(which, NonFinite):
        return nonfinite.select(which, *cases)
    if len(cases) != 2 or any(case.shape != out_shape(eqn) for case in cases):
        return None
    if all(map(is_zero, cases)):
        return cases[0]
    chosen = number_of(ctx, which)
    if chosen is None or not any(map(is_factored, cases)) or not all(map(algebra.linear, cases)):
        return None
    chosen = chosen.astype(bool)
    first, second = cases
    if not is_zero(first):
        first = algebra.with_keep(first, ~chosen)
    if not is_zero(second):
        second = algebra.with_keep(second, chosen)
    return joining.add(ctx, [first, second])
