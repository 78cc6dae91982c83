"""What `explain` tells, before anything runs."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from microbatch.jax import clip_by_global_norm, micro_grad
from microbatch.jax._factored import explain

PARAMS = {
    "w": jax.ShapeDtypeStruct((4, 6), jnp.float32),
    "b": jax.ShapeDtypeStruct((6,), jnp.float32),
}
ROWS = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((8, 6), jnp.float32)


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def gradient(transform):
    return lambda p, x, y: transform(jax.grad(loss)(p, x[None], y[None]))


def told(transform, engine="auto"):
    return explain(
        gradient(transform), (PARAMS, *ROWS), (None, 0, 0), aggregate="sum", engine=engine
    )


def test_the_table_line_by_line():
    assert str(told(clip_by_global_norm(1.0))).splitlines() == [
        "engine='auto', 8 examples in a microbatch",
        "leaf   shape  computed                       made dense by  bytes",
        "['w']  6x4    norm: factored, sum: factored  -              320",
        "['b']  6      entries: dense                 -              192",
    ]


def test_the_primitive_that_asks_for_entries_is_named():
    rows = told(lambda g: jax.tree.map(jnp.tanh, g)).rows
    assert {row.forced_by for row in rows} <= {"tanh", None}
    squashed = told(lambda g: jnp.tanh(g["w"]) * jnp.sum(g["w"] ** 2), "factored").rows
    (forced,) = (row for row in squashed if row.forced_by)
    assert forced.forced_by == "tanh" and ("norm", "factored") in forced.statistics


def test_the_vmap_engine_makes_everything_dense():
    rows = told(clip_by_global_norm(1.0), "vmap").rows
    assert [(row.leaf, row.bytes) for row in rows] == [("['w']", 768), ("['b']", 192)]


@pytest.mark.parametrize("engine", ["auto", "factored"])
def test_names_of_the_program_are_used(engine):
    named = lambda g: {k: checkpoint_name(v, f"layer/{k}") for k, v in g.items()}
    rows = told(lambda g: clip_by_global_norm(1.0)(named(g)), engine).rows
    assert "layer/w" in {row.leaf for row in rows}


def test_a_transformation_tells_for_itself():
    make = micro_grad(
        loss, batch_argnums=(1, 2), microbatch_size=4, transform_fn=clip_by_global_norm(1.0)
    )
    arrays = [jnp.zeros(s.shape) for s in (*ROWS,)]
    text = str(make.explain({k: jnp.zeros(s.shape) for k, s in PARAMS.items()}, *arrays))
    assert "4 examples in a microbatch" in text and "norm: factored, sum: factored" in text
