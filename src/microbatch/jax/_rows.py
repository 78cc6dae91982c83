"""Where a microbatch's rows are in the batch's arrays: views, never copies of the batch."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from microbatch._checks import Leaf, batch_size_of, check_size
from microbatch._errors import MicrobatchSizeError
from microbatch._splitting import Order, make_split


@dataclass(frozen=True)
class Rows:
    """How one array's rows are cut: `count` times `size` rows along `axis`, and what is left is the tail's."""

    axis: int
    size: int
    count: int
    order: Order


def reshape_batch_axis(tree: Any, microbatch_size: int, axis: int = 0) -> Any:
    """Splits the batch axis of every leaf into microbatches: ``[…, B, …]`` to ``[…, n, m, …]``.

    Strided order: microbatch i holds rows i, i + n, …, so that a batch sharded along its rows keeps their
    sharding on the m axis and no row changes its device.

    Args:
      tree: arrays with B rows along `axis`.
      microbatch_size: m, rows in a microbatch; it divides B.
      axis: the batch axis; negative axes are resolved leaf by leaf.

    Returns:
      The tree with ``[…, n, m, …]`` in place of ``[…, B, …]``; microbatch i is at index i of the n axis.

    Raises:
      MicrobatchSizeError: `microbatch_size` is not a positive integer or does not divide B.
      BatchError: a leaf has no such axis, or rows differ.

    >>> reshape_batch_axis(jnp.arange(6), microbatch_size=3).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    where = "reshape_batch_axis"
    size = check_size(where, "microbatch_size", microbatch_size)
    leaves = [
        Leaf(f"tree{jax.tree_util.keystr(path)}", getattr(leaf, "shape", None), axis)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    batch_size, subject = batch_size_of(where, leaves)
    split = make_split(batch_size, size, subject=f"{where}: {subject}")

    def split_leaf(leaf: Any) -> jax.Array:
        at = axis % leaf.ndim
        return jnp.swapaxes(split_axis(jnp.asarray(leaf), at, size, split.full), at, at + 1)

    return jax.tree.map(split_leaf, tree)


def take(leaf: jax.Array, rows: Rows, index: Any) -> jax.Array:
    """The rows of the full microbatch `index`, which may be traced: ``[…, B, …]`` to ``[…, m, …]``.

    Zeros, for their type, where there is no full microbatch.
    """
    if not rows.count:
        shape = (*leaf.shape[: rows.axis], rows.size, *leaf.shape[rows.axis + 1 :])
        return _constant(jax.typeof(leaf), shape, explicit_spec(leaf), 0, leaf.dtype)
    if rows.order == "contiguous":
        return lax.dynamic_slice_in_dim(leaf, index * rows.size, rows.size, rows.axis)
    if leaf.shape[rows.axis] > rows.size * rows.count:
        # A view as (m, n) would first have to copy the rows before the tail.
        picked = index + rows.count * jnp.arange(rows.size)
        options = {"mode": "clip", "unique_indices": True, "indices_are_sorted": True}
        return jnp.take(leaf, picked, rows.axis, **options)
    # Viewed as (m, n): row j·n + i is row j of microbatch i, so a sharded batch stays where it is.
    view = split_axis(leaf, rows.axis, rows.size, rows.count)
    return lax.dynamic_index_in_dim(view, index, rows.axis + 1, keepdims=False)


def take_tail(leaf: jax.Array, rows: Rows) -> jax.Array:
    """The rows after the full microbatches."""
    return lax.slice_in_dim(leaf, rows.size * rows.count, None, axis=rows.axis)


def split_axis(leaf: jax.Array, axis: int, outer: int, inner: int) -> jax.Array:
    """``[…, outer·inner, …]`` to ``[…, outer, inner, …]``, the sharding kept on the outer axis."""
    shape = (*leaf.shape[:axis], outer, inner, *leaf.shape[axis + 1 :])
    spec = explicit_spec(leaf)
    if spec is None:
        return leaf.reshape(shape)
    shards = explicit_shards(leaf, axis)
    if outer % shards:
        raise MicrobatchSizeError(
            f"microbatch_size={outer} is not a multiple of the {shards} shards of the batch axis "
            f"of an array of shape {leaf.shape}.\nUse a multiple of {shards}."
        )
    return leaf.reshape(shape, out_sharding=_on(leaf, (*spec[: axis + 1], None, *spec[axis + 1 :])))


def merge_axes(leaf: jax.Array, axis: int) -> jax.Array:
    """``[…, a, b, …]`` to ``[…, a·b, …]``; the inverse of `split_axis`."""
    shape = (*leaf.shape[:axis], leaf.shape[axis] * leaf.shape[axis + 1], *leaf.shape[axis + 2 :])
    spec = explicit_spec(leaf)
    if spec is None:
        return leaf.reshape(shape)
    return leaf.reshape(shape, out_sharding=_on(leaf, (*spec[: axis + 1], *spec[axis + 2 :])))


def filled(aval: Any, value: Any, dtype: Any) -> jax.Array:
    """A constant with the shape, sharding and varying mesh axes of `aval`."""
    return _constant(aval, aval.shape, explicit_spec(aval), value, dtype)


def rows_buffer(aval: Any, rows: Rows, tail_rows: int) -> Any:
    """Room for outputs of type `aval` of all microbatches.

    Contiguous: ``[…, n·q + tail, …]``. Strided: ``[…, q, n, …]``, with a second array for the tail where there is one.
    A scalar counts as one row.
    """
    axis, shape, spec = rows.axis, aval.shape or (1,), explicit_spec(aval)
    spec = (None,) if spec == () else spec
    with_rows = lambda count: (*shape[:axis], count, *shape[axis + 1 :])
    if rows.order == "contiguous":
        return _constant(aval, with_rows(rows.size * rows.count + tail_rows), spec, 0, aval.dtype)
    strided = (*shape[: axis + 1], rows.count, *shape[axis + 1 :])
    strided_spec = None if spec is None else (*spec[: axis + 1], None, *spec[axis + 1 :])
    buffer = _constant(aval, strided, strided_spec, 0, aval.dtype)
    return (buffer, _constant(aval, with_rows(tail_rows), spec, 0, aval.dtype))


def put(buffer: Any, value: jax.Array, rows: Rows, index: Any) -> Any:
    """`buffer` with the rows of the full microbatch `index` written; in place inside a loop."""
    value = value.reshape(value.shape or (1,))
    if rows.order == "contiguous":
        return lax.dynamic_update_slice_in_dim(buffer, value, index * rows.size, rows.axis)
    full, tail = buffer
    return lax.dynamic_update_index_in_dim(full, value, index, rows.axis + 1), tail


def put_tail(buffer: Any, value: jax.Array, rows: Rows) -> Any:
    """`buffer` with the tail's rows written."""
    value = value.reshape(value.shape or (1,))
    if rows.order == "contiguous":
        start = rows.size * rows.count
        return lax.dynamic_update_slice_in_dim(buffer, value, start, rows.axis)
    return buffer[0], value


def join(buffer: Any, rows: Rows) -> jax.Array:
    """The rows in the batch's own order: ``[…, B, …]``."""
    if rows.order == "contiguous":
        return buffer
    full, tail = buffer
    merged = merge_axes(full, rows.axis)
    return jnp.concatenate([merged, tail], rows.axis) if tail.shape[rows.axis] else merged


def explicit_spec(leaf: Any) -> tuple[Any, ...] | None:
    """How a leaf (or a type) lies on a mesh with explicit axes, one entry per axis; None elsewhere."""
    aval = leaf if isinstance(leaf, jax.core.ShapedArray) else jax.typeof(leaf)
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty or not mesh.are_all_axes_explicit:
        return None
    spec = tuple(aval.sharding.spec.partitions)
    return (*spec, *(None,) * (len(aval.shape) - len(spec)))


def explicit_shards(leaf: Any, axis: int) -> int:
    """Over how many shards an axis lies on a mesh with explicit axes; 1 elsewhere."""
    if not isinstance(leaf, jax.Array) or explicit_spec(leaf) is None:
        return 1
    return leaf.shape[axis] // max(1, jax.typeof(leaf).sharding.shard_shape(leaf.shape)[axis])


def vary_like(value: jax.Array, aval: Any) -> jax.Array:
    """`value`, varying over the manual mesh axes over which `aval` varies."""
    missing = tuple(sorted(varying_axes(aval) - varying_axes(jax.typeof(value))))
    return lax.pcast(value, missing, to="varying") if missing else value


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which a type varies; JAX before 0.10 calls the attribute ``vma``."""
    manual = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", frozenset()) if manual is None else manual.varying


def _constant(aval: Any, shape: Any, spec: Any, value: Any, dtype: Any) -> jax.Array:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return vary_like(lax.full(shape, 0, dtype), aval)
    if spec is None:
        return vary_like(jnp.full(shape, value, dtype), aval)
    zeros = jnp.zeros(shape, dtype, out_sharding=_on(aval, spec))
    return vary_like(zeros if isinstance(value, int) and value == 0 else zeros + value, aval)


def _on(leaf: Any, spec: tuple[Any, ...]) -> jax.sharding.NamedSharding:
    aval = leaf if isinstance(leaf, jax.core.ShapedArray) else jax.typeof(leaf)
    partial = {"unreduced": aval.sharding.spec.unreduced}
    placed = jax.sharding.PartitionSpec(*spec, **partial)
    return jax.sharding.NamedSharding(aval.sharding.mesh, placed)
