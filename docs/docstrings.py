"""Docstrings are written for `help()`: their loops, tables and examples become those of Markdown."""

import re
from textwrap import dedent

import griffe

_RULE = re.compile(r"^=+(  +=+)+$")


class Markdown(griffe.Extension):
    """Rewrites every docstring before its sections are parsed."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text):
    """Blocks after ``::``, examples behind ``>>>`` and tables between rules of ``=``, in Markdown."""
    lines, out = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        if line.startswith(">>> "):
            body = [line, *_taken(lines, lambda line: line.strip())]
            out += ["```pycon", *body, "```"]
        elif _RULE.match(line):
            out += _table(line, _taken_to_rule(lines))
        elif line.rstrip().endswith("::"):
            body = _taken(lines, lambda line: not line or line.startswith("    "))
            block = dedent("\n".join(body)).strip("\n")
            out += [line.rstrip()[:-1], "", "```python", block, "```", ""]
        else:
            out.append(line.replace("``", "`"))
    return "\n".join(out)


def _taken(lines, belongs):
    """Removes and returns the first lines that belong."""
    body = []
    while lines and belongs(lines[0]):
        body.append(lines.pop(0))
    return body


def _taken_to_rule(lines):
    """Removes and returns a table's lines: heads, a rule, rows, and the last rule."""
    head = _taken(lines, lambda line: not _RULE.match(line))
    lines.pop(0)
    body = _taken(lines, lambda line: not _RULE.match(line))
    lines.pop(0)
    return head, body


def _table(rule, parts):
    starts = [m.start() for m in re.finditer("=+", rule)]
    spans = list(zip(starts, [*starts[1:], None]))
    cut = lambda line: [line[a:b].strip().replace("``", "`") for a, b in spans]
    (head,), rows = map(cut, parts[0]), []
    for cells in map(cut, parts[1]):
        if cells[0]:
            rows.append(cells)
        else:  # the row above goes on
            rows[-1] = [
                f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells)
            ]
    render = lambda cells: "| " + " | ".join(cells) + " |"
    return [render(head), render(["---"] * len(head)), *map(render, rows), ""]
