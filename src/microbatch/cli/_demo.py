"""``microbatch demo``: train on real images, each step on all rows as one batch, within a memory budget."""

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from microbatch._memory import format_bytes
from microbatch._planning import Plan
from microbatch.cli._digits import TEST_ROWS, TRAINING_ROWS, Digits, load_digits
from microbatch.cli._errors import INTERRUPTED
from microbatch.cli._json import to_json
from microbatch.cli._pages import write_page
from microbatch.cli._target import installed_framework
from microbatch.report import Chart, Fact, Page, Screen, environment
from microbatch.report._charts import accuracy_by_step, loss_by_step
from microbatch.report._plan import plan_charts, plan_table

GOAL = 0.97
TIMED_STEPS = 5


class Trainer(Protocol):
    """What the demo asks of a framework; a `microbatch_size` of None is the whole batch in the ordinary way."""

    framework: str

    def plan(self, memory: int | str | None) -> Plan: ...
    def whole_bytes(self) -> int: ...
    def start(
        self, microbatch_size: int | None
    ) -> tuple[Callable[[], float], Callable[[], float]]: ...
    def gradient(self, microbatch_size: int | None, *, wide: bool = False) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class Demo:
    """Everything that the demo found out, in rows, bytes and seconds; None where it did not come to that."""

    framework: str
    seed: int
    steps: int
    plan: Plan
    whole_bytes: int
    whole_seconds: float | None = None
    microbatched_seconds: float | None = None
    whole_error: float | None = None
    microbatched_error: float | None = None
    losses: tuple[float, ...] = ()
    accuracies: tuple[tuple[int, float], ...] = ()
    training_seconds: float = 0.0
    interrupted: bool = False

    @property
    def test_accuracy(self) -> float | None:
        """The last one measured."""
        return self.accuracies[-1][1] if self.accuracies else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **asdict(replace(self, plan=None)),  # type: ignore[arg-type]
            "plan": self.plan.to_dict(),
            "test_accuracy": self.test_accuracy,
        }


def run_demo(
    framework: str | None,
    memory: int | str | None,
    seed: int,
    steps: int,
    out: str,
    as_json: bool,
) -> int:
    """Runs the demo and writes its page to `out`; returns the exit code."""
    screen = Screen(quiet=as_json)
    digits = load_digits()
    demo = None
    try:
        with screen.busy("Planning"):
            trainer = _trainer(framework or installed_framework(), digits, seed, steps)
            demo = _planned(trainer, memory, seed, steps)
        screen.say(f"{TRAINING_ROWS:,} handwritten digits, one batch a step, in {demo.framework}")
        if not demo.plan.fits:
            screen.verdict(demo.plan.explanation, good=False)
            if as_json:
                print(to_json(demo.to_dict()))
            return 1
        screen.facts(_facts(demo))
        with screen.busy("Comparing with the whole batch"):
            demo = _compared(demo, trainer)
        screen.facts(_facts(demo)[2:])
        demo = _trained(demo, trainer, screen)
    except KeyboardInterrupt:
        if demo is None:
            screen.say("Interrupted before anything was found out.")
            return INTERRUPTED
        demo = replace(demo, interrupted=True)
    page = demo_page(demo)
    screen.verdict(page.answer, page.good)
    screen.say(f"Report: {write_page(page, out)}")
    if as_json:
        print(to_json(demo.to_dict()))
    return INTERRUPTED if demo.interrupted else 0


def demo_page(demo: Demo) -> Page:
    """The demo as a page."""
    plan = demo.plan
    needs = "What one step needs: temporaries, arguments and outputs. No step was run to find out."
    if plan.margin_bytes:
        needs += " Sizes that are microbatched have a margin for what kernels take."
    charts = [replace(plan_charts(plan)[0], caption=needs)]
    if len(demo.losses) > 1:
        charts.append(
            Chart(
                "Training loss",
                f"Every step sees all {TRAINING_ROWS:,} rows as one batch.",
                loss_by_step(demo.losses),
            )
        )
    if demo.accuracies:
        charts.append(
            Chart(
                "Test accuracy",
                f"On {TEST_ROWS} images that were held out, also when the learning rate was chosen.",
                accuracy_by_step(demo.accuracies, GOAL),
            )
        )
    return Page(
        command=f"microbatch demo, {demo.framework}",
        answer=_answer(demo),
        good=None if demo.interrupted else (demo.test_accuracy or 0) >= GOAL,
        asked=(
            ("Data", f"handwritten digits of scikit-learn, {TRAINING_ROWS:,} rows to train on"),
            ("Network", "two convolutions (32 and 64 channels), two dense layers"),
            ("Memory", f"{format_bytes(plan.budget_bytes)} ({plan.budget_origin})"),
            ("Steps", str(demo.steps)),
            ("Seed", str(demo.seed)),
        ),
        facts=_facts(demo),
        charts=tuple(charts),
        tables=(plan_table(plan),),
        environment=environment(),
    )


def _trainer(framework: str, digits: Digits, seed: int, steps: int) -> Trainer:
    module = importlib.import_module(f"microbatch.cli._digits_{framework}")
    return module.Trainer(digits, seed, steps)


