"""What a command writes: plain where nobody looks at colours, JSON alone where it was asked for."""

import io

import pytest

from microbatch.report import Fact, Screen, Table

TABLE = Table("Sizes", ("rows", "memory"), (("8", "1.0 MiB"), ("64", "8.0 MiB")), marked=1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def written(terminal):
    screen = Screen(out=terminal)
    screen.table(TABLE)
    screen.facts((Fact("Budget", "8 MiB", "given"), Fact("Needs", "1 MiB")))
    screen.verdict("It [bold]fits[/bold].", good=True)
    with screen.progress("Training", 20) as report:
        for i in range(1, 21):
            report(i, f"loss {i}")
    return terminal.getvalue()


def test_a_pipe_gets_plain_lines():
    text = written(io.StringIO())
    assert "\x1b" not in text
    assert "  64  8.0 MiB  <-\n" in text
    assert "  Budget             8 MiB  given\n  Needs              1 MiB\n" in text
    # Words in brackets are the user's and not markup.
    assert "It [bold]fits[/bold].\n" in text
    assert text.count("Training ") == 10
    assert "Training 20/20  loss 20\n" in text


def test_a_terminal_gets_colours():
    assert "\x1b[1;32m" in written(Terminal())


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = written(Terminal())
    assert "\x1b[1;32m" not in text and "\x1b[32m" not in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in written(Terminal())


def test_a_pipe_does_not_cut_long_lines():
    out = io.StringIO()
    Screen(out=out).say("word " * 500)
    assert out.getvalue().count("\n") == 1


def test_no_facts_are_no_lines():
    out = io.StringIO()
    Screen(out=out).facts(())
    assert out.getvalue() == ""
