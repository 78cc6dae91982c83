"""The arguments of a call: which of their tensors are batches, and the arguments of one microbatch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from microbatch._checks import Leaf, Slot, batch_size_of
from microbatch._trees import leaves_with_paths, map_numbered_leaves, map_prefix
from microbatch.torch._batch import refuse_uncuttable
from microbatch.torch._rows import take


class Rows(NamedTuple):
    """A tensor of the batch arguments: which leaf of which argument it is, and its axis (not negative)."""

    key: int | str
    leaf: int
    axis: int


class Arguments(NamedTuple):
    """The arguments of a call and where their rows are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: tuple[Rows, ...]
    batch_size: int
    subject: str

    @property
    def axes(self) -> dict[int | str, dict[int, int]]:
        """By argument, and by the number of its leaf, the axis of the rows."""
        axes: dict[int | str, dict[int, int]] = {}
        for found in self.rows:
            axes.setdefault(found.key, {})[found.leaf] = found.axis
        return axes

    def cut(self, rows: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one microbatch; everything without rows is passed through untouched."""
        axes = self.axes

        def cut_argument(key: int | str, value: Any) -> Any:
            if key not in axes:
                return value

            def cut_leaf(number: int, leaf: Any) -> Any:
                axis = axes[key].get(number)
                return leaf if axis is None else take(leaf, axis, rows)

            return map_numbered_leaves(cut_leaf, value)

        args = tuple(cut_argument(i, value) for i, value in enumerate(self.args))
        return args, {name: cut_argument(name, value) for name, value in self.kwargs.items()}


def arguments_of(
    where: str,
    slots: Sequence[Slot],
    in_dims: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Arguments:
    """The batch arguments' tensors with their axes; numbers, strings and modules beside them are passed on."""
    leaves: list[Leaf] = []
    rows: list[Rows] = []
    for slot, dims in zip(slots, in_dims, strict=True):
        value = args[slot.key] if isinstance(slot.key, int) else kwargs[slot.key]
        axes: list[Any] = []
        map_prefix(lambda dim, _: axes.append(dim), dims, value, is_prefix_leaf=lambda d: d is None)
        for number, (path, leaf) in enumerate(leaves_with_paths(value, slot.name)):
            axis = axes[number]
            if axis is None:
                continue
            refuse_uncuttable(where, path, leaf)
            if isinstance(leaf, torch.Tensor):
                leaves.append(Leaf(path, tuple(leaf.shape), axis))
                first = axis % max(leaf.ndim, 1) if isinstance(axis, int) else 0  # refused below
                rows.append(Rows(slot.key, number, first))
    batch_size, subject = batch_size_of(where, leaves, option="in_dims")
    return Arguments(args, kwargs, tuple(rows), batch_size, f"{where}: {subject}")
