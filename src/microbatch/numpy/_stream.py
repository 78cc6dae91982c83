"""`accumulate` on NumPy arrays: a fold over microbatches that arrive one after another."""

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from microbatch._accumulation import MEANS, AccumulationType, Accumulator, Carry
from microbatch._checkpoint import (
    Checkpoint,
    Progress,
    function_words,
    leaves_digest,
    leaves_words,
)
from microbatch._checks import name_of
from microbatch._errors import AccumulatorError, BatchError, EmptyStream
from microbatch._outputs import assemble, canonical, check_can_weigh, parts_of
from microbatch._trees import leaves_with_paths
from microbatch.numpy._folds import Fold, Step, make_folds
from microbatch.numpy._microbatch import (
    accumulators_in,
    checked_dtype,
    checked_weight,
    out_by_path,
    same_parts,
    skeleton,
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
    settings = _Settings(
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
        return _run(settings, args, microbatches, checkpoint, out)

    return accumulated


class _Settings(NamedTuple):
    """The arguments of `accumulate`, checked."""

    where: str
    fun: Callable[..., Any]
    accumulator: Any
    weight_fn: Callable[..., Any] | None
    accumulator_dtype: np.dtype | None


def _run(
    settings: _Settings,
    args: tuple[Any, ...],
    microbatches: Iterable[Any],
    path: str | os.PathLike[str] | None,
    out: Any,
) -> Any:
    folding = _Folding(settings, args, out)
    checkpoint: Checkpoint | None = None
    saved: Progress | None = None
    for microbatch in map(_as_arguments, microbatches):
        if path is not None and checkpoint is None:
            checkpoint = Checkpoint(path, settings.where, _identity(settings, args, microbatch))
            saved = folding.resume(checkpoint, microbatch)
        if saved is not None and folding.position < saved.position:
            folding.pass_over(microbatch)
        else:
            if saved is not None and folding.position == saved.position:
                _check_same_stream(checkpoint, saved, folding)
            folding.add(microbatch)
            if checkpoint is not None and folding.started:
                checkpoint.save(folding.progress)
        # Released before the iterable makes the next one.
        del microbatch
    if saved is not None and folding.position <= saved.position:
        _check_same_stream(checkpoint, saved, folding)
    result = folding.result()
    if checkpoint is not None:
        checkpoint.remove()
    return result


def _check_same_stream(checkpoint: Checkpoint, saved: Progress, folding: "_Folding") -> None:
    was, now = (saved.position, saved.numbers["rows_read"]), (folding.position, folding.rows_read)
    checkpoint.check(
        "stream", *(f"{rows} rows in {count} microbatches" for count, rows in (was, now))
    )


class _Folding:
    """One call: the folds, which are known after the first output, and what they hold."""

    def __init__(self, settings: _Settings, args: tuple[Any, ...], out: Any) -> None:
        _check_carries(settings, args)
        self.position = 0
        self._settings = settings
        self._args = list(args)
        self._out = out
        self.rows_read = 0
        self._first_rows: int | None = None
        self._first_weight: Any = None
        self._total: Any = 0
        self._ran = 0
        self._folds: list[Fold] | None = None
        self._carries: list[Any] = []
        self._skipped: list[Step] = []
        self._unrun: tuple[Any, ...] | None = None

    @property
    def started(self) -> bool:
        """Whether a microbatch has been evaluated."""
        return self._folds is not None

    def add(self, microbatch: tuple[Any, ...]) -> None:
        """Evaluates the next microbatch and folds its output in, or skips it where its weight is 0."""
        settings = self._settings
        rows = self._read(microbatch)
        own_weight = self._weight(microbatch, rows)
        if own_weight == 0:
            self._skip(Step(self.position, rows or 0), microbatch)
        else:
            output = settings.fun(*self._args, *microbatch)
            if self._folds is None:
                self._start(output, rows)
            self._fold_in(output, rows, own_weight)
        self.position += 1

    def pass_over(self, microbatch: tuple[Any, ...]) -> None:
        """Reads past a microbatch that the checkpoint holds already."""
        self._read(microbatch)
        self.position += 1

    def result(self) -> Any:
        """What the folds make of the stream."""
        where = self._settings.where
        if self._folds is None and self._unrun is None:
            raise EmptyStream(
                f"{where}: microbatches had no element, so not even the shapes of the result are known.\n"
                "Give at least one; an iterator can be read only once."
            )
        if self._folds is None:
            self._start(self._run_quietly(self._unrun), self._first_rows)
        results = [
            fold.finalize(carry, self._total)
            for fold, carry in zip(self._folds, self._carries, strict=True)
        ]
        return assemble(self._settings.accumulator, self._like, results)

    def progress(self) -> Progress:
        """The state, as a checkpoint holds it."""
        leaves = {
            f"{i}.{j}": leaf
            for i, (fold, carry) in enumerate(zip(self._folds, self._carries, strict=True))
            for j, leaf in enumerate(fold.leaves(carry))
        }
        numbers = {
            "rows_read": self.rows_read,
            "total": self._total,
            "ran": self._ran,
            "first_weight": self._first_weight,
            "types": {name: _type_name(leaf) for name, leaf in leaves.items()},
        }
        return Progress(
            self.position, numbers, {name: np.asarray(leaf) for name, leaf in leaves.items()}
        )

    def resume(self, checkpoint: Checkpoint, microbatch: tuple[Any, ...]) -> Progress | None:
        """Takes the state of the file, if there is one.

        The structure of the state is that of an output, so `fun` runs once and its output is thrown away.
        """
        saved = checkpoint.load()
        if saved is None:
            return None
        self._start(self._run_quietly(microbatch), _rows_of(microbatch))
        numbers = saved.numbers
        checkpoint.check("output", numbers["output"], self._words)
        self._total, self._ran = numbers["total"], numbers["ran"]
        self._first_weight = numbers["first_weight"]
        for i, fold in enumerate(self._folds):
            names = [name for name in numbers["types"] if name.startswith(f"{i}.")]
            leaves = [_as_type(saved.arrays[name], numbers["types"][name]) for name in names]
            self._carries[i] = fold.from_leaves(leaves)
            if self._carried[i] is not None:
                self._args[self._carried[i]] = self._carries[i]
        return saved

    def _start(self, output: Any, rows: int | None) -> None:
        settings = self._settings
        parts = parts_of(settings.where, settings.accumulator, output)
        targets = out_by_path(settings.where, parts, output, self._out)
        self._folds = make_folds(
            settings.where,
            parts,
            lambda part: stream_concat(settings.where, part, rows or 0, targets.get(part.path)),
            initial=lambda carry: self._args[carry.argnum],
            accumulator_dtype=settings.accumulator_dtype,
            ragged=False,
        )
        self._carries = [fold.init() for fold in self._folds]
        self._like, self._paths = skeleton(output), [part.path for part in parts]
        self._words = leaves_words(leaves_with_paths(output, "output"))
        self._carried = [
            entry.argnum if isinstance(entry, Carry) else None for entry, _, _ in parts
        ]
        for step in self._skipped:
            self._leave_out(step)
        self._skipped, self._unrun = [], None

    def _skip(self, step: Step, microbatch: tuple[Any, ...]) -> None:
        if self._folds is None:
            self._skipped.append(step)
            # Kept until one runs: where none does, it is run for the shapes of the result.
            self._unrun = microbatch if self._unrun is None else self._unrun
        else:
            self._leave_out(step)

    def _leave_out(self, step: Step) -> None:
        self._carries = [
            fold.skip(carry, step) for fold, carry in zip(self._folds, self._carries, strict=True)
        ]

    def _fold_in(self, output: Any, rows: int | None, own_weight: Any) -> None:
        settings = self._settings
        if self._first_weight is None:
            self._first_weight = own_weight
        # Relative to the first weight, so that a stream of one element is that element's output.
        same = own_weight == self._first_weight
        weight = None if same else own_weight / self._first_weight
        step = Step(self.position, rows or 0, weight, own_weight, self._total, self._ran == 0)
        parts = same_parts(settings.where, settings.accumulator, output, self._paths)
        self._carries = [
            fold.update(carry, part.value, step)
            for fold, carry, part in zip(self._folds, self._carries, parts, strict=True)
        ]
        for accumulator, _, value in parts:
            if isinstance(accumulator, Carry):
                self._args[accumulator.argnum] = value
        self._total += 1 if weight is None else weight
        self._ran += 1

    def _read(self, microbatch: tuple[Any, ...]) -> int | None:
        """The rows of the next microbatch."""
        rows = _rows_of(microbatch)
        if self.position == 0:
            self._first_rows = rows
        elif rows != self._first_rows:
            for entry in accumulators_in(self._settings.accumulator):
                if isinstance(entry, Accumulator):
                    check_can_weigh(self._settings.where, entry, "output")
        self.rows_read += rows or 0
        return rows

    def _weight(self, microbatch: tuple[Any, ...], rows: int | None) -> Any:
        settings = self._settings
        if settings.weight_fn is not None:
            weight = settings.weight_fn(*self._args, *microbatch)
            return checked_weight(settings.where, weight, self.position)
        if rows is not None:
            return rows
        if any(entry in MEANS for entry in accumulators_in(settings.accumulator)):
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
            return self._settings.fun(*self._args, *microbatch)


def _as_arguments(element: Any) -> tuple[Any, ...]:
    return tuple(element) if isinstance(element, tuple | list) else (element,)


def _rows_of(microbatch: tuple[Any, ...]) -> int | None:
    """The common length of the first axes, None where there is none or they differ."""
    shapes = [shape_of(leaf) for _, leaf in leaves_with_paths(microbatch)]
    rows = {shape[0] for shape in shapes if shape}
    return rows.pop() if len(rows) == 1 else None


def _check_carries(settings: _Settings, args: tuple[Any, ...]) -> None:
    for entry in accumulators_in(settings.accumulator):
        if isinstance(entry, Carry) and not 0 <= entry.argnum < len(args):
            raise AccumulatorError(
                f"{settings.where}: Carry({entry.argnum}) names no argument; the call has {len(args)} "
                "before the microbatch's.\n"
                "Number the arguments given before microbatches= from 0."
            )


def _identity(
    settings: _Settings, args: tuple[Any, ...], microbatch: tuple[Any, ...]
) -> dict[str, str]:
    """What a checkpoint belongs to."""
    return {
        "function": function_words(settings.fun),
        "accumulator": ", ".join(
            f"{path or 'output'}: {_accumulator_words(entry)}"
            for path, entry in leaves_with_paths(settings.accumulator)
        ),
        "weight_fn": "rows" if settings.weight_fn is None else function_words(settings.weight_fn),
        "accumulator_dtype": str(settings.accumulator_dtype),
        "set of arguments": leaves_digest(leaves_with_paths(args, "args")),
        "microbatch": leaves_words(leaves_with_paths(microbatch, "microbatch")),
    }


def _accumulator_words(entry: Any) -> str:
    if isinstance(entry, Accumulator):
        parts = (entry.init, entry.update, entry.finalize)
        return f"Accumulator({', '.join(map(function_words, parts))})"
    return entry.name if isinstance(entry, AccumulationType) else repr(entry)


def _type_name(leaf: Any) -> str:
    if isinstance(leaf, np.generic):
        return "generic"
    return "python" if isinstance(leaf, bool | int | float | complex | str) else "array"


def _as_type(array: np.ndarray, name: str) -> Any:
    return {"generic": lambda: array[()], "python": array.item, "array": lambda: array}[name]()
