"""The largest size that fits, by few probes of `probe(size) -> bytes`.

Memory is nearly always affine in the microbatch size, so two probes give a line, the line gives the answer, and the
answer is probed too. Where three probes are not on a line, the bracket around the budget is halved by further probes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microbatch._checks import check_size
from microbatch._errors import PlanError
from microbatch._splitting import divisors

# Two figures that differ by less are taken as equal: the promise on predictions.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Line:
    """Bytes as `fixed_bytes + bytes_per_row * size`."""

    fixed_bytes: float
    bytes_per_row: float

    def __call__(self, size: int) -> float:
        return self.fixed_bytes + self.bytes_per_row * size


@dataclass(frozen=True)
class Search:
    """What a search found out: the probed sizes, the largest that fits, and whether probes lie on a line."""

    microbatch_size: int | None
    probed: Mapping[int, int]
    line: Line
    affine: bool


def sizes_of(where: str, rows: int, candidates: Any, *, remainder: bool) -> tuple[int, ...]:
    """The sizes to consider: those that were given and suit the batch, or all that are worth it."""
    if candidates is None:
        return candidate_sizes(max(rows, 1), remainder=remainder)
    if not isinstance(candidates, Iterable) or isinstance(candidates, str):
        raise PlanError(
            f"{where}: candidates={candidates!r} is no sequence.\n"
            "Give a sequence of microbatch sizes, for example candidates=(16, 32)."
        )
    given = {check_size(where, "candidates", size) for size in candidates}
    usable = tuple(sorted(s for s in given if s <= rows and (remainder or rows % s == 0)))
    if not usable and remainder:
        raise PlanError(
            f"{where}: all of candidates={tuple(sorted(given))!r} are larger than the batch of {rows} rows.\n"
            "Give smaller sizes, or leave candidates out."
        )
    if not usable:
        raise PlanError(
            f"{where}: none of candidates={tuple(sorted(given))!r} divides the batch of {rows} rows.\n"
            'Give sizes that do, or remainder="allow".'
        )
    return usable


def refuse_sizes(where: str, options: Mapping[str, Any]) -> None:
    """A size among the options of a plan, which is to find it."""
    for name in ("microbatch_size", "num_microbatches"):
        if name in options:
            raise PlanError(
                f"{where}: {name} is given, and a plan finds it.\n"
                "Leave it out, or name the only sizes to consider in candidates."
            )


def candidate_sizes(batch_size: int, *, remainder: bool) -> tuple[int, ...]:
    """Sizes worth considering, ascending: the divisors, and with a remainder the most even cuts into k pieces.

    >>> candidate_sizes(12, remainder=False)
    (1, 2, 3, 4, 6, 12)
    >>> candidate_sizes(7, remainder=True)
    (1, 2, 3, 4, 7)
    """
    if not remainder:
        return tuple(divisors(batch_size))
    root = math.isqrt(batch_size)
    # ceil(batch_size / k) for every k: all k up to the root give the large sizes, the sizes up to it the small ones.
    counts = {*range(1, root + 2), *(-(-batch_size // size) for size in range(1, root + 1))}
    return tuple(sorted({-(-batch_size // k) for k in counts}))


def search(
    probe: Callable[[int], int],
    batch_size: int,
    budget_bytes: int,
    sizes: Sequence[int],
    *,
    whole_saves: int = 0,
    slack_bytes: int = 0,
    prefers_divisors: bool = False,
) -> Search:
    """Finds the largest of `sizes` whose probe is within the budget.

    Four probes at most where bytes are affine in the size (and one more for a divisor, where sizes with a remainder are
    among `sizes`); where they are not, as many more as halving takes.

    Args:
      probe: bytes that a microbatch size needs.
      batch_size: rows in the batch. That size is no loop and has no accumulator, so it is never part of the line.
      budget_bytes: the most that fits.
      sizes: ascending candidates.
      whole_saves: bytes by which the whole batch may undercut the line.
      slack_bytes: what small buffers and padding may add anywhere, so that it does not count as a bend in the line.
      prefers_divisors: whether a divisor of the batch that is more than half as large is taken instead.

    >>> found = search(lambda size: 100 + 10 * size, 1024, 2000, candidate_sizes(1024, remainder=False))
    >>> found.microbatch_size, found.affine, len(found.probed)
    (128, True, 3)
    """
    probed: dict[int, int] = {}

    def measure(size: int) -> int:
        if size not in probed:
            probed[size] = probe(size)
        return probed[size]

    for size in _first_sizes([s for s in sizes if s < batch_size] or list(sizes)):
        measure(size)
    line = _line(probed, batch_size)
    if batch_size in sizes and line(batch_size) - whole_saves <= budget_bytes:
        measure(batch_size)

    while (size := _next_size(probed, batch_size, budget_bytes, sizes, slack_bytes)) is not None:
        measure(size)
    best = max((s for s, count in probed.items() if count <= budget_bytes), default=None)
    if prefers_divisors and best is not None and batch_size % best:
        even = (s for s in sizes if batch_size % s == 0 and best < 2 * s and s < best)
        divisor = max(even, default=None)
        if divisor is not None and measure(divisor) <= budget_bytes:
            best = divisor
    affine = is_affine(probed, batch_size, slack_bytes)
    return Search(best, dict(sorted(probed.items())), _line(probed, batch_size), affine)


def is_affine(probed: Mapping[int, int], batch_size: int, slack_bytes: int = 0) -> bool:
    """Whether each probed size below the whole batch is within 2% of the line through the two outermost."""
    points = {s: count for s, count in probed.items() if s < batch_size}
    if len(points) < 3:
        return True
    line = _line({s: points[s] for s in (min(points), max(points))}, batch_size)
    return all(
        abs(line(s) - count) <= max(TOLERANCE * count, slack_bytes) for s, count in points.items()
    )


def halvings(sizes: Sequence[int], largest: int, most: int = 5) -> list[int]:
    """`largest` and at most four smaller sizes, each about half of the one before.

    >>> halvings((1, 2, 3, 4, 6, 12), 12)
    [12, 6, 3, 1]
    """
    chosen: list[int] = []
    for size in sorted((s for s in sizes if s <= largest), reverse=True):
        if len(chosen) < most and (not chosen or size <= 0.6 * chosen[-1]):
            chosen.append(size)
    return chosen


def _first_sizes(sizes: Sequence[int]) -> list[int]:
    """Two sizes far enough apart for a line, small enough to be quick: near 8, and half-way (in logarithms) to the largest."""
    near = lambda aim, among: min(among, key=lambda s: abs(math.log(s / aim)))
    first = near(8, sizes)
    rest = [s for s in sizes if s != first]
    return [first] if not rest else [first, near(math.sqrt(first * max(sizes)), rest)]


def line_through(probed: Mapping[int, int]) -> Line:
    """Through the two largest sizes; through zero where there is one."""
    points = sorted(probed.items())
    return _through(*points[-2:]) if len(points) > 1 else _through((0, 0), points[0])


def _line(probed: Mapping[int, int], batch_size: int) -> Line:
    """Through sizes below the whole batch, which is no loop, unless there is only one of them."""
    below = {s: count for s, count in probed.items() if s < batch_size}
    return line_through(below if len(below) > 1 else probed)


def _through(first: tuple[int, int], second: tuple[int, int]) -> Line:
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return Line(first[1] - slope * first[0], slope)


def _next_size(
    probed: Mapping[int, int],
    batch_size: int,
    budget_bytes: int,
    sizes: Sequence[int],
    slack_bytes: int,
) -> int | None:
    """The size to probe next, or None where the answer is known."""
    low = max((s for s, count in probed.items() if count <= budget_bytes), default=0)
    high = min(
        (s for s, count in probed.items() if count > budget_bytes and s > low), default=math.inf
    )
    between = [s for s in sizes if low < s < high]
    if not between:
        return None
    affine = is_affine(probed, batch_size, slack_bytes)
    if not affine and len(probed) > 3:
        return between[len(between) // 2]
    points = sorted((s, count) for s, count in probed.items() if s < batch_size)
    bracket = [point for point in points if point[0] in (low, high)]
    line = _through(*bracket) if len(bracket) == 2 else _line(probed, batch_size)
    fitting = [s for s in between if line(s) <= budget_bytes]
    if fitting:
        return fitting[-1]
    trusted = affine and len(points) > 2 and low > 0
    if trusted and line(between[0]) > budget_bytes:
        return None
    return between[0]


def predictor(found: Search, batch_size: int) -> Callable[[int], float]:
    """Bytes of any size: probed where it was, else between the nearest probes, else from the line."""
    points = sorted((s, count) for s, count in found.probed.items() if s < batch_size)

    def predict(size: int) -> float:
        if size in found.probed:
            return found.probed[size]
        below = [p for p in points if p[0] < size]
        above = [p for p in points if p[0] > size]
        if below and above:
            return _through(below[-1], above[0])(size)
        if not below and len(points) > 1:
            return max(_through(*points[:2])(size), 0)
        return found.line(size)

    return predict
