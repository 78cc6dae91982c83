"""Why microbatches give other numbers than the whole batch: one experiment per known reason, framework-free."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from microbatch._accumulation import EXTREMES, AccumulationType
from microbatch._splitting import Split
from microbatch._verification import (
    TRUSTED_UNITS,
    Cause,
    Comparison,
    Leaf,
    Verification,
    agree,
    explain,
    worst,
)

MOST_MICROBATCHES = 64
MEAN, SUM = AccumulationType.MEAN, AccumulationType.SUM


class Subject(Protocol):
    """A function and its batch, which a front can evaluate in several ways; values only, no gradients."""

    @property
    def split(self) -> Split:
        """How the batch is cut."""
        ...

    @property
    def accumulator(self) -> Any:
        """One kind, or anything else that was given."""
        ...

    @property
    def weighted(self) -> bool:
        """Whether a weight function was given."""
        ...

    @property
    def precise(self) -> bool:
        """Whether results are in float64."""
        ...

    def whole(self, rows: np.ndarray | None = None) -> list[Leaf]:
        """The function of these rows of the batch (indices, repeats allowed), or of all of it."""
        ...

    def pieces(self, accumulator: Any = None, weight_fn: Any = None) -> list[Leaf]:
        """The microbatched function, with another accumulator or weight function where they are given."""
        ...

    def weights(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Weight functions that may be meant, each with the Python text to paste."""
        ...

    def random_numbers(self) -> Cause | None:
        """Whether the function draws random numbers, and what then can be done."""
        ...

    def influential_part(self, rows: np.ndarray) -> str | None:
        """The part of the program (a module's name) where one row begins to influence others, where it can be known."""
        ...


def explained(
    subject: Subject,
    comparisons: tuple[Comparison, ...],
    *,
    name: str,
    framework: str,
    batch_size: int,
) -> Verification:
    """The verdict on the comparisons, with the causes of a difference.

    Args:
      subject: what is examined where they differ.
      comparisons: of the whole batch with its microbatches, leaf by leaf.
      name: of the function.
      framework: of the front.
      batch_size: rows that were given, of which `subject` may have fewer.
    """
    verdict = worst([c.verdict for c in comparisons])
    return Verification(
        name=name,
        framework=framework,
        batch_size=batch_size,
        rows=subject.split.batch_size,
        microbatch_size=subject.split.microbatch_size,
        verdict=verdict,
        comparisons=comparisons,
        causes=_find_causes(subject, comparisons),
        explanation=explain(comparisons, verdict),
    )


def _find_causes(subject: Subject, comparisons: Sequence[Comparison]) -> tuple[Cause, ...]:
    """Tries one known reason after another, and reports the first that holds (and values that are not finite).

    Args:
      subject: what is examined.
      comparisons: of the values and the gradients. Where none differs, only non-finite values are sought.
    """
    whole = subject.whole()
    causes = [cause for cause in [_not_finite(subject, whole)] if cause]
    wrong = [c for c in comparisons if c.verdict == "different"]
    if not wrong:
        return tuple(causes)
    repeatable: tuple[Callable[[], Cause | None], ...] = (
        lambda: _not_repeatable(subject, whole),
        subject.random_numbers,
    )
    low_precision = lambda: _low_precision(subject, whole)
    influence = lambda: _influence(subject, whole)
    if any(c.role == "value" for c in wrong):
        reasons = (
            *repeatable,
            low_precision,
            lambda: _another_kind(subject, whole),
            lambda: _unequal_means(subject, whole),
            influence,
            lambda: _not_a_sum(subject, whole),
        )
    else:
        # Values that agree already would confirm any other kind or weight, and any precision.
        lost_digits = max(c.units for c in wrong) < TRUSTED_UNITS
        reasons = (
            *repeatable,
            *([low_precision] if lost_digits else []),
            influence,
            lambda: _gradient_alone(subject),
        )
    for reason in reasons:
        if cause := reason():
            return (*causes, cause)
    return tuple(causes)


