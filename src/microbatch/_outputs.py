"""Which accumulator each part of an output has, for fronts without a tree library of their own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from microbatch._accumulation import (
    EXTREMES,
    MEANS,
    AccumulationType,
    Accumulator,
    Carry,
    as_accumulator,
    is_accumulator,
)
from microbatch._errors import AccumulatorError, EmptyStream, MicrobatchError
from microbatch._trees import leaves_with_paths, map_leaves, map_subtrees, structure_words


class Part(NamedTuple):
    """One leaf of the output with a kind, or one subtree with an `Accumulator` or a `Carry`."""

    accumulator: AccumulationType | Accumulator | Carry
    path: str
    value: Any


def canonical(where: str, accumulator: Any) -> Any:
    """The accumulators' tree in this library's own types; an unknown entry is refused with its path."""

    def known(entry: Any, path: str, _: Any) -> Any:
        found = as_accumulator(entry)
        if found is None and entry is not None:
            raise unknown_accumulator(where, path, entry)
        return found

    return map_subtrees(known, accumulator, accumulator, is_prefix_leaf=is_accumulator)


def parts_of(where: str, accumulator: Any, output: Any) -> list[Part]:
    """The parts of one microbatch's output in order; `accumulator` is `canonical` and a prefix of the output."""
    parts: list[Part] = []

    def collect(entry: Any, path: str, subtree: Any) -> None:
        if isinstance(entry, AccumulationType):
            parts.extend(Part(entry, *leaf) for leaf in leaves_with_paths(subtree, path))
        else:
            parts.append(Part(entry, path, subtree))

    try:
        map_subtrees(collect, accumulator, output, "output", is_prefix_leaf=is_accumulator)
    except AccumulatorError:
        raise
    except MicrobatchError as error:
        words = structure_words(accumulator), structure_words(output)
        raise not_a_prefix(where, *words) from error
    return parts


def assemble(accumulator: Any, output: Any, results: Sequence[Any]) -> Any:
    """`output` with the results in place of its parts."""
    remaining = iter(results)

    def place(entry: Any, path: str, subtree: Any) -> Any:
        if isinstance(entry, AccumulationType):
            return map_leaves(lambda _: next(remaining), subtree)
        return next(remaining)

    return map_subtrees(place, accumulator, output, is_prefix_leaf=is_accumulator)


class Structure(NamedTuple):
    """What the outputs of all microbatches have in common: the structure of the first.

    Attributes:
      where: opens the messages.
      accumulator: `canonical`, a prefix of the output.
      skeleton: an output with 0 for each leaf.
      pattern: an output with a mark for each part.
      paths: of the parts.
    """

    where: str
    accumulator: Any
    skeleton: Any
    pattern: Any
    paths: list[str]

    @classmethod
    def of(cls, where: str, accumulator: Any, output: Any, parts: Sequence[Part]) -> "Structure":
        """The structure of `output`, whose parts are `parts`."""
        skeleton = map_leaves(lambda _: 0, output)
        marks = [_LEAF if isinstance(p.accumulator, AccumulationType) else _PART for p in parts]
        pattern = assemble(accumulator, skeleton, marks)
        return cls(where, accumulator, skeleton, pattern, [part.path for part in parts])

    def values(self, output: Any) -> list[Any]:
        """The values of the parts of another output, in the order of the first; one of another structure is refused."""
        values: list[Any] = []
        if _collected(self.pattern, output, values):
            return values
        parts = parts_of(self.where, self.accumulator, output)
        paths = [part.path for part in parts]
        if paths != self.paths:
            raise AccumulatorError(
                f"{self.where}: the output has {', '.join(paths)} in one microbatch and "
                f"{', '.join(self.paths)} in the first.\n"
                "Return the same structure from every microbatch."
            )
        return [part.value for part in parts]

    def whole(self, results: Sequence[Any]) -> Any:
        """The output with the results in place of its parts."""
        return assemble(self.accumulator, self.skeleton, results)


