"""A plan as a table, as charts and as one figure."""

from typing import Any

from microbatch._planning import Plan, chosen_row, plan_cells
from microbatch.report._charts import LIGHT, figure, memory_by_size, seconds_by_size
from microbatch.report._content import Chart, Table


def plan_table(plan: Plan) -> Table:
    """A plan's sizes as a table."""
    head, *rows = plan_cells(plan)
    return Table("Sizes", tuple(head), tuple(map(tuple, rows)), marked=chosen_row(plan))


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


def plan_figure(plan: Plan) -> Any:
    """The charts side by side, as a matplotlib figure."""
    return figure([chart.draw for chart in plan_charts(plan)], LIGHT)
