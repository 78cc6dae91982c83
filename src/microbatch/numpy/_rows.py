"""Where rows are: a microbatch's in the batch's arrays, and its output's in the arrays that CONCAT makes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from microbatch._accumulation import AccumulationType, Step
from microbatch._checks import Leaf, batch_size_of, check_size
from microbatch._errors import AccumulatorError
from microbatch._outputs import Part
from microbatch._splitting import Split, make_split
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.numpy._folds import Fold, refuse_change, spec_of, type_words


def reshape_batch_axis(tree: Any, microbatch_size: int, axis: int = 0) -> Any:
    """Splits the batch axis of every leaf into microbatches: ``[…, B, …]`` to ``[…, n, m, …]``.

    Strided order, as in the other fronts: microbatch i holds rows i, i + n, …. Equivalent to::

        np.stack([np.take(leaf, range(i, B, n), axis) for i in range(n)], axis)

    but a view wherever the leaf's memory allows one, which it does for arrays in C order.

    Args:
      tree: arrays with B rows along `axis`.
      microbatch_size: m, rows in a microbatch; it divides B.
      axis: the batch axis; negative axes are resolved leaf by leaf.

    Returns:
      The tree with ``[…, n, m, …]`` in place of ``[…, B, …]``; microbatch i is at index i of the n axis.

    Raises:
      MicrobatchSizeError: `microbatch_size` is not a positive integer or does not divide B.
      BatchError: a leaf has no such axis, or the numbers of rows differ.

    >>> reshape_batch_axis(np.arange(6), microbatch_size=3).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    where = "reshape_batch_axis"
    size = check_size(where, "microbatch_size", microbatch_size)
    leaves = [Leaf(path, shape_of(leaf), axis) for path, leaf in leaves_with_paths(tree, "tree")]
    batch_size, subject = batch_size_of(where, leaves)
    split = make_split(batch_size, size, subject=f"{where}: {subject}")

    def split_leaf(leaf: np.ndarray) -> np.ndarray:
        at = axis % leaf.ndim
        shape = (*leaf.shape[:at], size, split.full, *leaf.shape[at + 1 :])
        return np.swapaxes(leaf.reshape(shape), at, at + 1)

    return map_leaves(split_leaf, tree)


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """The shape of anything that has one and can be sliced (arrays, memory maps, HDF5 data sets); None for the rest."""
    if isinstance(leaf, bool | int | float | complex):
        return ()
    return tuple(leaf.shape) if hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") else None


def take(leaf: Any, axis: int, rows: slice) -> Any:
    """The rows `rows` along `axis`: a view, of which only the rows are touched."""
    return leaf[(slice(None),) * (axis % len(leaf.shape)) + (rows,)]


def batch_concat(where: str, split: Split, part: Part, rows: int, out: Any | None) -> Fold:
    """CONCAT of one leaf over a batch whose size is known: every output is written where its rows belong.

    Args:
      where: opens the messages.
      split: the microbatches.
      part: the leaf, with one microbatch's value.
      rows: how many rows that microbatch had.
      out: an array to write into; None for a new one.
    """
    path, spec = part.path, spec_of(_as_rows(part.value))
    per = _output_rows(spec.shape[0], rows)
    full, tail = per(split.microbatch_size), per(split.tail) if split.tail else 0
    in_full = split.full * full
    shape = (in_full + tail, *spec.shape[1:])
    if out is not None:
        _check_out(where, path, out, shape, spec.dtype)

    def place(buffer: np.ndarray, index: int) -> np.ndarray:
        if index >= split.full:
            return buffer[in_full:]
        if split.order == "strided":
            return buffer[index : in_full : split.full]
        return buffer[index * full : (index + 1) * full]

    def update(buffer: np.ndarray, value: Any, step: Step) -> np.ndarray:
        value = _as_rows(value)
        room = place(buffer, step.index)
        if value.shape == room.shape and np.can_cast(value.dtype, spec.dtype):
            room[...] = value
            return buffer
        if step.index < split.full or value.shape[1:] != room.shape[1:] or out is not None:
            refuse_change(where, AccumulationType.CONCAT, path, step.index, spec, value)
        return np.concatenate([buffer[:in_full], value], dtype=buffer.dtype)

    def skip(buffer: np.ndarray, step: Step) -> np.ndarray:
        place(buffer, step.index)[...] = 0
        return buffer

    def alone(value: Any, step: Step) -> Any:
        if out is None:
            return value if np.ndim(value) else _as_rows(value)
        return update(out, value, step)

    return Fold(
        init=lambda: np.zeros(shape, spec.dtype) if out is None else out,
        update=update,
        finalize=lambda buffer, total: buffer,
        # A new buffer is zeros already.
        skip=None if out is None else skip,
        alone=alone,
    )


