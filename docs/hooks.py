"""What the site needs beyond its pages: measurements, the notebook as a page, and a check that nothing public is missing."""

import html
import importlib
import json
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PUBLIC = (
    "microbatch",
    "microbatch.jax",
    "microbatch.torch",
    "microbatch.numpy",
)
NOT_MEASURED = "# Measured\n\nNothing yet: `make bench BENCH_ARGS=--save` writes `benchmarks/RESULTS.md`, which is shown here.\n"


def on_files(files, config):
    """Adds the pages that are made from files elsewhere."""
    results = ROOT / "benchmarks" / "RESULTS.md"
    text = results.read_text() if results.exists() else NOT_MEASURED
    files.append(File.generated(config, "measured.md", content=text))
    for figure in (results.with_name(name) for name in ("results.svg", "growth.svg")):
        if figure.exists():
            files.append(File.generated(config, figure.name, abs_src_path=str(figure)))
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())
    files.append(File.generated(config, "notebook.md", content=notebook_page(notebook)))
    return files


def notebook_page(notebook):
    """A notebook as Markdown: text as it is, code in blocks, what it shows below."""
    parts = ["[Download this notebook](notebook.ipynb){ download }"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [shown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def shown(output):
    """One output of a cell: the richest form that a page can show."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    joined = {kind: "".join(value) for kind, value in data.items()}
    if "image/png" in joined:
        picture = joined["image/png"].replace("\n", "")
        return f'<img alt="figure" src="data:image/png;base64,{picture}">'
    if "text/html" in joined:
        return f'<div class="output">{joined["text/html"]}</div>'
    return f'<pre class="output">{html.escape(joined["text/plain"])}</pre>'


def on_post_build(config):
    """Fails where a public name is on no page: it has no docstring, or the page of its module does not list it."""
    pages = "".join(
        path.read_text() for path in Path(config.site_dir, "api").rglob("*.html")
    )
    missing = [
        f"{place}.{name}"
        for place in PUBLIC
        for name in importlib.import_module(place).__all__
        if f'id="{place}.{name}"' not in pages and not is_of_the_core(place, name)
    ]
    if missing:
        raise PluginError(f"Not documented in docs/api: {', '.join(missing)}.")


def is_of_the_core(place, name):
    """Whether a front only passes on what the page of the core documents."""
    core = importlib.import_module("microbatch")
    value = getattr(importlib.import_module(place), name)
    return place != "microbatch" and getattr(core, name, None) is value
