"""The notebook runs from a fresh kernel, and what is kept of its last run names no machine."""

import getpass
import json
import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat

from tests.docs.blocks import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def shown(cells):
    """The kinds of output of each cell of code."""
    return [
        sorted({kind for output in cell["outputs"] for kind in output.get("data", {"stream": ""})})
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def test_it_runs_and_shows_what_is_kept(monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # a notebook draws into itself
    monkeypatch.setenv("XLA_FLAGS", "")
    kept = json.loads(NOTEBOOK.read_text())["cells"]
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert shown(notebook.cells) == shown(kept)
    said = "".join(o.text for c in notebook.cells for o in c.get("outputs", []) if "text" in o)
    assert float(re.search(r"([\d.]+)% of 360 test images right", said)[1]) > 90


def test_it_is_committed_with_tables_and_figures():
    kinds = shown(json.loads(NOTEBOOK.read_text())["cells"])
    assert sum("text/html" in cell for cell in kinds) == 2
    assert sum("image/png" in cell for cell in kinds) == 2


def test_no_machine_is_named():
    text = NOTEBOOK.read_text()
    for place in (str(ROOT), str(Path.home()) + "/", os.path.realpath(sys.prefix)):
        assert place not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text
    assert not re.search(r"(?<![\w/])/(home|Users|tmp|var)/", text)
