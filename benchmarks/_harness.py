"""Contenders of one workload, timed in turn in one process; medians, spread and ratios.

Machines are noisy and drift, so contenders take turns: every round times each of them once, and ratios are taken
round by round before their median is.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Attributes:
      name: what it is called in the table.
      run: does the work once and waits until it is done.
      memory_bytes: peak memory beside arguments, as the compiler or a tracker of tensors states it; None if unknown.
      compile_seconds: what it cost to make `run`; None if nothing is compiled.
      error: largest relative error of the result against float64; None if not measured.
    """

    name: str
    run: Callable[[], Any]
    memory_bytes: int | None = None
    compile_seconds: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Bar:
    """A promise about one contender: its `figure` is at most `limit` times that of `against`."""

    contender: str
    figure: str
    limit: float
    against: str


@dataclass(frozen=True)
class Workload:
    """Contenders for the same work, of which `reference` is what ratios are taken against."""

    name: str
    title: str
    reference: str
    contenders: tuple[Contender, ...]
    bars: tuple[Bar, ...] = ()
    rounds: int = 15


@dataclass(frozen=True)
class Row:
    """What was measured of one contender; seconds per run, bytes, and ratios to the reference."""

    name: str
    ratio: float
    seconds: float
    fastest: float
    slowest: float
    memory_bytes: int | None
    memory_ratio: float | None
    compile_seconds: float | None
    error: float | None
    times: tuple[float, ...] = field(repr=False, default=())


@dataclass(frozen=True)
class Result:
    """One workload's rows, and for each bar what was reached."""

    name: str
    title: str
    reference: str
    rows: tuple[Row, ...]
    bars: tuple[tuple[Bar, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Table:
    """What is counted rather than raced: how cost grows, how often something runs.

    Attributes:
      name: for the JSON file.
      title: what is counted, and of what.
      columns: what the cells are, with units.
      rows: one tuple of cells per row; None for what does not apply.
      x: the column to draw others against, on logarithmic axes; None draws nothing.
      panels: the columns to draw, those in one panel together.
      bars: promises, and for each what was reached.
      note: what a reader must know to read it.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    x: str | None = None
    panels: tuple[tuple[str, ...], ...] = ()
    bars: tuple[tuple[Bar, float], ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def table_of(records: Sequence[dict[str, Any]], name: str, title: str, **fields: Any) -> Table:
    """A `Table` with a row per record and a column per key; `fields` are its other attributes."""
    rows = tuple(tuple(record.values()) for record in records)
    return Table(name, title, tuple(records[0]), rows, **fields)


# What the figures of growing tables are called in their bars.
FIGURES = {"s": "time", "MiB": "memory", "compile s": "compile"}


def growth_table(
    records: Sequence[dict[str, Any]],
    name: str,
    title: str,
    note: str,
    *,
    mine: str,
    against: str,
    limits: Mapping[str, float],
) -> Table:
    """How the figures of several ways grow: a panel and a bar, where it is largest, for each figure in `limits`.

    The first key of a record is what grows, the others are ``"way, figure"``, and `time_columns`.
    """
    growing, *columns = records[0]
    last = records[-1]
    reached = {
        figure: last[f"{mine}, {figure}"] / last[f"{against}, {figure}"] for figure in limits
    }
    reached["s"] = last[f"{mine} / {against}"]
    subject = f"{mine}, {last[growing]:,} {growing},"
    return table_of(
        records,
        name,
        title,
        x=growing,
        panels=tuple(tuple(c for c in columns if c.endswith(f", {f}")) for f in limits),
        bars=tuple(
            (Bar(subject, FIGURES[figure], limit, against), reached[figure])
            for figure, limit in limits.items()
        ),
        note=note,
    )


def measure(workload: Workload, progress: Callable[[str], None] = lambda _: None) -> Result:
    """Times the contenders in turn."""
    runs = {contender.name: contender.run for contender in workload.contenders}
    say = lambda what: progress(f"{workload.name}: {what}")
    times = times_in_turn(runs, workload.rounds, say)
    by_name = {c.name: c for c in workload.contenders}
    memory = {name: c.memory_bytes for name, c in by_name.items()}
    rows = tuple(
        _row(by_name[name], taken, times[workload.reference], memory[workload.reference])
        for name, taken in times.items()
    )
    reached = tuple((bar, _reached(bar, by_name, times)) for bar in workload.bars)
    return Result(workload.name, workload.title, workload.reference, rows, reached)


def times_in_turn(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of each of `runs` in every round, after one run of each that warms up."""
    for name, run in runs.items():
        progress(f"{name}, warming up")
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        # Every second round runs backwards: what comes first finds other caches than what comes last.
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            progress(f"round {turn + 1} of {rounds}, {name}")
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return times


def seconds_in_turn(runs: Mapping[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """The median seconds of each of `runs`, which take turns."""
    times = times_in_turn(runs, rounds)
    return {name: statistics.median(taken) for name, taken in times.items()}


def time_columns(
    runs: Mapping[str, Callable[[], Any]], mine: str, against: str, rounds: int = 7
) -> dict[str, float]:
    """The median seconds of each of `runs`, and the median ratio of two of them, taken round by round."""
    times = times_in_turn(runs, rounds)
    seconds = {f"{name}, s": statistics.median(taken) for name, taken in times.items()}
    return seconds | {f"{mine} / {against}": _ratio(times[mine], times[against])}


def _row(
    contender: Contender, taken: list[float], against: list[float], against_bytes: int | None
) -> Row:
    known = contender.memory_bytes is not None and against_bytes
    return Row(
        name=contender.name,
        ratio=_ratio(taken, against),
        seconds=statistics.median(taken),
        fastest=min(taken),
        slowest=max(taken),
        memory_bytes=contender.memory_bytes,
        memory_ratio=contender.memory_bytes / against_bytes if known else None,
        compile_seconds=contender.compile_seconds,
        error=contender.error,
        times=tuple(taken),
    )


def _reached(bar: Bar, by_name: dict[str, Contender], times: dict[str, list[float]]) -> float:
    if bar.figure == "time":
        return _ratio(times[bar.contender], times[bar.against])
    mine, other = by_name[bar.contender], by_name[bar.against]
    attribute = {"memory": "memory_bytes", "compile": "compile_seconds", "error": "error"}
    name = attribute[bar.figure]
    return getattr(mine, name) / getattr(other, name)


def _ratio(taken: Iterable[float], against: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(taken, against, strict=True))
