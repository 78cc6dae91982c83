"""Per-example clipping in JAX by factored values, by `vmap`, and by what `engine="auto"` chooses, over many kinds of models."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks._harness import Bar, Table, seconds_in_turn, table_of
from benchmarks._jax import compiled_in_turn
from benchmarks.jax_gradient import mlp_loss
from benchmarks.jax_per_example import clipped, cnn, transformer
from microbatch.jax import AccumulationType, micro_grad, microbatch

MEAN = AccumulationType.MEAN
ENGINES = ("auto", "factored", "vmap")
# The loss, its parameters and a batch, and how many of its rows make a microbatch.
Model = tuple[Callable[..., Any], Any, tuple[jax.Array, ...], int]


def workloads() -> list[Table]:
    """One table: a row per model."""
    records = [_measured(name, make()) for name, make in MODELS.items()]
    worst = max(record["auto / better"] for record in records)
    return [
        table_of(
            records,
            "jax-engines",
            "JAX, per-example clipping: what engine= does to the time, for many kinds of models",
            bars=((Bar('engine="auto"', "largest time", 1.1, "the better engine"), worst),),
            note="Seconds for all rows; plain: the mean gradient in the same microbatches.",
        )
    ]


def _measured(name: str, model: Model) -> dict[str, Any]:
    loss, params, batch, size = model
    clip = lambda engine: micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=size,
        transform_fn=clipped,
        accumulator=MEAN,
        engine=engine,
    )
    ways = {"plain": microbatch(jax.value_and_grad(loss), (1, 2), size, MEAN)}
    ways |= {engine: clip(engine) for engine in ENGINES}
    args = params, *batch
    run = lambda program: jax.block_until_ready(program(*args))
    made = compiled_in_turn(ways, args, 1)
    runs = {way: functools.partial(run, program) for way, (program, _) in made.items()}
    seconds = seconds_in_turn(runs, rounds=9)
    better = min(seconds["factored"], seconds["vmap"])
    return (
        {"model": name}
        | {f"{way}, s": s for way, s in seconds.items()}
        | {"auto / plain": seconds["auto"] / seconds["plain"]}
        | {"auto / better": seconds["auto"] / better}
    )


def _normal(seed: int = 0) -> Callable[..., jax.Array]:
    keys = iter(jax.random.split(jax.random.key(seed), 30))
    return lambda *shape: jax.random.normal(next(keys), shape) / max(shape[-2:]) ** 0.5


def _mlp(width: int, layers: int, rows: int, size: int) -> Model:
    n = _normal()
    return (
        mlp_loss,
        [n(width, width) for _ in range(layers)],
        (n(rows, width), n(rows, width)),
        size,
    )


def _convolutions(shape: tuple[int, ...], layers: Any, rows: int, size: int) -> Model:
    """Filters and options of each layer, then a mean over space."""
    n, spatial = _normal(), tuple(range(1, len(shape)))
    numbers = ("NHWC", "HWIO", "NHWC") if len(shape) == 3 else ("NWC", "WIO", "NWC")

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for filters, (_, options) in zip(params, layers, strict=True):
            x = jnp.tanh(lax.conv_general_dilated(x, filters, dimension_numbers=numbers, **options))
        return jnp.mean((x.mean(spatial) - y) ** 2)

    params = [n(*filters) for filters, _ in layers]
    return loss, params, (n(rows, *shape), n(rows, layers[-1][0][-1])), size


def _rnn(width: int = 128, steps: int = 64, rows: int = 256, size: int = 32) -> Model:
    n = _normal()
    params = {"w": n(width, width), "u": n(8, width), "b": n(width), "o": n(width, 4)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ p["w"] + x @ p["u"] + p["b"])
            return h, h @ p["o"]

        _, out = lax.scan(step, jnp.zeros((x.shape[0], width)), jnp.swapaxes(x, 0, 1))
        return jnp.mean((jnp.swapaxes(out, 0, 1) - y) ** 2)

    return loss, params, (n(rows, steps, 8), n(rows, steps, 4)), size


def _experts(width: int = 64, tokens: int = 32, rows: int = 64, size: int = 16) -> Model:
    n = _normal()
    params = {"gate": n(width, 4), "up": n(4, width, 128), "down": n(4, 128, width)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(x @ p["gate"])
        h = jnp.tanh(jnp.einsum("btd,edf->betf", x, p["up"]))
        out = jnp.einsum("betf,efd->betd", h, p["down"])
        return jnp.mean((jnp.einsum("betd,bte->btd", out, weights) - y) ** 2)

    return loss, params, (n(rows, tokens, width), n(rows, tokens, width)), size


def _fused(width: int = 128, tokens: int = 16, rows: int = 256, size: int = 32) -> Model:
    """One matrix that is cut, and two that are joined."""
    n = _normal()
    params = {"qkv": n(width, 3 * width), "parts": [n(width, 64), n(width, 64)]}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        q, k, v = (x @ p["qkv"][:, i * width : (i + 1) * width] for i in range(3))
        joined = x @ jnp.concatenate(p["parts"], 1)
        return jnp.mean((jnp.tanh(q) * k + v - y) ** 2) + jnp.mean(jnp.sin(joined))

    return loss, params, (n(rows, tokens, width), n(rows, tokens, width)), size


def _embeddings(words: int = 20_000, width: int = 64, rows: int = 1024, size: int = 32) -> Model:
    """A bag of words: a large table of which each example reads few rows."""
    n = _normal()
    params = {"table": n(words, width), "out": n(width, 20)}

    def loss(p: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((p["table"][ids].mean(1) @ p["out"] - y) ** 2)

    ids = jax.random.randint(jax.random.key(1), (rows, 16), 0, words)
    return loss, params, (ids, n(rows, 20)), size


def _adapters(width: int = 256, rank: int = 4, rows: int = 2048, size: int = 64) -> Model:
    """Low-rank corrections of frozen matrices."""
    n = _normal()
    frozen = [n(width, width) for _ in range(3)]
    params = [(n(width, rank), n(rank, width)) for _ in frozen]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w, (down, up) in zip(frozen, params, strict=True):
            x = jnp.tanh(x @ w + x @ down @ up)
        return jnp.mean((x - y) ** 2)

    return loss, params, (n(rows, width), n(rows, width)), size


def _of(model: Any, size: int) -> Model:
    return *model, size


PLAIN, SAME = {"window_strides": (1,)}, {"window_strides": (1, 1), "padding": "SAME"}
MODELS: dict[str, Callable[[], Model]] = {
    "MLP, 8 wide": lambda: _mlp(8, 4, 65_536, 4096),
    "MLP, 64 wide": lambda: _mlp(64, 4, 8192, 256),
    "MLP, 512 wide": lambda: _mlp(512, 3, 256, 32),
    "CNN": lambda: _of(cnn(rows=64), 16),
    "1-D convolutions": lambda: _convolutions(
        (128, 8),
        [((5, 8, 32), PLAIN | {"padding": "SAME"}), ((5, 32, 32), PLAIN | {"padding": "VALID"})],
        256,
        16,
    ),
    "strided and dilated convolutions": lambda: _convolutions(
        (16, 16, 8),
        [
            ((3, 3, 8, 32), {"window_strides": (2, 2), "padding": "SAME"}),
            ((3, 3, 32, 32), SAME | {"rhs_dilation": (2, 2)}),
        ],
        256,
        16,
    ),
    "depthwise convolutions": lambda: _convolutions(
        (16, 16, 32),
        [((3, 3, 1, 32), SAME | {"feature_group_count": 32}), ((1, 1, 32, 64), SAME)],
        64,
        16,
    ),
    "transformer": lambda: _of(transformer(stacked=False, rows=32), 8),
    "transformer, layers in scan with checkpoint": lambda: _of(
        transformer(stacked=True, rows=32), 8
    ),
    "transformer, tied embeddings": lambda: _of(transformer(stacked=False, rows=32, tied=True), 8),
    "recurrent": _rnn,
    "mixture of experts": _experts,
    "fused and joined matrices": _fused,
    "bag of words": _embeddings,
    "low-rank adapters": _adapters,
}
