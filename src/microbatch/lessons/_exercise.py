"""Checking a learner's function: six inputs, and for each what came, what is right and the next hint."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np


class Refused:
    """The right answer to an input that must be refused: a `ValueError` or a `TypeError`."""

    def __repr__(self) -> str:
        return "a ValueError or a TypeError"


@dataclass(frozen=True)
class Case:
    """One input of an exercise.

    Attributes:
      name: what is tried, in two or three words.
      call: the call, as the learner would write it.
      run: applies a function to the input.
      right: the right answer; ``Refused()`` where the input must be refused.
      hints: from a nudge to nearly the answer.
    """

    name: str
    call: str
    run: Callable[[Callable[..., Any]], Any]
    right: Any
    hints: tuple[str, str, str]


@dataclass(frozen=True)
class Exercise:
    """A function to write, and the six inputs that it is tried on."""

    function: str
    task: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of one case; `hint` is empty where it passed."""

    case: Case
    passed: bool
    came: str
    hint: str = ""


def check(
    exercise: Exercise, function: Callable[..., Any], hints_seen: Mapping[str, int] | None = None
) -> list[Outcome]:
    """Runs `function` on every case; `hints_seen` says how many hints of a case the learner has had.

    >>> double = Case("doubles", "double(2)", lambda f: f(2), 4, ("Add.", "Add it to itself.", "x + x"))
    >>> [outcome] = check(Exercise("double", "", (double,)), lambda x: x**3, {"doubles": 1})
    >>> outcome.passed, outcome.came, outcome.hint
    (False, '8', 'Add it to itself.')
    """
    seen = hints_seen or {}
    outcomes = []
    for case in exercise.cases:
        passed, came = _try(case, function)
        hint = case.hints[min(seen.get(case.name, 0), 2)] if not passed else ""
        outcomes.append(Outcome(case, passed, came, hint))
    return outcomes


def words(value: Any) -> str:
    """A value as the learner would print it, on one line.

    >>> words(np.array([[2.0], [1.0]])), words((np.array([3.0]), 4))
    ('[[2.] [1.]]', '[3.] and 4')
    """
    if isinstance(value, tuple):
        return " and ".join(map(words, value))
    return " ".join(str(_as_array(value)).split()) if _is_array(value) else repr(value)


def _try(case: Case, function: Callable[..., Any]) -> tuple[bool, str]:
    must_refuse = isinstance(case.right, Refused)
    try:
        came = case.run(function)
    except (ValueError, TypeError) as error:
        return must_refuse, _error_words(error)
    except Exception as error:
        return False, _error_words(error)
    return not must_refuse and _same(came, case.right), words(came)


def _error_words(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}{_place(error.__traceback__)}"


def _place(trace: TracebackType | None) -> str:
    frames = [f for f in traceback.extract_tb(trace) if "site-packages" not in f.filename]
    own = [f for f in frames if "microbatch/lessons" not in f.filename.replace("\\", "/")]
    return f" (line {own[-1].lineno})" if own else ""


def _same(came: Any, right: Any) -> bool:
    if isinstance(right, tuple):
        return (
            isinstance(came, tuple)
            and len(came) == len(right)
            and all(_same(*pair) for pair in zip(came, right, strict=True))
        )
    try:
        came_array, right_array = _as_array(came), _as_array(right)
    except (TypeError, ValueError):
        return False
    if came_array.shape != right_array.shape or not np.issubdtype(came_array.dtype, np.number):
        return False
    return np.allclose(came_array, right_array, rtol=1e-5, atol=1e-6)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _as_array(value: Any) -> np.ndarray:
    return np.asarray(value.detach().numpy() if hasattr(value, "detach") else value)
