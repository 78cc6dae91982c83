"""The commands and their options; what they do is imported when they run."""

from typing import Annotated

import typer

from microbatch.cli._errors import told_plainly

app = typer.Typer(
    name="microbatch",
    help="Any batch size, in the memory you have, with the same answer.",
    no_args_is_help=True,
    add_completion=False,
    # Plain text at once: drawing help in boxes takes longer than all the rest of it.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TARGET = typer.Argument(
    metavar="[TARGET]",
    help="file.py:name or package.module:name, a function that returns a microbatch.cli.Problem. "
    "Without it: a convolutional network on handwritten digits.",
)
_FRAMEWORK = typer.Option(
    help="jax or torch, for the digits; by default the one that is installed."
)
_DEMO_FRAMEWORK = typer.Option(help="jax or torch; by default the one that is installed.")
_MEMORY = typer.Option(help='What may be used: "12GiB", "500MB", "80%" of the device, or bytes.')
_JSON = typer.Option(
    "--json", help="Print the result as JSON, and nothing else, on standard output."
)
_HTML = typer.Option(metavar="FILE", help="Also write a self-contained page.")
_PLOT = typer.Option(metavar="FILE.png", help="Also write the figure.")


@app.command(short_help="Which microbatch size fits in memory.")
def plan(
    target: Annotated[str | None, _TARGET] = None,
    memory: Annotated[str | None, _MEMORY] = None,
    time: Annotated[
        bool, typer.Option("--time", help="Measure, and choose the fastest size that fits.")
    ] = False,
    framework: Annotated[str | None, _FRAMEWORK] = None,
    as_json: Annotated[bool, _JSON] = False,
    html: Annotated[str | None, _HTML] = None,
    plot: Annotated[str | None, _PLOT] = None,
) -> None:
    """Which microbatch size fits in memory. Exit code 0: one fits, 1: none does, 2: wrong usage."""
    with told_plainly():
        from microbatch.cli._plan import Output, run_plan

        _check_framework(framework)
        raise typer.Exit(
            run_plan(target, framework, _budget(memory), time, Output(as_json, html, plot))
        )


@app.command(short_help="Whether microbatching keeps your numbers, and why not.")
def verify(
    target: Annotated[str | None, _TARGET] = None,
    microbatch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Rows in a microbatch; by default a quarter of the batch."),
    ] = None,
    memory: Annotated[str | None, _MEMORY] = None,
    framework: Annotated[str | None, _FRAMEWORK] = None,
    as_json: Annotated[bool, _JSON] = False,
    html: Annotated[str | None, _HTML] = None,
    plot: Annotated[str | None, _PLOT] = None,
) -> None:
    """Whether microbatches give the whole batch's numbers, and if not, why. Exit code 0: the same, 1: different, 2: wrong usage."""
    with told_plainly():
        from microbatch.cli._plan import Output, run_verify

        _check_framework(framework)
        raise typer.Exit(
            run_verify(
                target, framework, microbatch_size, _budget(memory), Output(as_json, html, plot)
            )
        )


@app.command(short_help="Train on handwritten digits, all rows as one batch.")
def demo(
    framework: Annotated[str | None, _DEMO_FRAMEWORK] = None,
    memory: Annotated[str, _MEMORY] = "32MiB",
    seed: Annotated[int, typer.Option(min=0, help="Of the first parameters.")] = 0,
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps; each uses all 1,437 rows.")
    ] = 100,
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Where the report goes.")
    ] = "report.html",
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Train a convolutional network on handwritten digits, each step on all rows as one batch."""
    with told_plainly():
        from microbatch.cli._demo import run_demo

        _check_framework(framework)
        raise typer.Exit(run_demo(framework, _budget(memory), seed, steps, out, as_json))


@app.command(short_help="Three textbook exercises, to read and to try.")
def lesson(
    name: Annotated[
        str,
        typer.Argument(
            metavar="scan|mean|torch", help="About JAX, NumPy and PyTorch, in this order."
        ),
    ],
    check: Annotated[
        str | None, typer.Option(metavar="FILE.py", help="Check your own solution instead.")
    ] = None,
) -> None:
    """Three textbook exercises, solved with the library; with --check, your own solution is tried on six inputs."""
    with told_plainly():
        from microbatch.cli._lesson import check_lesson, show_lesson

        raise typer.Exit(show_lesson(name) if check is None else check_lesson(name, check))


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show:
        from importlib.metadata import version as version_of

        typer.echo(f"microbatch {version_of('microbatch')}")
        raise typer.Exit


def _check_framework(framework: str | None) -> None:
    if framework not in (None, "jax", "torch"):
        raise typer.BadParameter(
            f"{framework!r} is unknown. Use jax or torch.", param_hint="--framework"
        )


def _budget(memory: str | None) -> int | str | None:
    """The budget as the library takes it (digits alone are bytes), refused at once where it cannot be read."""
    if memory is None:
        return None
    from microbatch._memory import host_memory_bytes, resolve_budget

    budget = int(memory) if memory.isdigit() else memory
    resolve_budget(budget, host_memory_bytes(), "this machine", where="--memory")
    return budget