def _not_finite(subject: Subject, whole: list[Leaf]) -> Cause | None:
    finite = lambda leaves: all(_is_finite(leaf.array) for leaf in leaves)
    if finite(whole) and finite(subject.pieces()):
        return None
    split, bad = subject.split, []
    for i in range(min(split.num_microbatches, MOST_MICROBATCHES)):
        if not finite(subject.whole(np.arange(split.batch_size)[split.rows(i)])):
            bad.append(i)
    if not bad:
        where = "no microbatch on its own gives one, so it appears where they are combined"
    else:
        rows = split.rows(bad[0])
        step = f" in steps of {rows.step}" if (rows.step or 1) > 1 else ""
        named = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        where = f"from microbatch {named} (microbatch {bad[0]} holds rows {rows.start} to {rows.stop - 1}{step})"
    return Cause(
        "not_finite",
        f"There are NaN or infinite values, {where}.",
        "Look at these rows; a microbatch without valid rows can be given weight 0 by weight_fn, which skips it.",
    )


def _not_repeatable(subject: Subject, whole: list[Leaf]) -> Cause | None:
    again = subject.whole()
    if all(a.array.tobytes() == b.array.tobytes() for a, b in zip(whole, again, strict=True)):
        return None
    return Cause(
        "not_repeatable",
        "The whole batch, run twice, gives two different results: the function uses state or random numbers that are "
        "not among its arguments.",
        "Pass them as arguments; then verify can hold them fixed.",
    )


def _low_precision(subject: Subject, whole: list[Leaf]) -> Cause | None:
    if not subject.precise or not all(agree(whole, subject.pieces(), exactness=1e4)):
        return None
    return Cause(
        "low_precision",
        "In float64 the microbatches and the whole batch agree, so the difference is lost precision alone: sums in the "
        "working dtype lose digits with every microbatch.",
        "Accumulate in a wider dtype: accumulator_dtype=float32 (or leave accumulator_dtype out for float16 and "
        "bfloat16), and larger microbatches.",
    )


def _another_kind(subject: Subject, whole: list[Leaf]) -> Cause | None:
    given = subject.accumulator
    for kind in (SUM, MEAN, *EXTREMES):
        if kind is given or not _agrees(subject, whole, accumulator=kind):
            continue
        remedy = f"Use AccumulationType.{kind.name} (tried: the numbers are then the same)."
        count = subject.split.num_microbatches
        if kind is SUM and given in (MEAN, AccumulationType.RUNNING_MEAN):
            return Cause(
                "sum_given_as_mean",
                f"The function is a sum over rows and was given as {given.name}: the mean of {count} microbatches' sums "
                f"is {count} times smaller than the sum.",
                remedy,
            )
        if kind is MEAN and given is SUM:
            return Cause(
                "mean_given_as_sum",
                f"The function is a mean over rows and was given as SUM: the sum of {count} microbatches' means is "
                f"{count} times larger than the mean.",
                remedy,
            )
        words = "maximum" if kind is AccumulationType.MAX else "minimum"
        if kind in EXTREMES:
            return Cause("extremum", f"The function is a {words} over rows.", remedy)
        return Cause("another_kind", f"The function is a {kind.name} over rows.", remedy)
    return None


def _unequal_means(subject: Subject, whole: list[Leaf]) -> Cause | None:
    for text, weight_fn in subject.weights():
        if _agrees(subject, whole, accumulator=MEAN, weight_fn=weight_fn):
            return Cause(
                "unequal_means",
                "The function is a mean over something that microbatches have different numbers of (valid tokens, "
                "weights), and the mean of unequal means is not the mean.",
                f"Use AccumulationType.MEAN with weight_fn={text} (tried: the numbers are then the same).",
            )
    return None


