"""Rows of words as a table, in text and in HTML; the first row is the head."""

import html
from collections.abc import Sequence


def text_table(cells: Sequence[Sequence[str]], names: int = 0) -> list[str]:
    """The lines of a table; the first `names` columns are aligned left, the others right.

    >>> text_table([["", "rows"], ["x", "8"], ["batch", "16"]], names=1)
    ['       rows', 'x         8', 'batch    16']
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < names else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def html_table(cells: Sequence[Sequence[str]]) -> str:
    """The same as an HTML element.

    >>> html_table([["rows"], ["<8"]])
    '<table><tr><th>rows</th></tr><tr><td>&lt;8</td></tr></table>'
    """

    def row(tag: str, words: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(word)}</{tag}>" for word in words) + "</tr>"

    head, *body = cells
    return f"<table>{row('th', head)}{''.join(row('td', words) for words in body)}</table>"
