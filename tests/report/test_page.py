"""The page: every string is text, nothing is loaded, and a real browser shows it without complaint."""

import html
import os
import re
import shutil
import subprocess
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from microbatch.report import Chart, Fact, Page, Table, render
from microbatch.report._charts import (
    LIGHT,
    accuracy_by_step,
    bars_by_name,
    loss_by_step,
    memory_by_size,
    save,
    seconds_by_size,
)

HOSTILE = "<script>document.title='broken'</script><img src=x onerror=alert(1)>\"'&$x_1^2$"
WHEN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def page_of(text):
    """A page in which `text` stands everywhere that a user's string can stand."""
    charts = (
        Chart(text, text, memory_by_size([(1, 2**20), (64, 2**25)], 2**24, 1, 64)),
        Chart(
            text,
            text,
            bars_by_name([(text, 3.0, True), ("value", 0.0, False)], 1.0, "units of rounding"),
        ),
    )
    table = Table(text, (text, "n"), ((text, "1"),), words=frozenset({0}), marked=0)
    return Page(
        command=text,
        answer=text,
        good=True,
        asked=((text, text),),
        facts=(Fact(text, text, text),),
        charts=charts,
        tables=(table,),
        notes=(text,),
        environment=((text, text),),
    )


class Elements(HTMLParser):
    """Counts tags, collects attributes and checks that what is opened is closed."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def elements(text):
    parser = Elements()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_a_hostile_string_adds_no_element():
    tame, hostile = (
        elements(render(page_of("tame"), WHEN)),
        elements(render(page_of(HOSTILE), WHEN)),
    )
    assert sorted(set(hostile.tags)) == sorted(set(tame.tags))
    assert "script" not in hostile.tags and "img" not in hostile.tags
    assert not [name for name, _ in hostile.attributes if name.startswith("on")]
    assert html.escape(HOSTILE) in render(page_of(HOSTILE), WHEN)


def test_this_check_can_fail():
    assert "script" in elements(render(page_of("tame"), WHEN).replace("tame", HOSTILE)).tags


def test_nothing_is_loaded_from_anywhere():
    text = render(page_of("tame"), WHEN)
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "http" not in without_names.replace("http-equiv", "")
    assert not re.search(r"url\((?!#)", without_names)
    assert "@import" not in text


def test_figures_take_their_colours_from_the_page():
    text = render(page_of("tame"), WHEN)
    figures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    # Each is drawn for a wide and for a narrow screen.
    assert len(figures) == 4
    for figure in figures:
        colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", figure)) - {"#000000"}
        assert colours == set()
        assert "var(--ink)" in figure or "var(--first)" in figure


def test_ids_of_figures_do_not_collide():
    text = render(page_of("tame"), WHEN)
    clips = re.findall(r'<clipPath id="([^"]+)"', text)
    assert len(clips) == len(set(clips)) > 0


def test_the_same_page_twice_is_the_same_text():
    assert render(page_of("tame"), WHEN) == render(page_of("tame"), WHEN)


@pytest.mark.parametrize(
    "draw",
    [
        memory_by_size([(7, 100)], None, None, 7),
        memory_by_size([(1, 10), (3, 2**40)], 5, None, 3),
        memory_by_size([(2**i, 2**i * 1000) for i in range(20)], 2**40, 2**19, 2**19),
        seconds_by_size([(1, 0.5)], 1),
        loss_by_step([2.0]),
        loss_by_step([2.0, float("nan"), 1.0]),
        accuracy_by_step([(1, 0.1)], 0.97),
        bars_by_name([("a", 0.0, False)], 1.0, "units"),
        bars_by_name([("a", float("inf"), True), ("b", 1.0, False)], 1.0, "units"),
    ],
)
def test_edges_can_be_drawn(draw, tmp_path):
    save(draw, str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert "</svg>" in render(Page("c", "a", charts=(Chart("t", "c", draw),)), WHEN)


def test_contrast_of_text_in_figures():
    """Ink, notes and names against paper: 4.5 to 1, as accessible text needs."""
    for name in ("ink", "muted", "first", "second", "good", "bad"):
        assert contrast(getattr(LIGHT, name), LIGHT.paper) >= 4.5, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_text_on_the_page(scheme):
    text = render(Page("c", "a"), WHEN)
    blocks = re.findall(r":root \{(.*?)\}", text, flags=re.DOTALL)
    values = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", blocks[0 if scheme == "light" else 1]))
    for name in ("ink", "muted", "first", "second", "good", "bad"):
        for ground in ("paper", "sheet"):
            assert contrast(values[name], values[ground]) >= 4.5, (scheme, name, ground)


def contrast(a, b):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"
)


def browse(text, folder):
    """What a browser makes of a page, and what it complains about."""
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=390,900",
            "--dump-dom",
            f"file://{file}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_chromium
def test_a_browser_shows_it_without_complaint(tmp_path):
    dom, complaints = browse(render(page_of(HOSTILE), WHEN), tmp_path)
    assert complaints == []
    shown = elements(dom)
    assert shown.tags.count("svg") == 4
    assert "script" not in shown.tags and "img" not in shown.tags
    # The hostile name stands in the title letter by letter, and did not run.
    title = re.search(r"<title>(.*?)</title>", dom, flags=re.DOTALL)
    assert html.unescape(title[1]) == HOSTILE


@needs_chromium
def test_the_browser_check_can_fail(tmp_path):
    script = "<script>console.error(1)</script></body>"
    _, complaints = browse(render(page_of("tame"), WHEN).replace("</body>", script), tmp_path)
    # The page's own policy stops the script, and the console says so.
    assert "Content Security Policy" in "".join(complaints)
