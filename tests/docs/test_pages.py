"""What the pages show runs as it stands, prints what it says, and leads to pages that exist."""

import re

import pytest

from tests.docs.blocks import ROOT, Block, alike, blocks, outputs, pages

NAMES = [str(page.relative_to(ROOT)) for page in pages()]
# Pages that docs/hooks.py makes; the site is built strictly, so their links are checked there.
GENERATED = {"measured.md", "notebook.md"}
RUNS = [name for name in NAMES if "```python" in (ROOT / name).read_text()]


def run(page, name, capsys):
    """Runs the Python blocks of a page in order: those outside of tabs share their names, and each tab adds its own."""
    spaces, expected = {}, outputs(page)
    for block in blocks(page):
        if block.language != "python":
            continue
        space = spaces.setdefault(block.tab, {"__name__": "__page__"})
        space.update((k, v) for k, v in spaces.get("", {}).items() if k not in space)
        # The padding makes line numbers in a traceback those of the page.
        source = "\n" * block.line + block.text
        exec(compile(source, name, "exec"), space)
        printed = capsys.readouterr().out
        check(block, printed, expected.get(block.line), name)


def check(block: Block, printed: str, text: str | None, name: str):
    """Each promise is a line that is printed, perhaps with a remark; a text block is all of it (or its end)."""
    lines = printed.splitlines()
    for promise in block.promised:
        assert any(said(line, promise) for line in lines), (
            f"{name}:{block.line} promises {promise!r}, and prints {lines}"
        )
    if text is not None:
        assert alike(printed).endswith(alike(text)), f"{name}:{block.line} prints\n{printed}"


def said(line, promise):
    """Whether the printed line is the promise, up to a remark after a comma, a semicolon or a colon."""
    rest = promise.removeprefix(line.strip())
    return bool(line.strip()) and rest != promise and (not rest or rest[0] in ",;:")


@pytest.mark.parametrize("name", RUNS)
def test_the_code_of_a_page_runs(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run((ROOT / name).read_text(), name, capsys)


@pytest.mark.parametrize("name", NAMES)
def test_languages_are_known(name):
    """A block in another language is never run, so a misspelled one would hide; whole files are those of examples."""
    for block in blocks((ROOT / name).read_text()):
        if block.language.startswith("{"):
            assert re.fullmatch(r'--8<-- "examples/\w+\.py"\n', block.text)
        else:
            assert block.language in {"python", "sh", "text"}


@pytest.mark.parametrize("name", RUNS)
def test_promises_stand_beside_their_print(name):
    """Behind the last line of a call that goes over several lines a comment would not be compared."""
    for block in blocks((ROOT / name).read_text()):
        for line in block.text.splitlines() if block.language == "python" else ():
            assert not re.match(r"^\s*[)\]}]+  # ", line), f"{name}:{block.line} {line}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = (ROOT / name).read_text()
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page):
        found = link in GENERATED or ((ROOT / name).parent / link).exists()
        assert found, f"{name} links to {link}"


PAGE = """
```python
print(1 + 1)  # 2
```

=== "One"

    ```python
    x = 1
    print(f"{x} of 3")
    ```

    ```text
    7 of 9
    ```
"""


def test_blocks_are_found(capsys):
    first, second, third = blocks(PAGE)
    assert first == Block("python", "print(1 + 1)  # 2\n", "", 2, 4) and first.promised == ["2"]
    assert (second.tab, second.text) == ("One", 'x = 1\nprint(f"{x} of 3")\n')
    assert outputs(PAGE) == {8: third.text}
    run(PAGE, "page", capsys)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# 2", "# 3"),
        ("# 2", "# 22"),
        ("7 of 9", "7 or 9"),
        ("x = 1", "print(y)"),
        ("1 + 1", "undefined"),
    ],
)
def test_this_check_can_fail(old, new, capsys):
    with pytest.raises((AssertionError, NameError)):
        run(PAGE.replace(old, new), "page", capsys)
