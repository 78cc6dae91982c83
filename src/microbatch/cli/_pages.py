"""Plans and verifications as pages."""

from pathlib import Path

from microbatch._memory import format_bytes
from microbatch._planning import Plan
from microbatch._verification import UNITS_ALLOWED, Comparison, Verification
from microbatch.cli._errors import UsageError
from microbatch.report import Chart, Fact, Page, Table, environment, render
from microbatch.report._charts import bars_by_name, memory_by_size, save, seconds_by_size

MAX_BARS = 12


def plan_page(plan: Plan, asked: tuple[tuple[str, str], ...]) -> Page:
    """A plan as a page."""
    facts = [
        Fact("Budget", format_bytes(plan.budget_bytes), plan.budget_origin),
        Fact(
            "Microbatch size",
            "none fits" if plan.microbatch_size is None else str(plan.microbatch_size),
            f"of {plan.batch_size} rows",
        ),
        Fact("Needs", format_bytes(plan.predicted_bytes), f"{plan.probes} sizes probed"),
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


def plan_charts(plan: Plan) -> tuple[Chart, ...]:
    """Memory by size, and time by size where it was measured."""
    points = [(c.microbatch_size, c.bytes) for c in plan.candidates]
    charts = [
        Chart(
            "Memory by microbatch size",
            "Found without running the function. Filled points fit the budget.",
            memory_by_size(points, plan.budget_bytes, plan.microbatch_size, plan.batch_size),
        )
    ]
    timed = [(c.microbatch_size, c.seconds) for c in plan.candidates if c.seconds is not None]
    if timed:
        charts.append(
            Chart(
                "Seconds by microbatch size",
                "Measured; the green point is the fastest size that fits.",
                seconds_by_size(timed, plan.microbatch_size),
            )
        )
    return tuple(charts)


def plan_table(plan: Plan) -> Table:
    """A plan's candidates as a table."""
    timed = any(c.seconds is not None for c in plan.candidates)
    rows = []
    for c in plan.candidates:
        seconds = ("" if c.seconds is None else f"{c.seconds:.4g}",) if timed else ()
        count = str(c.num_microbatches) + (f" (last of {c.tail})" if c.tail else "")
        memory = format_bytes(c.bytes) if c.probed else f"≈ {format_bytes(c.bytes)}"
        rows.append((str(c.microbatch_size), count, memory, "yes" if c.fits else "no", *seconds))
    sizes = [c.microbatch_size for c in plan.candidates]
    return Table(
        "Sizes",
        ("rows", "microbatches", "memory", "fits", *(("seconds",) if timed else ())),
        tuple(rows),
        marked=sizes.index(plan.microbatch_size) if plan.microbatch_size in sizes else None,
    )


def verification_page(found: Verification, asked: tuple[tuple[str, str], ...]) -> Page:
    """A verification as a page."""
    worst = max((c.units for c in found.comparisons), default=0.0)
    compared = (
        "all" if found.rows == found.batch_size else f"of {found.batch_size:,}; all do not fit"
    )
    facts = (
        Fact("Verdict", found.verdict, f"{len(found.comparisons)} arrays compared"),
        Fact("Rows", f"{found.rows:,}", compared),
        Fact("Microbatch size", f"{found.microbatch_size:,}", "rows"),
        Fact("Largest difference", _number(worst), "units of rounding"),
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
    rows = tuple(
        (
            _leaf_name(c),
            c.dtype,
            "×".join(map(str, c.shape)) or "scalar",
            _number(c.difference),
            _number(c.units),
            _number(c.whole_error),
            _number(c.microbatched_error),
            c.verdict,
        )
        for c in found.comparisons
    )
    header = (
        "array",
        "dtype",
        "shape",
        "difference",
        "units",
        "error, whole",
        "error, pieces",
        "verdict",
    )
    return Table("Arrays", header, rows, words=frozenset({0, 1, 7}))


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


def _leaf_name(comparison: Comparison) -> str:
    return f"{comparison.role} {comparison.path}".rstrip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
