"""CONCAT over a stream: rows that leave the devices for the host's memory, or for a file, as they are made."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from microbatch._errors import AccumulatorError


class HostRows:
    """The rows of one output so far.

    Args:
      where: opens the messages.
      path: the output's, for messages.
      like: the output's type in the first microbatch; a scalar counts as one row.
      out: the array to write into, with room for all rows; None collects.
    """

    def __init__(self, where: str, path: str, like: Any, out: Any | None) -> None:
        self._where = where
        self._path = path
        self._shape = tuple(like.shape[1:])
        self._dtype = np.dtype(like.dtype)
        self._out = out
        self._pieces: list[np.ndarray] = []
        self._end = 0
        if out is not None:
            self._check_out(out)

    def append(self, rows: Any) -> None:
        """Copies the rows of the next microbatch to the end."""
        array = np.asarray(rows)
        if array.shape[1:] != self._shape or array.dtype != self._dtype:
            raise AccumulatorError(
                f"{self._where}: {self._path} is {array.dtype.name}{list(array.shape)} in one microbatch and its rows "
                f"were {self._dtype.name}{list(self._shape)} before; CONCAT cannot combine them.\n"
                "Return rows of one shape, in one dtype."
            )
        end = self._end + len(array)
        if self._out is None:
            # A copy, even where the host's memory is the device's: the device's is given back.
            self._pieces.append(np.array(array))
        elif end > len(self._out):
            raise AccumulatorError(
                f"{self._where}: out for {self._path} has {len(self._out)} rows, and the stream has more.\n"
                "Give an array with room for all rows."
            )
        else:
            self._out[self._end : end] = array
        self._end = end

    def append_zeros(self, count: int) -> None:
        """The rows of a microbatch that does not run."""
        self.append(np.zeros((count, *self._shape), self._dtype))

    def result(self) -> np.ndarray:
        """All rows, in the order of the stream."""
        if self._out is not None:
            return self._out if self._end == len(self._out) else self._out[: self._end]
        if len(self._pieces) != 1:
            empty = np.zeros((0, *self._shape), self._dtype)
            self._pieces = [np.concatenate([empty, *self._pieces])]
        return self._pieces[0]

    def saved(self) -> np.ndarray:
        """What a checkpoint holds: the rows, or how many there are where they are in a file already."""
        if isinstance(self._out, np.memmap):
            self._out.flush()
            return np.asarray(self._end)
        return np.array(self.result())

    def restore(self, saved: np.ndarray) -> None:
        """Goes on after what `saved` gave."""
        if isinstance(self._out, np.memmap):
            self._end = int(saved)
        else:
            self.append(saved)

    def _check_out(self, out: Any) -> None:
        wanted = f"{self._dtype.name}{['rows', *self._shape]}".replace("'", "")
        dtype, shape = getattr(out, "dtype", None), getattr(out, "shape", ())
        writable = getattr(getattr(out, "flags", None), "writeable", True)
        fits = dtype is not None and np.can_cast(self._dtype, dtype, "same_kind")
        if not fits or tuple(shape[1:]) != self._shape or not shape or not writable:
            came = type(out).__name__ if dtype is None else f"{dtype}{list(shape)}"
            raise AccumulatorError(
                f"{self._where}: out for {self._path} is {came}, and the result is {wanted}.\n"
                f"Give np.empty((rows, {', '.join(map(str, self._shape))}), np.{self._dtype.name}), or np.memmap of "
                "that shape and dtype."
            )


def targets_of(where: str, out: Any, types: Any, concatenated: Collection[int]) -> dict[int, Any]:
    """Which array each output leaf is written into, by the leaf's place.

    Args:
      where: opens the messages.
      out: an array, or a tree like the output with None for what is not written.
      types: the output's types.
      concatenated: the places of the leaves that CONCAT has.
    """
    entries, treedef = jax.tree.flatten(out, is_leaf=lambda entry: entry is None)
    places = jax.tree.unflatten(jax.tree.structure(types), range(len(jax.tree.leaves(types))))
    try:
        under = [jax.tree.leaves(subtree) for subtree in treedef.flatten_up_to(places)]
    except ValueError as error:
        raise AccumulatorError(
            f"{where}: out does not fit the output: {error}.\n"
            "Give an array for a single output, or a tree like the output with None for what is not written."
        ) from None
    targets = {}
    for entry, leaves in zip(entries, under, strict=True):
        if entry is None:
            continue
        if len(leaves) != 1 or leaves[0] not in concatenated:
            raise AccumulatorError(
                f"{where}: out has an array for what is not one CONCAT output.\n"
                "Give None there; only the rows of CONCAT are written into out."
            )
        targets[leaves[0]] = entry
    return targets