def _influence(subject: Subject, whole: list[Leaf]) -> Cause | None:
    """A row is replaced by another one; outputs that have rows must change in that row alone."""
    size = subject.split.batch_size
    for changed in _some_rows(size):
        rows = np.arange(size)
        rows[changed] = (changed + 1) % size
        after = subject.whole(rows)
        for before, now in zip(whole, after, strict=True):
            if before.array.ndim == 0 or before.array.shape[0] != size:
                continue
            others = np.arange(size) != changed
            left, right = (Leaf(x.path, x.role, x.array[others]) for x in (before, now))
            if all(agree([left], [right], exactness=16)):
                continue
            apart = np.abs(left.array.astype(np.float64) - right.array.astype(np.float64))
            first = int(np.arange(size)[others][apart.reshape(len(apart), -1).max(1).argmax()])
            return _influence_words(
                subject.influential_part(rows),
                f"with row {changed} replaced by another one, the output of row {first} changes by {apart.max():.3g}",
            )
        if part := subject.influential_part(rows):
            return _influence_words(
                part,
                f"with row {changed} replaced by another one, its output changes in other rows",
            )
    return None


def _influence_words(part: str | None, evidence: str) -> Cause:
    place = f" in {part}" if part else ""
    return Cause(
        "rows_influence_each_other",
        f"Rows influence each other{place}: {evidence}.",
        "Normalise within a row (LayerNorm, GroupNorm) or use fixed statistics (evaluation mode); for a loss that "
        "compares rows, microbatch the encoder with CONCAT and apply the loss to the whole.",
    )


def _not_a_sum(subject: Subject, whole: list[Leaf]) -> Cause | None:
    """Two rows replaced one at a time and together: of a sum over rows, the changes add up."""
    size = subject.split.batch_size
    if size < 4:
        return None
    base = _numbers(whole)
    for first in _some_rows(size):
        second = (first + size // 2) % size
        change = []
        for replaced in ([first], [second], [first, second]):
            rows = np.arange(size)
            rows[replaced] = (rows[replaced] + 1) % size
            change.append(_numbers(subject.whole(rows)) - base)
        one, other, both = change
        apart = np.abs(both - one - other).max(initial=0.0)
        moved = max(np.abs(one).max(initial=0.0), np.abs(other).max(initial=0.0))
        if moved > 0 and apart > (1e-6 if subject.precise else 1e-2) * moved:
            return Cause(
                "not_a_sum",
                f"The function is not a sum, mean or concatenation over rows: replacing rows {first} and {second} together "
                f"changes it by {np.abs(both).max():.3g}, one at a time by {np.abs(one).max():.3g} and "
                f"{np.abs(other).max():.3g}, which differs from adding up by {apart:.3g}. Either rows influence each other "
                "(normalisation over the batch, a loss that compares rows), or it is a ratio, a root or another function of "
                "the whole.",
                "Return its sums as separate outputs (numerator and denominator) and combine them afterwards, or microbatch "
                "the encoder with CONCAT and apply the loss to the whole.",
            )
    return None


def _gradient_alone(subject: Subject) -> Cause:
    """The values agree, so they tell nothing; what is known of gradients is said."""
    if subject.accumulator in EXTREMES:
        return Cause(
            "gradient_alone",
            "The values agree and a gradient does not: where several rows have the extreme value, the derivative goes to "
            "the first microbatch of them.",
        )
    if subject.weighted:
        return Cause(
            "gradient_alone",
            "The values agree and a gradient does not: no derivative flows through weight_fn.",
            "Where the weights depend on what is differentiated, return numerator and denominator with "
            "AccumulationType.SUM, divide them outside, and differentiate that.",
        )
    return Cause(
        "gradient_alone",
        "The values agree for these arguments and a gradient does not, so the values cannot tell why.",
        "Verify with other arguments, such as parameters that are not zero: where values differ, too, the reason is found.",
    )


def _agrees(subject: Subject, whole: list[Leaf], **how: Any) -> bool:
    try:
        return all(agree(whole, subject.pieces(**how), exactness=4))
    except (TypeError, ValueError):
        # A kind or weight that does not suit this function.
        return False


def _some_rows(size: int) -> list[int]:
    return sorted({0, size // 3, size - 1})


def _numbers(leaves: Sequence[Leaf]) -> np.ndarray:
    flat = [
        leaf.array.astype(np.complex128).ravel() for leaf in leaves if leaf.array.dtype.kind != "b"
    ]
    return np.concatenate([*flat, np.zeros(0)])


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype.kind in "biu":
        return True
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    return bool(np.isfinite(array.astype(wide)).all())
