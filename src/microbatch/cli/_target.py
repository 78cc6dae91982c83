"""From ``file.py:name`` or ``package.module:name`` to a `Problem`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from microbatch.cli._errors import UsageError
from microbatch.cli._problem import Problem

FRAMEWORKS = ("jax", "torch")


def load_problem(target: str) -> Problem:
    """Imports the target's module, calls its function and returns the `Problem` that comes.

    Raises:
      UsageError: the target cannot be read, found or used. What the user's own code raises is not caught.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(
            f"{target!r} is not a target.\nWrite file.py:name or package.module:name, "
            "where name is a function that returns a Problem."
        )
    function = member(_import(place), name, place)
    made = function() if callable(function) and not isinstance(function, Problem) else function
    return _as_problem(made, target)


def load_file(path: str) -> ModuleType:
    """Runs a Python file as a module of its own, with its folder importable, as ``python file.py`` would have it."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"there is no file {path!r}.\nGive the path of a Python file.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path!r} is not a Python file.\nIts name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    # Dataclasses and pickles look their module up by name; a user's file must not hide a real package.
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def member(module: ModuleType, name: str, place: str) -> Any:
    """The attribute `name` of a user's module, or an error that lists what there is."""
    if not hasattr(module, name):
        own = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
        found = f"It defines {', '.join(own)}." if own else "It defines no function."
        raise UsageError(f"{place} has no {name!r}.\n{found}")
    return getattr(module, name)


def framework_of(problem: Problem) -> str:
    """Which front a problem is for: what it says, else the framework of its arrays.

    Raises:
      UsageError: neither tells.
    """
    if problem.framework is not None:
        if problem.framework not in FRAMEWORKS:
            raise UsageError(
                f"the problem's framework is {problem.framework!r}.\nUse 'jax' or 'torch'."
            )
        return problem.framework
    roots = {root for arg in problem.args for root in _roots(arg)}
    for framework in FRAMEWORKS:
        if framework in roots or f"{framework}lib" in roots:
            return framework
    # Modules of other libraries hide their arrays, but not what the target had to import.
    loaded = [framework for framework in FRAMEWORKS if framework in sys.modules]
    if len(loaded) == 1:
        return loaded[0]
    raise UsageError(
        "the problem's arguments hold neither JAX nor PyTorch arrays.\n"
        'Say which is meant: Problem(..., framework="jax").'
    )


def installed_framework() -> str:
    """The first framework that is installed, without importing it."""
    for framework in FRAMEWORKS:
        if importlib.util.find_spec(framework) is not None:
            return framework
    raise UsageError(
        "neither JAX nor PyTorch is installed.\n"
        'Install one: pip install "microbatch[jax]" or pip install "microbatch[torch]".'
    )


def _import(place: str) -> ModuleType:
    if place.endswith(".py") or "/" in place:
        return load_file(place)
    sys.path.insert(0, "")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module is theirs to see.
        if error.name is None or not (place + ".").startswith(error.name + "."):
            raise
        raise UsageError(
            f"there is no module {place!r}.\nFor a file, write its path: {place}.py:name."
        ) from None


def _as_problem(made: Any, target: str) -> Problem:
    if isinstance(made, Problem):
        return made
    wanted = ("fun", "args", "argnums", "accumulator")
    missing = [name for name in wanted if not hasattr(made, name)]
    if missing:
        raise UsageError(
            f"{target} gave a {type(made).__name__} without {', '.join(missing)}.\n"
            "Return microbatch.cli.Problem(fun, args, argnums, accumulator)."
        )
    options = {key: getattr(made, key) for key in ("options", "framework") if hasattr(made, key)}
    return Problem(made.fun, tuple(made.args), made.argnums, made.accumulator, **options)


def _roots(value: Any) -> set[str]:
    """The top packages of the classes in a tree of lists, tuples, mappings and objects."""
    if isinstance(value, dict):
        return {root for item in value.values() for root in _roots(item)}
    if isinstance(value, list | tuple):
        return {root for item in value for root in _roots(item)}
    return {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
