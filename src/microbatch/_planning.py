"""Which microbatch size fits: a search over `probe(size) -> bytes`, and the frozen, printable `Plan`.

Memory is nearly always affine in the microbatch size, so two probes give a line, the line gives the answer, and the
answer is probed too. Where three probes are not on a line, the bracket around the budget is halved by further probes.
"""

import html
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from microbatch._memory import Budget, format_bytes
from microbatch._splitting import divisors

logger = logging.getLogger("microbatch")

# Two figures that differ by less are taken as equal: the promise on predictions.
TOLERANCE = 0.02
# Below this share saved, microbatching is said not to help.
WORTHWHILE = 0.05
MAX_ROWS = 14


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


@dataclass(frozen=True)
class Candidate:
    """One size in a plan's table; `seconds` is None where it was not measured."""

    microbatch_size: int
    num_microbatches: int
    tail: int
    bytes: int
    probed: bool
    fits: bool
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """The answer of `plan`: which microbatch size fits in a budget, and what the others would need.

    Attributes:
      name: of the function that was planned.
      framework: ``"jax"`` or ``"torch"``.
      batch_size: rows in the batch.
      microbatch_size: rows in a microbatch: the largest that fits, or the fastest that fits where time was measured. None
        where nothing fits.
      num_microbatches: microbatches in the batch, a shorter last one included; 0 where nothing fits.
      predicted_bytes: what the chosen size needs (the smallest size, where nothing fits).
      budget_bytes: what may be used.
      budget_origin: where the budget came from.
      fixed_bytes: what does not depend on the size (arguments, outputs, accumulator), from the line through the probes.
      bytes_per_row: what one more row in a microbatch costs.
      affine: whether the probes lie on that line within 2%.
      probes: how many sizes were probed (in JAX: compilations).
      helps: whether microbatching saves memory that matters.
      explanation: the answer in one sentence, with its numbers.
      with_remainder: a size that does not divide the batch and is at least twice the chosen one, for
        ``remainder="allow"``; None where there is none.
      candidates: the table, by size.
    """

    name: str
    framework: str
    batch_size: int
    microbatch_size: int | None
    num_microbatches: int
    predicted_bytes: int
    budget_bytes: int
    budget_origin: str
    fixed_bytes: int
    bytes_per_row: float
    affine: bool
    probes: int
    helps: bool
    explanation: str
    with_remainder: int | None
    candidates: tuple[Candidate, ...]

    @property
    def fits(self) -> bool:
        """Whether any size fits."""
        return self.microbatch_size is not None

    @property
    def exit_code(self) -> int:
        """0 where a size fits, 1 where none does."""
        return 0 if self.fits else 1

    def to_dict(self) -> dict[str, Any]:
        """Everything in the plan as plain numbers, strings, lists and dictionaries, as JSON has them."""
        return asdict(self) | {
            "fits": self.fits,
            "candidates": [asdict(c) for c in self.candidates],
        }

    def __str__(self) -> str:
        return "\n".join([self.title, "", *_text_table(_cells(self)), "", self.explanation])

    @property
    def title(self) -> str:
        """What was asked, in one line."""
        return (
            f"plan({self.name}): {self.batch_size} rows, budget {format_bytes(self.budget_bytes)} "
            f"({self.budget_origin})"
        )

    def _repr_html_(self) -> str:
        head, *body = _cells(self)
        row = lambda tag, cells: (
            "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"
        )
        table = row("th", head) + "".join(row("td", cells) for cells in body)
        return f"<p>{html.escape(self.title)}</p><table>{table}</table><p>{html.escape(self.explanation)}</p>"

    def plot(self) -> Any:
        """A matplotlib figure: bytes by microbatch size with the budget as a line, and seconds where measured."""
        from matplotlib.figure import Figure

        timed = [c for c in self.candidates if c.seconds is not None]
        figure = Figure(figsize=(9 if timed else 5.5, 3.6), layout="constrained")
        axes = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
        _plot_bytes(axes[0], self)
        if timed:
            axes[1].plot(
                [c.microbatch_size for c in timed],
                [c.seconds for c in timed],
                "o-",
                color="#b45309",
            )
            axes[1].set(
                xscale="log", xlabel="rows a microbatch", ylabel="seconds a batch", ylim=(0, None)
            )
        return figure


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
) -> Search:
    """Finds the largest of `sizes` whose probe is within the budget.

    Four probes at most where bytes are affine in the size; where they are not, as many more as halving takes.

    Args:
      probe: bytes that a microbatch size needs.
      batch_size: rows in the batch. That size is no loop and has no accumulator, so it is never part of the line.
      budget_bytes: the most that fits.
      sizes: ascending candidates.
      whole_saves: bytes by which the whole batch may undercut the line.
      slack_bytes: what small buffers and padding may add anywhere, so that it does not count as a bend in the line.

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
    fitting = [s for s, count in probed.items() if count <= budget_bytes]
    affine = is_affine(probed, batch_size, slack_bytes)
    return Search(
        max(fitting, default=None), dict(sorted(probed.items())), _line(probed, batch_size), affine
    )


def is_affine(probed: Mapping[int, int], batch_size: int, slack_bytes: int = 0) -> bool:
    """Whether each probed size below the whole batch is within 2% of the line through the two outermost."""
    points = {s: count for s, count in probed.items() if s < batch_size}
    if len(points) < 3:
        return True
    line = _line({s: points[s] for s in (min(points), max(points))}, batch_size)
    return all(
        abs(line(s) - count) <= max(TOLERANCE * count, slack_bytes) for s, count in points.items()
    )


def make_plan(
    found: Search,
    sizes: Sequence[int],
    budget: Budget,
    *,
    name: str,
    framework: str,
    batch_size: int,
    remainder: bool,
    seconds: Mapping[int, float] | None = None,
) -> Plan:
    """Puts a search's findings (and measured seconds) in the words of a `Plan`."""
    seconds = seconds or {}
    predict = _predictor(found, batch_size)
    chosen = _prefer_divisor(found, sizes, batch_size, budget.bytes, predict)
    if chosen is not None and seconds:
        chosen = min(seconds, key=lambda size: (seconds[size], -size))
    shown = _thin(sizes, {*found.probed, *seconds, *([chosen] if chosen else [])})
    table = tuple(
        _candidate(s, batch_size, predict, found, budget.bytes, seconds.get(s)) for s in shown
    )
    offer = None if remainder else _offer(chosen, batch_size, budget.bytes, predict)
    smallest, whole = min(sizes), max(sizes)
    saved = 1 - predict(smallest) / max(predict(whole), 1)
    helps = len(sizes) > 1 and saved >= WORTHWHILE and (chosen is not None)
    plan = Plan(
        name=name,
        framework=framework,
        batch_size=batch_size,
        microbatch_size=chosen,
        num_microbatches=0 if chosen is None else -(-batch_size // chosen),
        predicted_bytes=round(predict(smallest if chosen is None else chosen)),
        budget_bytes=budget.bytes,
        budget_origin=budget.origin,
        fixed_bytes=max(round(found.line.fixed_bytes), 0),
        bytes_per_row=found.line.bytes_per_row,
        affine=found.affine,
        probes=len(found.probed),
        helps=helps,
        explanation="",
        with_remainder=offer,
        candidates=table,
    )
    return replace(plan, explanation=_explain(plan, predict, sizes))


def lower_to(plan: Plan, agreed: int, sizes: Iterable[int]) -> Plan:
    """The same plan with the largest size that is at most `agreed` (what all processes can hold)."""
    if plan.microbatch_size is None or agreed >= plan.microbatch_size:
        return plan
    size = max((s for s in sizes if s <= agreed), default=None)
    said = f"{plan.explanation} Another process can hold only {agreed}, so all use {size}."
    count = 0 if size is None else -(-plan.batch_size // size)
    return replace(plan, microbatch_size=size, num_microbatches=count, explanation=said)


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


def _predictor(found: Search, batch_size: int) -> Callable[[int], float]:
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


def _prefer_divisor(
    found: Search,
    sizes: Sequence[int],
    batch_size: int,
    budget_bytes: int,
    predict: Callable[[int], float],
) -> int | None:
    """The largest probed size that fits, or a divisor that is more than half of it."""
    best = found.microbatch_size
    if best is None or batch_size % best == 0:
        return best
    divisors = [s for s in sizes if batch_size % s == 0 and best < 2 * s and s < best]
    return max((s for s in divisors if predict(s) <= budget_bytes), default=best)


def _offer(
    chosen: int | None, batch_size: int, budget_bytes: int, predict: Callable[[int], float]
) -> int | None:
    """A size with a remainder that is at least twice the chosen divisor."""
    if chosen is None or chosen == batch_size:
        return None
    fits = [s for s in candidate_sizes(batch_size, remainder=True) if predict(s) <= budget_bytes]
    best = max((s for s in fits if s < batch_size), default=chosen)
    return best if best >= 2 * chosen else None


def _candidate(
    size: int,
    batch_size: int,
    predict: Callable[[int], float],
    found: Search,
    budget_bytes: int,
    seconds: float | None,
) -> Candidate:
    count = round(predict(size))
    return Candidate(
        microbatch_size=size,
        num_microbatches=-(-batch_size // size),
        tail=batch_size % size,
        bytes=count,
        probed=size in found.probed,
        fits=count <= budget_bytes,
        seconds=seconds,
    )


def _thin(sizes: Sequence[int], keep: set[int]) -> list[int]:
    """At most MAX_ROWS sizes, evenly spread, with those that matter, the smallest and the largest."""
    keep = keep | {min(sizes), max(sizes)}
    others = [s for s in sizes if s not in keep]
    room = max(MAX_ROWS - len(keep), 0)
    if len(others) > room:
        others = [others[i * len(others) // room] for i in range(room)]
    return sorted({*keep, *others})


def _explain(plan: Plan, predict: Callable[[int], float], sizes: Sequence[int]) -> str:
    smallest, whole = min(sizes), max(sizes)
    budget = format_bytes(plan.budget_bytes)
    rows = lambda size: f"{size} row" if size == 1 else f"{size} rows"
    parts = []
    if plan.microbatch_size is None:
        parts.append(
            f"Nothing fits: {rows(smallest)} a microbatch needs {format_bytes(predict(smallest))}, "
            f"the budget is {budget}"
        )
        if plan.fixed_bytes > plan.budget_bytes:
            parts[-1] += (
                f"; microbatching cannot help, because what does not depend on the size "
                f"(arguments, outputs, accumulator) alone takes {format_bytes(plan.fixed_bytes)}"
            )
        parts[-1] += "."
    elif plan.microbatch_size == plan.batch_size:
        parts.append(
            f"The whole batch of {rows(plan.batch_size)} fits: {format_bytes(plan.predicted_bytes)} of {budget}."
        )
    else:
        parts.append(
            f"{rows(plan.microbatch_size)} a microbatch ({plan.num_microbatches} microbatches) need "
            f"{format_bytes(plan.predicted_bytes)} of {budget}."
        )
    if not plan.helps and plan.microbatch_size is not None and len(sizes) > 1:
        parts.append(
            f"Microbatching will not help: {rows(smallest)} a microbatch needs {format_bytes(predict(smallest))}, "
            f"the whole batch {format_bytes(predict(whole))}, because {format_bytes(plan.fixed_bytes)} do not depend on "
            f"the size (arguments, outputs and an accumulator the size of the outputs)."
        )
    if plan.with_remainder is not None:
        parts.append(f'With remainder="allow", {rows(plan.with_remainder)} a microbatch would fit.')
    if not plan.affine:
        parts.append("Bytes are not affine in the size here, so sizes were probed one by one.")
    return " ".join(parts)


def _cells(plan: Plan) -> list[list[str]]:
    timed = any(c.seconds is not None for c in plan.candidates)
    head = ["rows", "microbatches", "memory", "fits", *(["seconds"] if timed else []), ""]
    body = []
    for c in plan.candidates:
        count = f"{c.num_microbatches}" + (f" (last {c.tail})" if c.tail else "")
        memory = format_bytes(c.bytes) if c.probed else f"~{format_bytes(c.bytes)}"
        seconds = ["" if c.seconds is None else f"{c.seconds:.4g}"] if timed else []
        mark = "<-" if c.microbatch_size == plan.microbatch_size else ""
        body.append(
            [f"{c.microbatch_size}", count, memory, "yes" if c.fits else "no", *seconds, mark]
        )
    return [head, *body]


def _text_table(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _plot_bytes(axes: Any, plan: Plan) -> None:
    mib = 2**20
    sizes = [c.microbatch_size for c in plan.candidates]
    axes.plot(
        sizes, [c.bytes / mib for c in plan.candidates], "o-", color="#2563eb", label="needed"
    )
    axes.axhline(plan.budget_bytes / mib, color="#dc2626", linestyle="--", label="budget")
    if plan.microbatch_size is not None:
        axes.plot(
            [plan.microbatch_size],
            [plan.predicted_bytes / mib],
            "o",
            color="#16a34a",
            markersize=10,
        )
    axes.set(xscale="log", yscale="log", xlabel="rows a microbatch", ylabel="MiB")
    axes.legend()