def _planned(trainer: Trainer, memory: int | str | None, seed: int, steps: int) -> Demo:
    whole_bytes = trainer.whole_bytes()
    plan = _with_whole(trainer.plan(memory), whole_bytes)
    return Demo(trainer.framework, seed, steps, plan, whole_bytes)


def _with_whole(plan: Plan, whole_bytes: int) -> Plan:
    """The plan with what the whole batch really needs: it is no loop, so no line through loops foretells it."""
    known = [
        replace(c, bytes=whole_bytes, probed=True, fits=whole_bytes <= plan.budget_bytes)
        if c.microbatch_size == plan.batch_size
        else c
        for c in plan.candidates
    ]
    return replace(plan, candidates=tuple(known))


def _compared(demo: Demo, trainer: Trainer) -> Demo:
    """Adds seconds a step and the distance to the float64 gradient, of the whole batch and of microbatches."""
    size = demo.plan.microbatch_size
    steps = [trainer.start(None)[0], trainer.start(size)[0]]
    seconds: list[list[float]] = [[], []]
    for step in steps:
        step()
    # In turn, so that what else the machine does falls on both alike.
    for _ in range(TIMED_STEPS):
        for step, measured in zip(steps, seconds, strict=True):
            began = time.perf_counter()
            step()
            measured.append(time.perf_counter() - began)
    exact = trainer.gradient(None, wide=True)
    whole, pieces = trainer.gradient(None), trainer.gradient(size)
    return replace(
        demo,
        whole_seconds=statistics.median(seconds[0]),
        microbatched_seconds=statistics.median(seconds[1]),
        whole_error=relative_error(whole, exact),
        microbatched_error=relative_error(pieces, exact),
    )


def _trained(demo: Demo, trainer: Trainer, screen: Screen) -> Demo:
    """Trains; an interruption gives what was reached so far."""
    step, accuracy = trainer.start(demo.plan.microbatch_size)
    losses: list[float] = []
    accuracies: list[tuple[int, float]] = []
    every = max(demo.steps // 12, 1)
    began = time.perf_counter()
    interrupted = False
    try:
        with screen.progress("Training", demo.steps) as report:
            for i in range(1, demo.steps + 1):
                losses.append(step())
                if i % every == 0 or i == demo.steps:
                    accuracies.append((i, accuracy()))
                reached = f"test accuracy {accuracies[-1][1]:.1%}" if accuracies else ""
                report(i, f"loss {losses[-1]:.4f}  {reached}".rstrip())
    except KeyboardInterrupt:
        interrupted = True
        accuracies.append((len(losses), accuracy()))
    return replace(
        demo,
        losses=tuple(losses),
        accuracies=tuple(accuracies),
        training_seconds=time.perf_counter() - began,
        interrupted=interrupted,
    )


def relative_error(leaves: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """The largest difference of any entry, relative to the largest entry of its leaf.

    >>> relative_error([np.array([1.0, 4.0])], [np.array([2.0, 4.0])])
    0.25
    """
    return max(
        float(np.abs(leaf - right).max() / np.abs(right).max())
        for leaf, right in zip(leaves, exact, strict=True)
    )


def _facts(demo: Demo) -> tuple[Fact, ...]:
    plan = demo.plan
    margin = f"; margin {format_bytes(plan.margin_bytes)}" if plan.margin_bytes else ""
    facts = [
        Fact("Whole batch", format_bytes(demo.whole_bytes), f"{plan.batch_size:,} rows at once"),
        Fact(
            "Microbatched",
            format_bytes(plan.predicted_bytes),
            f"{plan.microbatch_size} rows a microbatch, {plan.num_microbatches} microbatches{margin}",
        ),
    ]
    if demo.microbatched_seconds is not None and demo.whole_seconds is not None:
        facts.append(
            Fact(
                "Seconds a step",
                f"{demo.microbatched_seconds:.3f}",
                f"whole batch: {demo.whole_seconds:.3f}",
            )
        )
    if demo.microbatched_error is not None:
        facts.append(
            Fact(
                "Gradient error",
                f"{demo.microbatched_error:.1e}",
                f"largest, relative to float64; whole batch: {demo.whole_error:.1e}",
            )
        )
    if demo.test_accuracy is not None:
        right = round(demo.test_accuracy * TEST_ROWS)
        facts.append(
            Fact("Test accuracy", f"{demo.test_accuracy:.1%}", f"{right} of {TEST_ROWS} images")
        )
        facts.append(
            Fact("Training", f"{demo.training_seconds:.1f} s", f"{len(demo.losses)} steps")
        )
    return tuple(facts)


def _answer(demo: Demo) -> str:
    plan = demo.plan
    sizes = (
        f"{TRAINING_ROWS:,} rows a step in {format_bytes(plan.predicted_bytes)} "
        f"instead of {format_bytes(demo.whole_bytes)}"
    )
    if demo.test_accuracy is None:
        return f"Interrupted before training: {sizes}."
    reached = f"{demo.test_accuracy:.1%} of the test images are recognised"
    if demo.interrupted:
        return f"Interrupted after {len(demo.losses)} of {demo.steps} steps: {sizes}; {reached} so far."
    return f"{sizes}, and {reached} after {demo.steps} steps."
