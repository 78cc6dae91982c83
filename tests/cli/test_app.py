"""The commands as a person uses them: what they print, what they write and how they exit."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from microbatch._memory import format_bytes
from microbatch.cli._app import app


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return CliRunner().invoke(app, list(arguments), prog_name="microbatch")

    return run


@pytest.fixture
def target(tmp_path):
    def target(text, name="work.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return f"{name}:problem"

    return target


JAX = """
    import jax, jax.numpy as jnp
    from microbatch import AccumulationType
    from microbatch.cli import Problem

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def problem():
        w, x = jnp.ones((64, 64)), jnp.ones((512, 64))
        return Problem(jax.value_and_grad(loss), (w, x), 1, AccumulationType.MEAN)
"""
TORCH = """
    import torch
    from microbatch import AccumulationType
    from microbatch.cli import Problem

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def loss(x):
        return model(x).square().mean()

    def problem():
        return Problem(loss, (torch.ones(512, 64),), 0, AccumulationType.MEAN)
"""
MIXING = """
    import jax.numpy as jnp
    from microbatch import AccumulationType
    from microbatch.cli import Problem

    def loss(x):
        return jnp.mean((x - x.mean()) ** 2)

    def problem():
        return Problem(loss, (jnp.arange(16.0),), 0, AccumulationType.MEAN)
