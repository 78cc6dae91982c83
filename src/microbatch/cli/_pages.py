"""Plans and verifications as pages."""

from pathlib import Path

from microbatch._memory import format_bytes
from microbatch._planning import Plan
from microbatch._verification import UNITS_ALLOWED, Verification, verification_cells
from microbatch.cli._errors import UsageError
from microbatch.report import Chart, Fact, Page, Table, environment, render
from microbatch.report._charts import bars_by_name, save
from microbatch.report._plan import plan_charts, plan_table

MAX_BARS = 12


def plan_page(plan: Plan, asked: tuple[tuple[str, str], ...]) -> Page:
    """A plan as a page."""
    all_probed = all(c.probed for c in plan.candidates)
    facts = [
        Fact("Budget", format_bytes(plan.budget_bytes), plan.budget_origin),
        Fact(
            "Microbatch size",
            "none fits" if plan.microbatch_size is None else str(plan.microbatch_size),
            f"of {plan.batch_size} rows",
        ),
        Fact(
            "Needs",
            format_bytes(plan.predicted_bytes),
            f"{plan.probes} sizes probed"
            + ("" if all_probed else "; ~ is on the line through them"),
        ),
        Fact("Margin", format_bytes(plan.margin_bytes), "kept free for what kernels take"),
        Fact(
            "One more row",
            format_bytes(plan.bytes_per_row),
            f"on top of {format_bytes(plan.fixed_bytes)}",
        ),
    ]
    return Page(
        command=f"microbatch plan, {plan.name}",
        answer=plan.explanation,
        good=plan.fits,
        asked=asked,
        facts=tuple(facts),
        charts=plan_charts(plan),
        tables=(plan_table(plan),),
        environment=environment(),
    )


def verification_page(found: Verification, asked: tuple[tuple[str, str], ...]) -> Page:
    """A verification as a page."""
    worst = max((c.units for c in found.comparisons), default=0.0)
    compared = "all" if found.rows == found.batch_size else f"of {found.batch_size:,}; not all fit"
    facts = (
        Fact("Verdict", found.verdict, f"{len(found.comparisons)} arrays compared"),
        Fact("Rows", f"{found.rows:,}", compared),
        Fact("Microbatch size", f"{found.microbatch_size:,}", "rows"),
        Fact("Largest difference", f"{worst:.3g}", "units of rounding"),
    )
    return Page(
        command=f"microbatch verify, {found.name}",
        answer=found.explanation,
        good=found.verdict != "different",
        asked=asked,
        facts=facts,
        charts=verification_charts(found),
        tables=(verification_table(found),),
        notes=tuple(f"{cause.sentence} {cause.remedy}".strip() for cause in found.causes),
        environment=environment(),
    )


def verification_charts(found: Verification) -> tuple[Chart, ...]:
    """The difference of each array, the largest first."""
    ranked = sorted(found.comparisons, key=lambda c: c.units, reverse=True)
    rows = [(c.path or c.role, c.units, c.verdict == "different") for c in ranked[:MAX_BARS]]
    if not rows:
        return ()
    hidden = len(ranked) - len(rows)
    shown = f" The {MAX_BARS} largest; {hidden} more are in the table." if hidden else ""
    return (
        Chart(
            "Difference from the whole batch, array by array",
            "In units of rounding of each array's largest value. Up to the dashed line another order of summation "
            f"explains it; beyond it, the error against float64 decides. Arrays that differ are red.{shown}",
            bars_by_name(rows, UNITS_ALLOWED, "units of rounding"),
        ),
    )


def verification_table(found: Verification) -> Table:
    """The comparisons as a table."""
    head, *rows = verification_cells(found)
    return Table("Arrays", tuple(head), tuple(map(tuple, rows)), words=frozenset({0, 1, 7}))


def write_page(page: Page, path: str) -> str:
    """Writes the page and returns where it is."""
    try:
        Path(path).write_text(render(page), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path!r} cannot be written: {error.strerror}.\nChoose another file."
        ) from None
    return str(Path(path).resolve())


def write_plot(chart: Chart, path: str) -> str:
    """Writes one figure; the file's ending decides the format."""
    try:
        save(chart.draw, path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path!r} cannot be written: {error}.\nUse a .png, .svg or .pdf file."
        ) from None
    return str(Path(path).resolve())
