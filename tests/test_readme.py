"""What the README shows, runs as it stands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = dict(
    re.findall(r"## (JAX|PyTorch|NumPy)\n\n```python\n(.*?)```", README, flags=re.DOTALL)
)


@pytest.mark.parametrize(
    ("framework", "printed"),
    [("JAX", ["1.0 -2.0"]), ("PyTorch", []), ("NumPy", ["(5000,)"])],
)
def test_examples_run(framework, printed, capsys):
    exec(compile(EXAMPLES[framework], f"README.md, {framework}", "exec"), {})
    assert capsys.readouterr().out.splitlines() == printed


@pytest.mark.parametrize("framework", ["JAX", "PyTorch", "NumPy"])
def test_examples_are_ten_lines(framework):
    lines = [line for line in EXAMPLES[framework].splitlines() if line.strip()]
    assert 5 <= len(lines) <= 10
