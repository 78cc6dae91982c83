"""Results as a table in the terminal, as Markdown and as a figure."""

import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = (
    "microbatch",
    "numpy",
    "jax",
    "jaxlib",
    "optax",
    "torch",
    "accelerate",
    "lightning",
    "opacus",
    "transformers",
)
COLUMNS = ("", "time ratio", "seconds", "fastest … slowest", "MiB", "ratio", "compile s", "error")


def print_result(console: Console, result: dict[str, Any]) -> None:
    """One workload's table, and its bars."""
    table = Table(title=result["title"], title_justify="left", title_style="bold")
    columns, rows = _table(result)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if result.get("note"):
        console.print("  " + result["note"], highlight=False)
    for line in _bars(result):
        console.print("  " + line, highlight=False)
    console.print()


def save(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Merges `results` into the JSON at `path` by name, and writes RESULTS.md and the figures beside it."""
    known = json.loads(path.read_text()) if path.exists() else []
    # Each remembers where it is from: a later run may be on another machine, or with other versions.
    new = [{**result, "machine": _machine(), "versions": _versions()} for result in results]
    merged = {result["name"]: result for result in [*known, *new]}
    everything = list(merged.values())
    path.write_text(json.dumps(everything, indent=1) + "\n")
    (path.parent / "RESULTS.md").write_text(_markdown(everything))
    _figure([r for r in everything if "reference" in r], path.with_name("results.svg"))
    _growth_figure([r for r in everything if r.get("x")], path.with_name("growth.svg"))


def _table(result: dict[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and cells, of a race or of a table of counts."""
    if "columns" in result:
        return result["columns"], [[_in_words(cell) for cell in row] for row in result["rows"]]
    return COLUMNS, [_cells(row) for row in result["rows"]]


def _in_words(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _cells(row: dict[str, Any]) -> list[str]:
    number = lambda value, form: "" if value is None else format(value, form)
    mebibytes = None if row["memory_bytes"] is None else row["memory_bytes"] / 2**20
    return [
        row["name"],
        f"{row['ratio']:.3f}",
        f"{row['seconds']:.3f}",
        f"{row['fastest']:.3f} … {row['slowest']:.3f}",
        number(mebibytes, ".1f"),
        number(row["memory_ratio"], ".3f"),
        number(row["compile_seconds"], ".2f"),
        number(row["error"], ".1e"),
    ]


def _bars(result: dict[str, Any]) -> list[str]:
    lines = []
    for bar, reached in result["bars"]:
        verdict = "reached" if reached <= bar["limit"] else "MISSED"
        lines.append(
            f"{verdict}: {bar['figure']} of {bar['contender']} is {reached:.3f} × {bar['against']}'s"
            f" (bar: {bar['limit']:g})"
        )
    return lines


def _markdown(results: Sequence[dict[str, Any]]) -> str:
    origins = [_origin(result) for result in results]
    parts = [
        "# Measured",
        "",
        "Medians of interleaved rounds in one process; ratios of contenders are taken round by round. Memory is the "
        "peak beside parameters and batch: in JAX the compiler's figure, which leaves out results, in PyTorch a count of live tensor "
        "bytes, gradients included. Errors are relative to the "
        "same computation in float64. Written by `python -m benchmarks --save`.",
        "",
        *([origins[0], ""] if len(set(origins)) == 1 else []),
        "![Time and memory relative to the reference](results.svg)",
        "",
    ]
    if any(result.get("x") for result in results):
        parts += ["![How cost grows](growth.svg)", ""]
    for result, origin in zip(results, origins, strict=True):
        columns, rows = _table(result)
        note = f"Reference: {result['reference']}." if "reference" in result else result["note"]
        if len(set(origins)) > 1:
            note = f"{note} {origin}".strip()
        parts += [f"## {result['title']}", "", *([note, ""] if note else [])]
        parts += ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
        parts += ["| " + " | ".join(row) + " |" for row in rows]
        parts += ["", *(f"- {line}" for line in _bars(result)), ""]
    return "\n".join(parts)


def _origin(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"Machine: {result['machine']}. Versions: {versions}."


# Narrow enough to be read where a page shows them.
FIGURE_INCHES = 8.5


def _blank(height_inches: float) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    # The same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "microbatch"
    return Figure(figsize=(FIGURE_INCHES, height_inches), layout="constrained")


def _figure(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A line per contender below the name of its workload: time and memory relative to the reference."""
    labels, points = [], []
    for result in results:
        labels.append(result["name"])
        points.append(None)
        for row in result["rows"]:
            labels.append(row["name"])
            points.append((row["ratio"], row["memory_ratio"]))
    figure = _blank(1 + 0.2 * len(labels))
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=0.8)
    styles = (("time", "o", "#4477aa"), ("peak memory", "D", "#cc6677"))
    for which, (name, marker, colour) in enumerate(styles):
        known = [(p[which], y) for y, p in enumerate(points) if p and p[which] is not None]
        values, heights = zip(*known, strict=True)
        axes.scatter(values, heights, s=22, marker=marker, color=colour, label=name, zorder=3)
    axes.set_xscale("log")
    ticks = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300]
    least, most = axes.get_xlim()
    axes.set_xticks([t for t in ticks if least <= t <= most])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} ×")
    axes.minorticks_off()
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    for tick, point in zip(axes.get_yticklabels(), points, strict=True):
        if point is None:
            tick.set_fontweight("bold")
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(alpha=0.3)
    axes.set_title("relative to the reference of each workload; left is better", fontsize=10)
    axes.legend(loc="upper right", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _growth_figure(tables: Sequence[dict[str, Any]], path: Path) -> None:
    """One line of panels a table: its curves, on logarithmic axes."""
    if not tables:
        return
    figure = _blank(3 * len(tables))
    parts = figure.subfigures(len(tables), squeeze=False)[:, 0]
    for table, part in zip(tables, parts, strict=True):
        part.suptitle(table["title"], fontsize=9)
        values = {
            name: [row[i] for row in table["rows"]] for i, name in enumerate(table["columns"])
        }
        panels = part.subplots(1, len(table["panels"]), squeeze=False)[0]
        for axes, columns in zip(panels, table["panels"], strict=True):
            for column in columns:
                way, _, figure_name = column.rpartition(", ")
                axes.loglog(values[table["x"]], values[column], marker="o", markersize=3, label=way)
            axes.set_title(figure_name, fontsize=8)
            axes.set_xlabel(table["x"], fontsize=8)
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.3)
        panels[0].legend(fontsize=6)
    figure.savefig(path, metadata={"Date": None})


def _machine() -> str:
    import os

    processor = platform.processor() or platform.machine()
    return f"{platform.system()}, {processor}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
