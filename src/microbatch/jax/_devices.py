"""Over which devices the rows lie, and what can be refused about it before anything runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from microbatch._accumulation import AccumulationType
from microbatch._errors import AccumulatorError, MicrobatchError, MicrobatchSizeError
from microbatch._splitting import Split
from microbatch.jax._accumulators import CONCAT, Output

Reduce = Literal["once", "each"]


@dataclass(frozen=True)
class Devices:
    """Over which axes of a mesh the rows lie, and when sums are combined.

    Attributes:
      mesh: the mesh.
      axes: the mesh axes of the rows, outermost first.
      reduce: "once": each device holds whole sums, combined after the loop; "each": each holds its shard of
        them, and every microbatch is combined.
    """

    mesh: Any
    axes: tuple[str, ...]
    reduce: Reduce

    @property
    def shards(self) -> int:
        """In how many parts the rows lie."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def over(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`fun` on each device's part; all other axes of the mesh stay as they are."""
        # JAX does not track what varies: the loop has no collective but those written here, and a
        # user's function need not know that it runs in parts.
        mapped = jax.shard_map(
            fun,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=frozenset(self.axes),
            check_vma=False,
        )
        return jax.jit(mapped)

    def at_axis(self, axis: int | None) -> PartitionSpec:
        """Sharded along one array axis; None for not at all."""
        if axis is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * axis, self.axes)

    def of_all(self, output: Output) -> Output:
        """An output of one device's rows with the type that all rows give."""
        if output.kind is not CONCAT:
            return output
        size, *rest = output.type.shape
        return replace(output, types=(output.type.update(shape=(size * self.shards, *rest)),))

    def local(self, split: Split) -> Split:
        """What one device has of the split."""
        size = split.microbatch_size // self.shards
        return Split(split.batch_size // self.shards, size, split.order)


def find_devices(where: str, mesh: Any, batch_spec: Any, reduce: Reduce) -> Devices | None:
    """The devices that were asked for, checked; None where there is no mesh."""
    if mesh is None and batch_spec is None:
        return None
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise MicrobatchError(
                f"{where}: batch_spec={batch_spec!r} is given without a mesh.\n"
                "Pass mesh=, or call it under jax.set_mesh(mesh)."
            )
    if not hasattr(mesh, "axis_names"):
        raise MicrobatchError(
            f"{where}: mesh is a {type(mesh).__name__}, not a mesh.\n"
            "Make one with jax.make_mesh((jax.device_count(),), ('data',))."
        )
    devices = Devices(mesh, _row_axes(where, mesh, batch_spec), reduce)
    return devices if devices.shards > 1 else None


def _row_axes(where: str, mesh: Any, batch_spec: Any) -> tuple[str, ...]:
    names = tuple(mesh.axis_names)
    if batch_spec is None:
        if len(names) == 1:
            return names
        raise MicrobatchError(
            f"{where}: mesh has the axes {', '.join(map(repr, names))}, and batch_spec is not given.\n"
            f"Say over which the rows lie, for example batch_spec=P({names[0]!r})."
        )
    given = (batch_spec,) if isinstance(batch_spec, str) else tuple(batch_spec)
    entries = [entry for entry in given if entry is not None]
    if len(entries) != 1:
        raise MicrobatchError(
            f"{where}: batch_spec={batch_spec!r} shards {len(entries)} array axes.\n"
            f"Name the mesh axes of the rows alone, for example P({names[0]!r}); the others stay automatic."
        )
    axes = (entries[0],) if isinstance(entries[0], str) else tuple(entries[0])
    for axis in axes:
        if axis not in names:
            raise MicrobatchError(
                f"{where}: batch_spec={batch_spec!r} names {axis!r}, which the mesh does not have.\n"
                f"Use one of {', '.join(map(repr, names))}."
            )
    return axes


def check_sharded(where: str, subject: str, split: Split, shards: int) -> None:
    """Refuses a split that would move rows between devices.

    Args:
      where: opens the messages.
      subject: what has the rows, in words: ``"x along axis 0"``.
      split: the split of all rows.
      shards: in how many parts the rows lie.
    """
    if shards == 1:
        return
    batch, size = split.batch_size, split.microbatch_size
    lies = f"{subject} has {batch} rows in {shards} shards"
    if batch % shards:
        raise MicrobatchSizeError(
            f"{where}: {lies}, and {shards} does not divide {batch}.\n"
            f"Pad the batch to {batch + -batch % shards} rows with rows of weight 0 (weight_fn)."
        )
    if size % shards and split.num_microbatches > 1:
        below, above = size - size % shards, size + -size % shards
        sizes = [m for m in (below, above) if m and batch % m == 0] or [
            m for m in range(shards, batch + 1, shards) if batch % m == 0
        ]
        raise MicrobatchSizeError(
            f"{where}: {lies}, and microbatch_size={size} is not a multiple of {shards}.\n"
            f"Use {' or '.join(map(str, sizes[:4]))}, so that every device has equally many rows of each microbatch."
        )
    if split.tail and split.num_microbatches > 1:
        raise MicrobatchSizeError(
            f"{where}: {lies}, and the last microbatch would have {split.tail} of them, all in the last shards.\n"
            f"Pad the batch to {batch + -batch % size} rows with rows of weight 0 (weight_fn)."
        )
    if split.order == "contiguous" and split.num_microbatches > 1:
        raise MicrobatchError(
            f'{where}: {lies}, and order="contiguous" would move them between devices.\n'
            'Use order="strided".'
        )


def check_outputs(where: str, devices: Devices, outputs: Sequence[Output], local_size: int) -> None:
    """Refuses what has no meaning in parts."""
    shards = devices.shards
    for output in outputs:
        if output.is_custom:
            raise AccumulatorError(
                f"{where}: a custom accumulator cannot be combined over the {shards} shards of mesh=.\n"
                "Use a kind of AccumulationType, or a mesh with explicit axes and no mesh=."
            )
        if output.kind is AccumulationType.LAST:
            raise AccumulatorError(
                f"{where}: LAST has {shards} values on the {shards} shards of mesh=, one on each.\n"
                "Use MEAN, SUM or CONCAT, or a mesh with explicit axes and no mesh=."
            )
        if output.kind is CONCAT:
            shape = output.type.shape
            if not shape or (local_size and shape[0] % local_size):
                came = f"shape {shape}" if shape else "a scalar"
                raise AccumulatorError(
                    f"{where}: CONCAT of {came} from {local_size} rows on each of {shards} shards: "
                    "these are not outputs of rows.\n"
                    "Return one or more entries per row, or use MEAN or SUM."
                )


def refused_carry(where: str) -> AccumulatorError:
    """What a Carry meets under `mesh=`."""
    return AccumulatorError(
        f"{where}: a Carry has a different value on every shard of mesh=.\n"
        "Use a mesh with explicit axes and no mesh=, or update the state after the call."
    )
