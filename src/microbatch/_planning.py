"""What a search for the size that fits found out, in words: the frozen, printable `Plan`."""

import base64
import html
import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from microbatch._memory import Budget, format_bytes
from microbatch._search import Search, candidate_sizes, predictor
from microbatch._tables import html_table, text_table

logger = logging.getLogger("microbatch")

# Below this share saved, microbatching is said not to help.
WORTHWHILE = 0.05
MAX_ROWS = 14


@dataclass(frozen=True)
class Candidate:
    """One size in a plan's table.

    Attributes:
      microbatch_size: rows in a microbatch.
      num_microbatches: a shorter last one included.
      tail: the rows of that one; 0 where all have equally many.
      bytes: what the size needs, its margin included.
      probed: whether that was looked up; else it is from the line through those that were.
      fits: whether that is within the budget.
      seconds: for the batch; None where it was not measured.
    """

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
      predicted_bytes: what the chosen size needs (the smallest size, where nothing fits): the compiler's figure in JAX,
        the peak of live tensors in PyTorch.
      margin_bytes: what is kept free beside that, for memory that neither knows: kernels' own and fragmentation.
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
    margin_bytes: int
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
        table = text_table(plan_cells(self), marked=chosen_row(self))
        return "\n".join([self.title, "", *table, "", self.explanation])

    @property
    def title(self) -> str:
        """What was asked, in one line."""
        return (
            f"plan({self.name}): {self.batch_size} rows, budget {format_bytes(self.budget_bytes)} "
            f"({self.budget_origin})"
        )

    def plot(self) -> Any:
        """A matplotlib figure: bytes by microbatch size with the budget as a line, and seconds where measured."""
        from microbatch.report._plan import plan_figure

        return plan_figure(self)

    def _repr_html_(self) -> str:
        title, explanation = html.escape(self.title), html.escape(self.explanation)
        table = html_table(plan_cells(self), chosen_row(self))
        return f"<p>{title}</p>{table}{_picture(self)}<p>{explanation}</p>"


def plan_cells(plan: Plan) -> list[list[str]]:
    """The table of sizes in words, its head first."""
    timed = any(c.seconds is not None for c in plan.candidates)
    memory = "memory and margin" if plan.margin_bytes else "memory"
    head = ["rows", "microbatches", memory, "fits", *(["seconds"] if timed else [])]
    return [head, *(_cells(c, timed) for c in plan.candidates)]


def chosen_row(plan: Plan) -> int | None:
    """Which of the candidates was chosen."""
    sizes = [c.microbatch_size for c in plan.candidates]
    return sizes.index(plan.microbatch_size) if plan.microbatch_size in sizes else None


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
    margin_of: Callable[[int], int] = lambda size: 0,
) -> Plan:
    """Puts a search's findings (and measured seconds) in the words of a `Plan`.

    `margin_of` says which part of a size's bytes is a margin.
    """
    seconds = seconds or {}
    predict = predictor(found, batch_size)
    chosen = found.microbatch_size
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
    answer = smallest if chosen is None else chosen
    margin = margin_of(answer)
    plan = Plan(
        name=name,
        framework=framework,
        batch_size=batch_size,
        microbatch_size=chosen,
        num_microbatches=0 if chosen is None else -(-batch_size // chosen),
        predicted_bytes=round(predict(answer)) - margin,
        margin_bytes=margin,
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
    said = (
        "Another process can hold no size, so none fits."
        if size is None
        else f"Another process can hold only {agreed}, so all use {size}."
    )
    known = {c.microbatch_size: c.bytes for c in plan.candidates}
    answer = min(known) if size is None else size
    needed = known.get(answer, round(plan.fixed_bytes + plan.bytes_per_row * answer))
    return replace(
        plan,
        microbatch_size=size,
        num_microbatches=0 if size is None else -(-plan.batch_size // size),
        predicted_bytes=max(needed - plan.margin_bytes, 0),
        explanation=f"{plan.explanation} {said}",
    )


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
    needed = format_bytes(plan.predicted_bytes)
    if plan.margin_bytes:
        needed += f" and a margin of {format_bytes(plan.margin_bytes)} for what kernels take"
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
        parts.append(f"The whole batch of {rows(plan.batch_size)} fits: {needed} of {budget}.")
    else:
        verb = "needs" if plan.microbatch_size == 1 else "need"
        parts.append(
            f"{rows(plan.microbatch_size)} a microbatch ({plan.num_microbatches} microbatches) {verb} "
            f"{needed} of {budget}."
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


def _cells(c: Candidate, timed: bool) -> list[str]:
    return [
        str(c.microbatch_size),
        str(c.num_microbatches) + (f" (last {c.tail})" if c.tail else ""),
        format_bytes(c.bytes) if c.probed else f"~{format_bytes(c.bytes)}",
        "yes" if c.fits else "no",
        *([f"{c.seconds:.4g}" if c.seconds is not None else ""] if timed else []),
    ]


def _picture(plan: Plan) -> str:
    """The figure as an HTML element that holds all of it; nothing without matplotlib."""
    try:
        figure = plan.plot()
    except ImportError:
        return ""
    file = io.BytesIO()
    # Twice as many points as it is wide on the page, for screens that have them.
    figure.savefig(file, format="png", dpi=144)
    width = round(72 * figure.get_figwidth())
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img width="{width}" style="max-width: 100%" alt="memory by microbatch size" src="data:image/png;base64,{data}">'
