"""``microbatch plan`` and ``microbatch verify``."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from microbatch._splitting import divisors
from microbatch.cli._digits import load_digits
from microbatch.cli._errors import UsageError
from microbatch.cli._json import to_json
from microbatch.cli._pages import (
    plan_page,
    verification_page,
    write_page,
    write_plot,
)
from microbatch.cli._problem import Problem
from microbatch.cli._target import framework_of, installed_framework, load_problem
from microbatch.report import Page, Screen

BUILT_IN = "the built-in digits"


@dataclass(frozen=True)
class Output:
    """Where a result goes: JSON on standard output instead of a table, a page, a figure."""

    as_json: bool = False
    html: str | None = None
    plot: str | None = None


def run_plan(
    target: str | None,
    framework: str | None,
    memory: int | str | None,
    time: bool,
    output: Output,
) -> int:
    """Plans the target's problem and shows the plan; 0 where a size fits, else 1."""
    screen = Screen(quiet=output.as_json)
    with screen.busy("Planning and measuring" if time else "Planning"):
        problem = _problem(target, framework)
        keywords = {"memory_budget": memory, "time": time}
        plan = _transformed(problem, "plan", keywords)(*problem.args)
    asked = _asked(
        target,
        problem,
        [("Rows", f"{plan.batch_size:,}"), ("Memory", str(memory or "90% of the device"))],
    )
    _show(plan, plan_page(plan, asked), output, screen)
    return plan.exit_code


def run_verify(
    target: str | None,
    framework: str | None,
    microbatch_size: int | None,
    memory: int | str | None,
    output: Output,
) -> int:
    """Verifies the target's problem and shows the verdict; 0 where the numbers are the same, else 1."""
    screen = Screen(quiet=output.as_json)
    with screen.busy("Comparing"):
        problem = _problem(target, framework)
        size = microbatch_size or _a_quarter(problem)
        found = _transformed(problem, "verify", {"microbatch_size": size, "memory_budget": memory})(
            *problem.args
        )
    asked = _asked(
        target, problem, [("Rows", f"{found.batch_size:,}"), ("Microbatch size", str(size))]
    )
    _show(found, verification_page(found, asked), output, screen)
    return found.exit_code


def _a_quarter(problem: Problem) -> int:
    """A quarter of the rows, or the largest divisor up to that where a remainder is not allowed."""
    numbers = (problem.argnums,) if isinstance(problem.argnums, int) else tuple(problem.argnums)
    array = _first_array([problem.args[number] for number in numbers])
    axes = problem.options.get("in_axes", problem.options.get("in_dims", 0))
    axis = axes if isinstance(axes, int) else next((a for a in axes if isinstance(a, int)), 0)
    if array is None or not -array.ndim <= axis < array.ndim:
        raise UsageError("the batch has no rows to be seen.\nGive the size: --microbatch-size 8.")
    rows = array.shape[axis]
    if problem.options.get("remainder") == "allow":
        return max(rows // 4, 1)
    return max((size for size in divisors(rows) if 4 * size <= rows), default=1)


def _first_array(value: Any) -> Any:
    """The first array with an axis in a tree, or None."""
    if getattr(value, "ndim", 0):
        return value
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return None
    return next((found for item in items if (found := _first_array(item)) is not None), None)


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
    target: str | None, problem: Problem, more: list[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    options = ", ".join(f"{key}={value!r}" for key, value in problem.options.items())
    pairs = [
        ("Target", target or BUILT_IN),
        ("Framework", framework_of(problem)),
        ("Batch arguments", str(problem.argnums)),
        ("Accumulator", str(problem.accumulator)),
        ("Options", options),
        *more,
    ]
    return tuple((name, value) for name, value in pairs if value)


def _show(result: Any, page: Page, output: Output, screen: Screen) -> None:
    if output.as_json:
        print(to_json(result.to_dict()))
    else:
        screen.say(page.command)
        for table in page.tables:
            screen.say()
            screen.table(table)
        screen.say()
        screen.facts(page.facts)
        screen.say()
        screen.verdict(page.answer, page.good)
        for note in page.notes:
            screen.say(note)
    if output.html:
        screen.say(f"Page: {write_page(page, output.html)}")
    if output.plot:
        screen.say(f"Figure: {write_plot(page.charts[0], output.plot)}")
