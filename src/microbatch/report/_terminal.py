"""Tables, progress and sentences for a terminal, and the same as plain lines where there is none."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Any, Protocol

from microbatch._tables import text_table
from microbatch.report._content import Fact, Table


class Progress(Protocol):
    """Advances by one step, with a few words on where it stands."""

    def __call__(self, done: int, words: str) -> None: ...


class Screen:
    """Where a command writes: coloured and boxed on a terminal, plain text in a pipe or with ``NO_COLOR``.

    With `quiet`, sentences and progress go to standard error, so that standard output holds only the result.
    """

    def __init__(self, *, quiet: bool = False, out: IO[str] | None = None) -> None:
        from rich.console import Console

        stream = out or (sys.stderr if quiet else sys.stdout)
        self.interactive = stream.isatty() and os.environ.get("TERM") != "dumb"
        # A pipe has no width; a table must not be cut there.
        width = None if self.interactive else 10_000
        self._console = Console(
            file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def say(self, text: str = "", style: str | None = None) -> None:
        """Writes a sentence or a few."""
        self._console.print(text, style=style if self.interactive else None)

    def verdict(self, text: str, good: bool | None) -> None:
        """Writes the answer, in the colour of what it means."""
        style = {True: "bold green", False: "bold red", None: "bold"}[good]
        self.say(text, style)

    def table(self, table: Table) -> None:
        """Writes a table; the marked row is bold, and ends with an arrow in plain text."""
        if not self.interactive:
            lines = text_table([table.header, *table.rows], table.words, table.marked)
            for line in [*([table.title] if table.title else []), *lines]:
                self.say(line)
            return
        from rich import box
        from rich.table import Table as RichTable

        drawn = RichTable(box=box.SIMPLE_HEAD, title=table.title or None, title_justify="left")
        for i, name in enumerate(table.header):
            drawn.add_column(name, justify="left" if i in table.words else "right")
        for i, row in enumerate(table.rows):
            drawn.add_row(*row, style="bold green" if i == table.marked else None)
        self._console.print(drawn)

    def facts(self, facts: tuple[Fact, ...]) -> None:
        """Writes numbers that matter, one a line."""
        # At least so wide, so that facts that come one after another stand in the same columns.
        width = max([14, *(len(fact.label) for fact in facts)])
        values = max([8, *(len(fact.value) for fact in facts)])
        for fact in facts:
            note = f"  {fact.note}" if fact.note else ""
            self.say(f"  {fact.label:<{width}}  {fact.value:>{values}}{note}".rstrip())

    @contextmanager
    def busy(self, title: str) -> Generator[None]:
        """Shows that something goes on whose length is unknown; nothing in a pipe."""
        if not self.interactive:
            yield
            return
        with self._console.status(title):
            yield

    @contextmanager
    def progress(self, title: str, total: int) -> Generator[Progress]:
        """Shows how far a long work is: a bar on a terminal, a line every tenth of it elsewhere."""
        if not self.interactive:
            every = max(total // 10, 1)

            def line(done: int, words: str) -> None:
                if done % every == 0 or done == total:
                    self.say(f"{title} {done}/{total}  {words}".rstrip())

            yield line
            return
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns: tuple[Any, ...] = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
        )
        with RichProgress(*columns, console=self._console) as bar:
            task = bar.add_task(title, total=total, words="")
            yield lambda done, words: bar.update(task, completed=done, words=words)
