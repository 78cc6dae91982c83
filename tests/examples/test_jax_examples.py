"""Each JAX example runs as it is and agrees with the whole batch, and is short enough to be read."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("jax_*.py"))


def difference(printed):
    """The number at the end of the line that compares."""
    (line,) = (line for line in printed.splitlines() if line.startswith("largest difference from"))
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_agrees_with_the_whole_batch(name, capsys):
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert difference(capsys.readouterr().out) < 2e-6


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_short_and_listed(name):
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 80
    assert f"[{name}.py]({name}.py)" in (FOLDER / "README.md").read_text()


def test_this_check_can_fail(capsys):
    print("largest difference from the whole batch: 3.1e-02")
    assert difference(capsys.readouterr().out) == 3.1e-2


def test_C18_a_module_that_changes_inside_is_told_the_recipe():
    from flax import nnx

    from microbatch import MicrobatchError
    from microbatch.jax import AccumulationType, accumulate, microbatch

    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    x, mean = jnp.ones((8, 3)), AccumulationType.MEAN
    recipe = r"nnx.split\(model, nnx.Param, ...\)"
    with pytest.raises(MicrobatchError, match=recipe) as caught:
        microbatch(loss, 1, 4, mean)(model, x)
    assert "changes the state of args[0], a BatchNorm" in str(caught.value)
    with pytest.raises(MicrobatchError, match=recipe):
        jax.grad(lambda m: microbatch(nnx.jit(loss), 1, 4, mean)(m, x))(model)
    with pytest.raises(MicrobatchError, match=recipe):
        accumulate(loss, mean)(model, microbatches=[x, x])
    with pytest.raises(Exception, match="different trace level") as caught:
        microbatch(lambda x: loss(model, x), 0, 4, mean)(x)
    assert any("nnx.split(model, nnx.Param, ...)" in note for note in caught.value.__notes__)

    model.eval()
    assert float(microbatch(loss, 1, 4, mean)(model, x)) == pytest.approx(1, abs=1e-4)
