"""The folds of one call and what they hold, from the first output to the result."""

from collections.abc import Callable
from typing import Any

from microbatch._accumulation import AccumulationType, Carry, Step
from microbatch._errors import AccumulatorError, MicrobatchError
from microbatch._outputs import Part, Structure, parts_of
from microbatch._trees import map_subtrees
from microbatch.numpy._folds import Fold, refuse_masked


class Folding:
    """The folds of all parts of the output; known only after the first output.

    Args:
      where: opens the messages.
      accumulator: a canonical tree that is a prefix of the output.
      out: arrays for CONCAT outputs, a prefix of the output with None for what is not written.
      make: ``make(parts, targets, rows)``: one fold per part, from one microbatch's parts, the arrays of `out` by
        path, and that microbatch's rows.
    """

    def __init__(
        self,
        where: str,
        accumulator: Any,
        out: Any,
        make: Callable[[list[Part], dict[str, Any], int], list[Fold]],
    ) -> None:
        self._where = where
        self._accumulator = accumulator
        self._out = out
        self._make = make
        self._carried: list[int] = []
        self._skipped: list[Step] = []
        self.folds: list[Fold] = []
        self.carries: list[Any] = []
        self.accumulators: list[Any] = []
        self.started = False

    def start(self, output: Any, rows: int) -> None:
        """Makes the folds from the types of one output."""
        parts = parts_of(self._where, self._accumulator, output)
        for part in parts:
            combines = isinstance(part.accumulator, AccumulationType)
            if combines and part.accumulator is not AccumulationType.LAST:
                refuse_masked(self._where, part.path, part.value)
        targets = _targets(self._where, parts, output, self._out)
        self.folds = self._make(parts, targets, rows)
        self._structure = Structure.of(self._where, self._accumulator, output, parts)
        self.accumulators = [part.accumulator for part in parts]
        self._carried = [i for i, a in enumerate(self.accumulators) if isinstance(a, Carry)]
        self.carries = [fold.init() for fold in self.folds]
        self.started = True
        for step in self._skipped:
            self.skip(step)

    def add(self, output: Any, step: Step) -> dict[Carry, Any]:
        """Folds one output in; the parts that are carried into the next microbatch."""
        values = self._structure.values(output)
        self.carries = [
            fold.update(carry, value, step)
            for fold, carry, value in zip(self.folds, self.carries, values, strict=True)
        ]
        return {self.accumulators[i]: values[i] for i in self._carried}

    def skip(self, step: Step) -> None:
        """Leaves one microbatch out."""
        if not self.started:
            self._skipped.append(step)
            return
        self.carries = [
            carry if fold.skip is None else fold.skip(carry, step)
            for fold, carry in zip(self.folds, self.carries, strict=True)
        ]

    @property
    def skips_matter(self) -> bool:
        """Whether a microbatch that does not run leaves a trace."""
        return any(fold.skip is not None for fold in self.folds)

    def alone(self, output: Any, step: Step) -> Any:
        """The result where `output` is the only one there will be."""
        values = self._structure.values(output)
        results = [fold.alone(value, step) for fold, value in zip(self.folds, values, strict=True)]
        return self._structure.whole(results)

    def result(self, total: Any) -> Any:
        """The result; `total` is what MEAN divides by."""
        results = [
            fold.finalize(carry, total)
            for fold, carry in zip(self.folds, self.carries, strict=True)
        ]
        return self._structure.whole(results)


def _targets(where: str, parts: list[Part], output: Any, out: Any) -> dict[str, Any]:
    """The arrays to write into, by the path of the CONCAT leaf that each is for."""
    targets: dict[str, Any] = {}

    def collect(target: Any, path: str, subtree: Any) -> None:
        if target is not None:
            targets[path] = target

    try:
        map_subtrees(collect, out, output, "output", is_prefix_leaf=lambda entry: entry is None)
    except MicrobatchError as error:
        raise AccumulatorError(
            f"{where}: out does not fit the output: {error}.\n"
            "Give an array for a single output, or a tree like the output with None for what is not written."
        ) from None
    kinds = {part.path: part.accumulator for part in parts}
    for path in targets:
        if kinds.get(path) is not AccumulationType.CONCAT:
            raise AccumulatorError(
                f"{where}: out has an array for {path}, which is not one CONCAT output.\n"
                "Give None there; only the rows of CONCAT are written into out."
            )
    return targets
