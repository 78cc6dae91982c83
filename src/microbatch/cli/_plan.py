"""``microbatch plan`` and ``microbatch verify``."""

import importlib
from collections.abc import Callable
from typing import Any

from microbatch.cli._digits import load_digits
from microbatch.cli._json import to_json
from microbatch.cli._pages import (
    plan_charts,
    plan_page,
    plan_table,
    write_page,
    write_plot,
)
from microbatch.cli._problem import Problem
from microbatch.cli._target import framework_of, installed_framework, load_problem
from microbatch.report import Chart, Page, Screen, Table

BUILT_IN = "the built-in digits"


def run_plan(
    target: str | None,
    framework: str | None,
    memory: int | str | None,
    time: bool,
    as_json: bool,
    html: str | None,
    plot: str | None,
) -> int:
    """Plans the target's problem and shows the plan; 0 where a size fits, else 1."""
    problem = _problem(target, framework)
    keywords = {"memory_budget": memory, "time": time}
    plan = _transformed(problem, "plan", keywords)(*problem.args)
    page = plan_page(plan, _asked(target, problem, plan.batch_size, memory))
    _show(plan, page, plan_table(plan), plan_charts(plan), as_json, html, plot)
    return plan.exit_code


def run_verify(
    target: str | None,
    framework: str | None,
    microbatch_size: int | None,
    memory: int | str | None,
    as_json: bool,
    html: str | None,
    plot: str | None,
) -> int:
    """Verifies the target's problem and shows the verdict; 0 where the numbers are the same, else 1."""
    raise NotImplementedError


def _problem(target: str | None, framework: str | None) -> Problem:
    if target is not None:
        return load_problem(target)
    name = framework or installed_framework()
    module = importlib.import_module(f"microbatch.cli._digits_{name}")
    return module.problem(load_digits())


def _transformed(problem: Problem, name: str, keywords: dict[str, Any]) -> Callable[..., Any]:
    """``plan`` or ``verify`` of the problem's front, with the problem's own options."""
    front = importlib.import_module(f"microbatch.{framework_of(problem)}")
    given = {**problem.options, **{k: v for k, v in keywords.items() if v is not None}}
    return getattr(front, name)(problem.fun, problem.argnums, problem.accumulator, **given)


def _asked(
    target: str | None, problem: Problem, rows: int, memory: int | str | None
) -> tuple[tuple[str, str], ...]:
    options = ", ".join(f"{key}={value!r}" for key, value in problem.options.items())
    pairs = [
        ("Target", target or BUILT_IN),
        ("Framework", framework_of(problem)),
        ("Rows", f"{rows:,}"),
        ("Batch arguments", str(problem.argnums)),
        ("Accumulator", str(problem.accumulator)),
        ("Options", options),
        ("Memory", str(memory or "90% of the device")),
    ]
    return tuple((name, value) for name, value in pairs if value)


def _show(
    result: Any,
    page: Page,
    table: Table,
    charts: tuple[Chart, ...],
    as_json: bool,
    html: str | None,
    plot: str | None,
) -> None:
    screen = Screen(quiet=as_json)
    if as_json:
        print(to_json(result.to_dict()))
    else:
        screen.say(page.command)
        screen.say()
        screen.table(table)
        screen.say()
        screen.verdict(page.answer, page.good)
    if html:
        screen.say(f"Page: {write_page(page, html)}")
    if plot:
        screen.say(f"Figure: {write_plot(charts[0], plot)}")