def stream_concat(where: str, part: Part, rows: int, out: Any | None) -> Fold:
    """CONCAT of one leaf over a stream of unknown length; the arguments are those of `batch_concat`."""
    spec = spec_of(_as_rows(part.value))
    per = _output_rows(spec.shape[0], rows)
    if out is None:
        return _pieces(where, part.path, spec, per)
    return _into(where, part.path, spec, per, out)


def _pieces(where: str, path: str, spec: np.ndarray, per: Callable[[int], int]) -> Fold:
    def update(pieces: list[np.ndarray], value: Any, step: Step) -> list[np.ndarray]:
        # A copy: the function may hand out a view of a buffer that the next microbatch overwrites.
        pieces.append(np.array(_checked(where, path, spec, value, step)))
        return pieces

    def skip(pieces: list[np.ndarray], step: Step) -> list[np.ndarray]:
        pieces.append(_zero_rows(spec, per(step.rows)))
        return pieces

    return Fold(
        init=list,
        update=update,
        finalize=lambda pieces, total: _joined(pieces, spec),
        skip=skip,
        leaves=lambda pieces: [_joined(pieces, spec)],
        from_leaves=list,
    )


def _into(where: str, path: str, spec: np.ndarray, per: Callable[[int], int], out: Any) -> Fold:
    """The carry is the number of rows of `out` that are written."""
    _check_out(where, path, out, (len(out), *spec.shape[1:]), spec.dtype)
    on_disk = isinstance(out, np.memmap)

    def write(start: int, value: np.ndarray) -> int:
        end = start + len(value)
        if end > len(out):
            raise AccumulatorError(
                f"{where}: out for {path} has {len(out)} rows, and the stream has more.\n"
                "Give an array with room for all rows."
            )
        out[start:end] = value
        return end

    def leaves(end: int) -> list[Any]:
        if not on_disk:
            return [np.array(out[:end])]
        out.flush()
        return [end]

    return Fold(
        init=lambda: 0,
        update=lambda end, x, step: write(end, _checked(where, path, spec, x, step)),
        finalize=lambda end, total: out if end == len(out) else out[:end],
        skip=lambda end, step: write(end, _zero_rows(spec, per(step.rows))),
        leaves=leaves,
        from_leaves=lambda saved: saved[0] if on_disk else write(0, saved[0]),
    )


def _checked(where: str, path: str, spec: np.ndarray, value: Any, step: Step) -> np.ndarray:
    value = _as_rows(value)
    if value.shape[1:] != spec.shape[1:] or not np.can_cast(value.dtype, spec.dtype):
        refuse_change(where, AccumulationType.CONCAT, path, step.index, spec, value)
    return value


def _check_out(where: str, path: str, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    got = np.asarray(out) if not hasattr(out, "dtype") else out
    if tuple(got.shape) != shape or not np.can_cast(dtype, got.dtype, "same_kind"):
        raise AccumulatorError(
            f"{where}: out for {path} is {type_words(got)}, and the result is {dtype.name}{list(shape)}.\n"
            f"Give np.empty({shape}, np.{dtype.name}), or np.memmap of that shape and dtype."
        )
    if isinstance(got, np.ndarray) and not got.flags.writeable:
        raise AccumulatorError(
            f"{where}: out for {path} is read-only.\nGive an array that can be written, or a copy."
        )


def refuse_overlap(where: str, out: Any, batch: Any, others: Any) -> None:
    """Refuses an `out` whose rows are rows that a later microbatch still reads; a batch in its own place is fine."""
    for _, target in leaves_with_paths(out):
        for is_batch, tree in ((True, batch), (False, others)):
            for _, leaf in leaves_with_paths(tree):
                if not (isinstance(leaf, np.ndarray) and isinstance(target, np.ndarray)):
                    continue
                if _overlap(target, leaf) and not (is_batch and _same_rows(target, leaf)):
                    raise AccumulatorError(
                        f"{where}: out shares memory with an argument that is still to be read.\n"
                        "Give an array of its own: np.empty_like(out)."
                    )


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        # NumPy's stubs know its two named bounds alone.
        return np.shares_memory(a, b, max_work=10_000)  # pyrefly: ignore[bad-argument-type]
    except np.exceptions.TooHardError:
        return True


def _same_rows(a: np.ndarray, b: np.ndarray) -> bool:
    def rows(array: np.ndarray) -> Any:
        return array.__array_interface__["data"][0], array.shape[:1], array.strides[:1]

    return rows(a) == rows(b)


def _output_rows(output_rows: int, rows: int) -> Callable[[int], int]:
    """How many rows the output has for a microbatch of so many, told from one microbatch."""
    if rows and output_rows % rows == 0:
        return lambda count: output_rows // rows * count
    return lambda count: output_rows


def _as_rows(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array if array.ndim else array[None]


def _zero_rows(spec: np.ndarray, count: int) -> np.ndarray:
    return np.zeros((count, *spec.shape[1:]), spec.dtype)


def _joined(pieces: list[np.ndarray], spec: np.ndarray) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces, dtype=spec.dtype) if pieces else _zero_rows(spec, 0)