_LEAF, _PART = object(), object()


def _collected(pattern: Any, tree: Any, values: list[Any]) -> bool:
    """Appends what stands at each part of `pattern`; False where `tree` has another structure.

    The quick way for what is nearly always so; `parts_of` is the one that explains.
    """
    if pattern is _LEAF or pattern is _PART:
        values.append(tree)
        return pattern is _PART or not (tree is None or isinstance(tree, dict | list | tuple))
    if type(pattern) is not type(tree):
        return False
    if isinstance(pattern, dict):
        if pattern.keys() != tree.keys():
            return False
        return all(_collected(child, tree[key], values) for key, child in pattern.items())
    if isinstance(pattern, list | tuple):
        pairs = zip(pattern, tree, strict=False)
        return len(pattern) == len(tree) and all(_collected(*pair, values) for pair in pairs)
    return pattern is None


def unknown_accumulator(where: str, path: str, entry: Any) -> AccumulatorError:
    """The error for an entry of the accumulators' tree that is none."""
    return AccumulatorError(
        f"{where}: accumulator{path} is {entry!r}, not an accumulator.\n"
        f"Use one of {', '.join(AccumulationType.__members__)}, an Accumulator or a Carry."
    )


def not_a_prefix(where: str, accumulator: str, output: str) -> AccumulatorError:
    """The error for accumulators of another structure than the output, both in words."""
    return AccumulatorError(
        f"{where}: the accumulator is not a prefix of the output.\n"
        f"  accumulator: {accumulator}\n"
        f"  output:      {output}\n"
        "Give one accumulator for the whole output, or one per part of it."
    )


def check_can_average(
    where: str, kind: AccumulationType, path: str, dtype_name: str, inexact: bool
) -> None:
    """Refuses means of integers and booleans: their dtype cannot hold the result."""
    if kind in MEANS and not inexact:
        raise AccumulatorError(
            f"{where}: {path} has dtype {dtype_name}; {kind.name} averages floating-point and complex "
            "values.\n"
            "Use SUM or LAST for it, or return it as a float."
        )


def check_has_order(
    where: str, kind: AccumulationType, path: str, dtype_name: str, ordered: bool
) -> None:
    """Refuses extremes of what has none: complex numbers, random keys."""
    if kind in EXTREMES and not ordered:
        raise AccumulatorError(
            f"{where}: {path} has dtype {dtype_name}, which has no order for {kind.name}.\n"
            "Return its absolute value or its parts."
        )


def refuse_extremes(where: str, parts: Sequence[Part]) -> None:
    """MAX and MIN of zero rows have no value."""
    for accumulator, path, _ in parts:
        if accumulator in EXTREMES:
            raise EmptyStream(
                f"{where}: {accumulator.name} of zero rows has no value ({path}).\n"
                "Give at least one row."
            )


def check_can_weigh(where: str, accumulator: Accumulator, path: str) -> None:
    """Refuses a custom accumulator over microbatches of unequal rows, unless it takes their weight."""
    if not accumulator.takes_weight:
        raise AccumulatorError(
            f"{where}: the last microbatch has fewer rows, and the custom accumulator of {path} takes "
            "no weight.\n"
            "Give its update a keyword parameter weight, or use a microbatch_size that divides the batch."
        )


def changed_type(
    where: str, kind: AccumulationType, path: str, place: str, before: str, now: str
) -> AccumulatorError:
    """The error for an output whose type, in words, changes from one microbatch to the next, at `place`."""
    if kind is AccumulationType.CONCAT:
        advice = "Return equally many rows for each row of the microbatch, in one dtype."
    else:
        advice = "Use CONCAT for outputs with rows, or return one shape and dtype."
    return AccumulatorError(
        f"{where}: {path} is {now} in {place} and {before} before it; {kind.name} cannot "
        f"combine them.\n{advice}"
    )
