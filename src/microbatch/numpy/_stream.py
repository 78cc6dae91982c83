"""`accumulate` on NumPy arrays: a fold over microbatches that arrive one after another."""

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from microbatch._accumulation import MEANS, AccumulationType, Accumulator, Carry
from microbatch._checkpoint import (
    Checkpoint,
    Progress,
    leaves_words,
)
from microbatch._checks import name_of
from microbatch._errors import BatchError
from microbatch._outputs import Part, canonical, check_can_weigh
from microbatch._stream import Settings, fold_stream, identity_of
from microbatch._trees import leaves_with_paths
from microbatch.numpy._folding import Folding
from microbatch.numpy._folds import Fold, Step, make_folds
from microbatch.numpy._microbatch import (
    checked_dtype,
    checked_weight,
)
from microbatch.numpy._rows import shape_of, stream_concat


def accumulate(
    fun: Callable[..., Any],
    accumulator: Any = AccumulationType.SUM,
    *,
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: Any = None,
) -> Callable[..., Any]:
    """Folds `fun` over a stream of microbatches, so that the batch never exists in memory.

    The function returned by ``accumulate(fun, accumulator)`` is equivalent to::

        def accumulated(*args, microbatches):
            carry = init(typeof(fun(*args, *first)))
            for i, microbatch in enumerate(microbatches):
                carry = update(carry, fun(*args, *microbatch), i)
            return finalize(carry)

    Args:
      fun: called as ``fun(*args, *microbatch)``; a microbatch's arrays are ``[m, ...]`` with m rows, which may differ
        between microbatches.
      accumulator: how the outputs combine: one kind, or a tree of kinds that is a prefix of the output. A `Carry`
        names one of `args`.
      weight_fn: maps the arguments of `fun` to the microbatch's weight in MEAN and RUNNING_MEAN, in any unit (rows,
        valid tokens). Default: rows. A microbatch of weight 0 is skipped.
      accumulator_dtype: holds sums and means in this dtype. Default: float32 for float16 and bfloat16, the output's
        own dtype for others. The result has the output's dtype.

    Returns:
      A function of ``*args`` and the keywords

      - `microbatches`: an iterable that is consumed once; each element is a tuple or list of arguments, or a single
        argument that is neither. Progress is its business: ``microbatches=tqdm(loader)``.
      - `checkpoint`: a file in which the state is saved as the stream goes by (at most a twentieth of the time is
        spent on it) and which is deleted at the end. A killed run that is started again with the same stream reads
        past what is in the file and continues, bit for bit. Needs safetensors.
      - `out`: an array to write CONCAT rows into, as for `microbatch`; with room for all rows. The result is the part
        of it that was written.

    Raises:
      EmptyStream: the iterable had no element, so that not even the shapes of the result are known.
      BatchError: rows are to be counted and a microbatch has none, or unequal ones.
      AccumulatorError: as for `microbatch`.
      CheckpointError: the file belongs to another function, other arguments, or another tree, dtype or size of
        microbatches.

    ================  ================================================================
    stream            result
    ================  ================================================================
    one element       ``fun(*args, *element)``, bit for bit
    total weight 0    zeros, never NaN; `fun` runs once for the shapes
    weight 0          skipped; its CONCAT rows are zeros
    a NaN output      NaN, as the whole batch would give
    ================  ================================================================

    >>> stream = [(np.array([1.0, 2.0]),), (np.array([6.0]),)]
    >>> mean = accumulate(lambda scale, x: float(scale * x.mean()), AccumulationType.MEAN)
    >>> mean(10.0, microbatches=stream)
    30.0
    """
    where = f"accumulate({name_of(fun)})"
    settings = Settings(
        where,
        fun,
        canonical(where, accumulator),
        weight_fn,
        checked_dtype(where, accumulator_dtype),
    )

    def accumulated(
        *args: Any,
        microbatches: Iterable[Any],
        checkpoint: str | os.PathLike[str] | None = None,
        out: Any = None,
    ) -> Any:
        return fold_stream(_Stream(settings, args, out), microbatches, checkpoint)

    return accumulated


