"""Small models of the kinds that people train, each a loss of ``(params, *batch of one)`` with parameters and a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, TOKENS, WORDS, BATCH = 8, 6, 11, 4


class Model(NamedTuple):
    loss: Callable[..., Any]
    params: Any
    batch: tuple


def _draw(seed: int = 0):
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.3)


def _tokens(seed: int = 1):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.integers(0, WORDS, (BATCH, TOKENS))) for _ in range(2))


def mlp(wide: int = 16) -> Model:
    n = _draw()
    params = {"w": [n(WIDTH, wide), n(wide, 5)], "b": [n(wide), n(5)]}

    def loss(p, x, y):
        return jnp.mean((jnp.tanh(x @ p["w"][0] + p["b"][0]) @ p["w"][1] + p["b"][1] - y) ** 2)

    return Model(loss, params, (n(BATCH, WIDTH), n(BATCH, 5)))


def norm(x, scale, bias=0.0):
    centred = x - x.mean(-1, keepdims=True)
    return scale * centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) + bias


def _layer_params(n):
    heads = (2, WIDTH // 2)
    return {
        "qkv": n(WIDTH, 3 * WIDTH),
        "o": n(*heads, WIDTH),
        "g": 1 + n(WIDTH),
        "b": n(WIDTH),
        "up": n(WIDTH, 4 * WIDTH),
        "bu": n(4 * WIDTH),
        "down": n(4 * WIDTH, WIDTH),
    }


def layer(h, p):
    a = norm(h, p["g"], p["b"])
    q, k, v = jnp.split(a @ p["qkv"], 3, -1)
    q, k, v = (z.reshape(*z.shape[:2], 2, -1) for z in (q, k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 2
    scores = jax.nn.softmax(jnp.where(np.tril(np.ones((TOKENS, TOKENS))), scores, -1e9))
    mixed = jnp.einsum("bhts,bshd->bthd", scores, v)
    h = h + jnp.einsum("bthk,hkd->btd", mixed, p["o"])
    return h + jax.nn.gelu(norm(h, 1.0) @ p["up"] + p["bu"]) @ p["down"]


def cross_entropy(logits, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1))


def transformer(tied: bool = False, num_layers: int = 1) -> Model:
    n = _draw()
    params = {
        "emb": n(WORDS, WIDTH),
        "pos": n(TOKENS, WIDTH),
        "out": n(WIDTH, WORDS),
        "layers": [_layer_params(n) for _ in range(num_layers)],
    }

    def loss(p, x, y):
        h = p["emb"][x] + p["pos"]
        for one in p["layers"]:
            h = layer(h, one)
        return cross_entropy(h @ (p["emb"].T if tied else p["out"]), y)

    return Model(loss, params, _tokens())


def stacked_transformer(checkpoint: bool) -> Model:
    plain = transformer(tied=True, num_layers=2)
    params = plain.params | {
        "layers": jax.tree.map(lambda *a: jnp.stack(a), *plain.params["layers"])
    }
    step = lambda h, p: (layer(h, p), None)
    step = jax.checkpoint(step) if checkpoint else step

    def loss(p, x, y):
        h, _ = lax.scan(step, p["emb"][x] + p["pos"], p["layers"])
        return cross_entropy(h @ p["emb"].T, y)

    return Model(loss, params, plain.batch)


def rnn() -> Model:
    n = _draw()
    params = {"w": n(WIDTH, WIDTH), "u": n(3, WIDTH), "b": n(WIDTH), "o": n(WIDTH, 2)}

    def loss(p, x, y):
        def step(h, x):
            h = jnp.tanh(h @ p["w"] + x @ p["u"] + p["b"])
            return h, h @ p["o"]

        _, out = lax.scan(step, jnp.zeros((x.shape[0], WIDTH)), jnp.swapaxes(x, 0, 1))
        return jnp.mean((jnp.swapaxes(out, 0, 1) - y) ** 2)

    return Model(loss, params, (n(BATCH, TOKENS, 3), n(BATCH, TOKENS, 2)))


def convolutions(shape: tuple[int, ...], layers: list[tuple[tuple[int, ...], dict]]) -> Model:
    n = _draw()
    spatial = len(shape) - 1
    numbers = ("NHWC", "HWIO", "NHWC") if spatial == 2 else ("NWC", "WIO", "NWC")
    params = [n(*filters) for filters, _ in layers]

    def loss(p, x, y):
        for w, (_, options) in zip(p, layers, strict=True):
            x = lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)
            x = jnp.tanh(x)
        return jnp.mean((x.mean(tuple(range(1, spatial + 1))) - y) ** 2) + jnp.mean(x**2)

    return Model(loss, params, (n(BATCH, *shape), n(BATCH, layers[-1][0][-1])))


def pooled_cnn() -> Model:
    n = _draw()
    params = {"c": n(3, 3, 1, 4), "d": n(64, 5)}

    def loss(p, x, y):
        numbers = ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(x, p["c"], (1, 1), "SAME", dimension_numbers=numbers)
        h = lax.reduce_window(
            jax.nn.relu(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        return jnp.mean((h.reshape(h.shape[0], -1) @ p["d"] - y) ** 2)

    return Model(loss, params, (n(BATCH, 8, 8, 1), n(BATCH, 5)))


def two_losses() -> Model:
    base = mlp()

    def loss(p, x, y):
        h = jnp.tanh(x @ p["w"][0])
        return base.loss(p, x, y) + 0.1 * jnp.mean(jnp.abs(h)) + 0.01 * jnp.sum(p["w"][1] ** 2)

    return Model(loss, base.params, base.batch)


def experts() -> Model:
    n = _draw()
    params = {"gate": n(WIDTH, 3), "up": n(3, WIDTH, 16), "down": n(3, 16, WIDTH)}

    def loss(p, x, y):
        weights = jax.nn.softmax(x @ p["gate"])
        h = jnp.tanh(jnp.einsum("btd,edf->betf", x, p["up"]))
        out = jnp.einsum("betf,efd->betd", h, p["down"])
        return jnp.mean((jnp.einsum("betd,bte->btd", out, weights) - y) ** 2)

    return Model(loss, params, (n(BATCH, TOKENS, WIDTH), n(BATCH, TOKENS, WIDTH)))


def fused_parameters() -> Model:
    n = _draw()
    params = {"qkv": n(WIDTH, 3 * WIDTH), "parts": [n(WIDTH, 4), n(WIDTH, 5)]}

    def loss(p, x, y):
        q, k, v = (x @ p["qkv"][:, i * WIDTH : (i + 1) * WIDTH] for i in range(3))
        joined = x @ jnp.concatenate(p["parts"], 1)
        return jnp.mean((jnp.tanh(q) * k + v - y) ** 2) + jnp.mean(jnp.sin(joined))

    return Model(loss, params, (n(BATCH, TOKENS, WIDTH), n(BATCH, TOKENS, WIDTH)))


def flax_model() -> Model:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(4, (3, 3))(x)))
            return nn.Dense(5)(nn.LayerNorm()(nn.RMSNorm()(x.reshape(x.shape[0], -1))))

    n = _draw()
    x, net = n(BATCH, 6, 6, 2), Net()
    params = net.init(jax.random.key(0), x[:1])
    return Model(lambda p, x, y: jnp.mean((net.apply(p, x) - y) ** 2), params, (x, n(BATCH, 5)))


def equinox_model() -> Model:
    n = _draw()
    net = eqx.nn.MLP(WIDTH, 5, 16, 2, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(p, x, y):
        return jnp.mean((jax.vmap(eqx.combine(p, static))(x) - y) ** 2)

    return Model(loss, params, (n(BATCH, WIDTH), n(BATCH, 5)))


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": mlp,
    "tiny layers": lambda: mlp(2),
    "wide layers": lambda: mlp(64),
    "transformer": transformer,
    "tied embeddings": lambda: transformer(tied=True),
    "stacked layers": lambda: stacked_transformer(False),
    "stacked layers, checkpoint": lambda: stacked_transformer(True),
    "rnn": rnn,
    "pooled cnn": pooled_cnn,
    "strided and dilated": lambda: convolutions(
        (8, 8, 2),
        [
            ((3, 3, 2, 4), {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 1)}),
            ((3, 3, 4, 6), {"window_strides": (2, 1), "padding": [(1, 0), (0, 2)]}),
        ],
    ),
    "grouped and depthwise": lambda: convolutions(
        (6, 6, 4),
        [
            ((3, 3, 2, 4), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2}),
            ((3, 3, 1, 8), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4}),
        ],
    ),
    "1-D convolutions": lambda: convolutions(
        (12, 2),
        [
            ((3, 2, 4), {"window_strides": (2,), "padding": [(1, 1)]}),
            ((4, 4, 6), {"window_strides": (1,), "padding": [(1, 2)], "lhs_dilation": (2,)}),
        ],
    ),
    "two losses": two_losses,
    "experts": experts,
    "fused parameters": fused_parameters,
    "flax": flax_model,
    "equinox": equinox_model,
}
