"""What a command says when it cannot go on, and the exit code that goes with it."""

import sys
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import typer

from microbatch._errors import MicrobatchError

WRONG_USAGE = 2
INTERRUPTED = 130

_OWN = str(Path(__file__).resolve().parents[1])
_INSTALLED = tuple(
    str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "purelib", "platlib")
)


class UsageError(Exception):
    """A command was called in a way that cannot work; the message ends with the way out."""


@contextmanager
def told_plainly() -> Generator[None]:
    """Turns errors into messages and exit codes; what the user's own code raises keeps its traceback, trimmed."""
    try:
        yield
    except (UsageError, MicrobatchError) as error:
        _fail(f"microbatch: {error}")
    except ImportError as error:
        # A front says which extra is missing; a user's missing import has frames of theirs.
        _fail(_trimmed(error) if _user_frames(error) else f"microbatch: {_missing(error)}")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read the pipe has enough; Python would complain once more when it closes the stream.
        sys.stdout = None  # type: ignore[assignment]
        raise typer.Exit(0) from None
    except typer.Exit:
        raise
    except Exception as error:
        if not _user_frames(error):
            raise
        _fail(_trimmed(error))


def _missing(error: ImportError) -> str:
    """What could not be imported; a framework with the extra of its name, which installs it."""
    if error.name not in ("jax", "torch"):
        return str(error)
    return f'this needs {error.name}, which is not installed.\nInstall it with: pip install "microbatch[{error.name}]"'


def _fail(message: str) -> None:
    print(message, file=sys.stderr)
    raise typer.Exit(WRONG_USAGE) from None


def _trimmed(error: BaseException) -> str:
    """The traceback with the user's frames alone."""
    lines = ["Traceback (most recent call last; only frames of your files):\n"]
    lines += traceback.format_list(_user_frames(error))
    lines += _without_advice(error).format_exception_only()
    return "".join(lines).rstrip()


def _without_advice(error: BaseException) -> traceback.TracebackException:
    """The error without what JAX adds about frames that it removed: all frames but the user's are gone here."""
    told = traceback.TracebackException.from_exception(error)
    notes = getattr(error, "__notes__", [])
    told.__notes__ = [note for note in notes if "internal frames" not in note]
    return told


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        # The file that could not be read never got a frame of its own.
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>"))
    return [frame for frame in frames if _is_users(frame.filename)]


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = str(Path(filename).resolve())
    inside = lambda folder: path.startswith(folder + "/")
    return not any(inside(folder) for folder in (_OWN, *_INSTALLED))
