"""The command line: ``microbatch plan | verify | demo | lesson``. No framework is imported before a command needs it."""

import sys
from typing import NoReturn

from microbatch.cli._problem import Problem


def main() -> NoReturn:
    """Runs the command in ``sys.argv`` and exits with its code."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"microbatch: the command line needs {error.name}, which is not installed.\n"
            'Install it with: pip install "microbatch[cli]"',
            file=sys.stderr,
        )
        sys.exit(2)
    from microbatch.cli._app import app

    app(prog_name="microbatch")
    raise AssertionError("a command always exits")


__all__ = ["Problem", "main"]
