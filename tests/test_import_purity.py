"""Importing the library loads no framework, is quick, and a front loads only its own; each in a fresh process."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

FRAMEWORKS = ("jax", "jaxlib", "torch", "optax", "flax", "matplotlib", "rich", "typer", "sklearn")
LIGHT = (
    "microbatch",
    "microbatch.cli",
    "microbatch.lessons",
    "microbatch._planning",
    "microbatch._verification",
)


def loaded_by(statement: str, watched: tuple[str, ...] = FRAMEWORKS) -> set[str]:
    """Which of the watched packages a fresh Python has loaded after `statement`."""
    program = f"""
        {statement}
        import sys
        print(*[name for name in {watched!r} if name in sys.modules])
    """
    return set(run(program).stdout.split())


def run(program: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, **kwargs
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("module", LIGHT)
def test_core_and_applications_load_no_framework(module):
    assert loaded_by(f"import {module}") == set()


def test_the_purity_test_can_fail():
    assert loaded_by("import rich") == {"rich"}
    with pytest.raises(AssertionError):
        assert loaded_by("import microbatch, matplotlib") == set()


@pytest.mark.parametrize(
    ("front", "others"),
    [("numpy", {"jax", "torch"}), ("jax", {"torch"}), ("torch", {"jax", "jaxlib"})],
)
def test_a_front_loads_no_other_framework(front, others):
    assert loaded_by(f"import microbatch.{front}") & others == set()


@pytest.mark.parametrize("front", ["numpy", "jax", "torch"])
def test_a_front_imports_no_other_front(front):
    others = {"numpy", "jax", "torch"} - {front}
    folder = Path(__file__).parents[1] / "src" / "microbatch" / front
    for file in folder.rglob("*.py"):
        text = file.read_text()
        for other in others:
            assert f"microbatch.{other}" not in _imports(text), file


def test_top_level_modules_import_no_front():
    for file in (Path(__file__).parents[1] / "src" / "microbatch").glob("_*.py"):
        for front in ("numpy", "jax", "torch"):
            assert f"microbatch.{front}" not in _imports(file.read_text()), file


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_missing_framework_names_the_extra(framework):
    program = f"""
        import sys
        sys.modules[{framework!r}] = None
        try:
            import microbatch.{framework}
        except ImportError as error:
            print(error)
    """
    assert f"microbatch[{framework}]" in run(program).stdout


def test_help_loads_no_framework():
    program = """
        import sys
        from microbatch.cli import main
        sys.argv = ["microbatch", "plan", "--help"]
        try:
            main()
        except SystemExit as stop:
            assert not stop.code
        print("LOADED", *[m for m in ("jax", "torch", "numpy", "matplotlib", "sklearn") if m in sys.modules])
    """
    assert run(program).stdout.rpartition("LOADED")[2].split() == []


def test_import_costs_few_modules():
    """Deterministic stand-in for "under 50 ms": what is loaded beyond Python's own start."""
    program = """
        import sys
        before = set(sys.modules)
        import microbatch
        print(len(set(sys.modules) - before))
    """
    assert int(run(program).stdout) < 60


def _imports(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line.startswith(("import ", "from ")))