"""


class TestUsage:
    def test_help(self, run):
        for arguments in (["--help"], ["-h"], []):
            text = run(*arguments).output
            assert all(name in text for name in ("plan", "verify", "demo", "lesson"))
        assert run("--help").exit_code == 0

    def test_version(self, run):
        assert run("--version").stdout.startswith("microbatch 0.")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["fly"], "No such command 'fly'"),
            (["plan", "--fast"], "No such option: --fast"),
            (["plan", "--framework", "numpy"], "Use jax or torch"),
            (["plan", "missing.py:name"], "there is no file 'missing.py'"),
            (["demo", "--steps", "0"], "'--steps'"),
            (["demo", "--seed", "x"], "'--seed'"),
            (["demo", "--memory", "much"], "--memory: memory_budget='much' cannot be read"),
            (["demo", "--memory", "0MiB"], "not positive"),
            (["lesson", "flying"], "Choose scan, mean, torch"),
            (["lesson"], "Missing argument 'scan|mean|torch'"),
            (["lesson", "mean", "--check", "missing.py"], "there is no file 'missing.py'"),
        ],
    )
    def test_wrong_usage_is_said_and_exits_with_2(self, run, arguments, said):
        result = run(*arguments)
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.split())
        assert result.stdout == ""

    @pytest.mark.parametrize(("lesson", "framework"), [("scan", "jax"), ("torch", "torch")])
    def test_a_missing_framework_is_said_with_what_installs_it(
        self, run, monkeypatch, lesson, framework
    ):
        monkeypatch.setitem(sys.modules, framework, None)
        monkeypatch.delitem(sys.modules, f"microbatch.lessons.{lesson}", raising=False)
        result = run("lesson", lesson)
        assert result.exit_code == 2
        assert f'pip install "microbatch[{framework}]"' in result.stderr


class TestPlan:
    @pytest.mark.parametrize(
        ("source", "memory"), [(JAX, "260KiB"), (TORCH, "350KiB")], ids=["jax", "torch"]
    )
    def test_a_size_that_fits(self, run, target, source, memory):
        result = run("plan", target(source), "--memory", memory)
        assert result.exit_code == 0, result.stderr
        assert "  <-" in result.stdout and "rows a microbatch" in result.stdout
        assert re.search(r"^  Needs +[\d.]+ KiB .*\n  Margin +[\d.]+ K?i?B ", result.stdout, re.M)
        assert "\x1b" not in result.stdout

    @pytest.mark.parametrize("source", [JAX, TORCH], ids=["jax", "torch"])
    def test_nothing_fits(self, run, target, source):
        result = run("plan", target(source), "--memory", "1000")
        assert result.exit_code == 1
        assert "Nothing fits" in result.stdout

    def test_json_alone_on_standard_output(self, run, target, tmp_path):
        result = run("plan", target(JAX), "--memory", "1MiB", "--json", "--html", "page.html")
        plan = json.loads(result.stdout)
        assert plan["batch_size"] == 512 and plan["budget_bytes"] == 2**20
        chosen = [c["bytes"] for c in plan["candidates"] if c["microbatch_size"] == 512]
        assert chosen == [plan["predicted_bytes"] + plan["margin_bytes"]]
        assert "page.html" in result.stderr
        page = (tmp_path / "page.html").read_text()
        assert "work.py:problem" in page and page.count("<svg") == 2
        assert f'<dt>Margin</dt><dd class="value">{format_bytes(plan["margin_bytes"])}</dd>' in page

    def test_a_figure(self, run, target, tmp_path):
        assert run("plan", target(JAX), "--memory", "1MiB", "--plot", "figure.png").exit_code == 0
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")

    def test_a_file_that_cannot_be_written(self, run, target):
        for option, name in (("--html", "no/such/page.html"), ("--plot", "figure.unknown")):
            result = run("plan", target(JAX), "--memory", "1MiB", option, name)
            assert result.exit_code == 2 and name in result.stderr

    def test_time(self, run, target):
        result = run("plan", target(JAX), "--memory", "4MiB", "--time", "--json")
        timed = [c["seconds"] for c in json.loads(result.stdout)["candidates"] if c["seconds"]]
        assert timed and all(seconds > 0 for seconds in timed)


class TestVerify:
    @pytest.mark.parametrize("source", [JAX, TORCH], ids=["jax", "torch"])
    def test_the_same(self, run, target, source):
        result = run("verify", target(source), "--microbatch-size", "128")
        assert result.exit_code == 0, result.stdout + result.stderr

    def test_different_and_why(self, run, target, tmp_path):
        result = run("verify", target(MIXING), "--html", "page.html", "--json")
        assert result.exit_code == 1, result.stderr
        assert json.loads(result.stdout)["verdict"] == "different"
        page = (tmp_path / "page.html").read_text()
        assert "rows" in page and 'class="bad"' in page


class TestErrorsOfTheUser:
    def test_a_function_that_fails_inside_a_framework(self, run, target):
        source = JAX.replace("return jnp.mean(", "return jnp.ones(3) @ jnp.mean(")
        result = run("plan", target(source), "--memory", "1MiB")
        assert result.exit_code == 2
        assert "work.py" in result.stderr and "in loss" in result.stderr
        assert "site-packages" not in result.stderr and "_planning.py" not in result.stderr
        assert result.stderr.rstrip().splitlines()[-1].startswith(("TypeError", "ValueError"))

    def test_a_file_that_raises_when_it_is_imported(self, run, target):
        result = run("plan", target("def f():\n    raise KeyError('mine')\nf()"))
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == "KeyError: 'mine'"
        assert result.stderr.count("File ") == 2

    def test_a_file_that_is_not_python(self, run, target):
        result = run("plan", target("def problem(:"))
        assert result.exit_code == 2 and "SyntaxError" in result.stderr

    def test_a_missing_import(self, run, target):
        result = run("plan", target("import surely_not_installed"))
        assert result.exit_code == 2 and "surely_not_installed" in result.stderr


class TestLesson:
    def test_shown(self, run):
        result = run("lesson", "scan")
        assert result.exit_code == 0
        assert "total" in result.stdout and "--check" in result.stdout

    def test_a_right_solution(self, run, tmp_path):
        (tmp_path / "mine.py").write_text(
            "import numpy as np\n"
            "def gradient_accumulation(grads, steps):\n"
            "    if not np.issubdtype(grads[0].dtype, np.inexact):\n"
            "        raise TypeError(grads[0].dtype)\n"
            "    return sum(grads[:steps]) / steps\n"
        )
        result = run("lesson", "mean", "--check", "mine.py")
        assert result.exit_code == 0, result.stdout
        assert "6 of 6 pass." in result.stdout

    def test_the_next_hint_comes_each_time_and_the_first_after_a_pass(self, run, tmp_path):
        wrong = "def gradient_accumulation(grads, steps):\n    return sum(grads[:steps])\n"
        right = wrong.replace("steps])", "steps]) / steps")

        def hint(text):
            (tmp_path / "mine.py").write_text(text)
            result = run("lesson", "mean", "--check", "mine.py")
            assert result.exit_code == 1
            lines = result.stdout.splitlines()
            at = next(i for i, line in enumerate(lines) if "the mean against the sum" in line)
            return lines[at + 3].strip() if "hint" in lines[at + 3] else None

        hints = [hint(wrong) for _ in range(4)]
        assert len(set(hints)) == 3 and hints[2] == hints[3]
        assert hint(right) is None
        assert hint(wrong) == hints[0]

    def test_a_file_without_the_function(self, run, tmp_path):
        (tmp_path / "mine.py").write_text("def accumulate(): ...")
        result = run("lesson", "mean", "--check", "mine.py")
        assert result.exit_code == 2
        assert "has no 'gradient_accumulation'" in result.stderr
        assert "It defines accumulate." in result.stderr


def started(arguments, folder, **keywords):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", "from microbatch.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        # Tests that run in the background inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **keywords,
    )


class TestDemo:
    @pytest.mark.parametrize("framework", ["jax", "torch"])
    def test_few_steps(self, run, framework, tmp_path):
        result = run(
            "demo", "--framework", framework, "--steps", "3", "--json", "--out", "out.html"
        )
        assert result.exit_code == 0, result.stderr
        demo = json.loads(result.stdout)
        assert demo["plan"]["predicted_bytes"] <= 32 * 2**20 < demo["whole_bytes"]
        assert demo["microbatched_error"] <= 2 * demo["whole_error"]
        # The first of the large steps may be one too far.
        assert len(demo["losses"]) == 3 and demo["losses"][-1] < max(demo["losses"])
        assert demo["test_accuracy"] > 0.1
        assert "out.html" in result.stderr
        assert (tmp_path / "out.html").read_text().count("<svg") == 6

    def test_without_a_framework_given_it_takes_the_one_that_is_installed(self, run, monkeypatch):
        monkeypatch.setattr("microbatch.cli._demo.installed_framework", lambda: "torch")
        result = run("demo", "--memory", "1KiB", "--json")
        assert json.loads(result.stdout)["framework"] == "torch"

    def test_a_budget_that_nothing_fits(self, run, tmp_path):
        result = run("demo", "--framework", "torch", "--memory", "100KiB")
        assert result.exit_code == 1 and "Nothing fits" in result.stdout
        assert not (tmp_path / "report.html").exists()

    def test_a_budget_that_nothing_fits_as_json(self, run, tmp_path):
        result = run("demo", "--framework", "torch", "--memory", "1KiB", "--json")
        demo = json.loads(result.stdout)
        assert result.exit_code == 1 and demo["plan"]["microbatch_size"] is None
        assert demo["losses"] == [] and not (tmp_path / "report.html").exists()

    def test_ctrl_c_reports_what_was_reached(self, tmp_path):
        demo = started(["demo", "--framework", "torch", "--steps", "5000"], tmp_path)
        for line in demo.stdout:
            if "Seconds a step" in line:
                break
        try:
            # A few steps into the training.
            with pytest.raises(subprocess.TimeoutExpired):
                demo.wait(timeout=3)
            demo.send_signal(signal.SIGINT)
            out, err = demo.communicate(timeout=120)
        finally:
            demo.kill()
        assert demo.returncode == 130, err
        assert "Interrupted after" in out and "of 5000 steps" in out
        assert "Traceback" not in err
        assert "Interrupted after" in (tmp_path / "report.html").read_text()


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    lesson = started(["lesson", "scan"], tmp_path)
    lesson.stdout.readline()
    lesson.stdout.close()
    assert "Traceback" not in lesson.stderr.read()
    lesson.stderr.close()
    lesson.wait()
