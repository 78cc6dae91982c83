"""A stream whose microbatches are evaluated and weighed one after another, as NumPy and PyTorch do."""

import abc
from collections.abc import Callable
from typing import Any

from microbatch._accumulation import Carry, Step
from microbatch._checkpoint import Progress, leaves_words
from microbatch._stream import Settings, Stream
from microbatch._trees import leaves_with_paths


class EagerStream(Stream):
    """One call: what it has read and weighed so far. A subclass has the arrays: how to evaluate, and the folds.

    Attributes:
      fun: the function.
      args: its arguments before the microbatch's; what is carried changes.
      total: the weight so far, relative to the first weight that is not zero.
    """

    def __init__(self, settings: Settings, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        settings.check_carries(len(args))
        self.settings = settings
        self.fun = fun
        self.args = list(args)
        self.total: Any = 0
        self._began = 0
        self._first_rows: int | None = None
        self._first_weight: Any = None
        self._unrun: tuple[Any, ...] | None = None

    @abc.abstractmethod
    def rows_of(self, leaf: Any) -> int | None:
        """How many rows a leaf of a microbatch has; None where it has none."""

    @abc.abstractmethod
    def as_weight(self, value: Any) -> Any:
        """What `weight_fn` gave as a number, or an error."""

    @abc.abstractmethod
    def evaluated(self, microbatch: tuple[Any, ...]) -> Any:
        """The output of one microbatch."""

    @abc.abstractmethod
    def evaluated_aside(self, microbatch: tuple[Any, ...]) -> Any:
        """An output of which only the types matter; nothing else may be noticed of it."""

    @abc.abstractmethod
    def make_folds(self, output: Any, rows: int) -> None:
        """Makes the folds from an output's types and the rows of its microbatch."""

    @abc.abstractmethod
    def fold(self, output: Any, step: Step) -> dict[Carry, Any]:
        """Folds one output in; the parts that are carried into the next microbatch."""

    @abc.abstractmethod
    def skip(self, step: Step) -> None:
        """Leaves one microbatch out, also before the folds are made."""

    @abc.abstractmethod
    def folded(self) -> Any:
        """The result of the folds."""

    def read(self, element: Any) -> tuple[Any, ...]:
        return tuple(element) if isinstance(element, tuple | list) else (element,)

    def start(self, microbatch: tuple[Any, ...]) -> None:
        self._start(self.evaluated_aside(microbatch), self._rows(microbatch))

    def add(self, microbatch: tuple[Any, ...]) -> None:
        rows = self._count(microbatch)
        own_weight = self._weight(microbatch, rows)
        if own_weight == 0:
            self.skip(Step(self.position, rows or 0))
            # One is kept: if none has a weight, it is run for the shapes of the result.
            self._unrun = self._unrun or microbatch
        else:
            output = self.evaluated(microbatch)
            if not self.started:
                self._start(output, rows)
            self._fold_in(output, rows, own_weight)
        self.position += 1

    def pass_over(self, microbatch: tuple[Any, ...]) -> None:
        self._count(microbatch)
        self.position += 1

    def result(self) -> Any:
        if not self.started and self._unrun is not None:
            self._start(self.evaluated_aside(self._unrun), self._first_rows)
        return self.folded()

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint holds of this class."""
        return {
            "rows_read": self.rows_read,
            "began": self._began,
            "total": self.total,
            "first_weight": self._first_weight,
            "output": self.output_words,
        }

    def restore_numbers(self, saved: Progress) -> None:
        """Takes what `numbers` gave."""
        self.total = saved.numbers["total"]
        self._first_weight = saved.numbers["first_weight"]

    def _start(self, output: Any, rows: int | None) -> None:
        self.output_words = leaves_words(leaves_with_paths(output, "output"))
        self._began = self.position
        self.make_folds(output, rows or 0)
        self._unrun = None

    def _fold_in(self, output: Any, rows: int | None, own_weight: Any) -> None:
        if self._first_weight is None:
            self._first_weight = own_weight
        # Relative to the first weight, so that a stream of one element is that element's output.
        same = own_weight == self._first_weight
        weight = None if same else own_weight / self._first_weight
        first = self.total == 0
        step = Step(self.position, rows or 0, weight, self.total, own_weight, first)
        for carry, value in self.fold(output, step).items():
            self.args[carry.argnum] = value
        self.total += 1 if weight is None else weight

    def _count(self, microbatch: tuple[Any, ...]) -> int | None:
        """The rows of the next microbatch, counted as read."""
        rows = self._rows(microbatch)
        if self.position == 0:
            self._first_rows = rows
        elif rows != self._first_rows:
            self.settings.check_unequal_rows()
        self.rows_read += rows or 0
        return rows

    def _rows(self, microbatch: tuple[Any, ...]) -> int | None:
        """The rows that all leaves have in common; None where none has rows, or they differ."""
        counts = {self.rows_of(leaf) for _, leaf in leaves_with_paths(microbatch)} - {None}
        return counts.pop() if len(counts) == 1 else None

    def _weight(self, microbatch: tuple[Any, ...], rows: int | None) -> Any:
        if self.settings.weight_fn is not None:
            return self.as_weight(self.settings.weight_fn(*self.args, *microbatch))
        if rows is None and self.settings.counts_rows:
            raise self.settings.no_rows(self.position, leaves_with_paths(microbatch, "microbatch"))
        return 1 if rows is None else rows
