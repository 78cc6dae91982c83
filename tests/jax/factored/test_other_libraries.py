"""Another library's per-example function gets the engine by calling `micro_vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from microbatch import jax as mb
from microbatch.jax._factored import explain

clipping = pytest.importorskip("jax_privacy.clipping", reason="jax-privacy is not installed")


def problem():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
    params = {"w": draw(12, 24), "v": draw(24, 5)}

    def loss(p, x, y):
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)

    return loss, params, (draw(8, 12), draw(8, 5))


def clipped(loss, params, batch, **options):
    fun = clipping.clipped_grad(
        loss, l2_clip_norm=0.1, batch_argnums=(1, 2), return_values=True, microbatch_size=4
    )
    return fun(params, *batch, **options)


@pytest.mark.parametrize("padded", [False, True])
def test_clipped_grad_is_the_same_as_with_optax(monkeypatch, padded):
    loss, params, batch = problem()
    options = {"is_padding_example": jnp.arange(8) >= 6} if padded else {}
    theirs = clipped(loss, params, batch, **options)
    monkeypatch.setattr(clipping.optax, "microbatching", mb)
    got = clipped(loss, params, batch, **options)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_its_clipping_stays_factored():
    loss, params, batch = problem()

    def one(p, x, y):
        gradient = jax.grad(loss)(p, x[None], y[None])
        return clipping.clip_pytree(gradient, clip_norm=0.1, nan_safe=True, return_zero=x[0] > 9)

    told = explain(
        one, (params, *batch), (None, 0, 0), aggregate=("sum", "stack"), engine="factored"
    )
    assert not [row for row in told.rows if row.forced_by]
