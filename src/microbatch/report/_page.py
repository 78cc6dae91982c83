"""One self-contained HTML page: no script, no network, readable on a phone, in the dark and on paper."""

import html
from datetime import datetime

from microbatch.report._charts import NARROW, WIDE, svg
from microbatch.report._content import Chart, Fact, Page, Table

# Nothing may be loaded and nothing may run, whatever a user's string says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  --paper: #fffdf9; --sheet: #f6f2ea; --ink: #1c1917; --muted: #6b655e; --grid: #e3ded6;
  --first: #1d5fbf; --second: #a84b06; --good: #147a3b; --bad: #b42318;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #171513; --sheet: #211e1b; --ink: #f2ede6; --muted: #a8a097; --grid: #3a3530;
    --first: #7cb1ff; --second: #f2a65a; --good: #5fd38a; --bad: #ff8a7a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 47rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.55 var(--font);
  overflow-wrap: anywhere;
}
header p { margin: 0; color: var(--muted); font-size: .9rem; }
h1 { margin: .5rem 0 1.5rem; font-size: 1.55rem; line-height: 1.3; font-weight: 650; text-wrap: pretty; }
h1::before { content: ""; display: block; width: 2.5rem; height: .3rem; margin-bottom: .9rem;
  border-radius: 1rem; background: var(--muted); }
h1.good::before { background: var(--good); }
h1.bad::before { background: var(--bad); }
h2 { margin: 2.5rem 0 .25rem; font-size: 1.05rem; font-weight: 650; }
dl.facts { display: grid; grid-template-columns: repeat(var(--columns), 1fr); gap: .75rem; margin: 0 0 1.5rem; }
dl.facts div { padding: .8rem 1rem; background: var(--sheet); border-radius: .6rem; display: flex; flex-direction: column; }
dl.facts dt { color: var(--muted); font-size: .82rem; }
dl.facts dd { margin: .1rem 0 0; }
dl.facts .value { font-size: 1.35rem; font-weight: 650; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
dl.facts .note { color: var(--muted); font-size: .82rem; line-height: 1.35; }
dl.pairs { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: .5rem 0 0; font-size: .9rem; }
dl.pairs dt { color: var(--muted); }
dl.pairs dd { margin: 0; }
figure { margin: 0; }
figcaption { color: var(--muted); font-size: .9rem; margin-bottom: .5rem; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure .narrow { display: none; }
@media (max-width: 34rem) {
  body { padding-top: 1.5rem; }
  h1 { font-size: 1.3rem; }
  figure .wide { display: none; }
  figure .narrow { display: block; }
  dl.facts { --columns: 2 !important; }
  dl.facts div { padding: .6rem .75rem; }
  dl.facts .value { font-size: 1.1rem; }
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; font-size: .92rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); vertical-align: top; }
th:first-child, td:first-child { padding-left: .5rem; }
th { color: var(--muted); font-weight: 500; }
th.words, td.words { text-align: left; white-space: normal; }
table.dense { font-size: .8rem; }
table.dense th, table.dense td { padding: .3rem .4rem; }
tr.marked td { background: var(--sheet); font-weight: 650; color: var(--good); }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--grid); }
@media print {
  :root {
    --paper: #fff; --sheet: #f4f4f4; --ink: #000; --muted: #444; --grid: #ccc;
    --first: #1d5fbf; --second: #a84b06; --good: #147a3b; --bad: #b42318;
  }
  body { padding: 0; max-width: none; font-size: 10.5pt; }
  h2 { break-after: avoid; }
  figure, dl.facts div, tr, footer { break-inside: avoid; }
  figure .wide { display: block; max-width: 15cm; }
  figure .narrow { display: none; }
}
"""


def render(page: Page, when: datetime | None = None) -> str:
    """The page as one HTML document. Every string of `page` is shown as text, whatever it contains.

    >>> text = render(Page(command="plan(<b>loss</b>)", answer="8 rows fit."))
    >>> "plan(&lt;b&gt;loss&lt;/b&gt;)" in text, "<script" in text
    (True, False)
    """
    when = when or datetime.now().astimezone()
    tone = {True: "good", False: "bad", None: ""}[page.good]
    parts = [
        f"<header><p>{_text(page.command)}</p>",
        f'<h1 class="{tone}">{_text(page.answer)}</h1></header>',
        _facts(page.facts),
        *(f"<p>{_text(note)}</p>" for note in page.notes),
        *(_chart(chart, f"figure-{i}") for i, chart in enumerate(page.charts)),
        *map(_table, page.tables),
        _pairs("What was asked", page.asked),
        "<footer>",
        _pairs("Versions and machine", page.environment),
        f"<p><small>Written by microbatch on {_text(f'{when:%Y-%m-%d %H:%M %Z}'.strip())}.</small></p></footer>",
    ]
    body = "\n".join(part for part in parts if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(page.command)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _facts(facts: tuple[Fact, ...]) -> str:
    if not facts:
        return ""
    items = []
    for fact in facts:
        note = f'<dd class="note">{_text(fact.note)}</dd>' if fact.note else ""
        items.append(
            f'<div><dt>{_text(fact.label)}</dt><dd class="value">{_text(fact.value)}</dd>{note}</div>'
        )
    # Full rows look like a table; a single box in the last one looks like a mistake.
    columns = min(len(items), 4 if len(items) % 4 == 0 or len(items) == 7 else 3)
    return f'<dl class="facts" style="--columns: {columns}">{"".join(items)}</dl>'


def _pairs(title: str, pairs: tuple[tuple[str, str], ...]) -> str:
    if not pairs:
        return ""
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in pairs)
    return f'<h2>{_text(title)}</h2><dl class="pairs">{items}</dl>'


def _chart(chart: Chart, name: str) -> str:
    wide = svg(chart.draw, chart.title, WIDE, f"{name}-wide")
    narrow = svg(chart.draw, chart.title, NARROW, f"{name}-narrow")
    return (
        f"<h2>{_text(chart.title)}</h2><figure><figcaption>{_text(chart.caption)}</figcaption>"
        f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div></figure>'
    )


def _table(table: Table) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        words = [' class="words"' if i in table.words else "" for i in range(len(row))]
        return "".join(
            f"<{tag}{word}>{_text(cell)}</{tag}>" for word, cell in zip(words, row, strict=True)
        )

    marks = [' class="marked"' if i == table.marked else "" for i in range(len(table.rows))]
    rows = "".join(
        f"<tr{mark}>{cells('td', row)}</tr>" for mark, row in zip(marks, table.rows, strict=True)
    )
    title = f"<h2>{_text(table.title)}</h2>" if table.title else ""
    dense = ' class="dense"' if len(table.header) > 6 else ""
    return (
        f'{title}<div class="scroll"><table{dense}><thead><tr>{cells("th", table.header)}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
