"""CONCAT over a stream of unknown length: rows in the host's memory, or in an array that was given for them."""

from typing import Any

import numpy as np
import torch

from microbatch._accumulation import AccumulationType
from microbatch._errors import AccumulatorError
from microbatch._outputs import Part
from microbatch._trees import map_prefix
from microbatch.torch._accumulators import refuse_change
from microbatch.torch._rows import output_rows
from microbatch.torch._tensors import dtype_name


class HostRows:
    """The rows of one leaf of the output, in the order in which they come.

    Args:
      where: the words that open a message.
      part: the leaf, as a spec of one microbatch's output.
      rows: the rows of that microbatch.
      out: a NumPy array or a tensor to write into, or None.
    """

    def __init__(self, where: str, part: Part, rows: int, out: Any = None) -> None:
        self._where = where
        self._part = part
        self._rows = rows
        self._out = out
        self._target = None if out is None else self._checked(out)
        self._pieces: list[torch.Tensor] = []
        self._end = 0

    def add(self, value: torch.Tensor, index: int) -> None:
        """Appends the rows of microbatch `index`; a scalar is one row."""
        spec = self._part.value
        same = value.shape[1:] == spec.shape[1:] and value.ndim == spec.ndim
        if not same or not torch.can_cast(value.dtype, spec.dtype):
            kind = AccumulationType.CONCAT
            refuse_change(self._where, kind, self._part.path, index, spec, value)
        self._append(value if value.ndim else value.unsqueeze(0))

    def skip(self, rows: int) -> None:
        """Appends the zeros of a microbatch that does not run."""
        spec = self._part.value
        count = output_rows(spec.shape[0], self._rows)(rows) if spec.ndim else 1
        self._append(torch.zeros((count, *spec.shape[1:]), dtype=spec.dtype))

    def result(self) -> Any:
        """All rows."""
        if self._out is not None:
            return self._out if self._end == len(self._out) else self._out[: self._end]
        self._join()
        return self._pieces[0]

    def state(self) -> list[torch.Tensor]:
        """What a checkpoint keeps: the rows, or their number where they are in a file already."""
        if isinstance(self._out, np.memmap):
            self._out.flush()
            return [torch.tensor(self._end)]
        if self._target is not None:
            return [self._target[: self._end]]
        self._join()
        return [self._pieces[0]]

    def restore(self, state: list[torch.Tensor]) -> None:
        """Takes the state of a checkpoint."""
        self._pieces, self._end = [], 0
        if isinstance(self._out, np.memmap):
            self._end = int(state[0])
        else:
            self._append(state[0])

    def _append(self, rows: torch.Tensor) -> None:
        if self._target is None:
            # A copy: the function may hand out a view of a buffer that the next microbatch overwrites.
            self._pieces.append(rows.to("cpu", self._part.value.dtype, copy=True))
            return
        end = self._end + len(rows)
        if end > len(self._target):
            raise AccumulatorError(
                f"{self._where}: out for {self._part.path} has {len(self._target)} rows, and the stream has more.\n"
                "Give an array with room for all rows."
            )
        self._target[self._end : end].copy_(rows)
        self._end = end

    def _join(self) -> None:
        if not self._pieces:
            self.skip(0)
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces)]

    def _checked(self, out: Any) -> torch.Tensor:
        spec = self._part.value
        target = torch.from_numpy(out) if isinstance(out, np.ndarray) else out
        fits = (
            isinstance(target, torch.Tensor)
            and target.shape[1:] == spec.shape[1:]
            and target.ndim == max(spec.ndim, 1)
            and target.dtype == spec.dtype
        )
        if not fits:
            came = (
                f"{dtype_name(target.dtype)}{list(target.shape)}"
                if hasattr(target, "dtype")
                else repr(out)
            )
            wanted = ", ".join(["rows", *map(str, spec.shape[1:])])
            raise AccumulatorError(
                f"{self._where}: out for {self._part.path} is {came}, and the result is "
                f"{dtype_name(spec.dtype)}[{wanted}].\n"
                f"Give a NumPy array or a tensor of that dtype with room for all rows."
            )
        return target


def targets_of(where: str, out: Any, template: Any, parts: list[Part]) -> dict[str, Any]:
    """`out`, a tree that is a prefix of the output, by the paths of the leaves it names."""
    if out is None:
        return {}
    found: list[Any] = []
    map_prefix(
        lambda target, _: found.append(target), out, template, is_prefix_leaf=lambda x: x is None
    )
    paths = [part.path for part in parts]
    if len(found) != len(paths):
        raise AccumulatorError(
            f"{where}: out is given for {len(found)} leaves, and the output has {len(paths)} parts.\n"
            "Give out for an output whose accumulators are all kinds."
        )
    return {path: target for path, target in zip(paths, found) if target is not None}
