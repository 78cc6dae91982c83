"""Moving the dimensions of an `Outer` around without touching its entries: only names of axes change, or a factor's view."""

import dataclasses
import math
from collections import deque

import jax.numpy as jnp
from jax import lax

from microbatch.jax._factored._values import Axis, Outer

_GROUPS = ("stack", "lhs", "rhs")


def outer(
    lhs,
    rhs,
    dims: tuple[tuple[Axis, ...], ...],
    dtype,
    precision=None,
    sites: tuple = (),
) -> Outer:
    """An `Outer` without scale from ``lhs [*stack, B, tokens, *axes]`` and `rhs`; axes of size 1 are dropped."""
    return drop_units(Outer(lhs, rhs, None, None, dims, dtype, precision, sites))


def drop_units(value: Outer) -> Outer:
    """The same value with no stored axis of size 1."""
    sizes = {axis: value.axis_size(axis) for dim in value.dims for axis in dim}
    if all(size != 1 for size in sizes.values()):
        return value
    return _relabel(value, {axis: [s for s in (size,) if s != 1] for axis, size in sizes.items()})


def transpose(value: Outer, permutation) -> Outer:
    """``[d0, d1, ..]`` to ``[d[p0], d[p1], ..]``."""
    return dataclasses.replace(value, dims=tuple(value.dims[d] for d in permutation))


def reshape(value: Outer, shape: tuple[int, ...]) -> Outer | None:
    """A view of another shape; None where a new dimension would cut a stored axis unevenly."""
    queue = deque((axis, value.axis_size(axis)) for dim in value.dims for axis in dim)
    pieces: dict[Axis, list[int]] = {axis: [] for axis, _ in queue}
    dims = []
    for size in shape:
        dim = []
        while size != 1:
            if not queue:
                return None
            axis, available = queue.popleft()
            take = math.gcd(size, available)
            if take != min(size, available):
                return None
            if take < available:
                queue.appendleft((axis, available // take))
            dim.append((axis, len(pieces[axis])))
            pieces[axis].append(take)
            size //= take
        dims.append(tuple(dim))
    if queue:
        return None
    return _relabel(value, pieces, tuple(dims))


def slice_dim(value: Outer, dim: int, start: int, limit: int, stride: int) -> Outer | None:
    """``value[.., start:limit:stride, ..]``; None where the dimension is made of several stored axes."""
    if (start, limit, stride) == (0, value.shape[dim], 1):
        return value
    return _on_axis(value, dim, lambda x, at: lax.slice_in_dim(x, start, limit, stride, at))


def refine(left: Outer, right: Outer) -> tuple[Outer, Outer] | None:
    """Both values with the same stored axes in the same groups; None where their factors do not correspond."""
    atoms = []
    for ours, theirs in zip(_sizes(left), _sizes(right), strict=True):
        common = _common_refinement(ours, theirs)
        if common is None:
            return None
        atoms.append(common)
    flat = tuple(size for dim in atoms for size in dim)
    left, right = reshape(left, flat), reshape(right, flat)
    if left is None or right is None:
        return None
    groups = [[dim[0][0] if dim else None for dim in v.dims] for v in (left, right)]
    if groups[0] != groups[1]:
        right = swap(right)
        groups[1] = [dim[0][0] if dim else None for dim in right.dims]
    return (left, right) if groups[0] == groups[1] else None


def swap(value: Outer) -> Outer:
    """The same value with its two factors exchanged."""
    other = {"stack": "stack", "lhs": "rhs", "rhs": "lhs"}
    dims = tuple(tuple((other[group], i) for group, i in dim) for dim in value.dims)
    return dataclasses.replace(value, lhs=value.rhs, rhs=value.lhs, dims=dims)


def in_order(value: Outer) -> Outer:
    """The same value with the stored axes of each group in the order of the dimensions."""
    order: dict[str, list[int]] = {group: [] for group in _GROUPS}
    for dim in value.dims:
        for group, index in dim:
            order[group].append(index)
    if all(indices == sorted(indices) for indices in order.values()):
        return value
    stack = len(order["stack"])
    front = (*order["stack"], stack, stack + 1)
    lhs = jnp.transpose(value.lhs, (*front, *(stack + 2 + i for i in order["lhs"])))
    rhs = jnp.transpose(value.rhs, (*front, *(stack + 2 + i for i in order["rhs"])))
    dims = tuple(tuple((group, order[group].index(i)) for group, i in dim) for dim in value.dims)
    return dataclasses.replace(value, lhs=lhs, rhs=rhs, dims=dims)


def _relabel(value: Outer, pieces: dict[Axis, list[int]], dims=None) -> Outer:
    """Cuts each stored axis into `pieces` (their sizes); `dims` name pieces as ``(axis, number of the piece)``."""
    if dims is None:
        dims = tuple(
            tuple((axis, i) for axis in dim for i in range(len(pieces[axis]))) for dim in value.dims
        )
    number: dict[tuple[Axis, int], Axis] = {}
    sizes: dict[str, list[int]] = {group: [] for group in _GROUPS}
    for axis in sorted(pieces):
        group = axis[0]
        for i, size in enumerate(pieces[axis]):
            number[axis, i] = (group, len(sizes[group]))
            sizes[group].append(size)
    stack = value.num_stack
    middle = value.lhs.shape[stack : stack + 2]
    return dataclasses.replace(
        value,
        lhs=value.lhs.reshape(*sizes["stack"], *middle, *sizes["lhs"]),
        rhs=value.rhs.reshape(*sizes["stack"], *middle, *sizes["rhs"]),
        dims=tuple(tuple(number[piece] for piece in dim) for dim in dims),
    )


def _on_axis(value: Outer, dim: int, change) -> Outer | None:
    if len(value.dims[dim]) != 1:
        return None
    group, index = value.dims[dim][0]
    stack = value.num_stack
    lhs, rhs = value.lhs, value.rhs
    if group == "stack":
        lhs, rhs = change(lhs, index), change(rhs, index)
    elif group == "lhs":
        lhs = change(lhs, stack + 2 + index)
    else:
        rhs = change(rhs, stack + 2 + index)
    return drop_units(dataclasses.replace(value, lhs=lhs, rhs=rhs))


def _sizes(value: Outer) -> list[list[int]]:
    return [[value.axis_size(axis) for axis in dim] for dim in value.dims]


def _common_refinement(ours: list[int], theirs: list[int]) -> list[int] | None:
    ours, theirs, common = deque(ours), deque(theirs), []
    while ours and theirs:
        a, b = ours.popleft(), theirs.popleft()
        take = min(a, b)
        if a % take or b % take:
            return None
        common.append(take)
        if a > take:
            ours.appendleft(a // take)
        if b > take:
            theirs.appendleft(b // take)
    return None if ours or theirs else common
