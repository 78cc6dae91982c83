"""A fold over a stream: the loop with its checkpoint, the same for every front."""

import abc
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from microbatch._accumulation import MEANS, AccumulationType, Accumulator, Carry
from microbatch._checkpoint import (
    Checkpoint,
    Progress,
    function_words,
    leaves_digest,
    leaves_words,
)
from microbatch._errors import AccumulatorError, BatchError, CheckpointError, EmptyStream
from microbatch._outputs import check_can_weigh


class Settings(NamedTuple):
    """The arguments of `accumulate` but the function, checked.

    Attributes:
      where: opens the messages.
      accumulator: one kind, or a tree of kinds.
      entries: the kinds in it, each with the path of its part of the output.
      weight_fn: see `accumulate`.
      accumulator_dtype: see `accumulate`.
    """

    where: str
    accumulator: Any
    entries: tuple[tuple[str, Any], ...]
    weight_fn: Callable[..., Any] | None
    accumulator_dtype: Any

    @property
    def counts_rows(self) -> bool:
        """Whether a microbatch's rows are its weight, and the weight matters."""
        return self.weight_fn is None and any(entry in MEANS for _, entry in self.entries)

    def check_carries(self, count: int) -> None:
        """Refuses a `Carry` that names none of the `count` arguments of a call, or one that another names."""
        carried = [entry.argnum for _, entry in self.entries if isinstance(entry, Carry)]
        for argnum in carried:
            if not 0 <= argnum < count:
                raise AccumulatorError(
                    f"{self.where}: Carry({argnum}) names no argument; the call has {count} before the "
                    "microbatch's.\nNumber the arguments given before microbatches= from 0."
                )
        if len(set(carried)) < len(carried):
            raise AccumulatorError(
                f"{self.where}: two outputs are carried to one argument.\n"
                "Give each Carry an argument of its own."
            )

    def check_unequal_rows(self) -> None:
        """Refuses, for microbatches of different sizes, custom accumulators that are not told about it."""
        for _, entry in self.entries:
            if isinstance(entry, Accumulator):
                check_can_weigh(self.where, entry, "output")

    def no_rows(self, position: int, leaves: Sequence[tuple[str, Any]]) -> BatchError:
        """The error for a microbatch whose rows are to be counted and cannot be."""
        return BatchError(
            f"{self.where}: microbatch {position} has no rows that could be counted ({leaves_words(leaves)}).\n"
            "Give equally many rows on the first axis of each, or weight_fn=."
        )


class Stream(abc.ABC):
    """One call of a front: where it is in the stream, and what it holds.

    A microbatch is what `read` makes of an element of the iterable.

    Attributes:
      settings: of the call.
      position: how many microbatches were read.
      rows_read: how many rows they had.
      output_words: the types of an output, once the folds are made.
    """

    settings: Settings
    position: int = 0
    rows_read: int = 0
    output_words: str = ""

    @property
    @abc.abstractmethod
    def started(self) -> bool:
        """Whether the folds are made."""

    @abc.abstractmethod
    def read(self, element: Any) -> Any:
        """The next microbatch."""

    @abc.abstractmethod
    def identity(self, microbatch: Any) -> dict[str, str]:
        """What a checkpoint of this call belongs to, told by its first microbatch."""

    @abc.abstractmethod
    def start(self, microbatch: Any) -> None:
        """Makes the folds from the types of an output."""

    @abc.abstractmethod
    def add(self, microbatch: Any) -> None:
        """Evaluates the microbatch and folds its output in, or skips it where its weight is 0."""

    @abc.abstractmethod
    def pass_over(self, microbatch: Any) -> None:
        """Leaves out a microbatch that the checkpoint holds already."""

    @abc.abstractmethod
    def progress(self) -> Progress:
        """The state, as a checkpoint holds it; its numbers have `rows_read` and `output`, and `began` where the folds were not made
        of the first microbatch."""

    @abc.abstractmethod
    def restore(self, saved: Progress) -> None:
        """Takes what `progress` gave; the folds are made."""

    @abc.abstractmethod
    def result(self) -> Any:
        """What the folds make of the stream, which had a microbatch."""

    def go_on(self, saved: Progress) -> None:
        """Takes up, as it was saved, what the iterable may have changed since: random numbers."""
        del saved

    def wait(self, result: Any = None) -> None:
        """Until what goes on in the background is done, that of `result` included."""
        del result


