"""From a target to a problem, and what is said where that cannot be."""

import textwrap

import pytest

from microbatch.cli import Problem
from microbatch.cli._errors import UsageError
from microbatch.cli._target import framework_of, load_file, load_problem, member


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="targets.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write


GOOD = """
    import numpy as np
    from microbatch.cli import Problem

    def problem():
        return Problem(np.mean, (np.ones(4),), 0, "MEAN", framework="jax")

    ready = problem()
"""


def test_a_function_in_a_file(write):
    problem = load_problem(write(GOOD) + ":problem")
    assert problem.argnums == 0 and framework_of(problem) == "jax"


def test_a_problem_itself(write):
    assert load_problem(write(GOOD) + ":ready").accumulator == "MEAN"


def test_a_module_in_the_current_folder(write):
    write(GOOD, "targets_of_mine.py")
    assert load_problem("targets_of_mine:problem").argnums == 0


def test_a_file_imports_its_neighbours(write):
    write("SIZE = 7", "neighbour_of_target.py")
    path = write("from neighbour_of_target import SIZE\ndef size(): return SIZE")
    assert member(load_file(path), "size", path)() == 7


def test_another_class_with_the_four_attributes(write):
    path = write("""
        import types
        def problem():
            return types.SimpleNamespace(fun=max, args=[1], argnums=0, accumulator="SUM")
    """)
    problem = load_problem(f"{path}:problem")
    assert isinstance(problem, Problem) and problem.args == (1,)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "Write file.py:name"),
        (":name", "Write file.py:name"),
        ("file.py:", "Write file.py:name"),
        ("missing.py:name", "there is no file 'missing.py'"),
        ("no_such_module_here:name", "no_such_module_here.py:name"),
        ("no_such_package.module:name", "there is no module 'no_such_package.module'"),
        ("targets.py:absent", "It defines problem."),
        ("targets.txt:problem", "there is no module 'targets.txt'"),
    ],
)
def test_targets_that_cannot_be(write, target, said):
    write(GOOD)
    with pytest.raises(UsageError) as raised:
        load_problem(target)
    assert said in str(raised.value)


def test_a_function_that_returns_something_else(write):
    path = write("def problem(): return 3")
    with pytest.raises(UsageError, match="gave a int without fun, args, argnums, accumulator"):
        load_problem(f"{path}:problem")


def test_a_missing_import_inside_a_module_is_the_users(write):
    write("import surely_not_installed", "broken_module.py")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_problem("broken_module:problem")


def test_the_framework_of_arrays():
    import jax
    import jax.numpy as jnp
    import torch

    def of(*args, framework=None):
        return framework_of(Problem(max, args, 0, "SUM", framework=framework))

    assert of({"w": [jnp.ones(2)]}) == "jax"
    assert of(jax.ShapeDtypeStruct((2,), "float32")) == "jax"
    assert of((torch.ones(2),)) == "torch"
    assert of(torch.nn.Linear(1, 1)) == "torch"
    assert of(3.0, framework="torch") == "torch"
    with pytest.raises(UsageError, match='framework="jax"'):
        of(3.0)
    with pytest.raises(UsageError, match="Use 'jax' or 'torch'"):
        of(3.0, framework="numpy")
