"""Figures: one drawing for each, in colours that the page decides."""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from microbatch._memory import format_bytes

# Inches. Text has the same size in both, so a phone gets a smaller figure and not smaller letters.
WIDE, NARROW = (7.2, 3.4), (4.3, 3.3)


@dataclass(frozen=True)
class Theme:
    """The colours of a figure, by what they mean."""

    ink: str
    muted: str
    grid: str
    first: str
    second: str
    good: str
    bad: str
    paper: str


LIGHT = Theme(
    ink="#1c1917",
    muted="#6b655e",
    grid="#e3ded6",
    first="#1d5fbf",
    second="#a84b06",
    good="#147a3b",
    bad="#b42318",
    paper="#ffffff",
)
# Stand-ins that become CSS variables in the page, so that one figure serves light, dark and print.
_CSS = Theme(*(f"#0{i}0{i}0{i}" for i in range(1, 9)))


def svg(
    draw: Callable[[Any, Theme], None], title: str, size: tuple[float, float], salt: str
) -> str:
    """The drawing as an inline ``<svg>`` whose colours are the CSS variables of the page.

    `salt` keeps the ids of several figures in one page apart.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}):
        buffer = io.StringIO()
        drawn = figure([draw], _CSS, size)
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"(font: (?:\w+ )*?[\d.]+px )[^;\"]+", r"\1var(--font)", text)
    for field in fields(Theme):
        text = text.replace(getattr(_CSS, field.name), f"var(--{field.name})")
    label = html.escape(title, quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def save(draw: Callable[[Any, Theme], None], path: str) -> None:
    """Writes the drawing to a file; its ending decides the format."""
    import matplotlib

    with matplotlib.rc_context({"font.size": 10}):
        figure([draw], LIGHT).savefig(path, dpi=160)


def figure(
    draws: Sequence[Callable[[Any, Theme], None]],
    theme: Theme,
    size: tuple[float, float] = WIDE,
) -> Any:
    """The drawings side by side, each of `size` inches, as a matplotlib figure."""
    from matplotlib.figure import Figure

    width, height = size
    made = Figure((width * len(draws), height), layout="constrained", facecolor=theme.paper)
    for axes, draw in zip(made.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
        axes.set_facecolor("none")
        axes.grid(visible=True, axis="both", color=theme.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(theme.muted)
        axes.tick_params(which="both", colors=theme.muted, length=0)
        axes.tick_params(axis="x", which="major", length=3)
        draw(axes, theme)
        axes.xaxis.label.set_color(theme.muted)
        axes.yaxis.label.set_color(theme.muted)
    return made


def memory_by_size(
    points: Sequence[tuple[int, int]], budget_bytes: int | None, chosen: int | None, whole: int
) -> Callable[[Any, Theme], None]:
    """Bytes by microbatch size, the budget as a line, the chosen size and the whole batch named at their points."""

    def draw(axes: Any, theme: Theme) -> None:
        sizes, counts = zip(*points, strict=True)
        fits = [budget_bytes is None or count <= budget_bytes for count in counts]
        axes.set(xscale="log", yscale="log", xlabel="rows a microbatch")
        axes.plot(sizes, counts, color=theme.first, linewidth=1.6, zorder=2)
        axes.scatter(
            sizes,
            counts,
            s=26,
            zorder=3,
            edgecolor=theme.first,
            linewidth=1.4,
            color=[theme.first if fit else theme.paper for fit in fits],
        )
        low, high = min(counts), max(counts)
        if budget_bytes is not None:
            low, high = min(low, budget_bytes), max(high, budget_bytes)
            axes.axhline(budget_bytes, color=theme.bad, linewidth=1.2, linestyle=(0, (5, 3)))
            _note(
                axes,
                f"budget {format_bytes(budget_bytes)}",
                (min(sizes), budget_bytes),
                (0, 4),
                theme.bad,
                "left",
            )
        by_size = dict(points)
        if whole in by_size and whole != chosen:
            _note(
                axes,
                f"whole batch: {format_bytes(by_size[whole])}",
                (whole, by_size[whole]),
                (-8, 4),
                theme.muted,
                "right",
            )
        if chosen in by_size:
            axes.scatter([chosen], [by_size[chosen]], s=90, color=theme.good, zorder=4)
            # The curve rises, so below it on the right and above it on the left nothing is in the way.
            right = chosen < max(sizes) ** 0.85
            _note(
                axes,
                f"{chosen} rows: {format_bytes(by_size[chosen])}",
                (chosen, by_size[chosen]),
                (9, -14) if right else (-9, 7),
                theme.good,
                "left" if right else "right",
            )
        axes.set_ylim(low / 1.6, high * 1.7)
        _byte_ticks(axes, low / 1.6, high * 1.7)
        _size_ticks(axes, sizes)

    return draw


def seconds_by_size(
    points: Sequence[tuple[int, float]], chosen: int | None
) -> Callable[[Any, Theme], None]:
    """Measured seconds a batch by microbatch size."""

    def draw(axes: Any, theme: Theme) -> None:
        sizes, seconds = zip(*points, strict=True)
        axes.set(xscale="log", xlabel="rows a microbatch", ylim=(0, 1.15 * max(seconds)))
        axes.set_ylabel("seconds a batch")
        axes.plot(sizes, seconds, "o-", color=theme.second, linewidth=1.6, markersize=5)
        if chosen in dict(points):
            axes.scatter([chosen], [dict(points)[chosen]], s=90, color=theme.good, zorder=4)
        _size_ticks(axes, sizes)

    return draw


def loss_by_step(losses: Sequence[float]) -> Callable[[Any, Theme], None]:
    """The training loss on a logarithmic scale."""

    def draw(axes: Any, theme: Theme) -> None:
        axes.plot(range(1, len(losses) + 1), losses, color=theme.first, linewidth=1.8)
        axes.set(yscale="log", xlabel="step", ylabel="loss")
        _plain_log_ticks(axes, min(losses), max(losses))
        axes.set_ylim(min(losses) / 1.5, max(losses) * 1.5)
        _note(axes, f"{losses[-1]:.3g}", (len(losses), losses[-1]), (-2, 8), theme.first, "right")

    return draw


def accuracy_by_step(
    points: Sequence[tuple[int, float]], goal: float
) -> Callable[[Any, Theme], None]:
    """Test accuracy in percent, with the goal as a line."""

    def draw(axes: Any, theme: Theme) -> None:
        steps, values = zip(*points, strict=True)
        percent = [100 * value for value in values]
        axes.axhline(100 * goal, color=theme.muted, linewidth=1, linestyle=(0, (5, 3)))
        _note(axes, f"goal {goal:.0%}", (steps[0], 100 * goal), (0, 4), theme.muted, "left")
        axes.plot(steps, percent, "o-", color=theme.second, linewidth=1.6, markersize=4)
        _note(axes, f"{percent[-1]:.1f}%", (steps[-1], percent[-1]), (0, 7), theme.second, "right")
        axes.set(xlabel="step", ylabel="test accuracy, %", ylim=(min(*percent, 90) - 4, 103))

    return draw


def bars_by_name(
    rows: Sequence[tuple[str, float, bool]], limit: float, label: str
) -> Callable[[Any, Theme], None]:
    """One bar per (name, value, whether that is trouble), beside a limit."""

    def draw(axes: Any, theme: Theme) -> None:
        names = [_short(name) for name, _, _ in rows][::-1]
        values = [value for _, value, _ in rows][::-1]
        colors = [theme.bad if trouble else theme.first for _, _, trouble in rows][::-1]
        seen = [value for value in [limit, *values] if 0 < value < math.inf]
        # An exact zero and an infinity have no place on a logarithmic scale: they are drawn at its ends.
        floor, ceiling = min(seen) / 10, 10 * max(seen)
        lengths = [
            min(max(v, 1.05 * floor), ceiling) - floor if v == v else ceiling for v in values
        ]
        axes.barh(range(len(rows)), lengths, left=floor, color=colors, height=0.6)
        axes.axvline(limit, color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)))
        axes.set(xscale="log", xlabel=label, yticks=range(len(rows)))
        for text in axes.set_yticklabels(names):
            text.set_parse_math(False)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        _plain_log_ticks(axes, floor, ceiling, axis="x")
        axes.set_xlim(floor, 2 * max(seen) if all(map(math.isfinite, values)) else ceiling)

    return draw


def _note(
    axes: Any,
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    color: str,
    align: str,
) -> None:
    axes.annotate(
        text, at, xytext=offset, textcoords="offset points", color=color, ha=align, zorder=5
    )


def _short(name: str, length: int = 26) -> str:
    """The end of a long name: paths differ there."""
    return name if len(name) <= length else "…" + name[-length + 1 :]


def _size_ticks(axes: Any, sizes: Sequence[int]) -> None:
    """Powers of two (or of four, sixteen …) across the sizes: at most eight."""
    top = max(sizes).bit_length()
    step = -(-top // 8)
    ticks = [2**i for i in range(0, top + 1, step) if min(sizes) <= 2**i <= max(sizes)] or list(
        sizes
    )
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(_nothing())


def _byte_ticks(axes: Any, low: float, high: float) -> None:
    exponents = [i for i in range(60) if low <= 2**i <= high]
    step = -(-len(exponents) // 6) or 1
    ticks = [2.0**i for i in exponents[::step]]
    axes.set_yticks(ticks, [format_bytes(tick).replace(".0 ", " ") for tick in ticks])
    axes.yaxis.set_minor_locator(_nothing())


def _plain_log_ticks(axes: Any, low: float, high: float, axis: str = "y") -> None:
    if not (0 < low < math.inf and 0 < high < math.inf):
        return
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    step = -(-len(exponents) // 6)
    ticks = [10.0**i for i in exponents[::step]]
    target = axes.yaxis if axis == "y" else axes.xaxis
    target.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    target.set_minor_locator(_nothing())


def _nothing() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
