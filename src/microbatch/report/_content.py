"""What a report says, before anybody decides how it looks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One number that matters, with what it is and what it should be compared with."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; columns in `words` are aligned to the left, numbers to the right.

    `marked` is the index of the row that is the answer.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset()
    marked: int | None = None


@dataclass(frozen=True)
class Chart:
    """A figure and the sentence that says what to see in it.

    `draw` receives matplotlib axes and a theme, so that the same chart can be drawn for a page in the dark, for a
    phone and for a file.
    """

    title: str
    caption: str
    draw: Callable[[Any, Any], None]


@dataclass(frozen=True)
class Page:
    """One report: what was asked, the answer in a sentence, and what shows it.

    Attributes:
      command: what was run, in words.
      answer: the answer in one sentence.
      good: whether the answer is the hoped-for one; None where it is neither.
      asked: pairs of a name and what was given for it.
      notes: sentences below the answer.
    """

    command: str
    answer: str
    good: bool | None = None
    asked: tuple[tuple[str, str], ...] = ()
    facts: tuple[Fact, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = field(default=())
