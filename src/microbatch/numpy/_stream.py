"""`accumulate` on NumPy arrays: a fold over microbatches that arrive one after another."""

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from microbatch._accumulation import AccumulationType, Carry, Step
from microbatch._checkpoint import Progress
from microbatch._checks import check_function, name_of
from microbatch._eager_stream import EagerStream
from microbatch._outputs import Part, canonical
from microbatch._stream import Settings, fold_stream, identity_of
from microbatch._trees import leaves_with_paths
from microbatch.numpy._folding import Folding
from microbatch.numpy._folds import Fold, make_folds
from microbatch.numpy._microbatch import checked_dtype, checked_weight
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
    check_function(where, "fun", fun)
    if weight_fn is not None:
        check_function(where, "weight_fn", weight_fn)
    kinds = canonical(where, accumulator)
    entries = tuple(leaves_with_paths(kinds, "output"))
    dtype = checked_dtype(where, accumulator_dtype)
    settings = Settings(where, kinds, entries, weight_fn, dtype)

    def accumulated(
        *args: Any,
        microbatches: Iterable[Any],
        checkpoint: str | os.PathLike[str] | None = None,
        out: Any = None,
    ) -> Any:
        return fold_stream(_Stream(settings, fun, args, out), microbatches, checkpoint)

    return accumulated


class _Stream(EagerStream):
    """One call on NumPy arrays."""

    def __init__(
        self, settings: Settings, fun: Callable[..., Any], args: tuple[Any, ...], out: Any
    ) -> None:
        super().__init__(settings, fun, args)
        self._folding = Folding(settings.where, settings.accumulator, out, self._make)

    @property
    def started(self) -> bool:
        return self._folding.started

    def identity(self, microbatch: tuple[Any, ...]) -> dict[str, str]:
        leaves = leaves_with_paths(tuple(self.args), "args")
        rows = leaves_with_paths(microbatch, "microbatch")
        return identity_of(self.settings, self.fun, leaves, rows)

    def rows_of(self, leaf: Any) -> int | None:
        return next(iter(shape_of(leaf) or ()), None)

    def as_weight(self, value: Any) -> Any:
        return checked_weight(self.settings.where, value, self.position)

    def evaluated(self, microbatch: tuple[Any, ...]) -> Any:
        return self.fun(*self.args, *microbatch)

    def evaluated_aside(self, microbatch: tuple[Any, ...]) -> Any:
        # Its values mean nothing, and neither do warnings about them.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return self.evaluated(microbatch)

    def make_folds(self, output: Any, rows: int) -> None:
        self._folding.start(output, rows)

    def fold(self, output: Any, step: Step) -> dict[Carry, Any]:
        return self._folding.add(output, step)

    def skip(self, step: Step) -> None:
        self._folding.skip(step)

    def folded(self) -> Any:
        return self._folding.result(self.total)

    def progress(self) -> Progress:
        folding = self._folding
        leaves = {
            f"{i}.{j}": leaf
            for i, (fold, carry) in enumerate(zip(folding.folds, folding.carries, strict=True))
            for j, leaf in enumerate(fold.leaves(carry))
        }
        types = {name: _type_name(leaf) for name, leaf in leaves.items()}
        arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        return Progress(self.position, {**self.numbers(), "types": types}, arrays)

    def restore(self, saved: Progress) -> None:
        self.restore_numbers(saved)
        types, folding = saved.numbers["types"], self._folding
        for i, (fold, accumulator) in enumerate(
            zip(folding.folds, folding.accumulators, strict=True)
        ):
            names = [name for name in types if name.startswith(f"{i}.")]
            leaves = [_as_type(saved.arrays[name], types[name]) for name in names]
            folding.carries[i] = fold.from_leaves(leaves)
            if isinstance(accumulator, Carry):
                self.args[accumulator.argnum] = folding.carries[i]

    def _make(self, parts: list[Part], targets: dict[str, Any], rows: int) -> list[Fold]:
        where = self.settings.where
        return make_folds(
            where,
            parts,
            lambda part: stream_concat(where, part, rows, targets.get(part.path)),
            initial=lambda carry: self.args[carry.argnum],
            accumulator_dtype=self.settings.accumulator_dtype,
            ragged=False,
        )


def _type_name(leaf: Any) -> str:
    if isinstance(leaf, np.generic):
        return "generic"
    return "python" if isinstance(leaf, bool | int | float | complex | str) else "array"


def _as_type(array: np.ndarray, name: str) -> Any:
    return {"generic": lambda: array[()], "python": array.item, "array": lambda: array}[name]()
