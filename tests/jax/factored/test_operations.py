"""What people do to one example's gradient, in ordinary JAX: same numbers as `jax.vmap`, factored where the algebra allows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from microbatch.jax._factored import explain

from .models import MODELS, TOKENS, WIDTH, Model
from .running import as_double, assert_same_tree, clip, per_example, run, squared_norm

pytestmark = pytest.mark.usefixtures("quick_compile")

tree_map = jax.tree.map


def one_token() -> Model:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    params = {"w": draw(WIDTH, 16), "v": draw(16, 5)}
    loss = lambda p, x, y: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)
    return Model(loss, params, (draw(4, WIDTH), draw(4, 5)))


def many_tokens() -> Model:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    params = {"e": draw(9, WIDTH), "w": draw(WIDTH, 16), "v": draw(16, 5)}

    def loss(p, x, y):
        return jnp.mean((jnp.tanh(p["e"][x] @ p["w"]) @ p["v"] - y) ** 2)

    return Model(loss, params, (jnp.asarray(rng.integers(0, 9, (4, TOKENS))), draw(4, TOKENS, 5)))


def clip_each_layer(g):
    return tree_map(lambda leaf: leaf / jnp.maximum(1.0, 10 * jnp.linalg.norm(leaf)), g)


def guard(g):
    norm = jnp.sqrt(squared_norm(g))
    ok = jnp.isfinite(norm) & (norm < 0.3)
    return tree_map(lambda leaf: jnp.where(ok, leaf, jnp.zeros_like(leaf)), g)


def dot_with_fixed_tree(g):
    return sum(
        jnp.vdot(leaf, jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape))
        for leaf in jax.tree.leaves(g)
    )


def accumulate_two(g):
    return tree_map(lambda leaf: -(leaf + 2 * leaf) / 3 - leaf, g)


def all_finite(g):
    ok = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(g)]))
    return tree_map(lambda leaf: jnp.where(ok, leaf, 0.0), g)


def nan_to_num(g):
    return tree_map(lambda leaf: jnp.nan_to_num(leaf, nan=0.0, posinf=0.0, neginf=0.0), g)


def choose(g):
    big = squared_norm(g) > 0.05
    return tree_map(lambda leaf: jax.lax.select(big, leaf * 0.5, leaf * 3.0), g)


EVERYWHERE = {
    "clip": clip,
    "clip each layer": clip_each_layer,
    "optax norm": lambda g: tree_map(lambda leaf: leaf / (1 + optax.tree.norm(g)), g),
    "norm per layer": lambda g: tree_map(jnp.linalg.norm, g),
    "guard": guard,
    "all finite": all_finite,
    "nan_to_num": nan_to_num,
    "is_finite": lambda g: tree_map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0), g),
    "choice": choose,
    "dot with a fixed tree": dot_with_fixed_tree,
    "linear combinations": accumulate_two,
    "row scales": lambda g: (
        tree_map(lambda l: l * jnp.arange(1.0, l.shape[0] + 1)[:, None], g) | {"e": jnp.zeros(())}
    ),
    "transposed and sliced": lambda g: {"w": g["w"].T[2:10, ::2], "v": g["v"].reshape(2, 8, 5)},
    "sums of rows": lambda g: {"w": g["w"].sum(1), "v": g["v"].sum()},
    "norms of rows": lambda g: {"w": jnp.sum(g["w"] ** 2, 1), "v": jnp.sum(jnp.square(g["v"]), 0)},
    "projection": lambda g: squared_norm(
        {"w": g["w"] @ jnp.ones((16, 3)), "v": g["v"] @ jnp.eye(5)}
    ),
    "unstacked": lambda g: [leaf.sum() for leaf in jnp.unstack(g["v"])],
    "stacked": lambda g: jnp.linalg.norm(jnp.stack([g["w"], g["w"] * 2])),
    "padded": lambda g: jnp.pad(g["w"], ((0, 0), (1, 2))) + jnp.pad(g["w"], ((0, 0), (2, 1))),
    "custom derivative": lambda g: tree_map(lambda l: l * jax.nn.relu(jnp.sum(l**2) - 0.1), g),
    "dense": lambda g: tree_map(jnp.tanh, g),
}
ONE_TOKEN = {
    "sign": lambda g: tree_map(jnp.sign, g),
    "absolute": lambda g: tree_map(jnp.abs, g),
    "maximum": lambda g: tree_map(lambda leaf: leaf / jnp.max(jnp.abs(leaf)), g),
    "smallest": lambda g: tree_map(lambda leaf: jnp.min(leaf * -2.0), g),
    "cube": lambda g: tree_map(lambda leaf: leaf**3, g),
    "square": lambda g: tree_map(jnp.square, g),
}
DENSE = {"dense", "row scales", "transposed and sliced", "padded"}


@pytest.mark.parametrize("model, operations", [(one_token, ONE_TOKEN), (many_tokens, {})])
def test_operations_give_what_vmap_gives(model, operations):
    """All in one program: compiling is what takes the time here."""
    with jax.enable_x64(True):
        model, operations = as_double(model()), EVERYWHERE | operations
        one = per_example(model, lambda g: {name: f(g) for name, f in operations.items()})
        assert_same_tree(run("factored", model, one), run("vmap", model, one), 1e-12)


@pytest.mark.parametrize("name", sorted({**EVERYWHERE, **ONE_TOKEN}.keys() - DENSE))
def test_operations_stay_factored(name):
    told = _told(one_token(), {**EVERYWHERE, **ONE_TOKEN}[name])
    assert not [row for row in told.rows if row.forced_by]
    if name in EVERYWHERE:
        told = _told(many_tokens(), EVERYWHERE[name])
        assert not [row for row in told.rows if row.forced_by]


def test_an_operation_without_a_rule_is_named():
    told = _told(many_tokens(), EVERYWHERE["dense"])
    assert {row.forced_by for row in told.rows if row.forced_by} == {"tanh"}


def _told(model, transform):
    one = per_example(model, transform, squared_norm)
    arguments = (model.params, *model.batch)
    return explain(one, arguments, (None, 0, 0), aggregate=("sum", "stack"), engine="factored")


def test_a_cast_keeps_factors_and_is_rounded_once():
    with jax.enable_x64(True):
        model = as_double(many_tokens())
        norm = lambda g: squared_norm(tree_map(lambda leaf: leaf.astype(jnp.float32), g))
        one = per_example(model, norm, norm)
        assert_same_tree(run("factored", model, one), run("vmap", model, one), 1e-6)


@pytest.mark.parametrize("aggregate", ["sum", "mean", "stack", lambda x: jnp.max(x, 0)])
def test_every_way_to_aggregate(aggregate):
    with jax.enable_x64(True):
        model = as_double(MODELS["mlp"]())
        one = per_example(model, clip)
        results = [run(e, model, one, aggregate=(aggregate, "stack")) for e in ("vmap", "auto")]
        assert_same_tree(results[1], results[0], 1e-12)


def test_keys_are_per_example():
    with jax.enable_x64(True):
        model = as_double(one_token())
        keys = jax.random.split(jax.random.key(0), 4)

        def loss(p, x, y, key):
            return model.loss(p, x + jax.random.normal(key[0], x.shape), y)

        noisy = Model(loss, model.params, (*model.batch, keys))
        one = per_example(noisy, clip, squared_norm)
        assert_same_tree(run("factored", noisy, one), run("vmap", noisy, one), 1e-12)


def test_leaves_that_are_not_arrays_reach_the_function():
    from microbatch.jax._factored import evaluate

    def fun(scale, name, x):
        assert name == "relu" and scale == 2.0 and not hasattr(scale, "dtype")
        return scale * x

    out = evaluate(fun, (2.0, "relu", jnp.arange(3.0)), (None, None, 0), aggregate="sum")
    assert float(out) == 6.0


def test_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="engine='fast' is none of 'auto', 'factored', 'vmap'"):
        run("fast", one_token(), per_example(one_token(), clip))
