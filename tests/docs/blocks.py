"""Code blocks of a page: what is shown, in which tab, and what it says it prints."""

import re
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_TAB = re.compile(r'^=== "(.+)"$')
# Another file that is shown in a page, as ```{ .python }, is tested where it lies, and not formatted here.
_FENCE = re.compile(r"^ *```(\w*|\{.*\})$")
_PROMISE = re.compile(r"^print\(.*\)  # (.+)$")


class Block(NamedTuple):
    """A fenced block: its language, its text, the tab that it is in ("" for none), and the lines of its fences."""

    language: str
    text: str
    tab: str
    line: int
    end: int

    @property
    def promised(self) -> list[str]:
        """The comments behind the prints of this block."""
        return [m[1] for line in self.text.splitlines() if (m := _PROMISE.match(line))]


def pages() -> list[Path]:
    """Every page whose code is run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found, tab, opened, body = [], "", None, []
    for number, line in enumerate(page.splitlines(), 1):
        if opened:
            language, start = opened
            if line.strip() == "```":
                text = dedent("\n".join(body)) + "\n"
                found.append(Block(language, text, tab, start, number))
                opened = None
            body.append(line)
            continue
        if match := _TAB.match(line):
            tab = match[1]
        elif line and not line.startswith(" "):
            tab = ""
        if match := _FENCE.match(line):
            opened, body = (match[1], number), []
    return found


def outputs(page: str) -> dict[int, str]:
    """By the line of a Python block: the text block that follows it at once, which is what it prints."""
    shown = blocks(page)
    return {
        code.line: text.text
        for code, text in zip(shown, shown[1:])
        if (code.language, text.language) == ("python", "text") and text.line == code.end + 2
    }


def alike(text: str) -> str:
    """What is compared of a printed table: not its digits, which a compiler's version changes, nor its spaces."""
    return " ".join(re.sub(r"~?\d[\d.,e+-]*( [KMG]iB)?", " # ", text).split())
