"""The reference is whole: every public name is on a page, and every option of the command line."""

import importlib
import re

import pytest
import typer

from microbatch.cli._app import app
from tests.docs.blocks import ROOT

PAGES = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
PLACES = ("microbatch", "microbatch.numpy", "microbatch.jax", "microbatch.torch")
SHARED = {"AccumulationType", "Accumulator", "Carry"}  # on the page of the core alone


def absent(pages, place):
    """Public names of a module that no page shows."""
    names = importlib.import_module(place).__all__
    shown = set(re.findall(rf"^::: {re.escape(place)}\.(\w+)$", pages, re.MULTILINE))
    return sorted(set(names) - shown - (SHARED if place != "microbatch" else set()))


@pytest.mark.parametrize("place", PLACES)
def test_every_public_name_is_on_a_page(place):
    assert absent(PAGES, place) == []


def test_this_check_can_fail():
    pages = PAGES.replace("::: microbatch.jax.plan\n", "").replace("::: microbatch.Carry\n", "")
    assert absent(pages, "microbatch.jax") == ["plan"]
    assert absent(pages, "microbatch") == ["Carry"]


@pytest.mark.parametrize("command", ["plan", "verify", "demo", "lesson"])
def test_every_option_is_on_the_page_of_the_command_line(command):
    page = (ROOT / "docs" / "api" / "cli.md").read_text()
    (section,) = re.findall(rf"## `microbatch {command}.*?(?=^## )", page, re.DOTALL | re.MULTILINE)
    for parameter in typer.main.get_command(app).commands[command].params:
        for option in (o for o in parameter.opts if o.startswith("--")):
            assert f"`{option}" in section, f"{command} {option}"


def test_the_differences_from_optax_are_those_that_are_tested():
    table = (ROOT / "tests" / "jax" / "optax_differences.md").read_text()
    page = (ROOT / "docs" / "guides" / "coming_from.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 5 and "\n".join(rows) in page
