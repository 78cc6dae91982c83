"""Three textbook exercises, solved with the library: each can be read, run and done oneself.

``microbatch lesson scan`` shows one; ``microbatch lesson scan --check mine.py`` checks one's own solution. Importing
this package imports no framework; a lesson imports the one that it is about when it runs.
"""

import importlib
from types import ModuleType

from microbatch.lessons._exercise import Case, Exercise, Outcome, check

LESSONS = {
    "scan": "JAX: gradients of equal parts, added up by a compiled loop",
    "mean": "NumPy and PyTorch: the mean of the first K gradients",
    "torch": "PyTorch: one step on all rows, a few rows at a time",
}


def load(name: str) -> ModuleType:
    """The module of the lesson called `name`: its solution, `picture` and `EXERCISE`."""
    return importlib.import_module(f"microbatch.lessons.{name}")


__all__ = ["LESSONS", "Case", "Exercise", "Outcome", "check", "load"]
