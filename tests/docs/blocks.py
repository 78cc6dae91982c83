"""Code blocks of a page: what is shown, in which tab, and what it says it prints."""

import re
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_TAB = re.compile(r'^=== "(.+)"$')
_FENCE = re.compile(r"^( *)```(\w*)$")
_PROMISE = re.compile(r"^print\(.*\)  # (.+)$")


class Block(NamedTuple):
    """A fenced block: its language, its text, the tab that it is in ("" for none), and its first line in the page."""

    language: str
    text: str
    tab: str
    line: int

    @property
    def promised(self) -> list[str]:
        """The comments behind the prints of this block."""
        return [m[1] for line in self.text.splitlines() if (m := _PROMISE.match(line))]


def pages() -> list[Path]:
    """Every page whose code is run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found, tab = [], ""
    lines = iter(enumerate(page.splitlines(), 1))
    for number, line in lines:
        if match := _TAB.match(line):
            tab = match[1]
        elif line and not line.startswith(" "):
            tab = ""
        if match := _FENCE.match(line):
            body = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                body.append(inner)
            found.append(Block(match[2], dedent("\n".join(body)) + "\n", tab, number))
    return found


def outputs(page: str) -> dict[int, str]:
    """By the line of a Python block: the text block that follows it at once, which is what it prints."""
    bodies = re.compile(r"^ *```python\n.*?^ *```\n\n *```text\n", re.DOTALL | re.MULTILINE)
    followed = {page[: m.start()].count("\n") + 1 for m in bodies.finditer(page)}
    shown, found = blocks(page), {}
    for code, text in zip(shown, shown[1:]):
        if code.language == "python" and text.language == "text" and code.line in followed:
            found[code.line] = text.text
    return found


def alike(text: str) -> str:
    """What is compared of a printed table: not its digits, which a compiler's version changes, nor its spaces."""
    return " ".join(re.sub(r"~|\d[\d.,e+-]*", "#", text).replace("#", " # ").split())
