"""Every engine gives what `jax.vmap` gives, on every kind of model."""

import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

from microbatch.jax._factored import explain

from .models import MODELS, Model
from .running import as_double, assert_same_tree, clip, per_example, run, squared_norm

pytestmark = pytest.mark.usefixtures("quick_compile")

# Where "auto" prefers arrays to some of the factors that "factored" keeps.
CHOSEN_OTHERWISE = {
    "tiny layers",
    "transformer",
    "pooled cnn",
    "strided and dilated",
    "grouped and depthwise",
}


def clip_and_square(grad):
    clipped = clip(grad)
    return clipped, jax.tree.map(jnp.square, clipped)


@pytest.mark.parametrize("name", MODELS)
def test_engines_agree_in_float64(name):
    with jax.enable_x64(True):
        model = as_double(MODELS[name]())
        one = per_example(model, clip_and_square, squared_norm)
        weight = jnp.array([1.0, 0.0, 2.5, 1.0])
        vmap = run("vmap", model, one, weight=weight)
        assert_same_tree(run("factored", model, one, weight=weight), vmap, 1e-12)
        if name in CHOSEN_OTHERWISE:
            assert_same_tree(run("auto", model, one, weight=weight), vmap, 1e-12)


@pytest.mark.parametrize("name", ["mlp", "tied embeddings", "rnn", "pooled cnn"])
def test_engines_agree_in_float32(name):
    model = MODELS[name]()
    one = per_example(model, clip, squared_norm)
    assert_same_tree(run("auto", model, one), run("vmap", model, one), 1e-5)


SUMMED = {
    "dense": lambda p, x: x @ p,
    "convolution": lambda p, x: jax.lax.conv(x[:, None], p[:, None, None], (1, 1), "SAME"),
    "embedding": lambda p, x: p[jnp.argsort(x, axis=-1)],
}


@pytest.mark.parametrize("kind", SUMMED)
def test_cotangents_that_are_one_number_everywhere(kind):
    layer = SUMMED[kind]
    with jax.enable_x64(True):
        x, p = jnp.cos(jnp.arange(60.0)).reshape(5, 4, 3), jnp.sin(jnp.arange(12.0)).reshape(3, 4)
        model = Model(lambda p, x: jnp.sum(layer(p, x)) ** 2, p, (x,))
        one = per_example(model, clip_and_square, squared_norm)
        assert_same_tree(run("auto", model, one), run("vmap", model, one), 1e-12)


def test_ravelled_gradients_stay_factored():
    with jax.enable_x64(True):
        model = as_double(MODELS["tied embeddings"]())

        def transform(grad):
            flat, unravel = ravel_pytree(grad)
            scale = jnp.minimum(1.0, 0.1 / jnp.linalg.norm(flat))
            return unravel(flat * scale), flat

        one = per_example(model, transform, lambda g: jnp.linalg.norm(ravel_pytree(g)[0]))
        assert_same_tree(run("factored", model, one), run("vmap", model, one), 1e-12)
        assert not _forced(model, one)


def test_mixed_precision_is_as_accurate_as_float32():
    model = MODELS["mlp"]()

    def loss(p, x, y):
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x))
        return model.loss(*half, y.astype(jnp.bfloat16)).astype(jnp.float32)

    mixed = model._replace(loss=loss)
    one = per_example(mixed, clip, squared_norm)
    whole = run("vmap", mixed, one)
    assert_same_tree(run("factored", mixed, one), whole, 2e-2)


@pytest.mark.parametrize("name", ["mlp", "transformer", "stacked layers, checkpoint", "rnn"])
def test_nothing_of_these_is_made_dense(name):
    model = MODELS[name]()
    assert not _forced(model, per_example(model, clip, squared_norm))


def test_the_previous_test_can_fail():
    model = MODELS["mlp"]()
    one = per_example(model, lambda g: jax.tree.map(jnp.tanh, g), squared_norm)
    assert _forced(model, one) == {"tanh"}


def _forced(model, one):
    in_axes = (None,) + (0,) * len(model.batch)
    told = explain(
        one, (model.params, *model.batch), in_axes, aggregate=("sum", "stack"), engine="factored"
    )
    return {row.forced_by for row in told.rows if row.leaf.startswith("[0]") and row.forced_by} | {
        row.forced_by for row in told.rows if "made by" in row.leaf and row.forced_by == "tanh"
    }
