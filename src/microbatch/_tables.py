"""Rows of words as a table, in text and in HTML; the first row is the head."""

import html
from collections.abc import Collection, Sequence


def text_table(
    cells: Sequence[Sequence[str]], words: Collection[int] = (), marked: int | None = None
) -> list[str]:
    """The lines of a table: columns in `words` aligned left, numbers right, an arrow behind the row `marked`.

    >>> text_table([["", "rows"], ["x", "8"], ["batch", "16"]], words={0}, marked=0)
    ['       rows', 'x         8  <-', 'batch    16']
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for index, row in enumerate(cells, start=-1):
        line = "  ".join(
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append((line + ("  <-" if index == marked else "")).rstrip())
    return lines


def html_table(cells: Sequence[Sequence[str]], marked: int | None = None) -> str:
    """The same as an HTML element, the row `marked` in bold.

    >>> html_table([["rows"], ["<8"]])
    '<table><tr><th>rows</th></tr><tr><td>&lt;8</td></tr></table>'
    """

    def row(index: int, words: Sequence[str]) -> str:
        tag = "th" if index < 0 else "td"
        style = ' style="font-weight: bold"' if index == marked else ""
        inside = "".join(f"<{tag}>{html.escape(word)}</{tag}>" for word in words)
        return f"<tr{style}>{inside}</tr>"

    return f"<table>{''.join(row(i, words) for i, words in enumerate(cells, start=-1))}</table>"