def fold_stream(
    stream: Stream, microbatches: Iterable[Any], path: str | os.PathLike[str] | None
) -> Any:
    """Folds the microbatches into `stream`; past those that the file at `path` holds already."""
    where = stream.settings.where
    _check_given(where, microbatches, path)
    checkpoint: Checkpoint | None = None
    saved: Progress | None = None
    for element in microbatches:
        microbatch = stream.read(element)
        # Released as soon as may be: the iterable makes the next one, and both are large.
        del element
        if path is not None and checkpoint is None:
            checkpoint = Checkpoint(path, where, stream.identity(microbatch))
            saved = checkpoint.load()
        if checkpoint is not None and saved is not None:
            _take_up(stream, checkpoint, saved, microbatch)
        if saved is not None and stream.position < saved.position:
            stream.pass_over(microbatch)
        else:
            _reached(stream, checkpoint, saved)
            saved = None
            stream.add(microbatch)
            if checkpoint is not None and stream.started and checkpoint.due:
                # Waited for first, so that the time of computing is not taken for that of saving.
                stream.wait()
                checkpoint.save(stream.progress)
        del microbatch
    _reached(stream, checkpoint, saved)
    if stream.position == 0:
        raise EmptyStream(
            f"{where}: microbatches had no element, so not even the shapes of the result are known.\n"
            "Give at least one; an iterator can be read only once."
        )
    result = stream.result()
    if checkpoint is not None:
        stream.wait(result)
        checkpoint.remove()
    return result


def _check_given(where: str, microbatches: Any, path: Any) -> None:
    if not isinstance(microbatches, Iterable) and not hasattr(microbatches, "__getitem__"):
        raise BatchError(
            f"{where}: microbatches={microbatches!r} cannot be iterated over.\n"
            "Give a list, a generator or a loader of microbatches, each a tuple of arrays."
        )
    if path is not None and not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"{where}: checkpoint={path!r} is not a path.\n"
            'Give the name of a file, for example checkpoint="state.safetensors".'
        )
    if path is not None and (
        os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")
    ):
        what = "is a folder" if os.path.isdir(path) else "lies in a folder that does not exist"
        raise CheckpointError(
            f"{where}: checkpoint={os.fspath(path)!r} {what}.\n"
            "Give the name of a file in a folder that exists."
        )


def identity_of(
    settings: Settings,
    fun: Callable[..., Any],
    args: Sequence[tuple[str, Any]],
    microbatch: Sequence[tuple[str, Any]],
) -> dict[str, str]:
    """What a checkpoint belongs to; arguments and microbatch as leaves with paths, `args` on the host."""
    weight_fn = settings.weight_fn
    return {
        "function": function_words(fun),
        "accumulator": ", ".join(
            f"{path}: {_accumulator_words(entry)}" for path, entry in settings.entries
        ),
        "weight_fn": "rows" if weight_fn is None else function_words(weight_fn),
        "accumulator_dtype": str(settings.accumulator_dtype),
        "set of arguments": leaves_digest(args),
        "microbatch": leaves_words(microbatch),
    }


def _take_up(stream: Stream, checkpoint: Checkpoint, saved: Progress, microbatch: Any) -> None:
    """Takes what the file holds into the stream, at the microbatch whose output made the folds then."""
    if not stream.started and stream.position == saved.numbers.get("began", 0):
        stream.start(microbatch)
        checkpoint.check("output", saved.numbers["output"], stream.output_words)
        stream.restore(saved)


def _reached(stream: Stream, checkpoint: Checkpoint | None, saved: Progress | None) -> None:
    """Where the stream stands at what the checkpoint holds, or ended before it: as many rows as then."""
    if checkpoint is None or saved is None:
        return
    was = f"{saved.numbers['rows_read']} rows in {saved.position} microbatches"
    now = f"{stream.rows_read} rows in {stream.position} microbatches"
    checkpoint.check("stream", was, now)
    stream.go_on(saved)


def _accumulator_words(entry: Any) -> str:
    if isinstance(entry, Accumulator):
        parts = (entry.init, entry.update, entry.finalize)
        return f"Accumulator({', '.join(map(function_words, parts))})"
    return entry.name if isinstance(entry, AccumulationType) else repr(entry)
