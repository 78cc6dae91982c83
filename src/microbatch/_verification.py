"""Comparing the whole batch with its microbatches, and the frozen, printable `Verification`; NumPy only."""

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from microbatch._errors import DifferentError
from microbatch._tables import html_table, text_table

Verdict = Literal["exact", "rounding", "different"]

# What a sum in another order may cost, in units of rounding of the largest value.
UNITS_ALLOWED = 16.0
UNITS_ALLOWED_UNSEEN = 64.0
# A whole batch that is further from float64 than this was not computed from the same numbers.
TRUSTED_UNITS = 1e4
# In narrow dtypes so many units would be half the value.
MOST_ALLOWED = 0.03

# The spacing of floating-point types that NumPy knows through other packages, if at all.
_NARROW = {"bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2}


@dataclass(frozen=True)
class Leaf:
    """One array of a result: where it is, whether it is a value or a gradient, and its numbers.

    `dtype` is the name of the dtype that it was computed in, where NumPy has no such dtype and `array` is wider.
    """

    path: str
    role: Literal["value", "gradient"]
    array: np.ndarray
    dtype: str = ""

    @property
    def dtype_name(self) -> str:
        """The dtype that it was computed in."""
        return self.dtype or self.array.dtype.name


@dataclass(frozen=True)
class Comparison:
    """One leaf of the whole batch beside the same leaf of the microbatches.

    Attributes:
      path: of the leaf.
      role: "value" or "gradient".
      dtype: of the leaf, as computed.
      shape: of the leaf.
      difference: the largest absolute difference.
      units: that difference in units of rounding: of the dtype's epsilon times the leaf's largest value.
      whole_error: the whole batch's largest error against float64; None where float64 was not possible.
      microbatched_error: the same of the microbatches.
      verdict: "exact" (bit for bit), "rounding" (at most twice the whole batch's error, or a few units), "different".
    """

    path: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    difference: float
    units: float
    whole_error: float | None
    microbatched_error: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Cause:
    """Why numbers differ, what was tried to know it, and the way out.

    Attributes:
      kind: a name for programs: ``"rows_influence_each_other"``, ``"unequal_means"``, ``"sum_given_as_mean"``,
        ``"mean_given_as_sum"``, ``"extremum"``, ``"random_numbers"``, ``"not_repeatable"``, ``"low_precision"``,
        ``"not_finite"``, ``"not_a_sum"``, ``"gradient_alone"``.
      sentence: the cause in words, with its evidence.
      remedy: what to do; empty where nothing can be done.
    """

    kind: str
    sentence: str
    remedy: str = ""


@dataclass(frozen=True)
class Verification:
    """The answer of `verify`: whether microbatching keeps the numbers of a function, and why not.

    Attributes:
      name: of the function.
      framework: ``"jax"`` or ``"torch"``.
      batch_size: rows in the batch that was given.
      rows: rows that were compared: all, or a prefix where the whole batch would not fit in memory.
      microbatch_size: rows in a microbatch.
      verdict: the worst of the leaves' verdicts.
      comparisons: one per leaf of the value and of the gradient.
      causes: why, where the verdict is "different"; what else was noticed, where it is not.
      explanation: the answer in one sentence.
    """

    name: str
    framework: str
    batch_size: int
    rows: int
    microbatch_size: int
    verdict: Verdict
    comparisons: tuple[Comparison, ...]
    causes: tuple[Cause, ...]
    explanation: str

    @property
    def exit_code(self) -> int:
        """0 where the numbers are the same up to rounding, 1 where they are not."""
        return 1 if self.verdict == "different" else 0

    def raise_if_different(self) -> "Verification":
        """This verification, or a `DifferentError` with everything it says."""
        if self.verdict == "different":
            raise DifferentError(str(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dictionaries, as JSON has them."""
        plain = asdict(self)
        plain["comparisons"] = [c | {"shape": list(c["shape"])} for c in plain["comparisons"]]
        plain["causes"] = list(plain["causes"])
        return plain

    @property
    def title(self) -> str:
        """What was asked, in one line."""
        part = "" if self.rows == self.batch_size else f" (the first {self.rows}: not all fit)"
        return f"verify({self.name}): {self.batch_size} rows{part}, {self.microbatch_size} a microbatch"

    def __str__(self) -> str:
        said = [line for cause in self.causes for line in (cause.sentence, cause.remedy) if line]
        return "\n".join(
            [
                self.title,
                "",
                *text_table(verification_cells(self), words={0}),
                "",
                self.explanation,
                *said,
            ]
        )

    def _repr_html_(self) -> str:
        said = "".join(
            f"<li>{html.escape(cause.sentence)} {html.escape(cause.remedy)}</li>"
            for cause in self.causes
        )
        return (
            f"<p>{html.escape(self.title)}</p>{html_table(verification_cells(self))}"
            f"<p>{html.escape(self.explanation)}</p><ul>{said}</ul>"
        )


def verification_cells(found: Verification) -> list[list[str]]:
    """The comparisons in words, their head first."""
    head = [
        "",
        "dtype",
        "shape",
        "difference",
        "units",
        "whole error",
        "microbatched",
        "verdict",
    ]
    return [head, *map(_cells, found.comparisons)]


def compare(
    whole: Sequence[Leaf],
    pieces: Sequence[Leaf],
    reference: Sequence[Leaf] | None,
) -> tuple[Comparison, ...]:
    """Each leaf of the whole batch beside that of the microbatches.

    Args:
      whole: of the whole batch, in the working precision.
      pieces: of the microbatches, in the working precision.
      reference: of the whole batch in float64; None where that was not possible.
    """
    references = [None] * len(whole) if reference is None else list(reference)
    largest = {
        role: max((_scale(leaf.array) for leaf in whole if leaf.role == role), default=0.0)
        for role in ("value", "gradient")
    }
    return tuple(
        _compare_leaf(a, b, c, largest[a.role])
        for a, b, c in zip(whole, pieces, references, strict=True)
    )


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several verdicts.

    >>> worst(["exact", "rounding"]), worst([])
    ('rounding', 'exact')
    """
    order: tuple[Verdict, ...] = ("exact", "rounding", "different")
    return max(verdicts, key=order.index, default="exact")


def agree(left: Sequence[Leaf], right: Sequence[Leaf], *, exactness: float = 1.0) -> list[bool]:
    """Per leaf, whether two results are the same up to rounding in their precision.

    Args:
      left: one result.
      right: another one, of the same structure or not.
      exactness: how many times the usual allowance.
    """
    if len(left) != len(right):
        return [False] * len(left)
    return [_same(a, b, exactness) for a, b in zip(left, right, strict=True)]


def explain(comparisons: Sequence[Comparison], verdict: Verdict) -> str:
    """The verdict in one sentence, with the leaf that decides it."""
    if verdict == "exact":
        return "Exact: the microbatches give the whole batch's numbers, bit for bit."
    deciding = max(
        (c for c in comparisons if c.verdict == verdict), key=lambda c: (np.isinf(c.units), c.units)
    )
    where = f"the {deciding.role}{f' {deciding.path}' if deciding.path else ''}"
    amount = f"{deciding.units:.3g} units of rounding of {deciding.dtype}"
    errors = ""
    if deciding.whole_error is not None and deciding.microbatched_error is not None:
        errors = (
            f"; against float64 the whole batch is off by {deciding.whole_error:.3g}, "
            f"the microbatches by {deciding.microbatched_error:.3g}"
        )
    if verdict == "rounding":
        # Many units, where a gradient is zero but for rounding, need the reason why they are allowed.
        said = errors if deciding.units > UNITS_ALLOWED else ""
        return f"Rounding: the largest difference is {amount}, in {where}{said}."
    return f"Different: {where} is off by {deciding.difference:.3g}, {amount}{errors}."


def _compare_leaf(whole: Leaf, pieces: Leaf, reference: Leaf | None, largest: float) -> Comparison:
    a, b = whole.array, pieces.array
    dtype = whole.dtype_name

    def result(
        difference: float,
        units: float,
        verdict: Verdict,
        errors: Sequence[float | None] = (None, None),
    ) -> Comparison:
        return Comparison(
            whole.path, whole.role, dtype, a.shape, difference, units, errors[0], errors[1], verdict
        )

    if a.shape != b.shape:
        return result(np.inf, np.inf, "different")
    wide_a, wide_b = _widened(a), _widened(b)
    difference = _distance(wide_a, wide_b)
    if difference == 0:
        return result(0.0, 0.0, "exact")
    epsilon, scale = _epsilon(dtype), _scale(a)
    if not np.isfinite(difference) or not epsilon:
        return result(difference, np.inf, "different")
    units = difference / (epsilon * scale) if scale else np.inf
    # A gradient that is zero but for rounding is measured beside the others.
    floor = epsilon * largest
    if reference is None:
        allowed = max(_allowed(UNITS_ALLOWED_UNSEEN, epsilon) * scale, floor)
        return result(difference, units, "rounding" if difference <= allowed else "different")
    exact = _widened(reference.array)
    errors = (_distance(wide_a, exact), _distance(wide_b, exact))
    if errors[0] > max(TRUSTED_UNITS * epsilon * scale, floor):
        # Not rounding: in float64 the function does something else, such as drawing other random numbers.
        return _compare_leaf(whole, pieces, None, largest)
    allowed = max(2 * errors[0], _allowed(UNITS_ALLOWED, epsilon) * scale, floor)
    verdict = "rounding" if errors[1] <= allowed else "different"
    return result(difference, units, verdict, errors)


def _allowed(units: float, epsilon: float) -> float:
    return min(units * epsilon, MOST_ALLOWED)


def _same(left: Leaf, right: Leaf, exactness: float) -> bool:
    a, b = left.array, right.array
    if a.shape != b.shape:
        return False
    if a.tobytes() == b.tobytes() and a.dtype == b.dtype:
        return True
    relative = _allowed(exactness * UNITS_ALLOWED_UNSEEN, _epsilon(left.dtype_name))
    return bool(_distance(_widened(a), _widened(b)) <= relative * max(_scale(a), _scale(b)))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute difference; NaN beside NaN, and equal infinities, are no difference."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    apart = np.where(alike, 0.0, np.where(np.isnan(apart), np.inf, apart))
    return float(apart.max(initial=0.0))


def _scale(array: np.ndarray) -> float:
    size = np.abs(_widened(array))
    return float(size[np.isfinite(size)].max(initial=0.0))


def _widened(array: np.ndarray) -> np.ndarray:
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    return np.asarray(array).astype(wide)


def _epsilon(dtype: str) -> float:
    """The relative spacing of a dtype; 0 for integers, which do not round."""
    if dtype in _NARROW:
        return _NARROW[dtype]
    return float(np.finfo(dtype).eps) if dtype.startswith(("float", "complex")) else 0.0


def _cells(c: Comparison) -> list[str]:
    numbers = (c.difference, c.units, c.whole_error, c.microbatched_error)
    return [
        f"{c.role} {c.path}".rstrip(),
        c.dtype,
        "x".join(map(str, c.shape)) or "scalar",
        *("" if number is None else f"{number:.3g}" for number in numbers),
        c.verdict,
    ]