class _Stream:
    """One call: where it is in the stream, and what it holds."""

    def __init__(self, settings: Settings, args: tuple[Any, ...], out: Any) -> None:
        settings.check_carries(len(args))
        self.settings = settings
        self.position = 0
        self.rows_read = 0
        self.folding = Folding(settings.where, settings.accumulator, out, self._make)
        self._args = list(args)
        self._first_rows: int | None = None
        self._first_weight: Any = None
        self._total: Any = 0
        self._output_words = ""
        self._unrun: tuple[Any, ...] | None = None

    @property
    def started(self) -> bool:
        """Whether an output is in the folds."""
        return self.folding.started

    def identity(self, microbatch: tuple[Any, ...]) -> dict[str, str]:
        """What a checkpoint of this stream belongs to, told by its first microbatch."""
        return identity_of(self.settings, tuple(self._args), microbatch)

    def go_on(self, saved: Progress) -> None:
        """Nothing: NumPy has no random state that a checkpoint could hold for the function."""

    def add(self, microbatch: tuple[Any, ...]) -> None:
        """Evaluates the next microbatch and folds its output in, or skips it where its weight is 0."""
        rows = self._read(microbatch)
        own_weight = self._weight(microbatch, rows)
        if own_weight == 0:
            self.folding.skip(Step(self.position, rows or 0))
            # One is kept: if none has a weight, it is run for the shapes of the result.
            self._unrun = self._unrun or microbatch
        else:
            self._fold_in(self.settings.fun(*self._args, *microbatch), rows, own_weight)
        self.position += 1

    def pass_over(self, microbatch: tuple[Any, ...]) -> None:
        """Reads past a microbatch that the checkpoint holds already."""
        self._read(microbatch)
        self.position += 1

    def result(self) -> Any:
        """What the folds make of the stream."""
        if not self.folding.started:
            self._start(self._run_quietly(self._unrun), self._first_rows)
        return self.folding.result(self._total)

    def progress(self) -> Progress:
        """The state, as a checkpoint holds it."""
        folding = self.folding
        leaves = {
            f"{i}.{j}": leaf
            for i, (fold, carry) in enumerate(zip(folding.folds, folding.carries, strict=True))
            for j, leaf in enumerate(fold.leaves(carry))
        }
        numbers = {
            "rows_read": self.rows_read,
            "total": self._total,
            "first_weight": self._first_weight,
            "output": self._output_words,
            "types": {name: _type_name(leaf) for name, leaf in leaves.items()},
        }
        arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        return Progress(self.position, numbers, arrays)

    def resume(self, checkpoint: Checkpoint, microbatch: tuple[Any, ...]) -> Progress | None:
        """Takes the state of the file, if there is one.

        The structure of the state is that of an output, so `fun` runs once and its output is thrown away.
        """
        saved = checkpoint.load()
        if saved is None:
            return None
        self._start(self._run_quietly(microbatch), _rows_of(microbatch))
        numbers, types = saved.numbers, saved.numbers["types"]
        checkpoint.check("output", numbers["output"], self._output_words)
        self._total, self._first_weight = numbers["total"], numbers["first_weight"]
        folding = self.folding
        for i, (fold, accumulator) in enumerate(
            zip(folding.folds, folding.accumulators, strict=True)
        ):
            names = [name for name in types if name.startswith(f"{i}.")]
            leaves = [_as_type(saved.arrays[name], types[name]) for name in names]
            folding.carries[i] = fold.from_leaves(leaves)
            if isinstance(accumulator, Carry):
                self._args[accumulator.argnum] = folding.carries[i]
        return saved

    def _make(self, parts: list[Part], targets: dict[str, Any], rows: int) -> list[Fold]:
        where = self.settings.where
        return make_folds(
            where,
            parts,
            lambda part: stream_concat(where, part, rows, targets.get(part.path)),
            initial=lambda carry: self._args[carry.argnum],
            accumulator_dtype=self.settings.accumulator_dtype,
            ragged=False,
        )

    def _start(self, output: Any, rows: int | None) -> None:
        self._output_words = leaves_words(leaves_with_paths(output, "output"))
        self.folding.start(output, rows or 0)
        self._unrun = None

    def _fold_in(self, output: Any, rows: int | None, own_weight: Any) -> None:
        if not self.folding.started:
            self._start(output, rows)
        if self._first_weight is None:
            self._first_weight = own_weight
        # Relative to the first weight, so that a stream of one element is that element's output.
        same = own_weight == self._first_weight
        weight = None if same else own_weight / self._first_weight
        first = self._total == 0
        step = Step(self.position, rows or 0, weight, own_weight, self._total, first)
        for carry, value in self.folding.add(output, step).items():
            self._args[carry.argnum] = value
        self._total += 1 if weight is None else weight

    def _read(self, microbatch: tuple[Any, ...]) -> int | None:
        """The rows of the next microbatch."""
        rows = _rows_of(microbatch)
        if self.position == 0:
            self._first_rows = rows
        elif rows != self._first_rows:
            for entry in self.settings.entries():
                if isinstance(entry, Accumulator):
                    check_can_weigh(self.settings.where, entry, "output")
        self.rows_read += rows or 0
        return rows

    def _weight(self, microbatch: tuple[Any, ...], rows: int | None) -> Any:
        settings = self.settings
        if settings.weight_fn is not None:
            weight = settings.weight_fn(*self._args, *microbatch)
            return checked_weight(settings.where, weight, self.position)
        if rows is not None:
            return rows
        if any(entry in MEANS for entry in settings.entries()):
            raise BatchError(
                f"{settings.where}: microbatch {self.position} has no rows that could be counted "
                f"({leaves_words(leaves_with_paths(microbatch, 'microbatch'))}).\n"
                "Give arrays with equally many rows on their first axis, or weight_fn=."
            )
        return 1

    def _run_quietly(self, microbatch: Any) -> Any:
        """An output of which only the types matter."""
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return self.settings.fun(*self._args, *microbatch)


def _rows_of(microbatch: tuple[Any, ...]) -> int | None:
    """The common length of the first axes, None where there is none or they differ."""
    shapes = [shape_of(leaf) for _, leaf in leaves_with_paths(microbatch)]
    rows = {shape[0] for shape in shapes if shape}
    return rows.pop() if len(rows) == 1 else None


def _type_name(leaf: Any) -> str:
    if isinstance(leaf, np.generic):
        return "generic"
    return "python" if isinstance(leaf, bool | int | float | complex | str) else "array"


def _as_type(array: np.ndarray, name: str) -> Any:
    return {"generic": lambda: array[()], "python": array.item, "array": lambda: array}[name]()
