"""``python -m benchmarks [NAME …]``: every workload, the library beside its peers, ratios first."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import _report
from benchmarks._harness import Table, measure

# Each module runs in a process of its own, so that none finds another's memory or compiled programs.
MODULES = {
    "gradient": "benchmarks.jax_gradient",
    "through": "benchmarks.jax_through",
    "per_example": "benchmarks.jax_per_example",
    "engines": "benchmarks.jax_engines",
    "mapping": "benchmarks.jax_mapping",
    "growth": "benchmarks.jax_growth",
    "devices": "benchmarks.jax_devices",
    "bounds": "benchmarks.bounds",
    "torch_training": "benchmarks.torch_training",
    "torch_through": "benchmarks.torch_through",
    "torch_per_example": "benchmarks.torch_per_example",
    "torch_growth": "benchmarks.torch_growth",
    "finding_a_size": "benchmarks.finding_a_size",
    "planning": "benchmarks.planning",
}
RESULTS = Path(__file__).parent / "results.json"

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Which: {', '.join(MODULES)}. Default: all.")
    ] = None,
    save: Annotated[
        bool, typer.Option(help="Write results.json, RESULTS.md and the figures in benchmarks/.")
    ] = False,
    inside: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Runs benchmarks one after another and prints a table for each."""
    names = names or list(MODULES)
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(MODULES)}.")
    if inside:
        _run_here(names[0])
        return
    # A table needs its columns also where the output is a file.
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name in names:
        command = [sys.executable, "-m", "benchmarks", name, "--inside"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
        results = json.loads(done.stdout)
        for result in results:
            _report.print_result(console, result)
        if save:  # At once: what comes later may fail.
            _report.save(results, RESULTS)
    if save:
        console.print(f"Wrote {RESULTS}, RESULTS.md and the figures beside it.")


def _run_here(name: str) -> None:
    """Measures one module's workloads and prints them as JSON; progress goes to standard error."""
    log = Console(stderr=True)
    with log.status(name) as status:
        found = importlib.import_module(MODULES[name]).workloads()
        results = [
            (w if isinstance(w, Table) else measure(w, status.update)).to_dict() for w in found
        ]
    print(json.dumps(results))


if __name__ == "__main__":
    app()
