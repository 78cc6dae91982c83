"""A fold over a stream: the loop with its checkpoint, the same for NumPy and PyTorch."""

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from microbatch._accumulation import AccumulationType, Accumulator, Carry
from microbatch._checkpoint import (
    Checkpoint,
    Progress,
    function_words,
    leaves_digest,
    leaves_words,
)
from microbatch._errors import AccumulatorError, EmptyStream
from microbatch._trees import leaves_with_paths


class Settings(NamedTuple):
    """The arguments of `accumulate`, checked."""

    where: str
    fun: Callable[..., Any]
    accumulator: Any
    weight_fn: Callable[..., Any] | None
    accumulator_dtype: Any

    def entries(self) -> list[Any]:
        """The accumulators in the tree of them."""
        return [entry for _, entry in leaves_with_paths(self.accumulator)]

    def check_carries(self, count: int) -> None:
        """Refuses a `Carry` that names none of the `count` arguments of a call."""
        for entry in self.entries():
            if isinstance(entry, Carry) and not 0 <= entry.argnum < count:
                raise AccumulatorError(
                    f"{self.where}: Carry({entry.argnum}) names no argument; the call has {count} "
                    "before the microbatch's.\n"
                    "Number the arguments given before microbatches= from 0."
                )


class Stream(Protocol):
    """One call of a front: where it is in the stream, and what it holds.

    Attributes:
      position: how many microbatches were read.
      rows_read: how many rows they had.
      started: whether an output is in the folds.
    """

    settings: Settings
    position: int
    rows_read: int

    @property
    def started(self) -> bool: ...
    def identity(self, microbatch: tuple[Any, ...]) -> dict[str, str]: ...
    def resume(self, checkpoint: Checkpoint, microbatch: tuple[Any, ...]) -> Progress | None: ...
    def pass_over(self, microbatch: tuple[Any, ...]) -> None: ...
    def go_on(self, saved: Progress) -> None: ...
    def add(self, microbatch: tuple[Any, ...]) -> None: ...
    def progress(self) -> Progress: ...
    def result(self) -> Any: ...


def fold_stream(
    stream: Stream, microbatches: Iterable[Any], path: str | os.PathLike[str] | None
) -> Any:
    """Folds the microbatches into `stream`; past those that the file at `path` holds already."""
    checkpoint: Checkpoint | None = None
    saved: Progress | None = None
    for microbatch in map(_as_arguments, microbatches):
        if path is not None and checkpoint is None:
            checkpoint = Checkpoint(path, stream.settings.where, stream.identity(microbatch))
            saved = stream.resume(checkpoint, microbatch)
        if saved is not None and stream.position < saved.position:
            stream.pass_over(microbatch)
        else:
            _reached(stream, checkpoint, saved)
            saved = None
            stream.add(microbatch)
            if checkpoint is not None and stream.started:
                checkpoint.save(stream.progress)
        # Released before the iterable makes the next one.
        del microbatch
    _reached(stream, checkpoint, saved)
    if stream.position == 0:
        raise EmptyStream(
            f"{stream.settings.where}: microbatches had no element, so not even the shapes of the result are known.\n"
            "Give at least one; an iterator can be read only once."
        )
    result = stream.result()
    if checkpoint is not None:
        checkpoint.remove()
    return result


def identity_of(settings: Settings, args: Any, microbatch: tuple[Any, ...]) -> dict[str, str]:
    """What a checkpoint belongs to; `args` are on the host."""
    weight_fn = settings.weight_fn
    return {
        "function": function_words(settings.fun),
        "accumulator": ", ".join(
            f"{path or 'output'}: {_accumulator_words(entry)}"
            for path, entry in leaves_with_paths(settings.accumulator)
        ),
        "weight_fn": "rows" if weight_fn is None else function_words(weight_fn),
        "accumulator_dtype": str(settings.accumulator_dtype),
        "set of arguments": leaves_digest(leaves_with_paths(args, "args")),
        "microbatch": leaves_words(leaves_with_paths(microbatch, "microbatch")),
    }


def _reached(stream: Stream, checkpoint: Checkpoint | None, saved: Progress | None) -> None:
    """Where the stream stands at what the checkpoint holds, or ended before it: as many rows as then."""
    if checkpoint is None or saved is None:
        return
    was = f"{saved.numbers['rows_read']} rows in {saved.position} microbatches"
    now = f"{stream.rows_read} rows in {stream.position} microbatches"
    checkpoint.check("stream", was, now)
    stream.go_on(saved)


def _as_arguments(element: Any) -> tuple[Any, ...]:
    return tuple(element) if isinstance(element, tuple | list) else (element,)


def _accumulator_words(entry: Any) -> str:
    if isinstance(entry, Accumulator):
        parts = (entry.init, entry.update, entry.finalize)
        return f"Accumulator({', '.join(map(function_words, parts))})"
    return entry.name if isinstance(entry, AccumulationType) else repr(entry)
