"""Where rows are: a microbatch's in the batch's tensors, and its output's in the tensors that CONCAT makes."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from microbatch._splitting import Split


class Place(NamedTuple):
    """Where the rows of a microbatch are: along `axis`, `full` in a full microbatch and `tail` in the last one."""

    axis: int
    full: int
    tail: int

    def take(self, tensor: torch.Tensor, split: Split, index: int) -> torch.Tensor:
        """The rows of microbatch `index`, a view."""
        return take(tensor, self.axis, concat_place(split, index, self.full, self.tail))


def take(tensor: torch.Tensor, axis: int, rows: slice) -> torch.Tensor:
    """The rows along `axis`: a view."""
    if rows.step in (None, 1):
        return tensor.narrow(axis, rows.start, rows.stop - rows.start)
    return tensor[(slice(None),) * axis + (rows,)]


def concat_place(split: Split, index: int, full: int, tail: int) -> slice:
    """Where the rows of microbatch `index` belong, if a full one has `full` rows and the last one `tail`."""
    in_full = split.full * full
    if index >= split.full:
        return slice(in_full, in_full + tail)
    if split.order == "strided":
        return slice(index, in_full, split.full)
    return slice(index * full, (index + 1) * full)


def output_rows(found: int, rows: int) -> Callable[[int], int]:
    """How many rows an output has for a microbatch of so many, told from one microbatch."""
    if rows and found % rows == 0:
        return lambda count: found // rows * count
    return lambda count: found


def row_counts(spec: torch.Tensor, axis: int, split: Split, rows: int) -> tuple[int, int]:
    """Rows of a full microbatch's output and of the last, smaller one's, told from one of `rows` rows."""
    per = output_rows(spec.shape[axis] if spec.ndim > axis else 1, rows)
    return per(split.microbatch_size), per(split.tail) if split.tail else 0


def as_rows(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """A scalar as one row."""
    return tensor if tensor.ndim > axis else tensor.unsqueeze(axis)
