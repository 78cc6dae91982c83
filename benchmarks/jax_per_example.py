"""Per-example clipping and moments in JAX, against the plain gradient at the same microbatch size."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks._harness import Bar, Contender, Workload
from benchmarks._jax import contenders, in_float64, relative_error
from benchmarks.jax_gradient import cnn_loss, mlp_loss
from microbatch.jax import AccumulationType, micro_grad, microbatch

MEAN = AccumulationType.MEAN


def workloads() -> list[Workload]:
    """Three models, and the transformer with its layers in a scan."""
    return [
        _workload("mlp", "MLP 4 × 512, 1,024 rows", _mlp(), 256, (32, 64), (1.2, 1.6, 1.3)),
        _workload("cnn", "CNN, 256 images of 16 × 16", cnn(), 16, (16, 32), (1.5, 2.5, 1.5)),
        _workload(
            "transformer",
            "transformer, 2 layers, width 128, 64 rows of 64 tokens",
            transformer(stacked=False),
            8,
            (1, 8),
            (1.15, 1.6, 1.2),
        ),
        _stacked_workload(),
    ]


def clipped(gradients: Any) -> Any:
    """The gradient clipped to a global norm of 1."""
    factor = jnp.minimum(1, 1 / optax.tree.norm(gradients))
    return jax.tree.map(lambda leaf: leaf * factor, gradients)


def clipped_and_squared(gradients: Any) -> Any:
    """The clipped gradient, and its second moment."""
    small = clipped(gradients)
    return small, jax.tree.map(jnp.square, small)


Model = tuple[Callable[..., Any], Any, tuple[jax.Array, ...]]


def _workload(
    name: str,
    title: str,
    model: Model,
    size: int,
    peer_sizes: Sequence[int],
    limits: tuple[float, float, float],
) -> Workload:
    loss, params, batch = model
    here = lambda transform: micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=size,
        transform_fn=transform,
        metrics_fn=optax.tree.norm,
        accumulator=MEAN,
    )
    there = lambda size: optax.microbatching.micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=size,
        transform_fn=clipped,
        metrics_fn=optax.tree.norm,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )
    best = min(peer_sizes, key=lambda size: _seconds(there(size), params, *batch))
    peer = f"optax micro_grad, {best} a microbatch"
    clip, moments = "micro_grad: clip + norms", "micro_grad: clip + second moments"
    exact = in_float64(functools.partial(_one_by_one, loss), params, *batch)
    gradient_of = {
        clip: lambda out: out[0],
        moments: lambda out: out[0][0],
        peer: lambda out: out[0],
    }

    def checked(contender: Contender) -> Contender:
        if contender.name not in gradient_of:
            return contender
        found = gradient_of[contender.name](contender.run())
        return replace(contender, error=relative_error(found, exact))

    faster = {"mlp": 1 / 50, "cnn": 1 / 10}.get(name, 1.0)
    return Workload(
        name=f"jax-per-example-{name}",
        title=f"JAX, per-example statistics: {title}, {size} a microbatch",
        reference="plain gradient",
        contenders=tuple(
            map(
                checked,
                contenders(
                    {
                        "plain gradient": _plain(loss, size),
                        clip: here(clipped),
                        moments: here(clipped_and_squared),
                        peer: there(best),
                    },
                    (params, *batch),
                ),
            )
        ),
        bars=(
            Bar(clip, "time", limits[0], "plain gradient"),
            Bar(moments, "time", limits[1], "plain gradient"),
            Bar(clip, "memory", limits[2], "plain gradient"),
            Bar(clip, "time", faster, peer),
        ),
        rounds=7,
    )


def _stacked_workload(size: int = 8) -> Workload:
    def step(stacked: bool) -> Any:
        loss, params, batch = transformer(stacked=stacked)
        clip = micro_grad(
            loss,
            batch_argnums=(1, 2),
            microbatch_size=size,
            transform_fn=clipped,
            metrics_fn=optax.tree.norm,
            accumulator=MEAN,
        )
        return clip, (params, *batch)

    unrolled, args = step(False)
    scanned, stacked_args = step(True)
    names = "layers unrolled", "layers in scan with checkpoint"
    return Workload(
        name="jax-per-example-scan",
        title=f"JAX, per-example clipping: the transformer's layers in a scan, {size} a microbatch",
        reference=names[0],
        contenders=(
            *contenders({names[0]: unrolled}, args),
            *contenders({names[1]: scanned}, stacked_args),
        ),
        bars=(Bar(names[1], "time", 1.1, names[0]),),
    )


def _one_by_one(loss: Callable[..., Any], params: Any, *batch: jax.Array) -> Any:
    """The definition of the mean clipped gradient: a loop over examples."""

    def step(total: Any, row: tuple[jax.Array, ...]) -> tuple[Any, None]:
        found = clipped(jax.grad(loss)(params, *(leaf[None] for leaf in row)))
        return jax.tree.map(jnp.add, total, found), None

    total, _ = lax.scan(step, jax.tree.map(jnp.zeros_like, params), batch)
    return jax.tree.map(lambda leaf: leaf / len(batch[0]), total)


def _plain(loss: Callable[..., Any], size: int) -> Callable[..., Any]:
    """The mean gradient at the same microbatch size, without anything per example."""
    return microbatch(jax.value_and_grad(loss), (1, 2), size, MEAN)


def _seconds(fun: Callable[..., Any], *args: Any) -> float:
    compiled = jax.jit(fun).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start


def _mlp(rows: int = 1024, width: int = 512, layers: int = 4) -> Model:
    keys = iter(jax.random.split(jax.random.key(0), layers + 2))
    params = [jax.random.normal(next(keys), (width, width)) / width**0.5 for _ in range(layers)]
    batch = tuple(jax.random.normal(next(keys), (rows, width)) for _ in range(2))
    return mlp_loss, params, batch


def cnn(rows: int = 256) -> Model:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * 0.05
    params = {
        "filters": [normal(3, 3, 1, 32), normal(3, 3, 32, 64)],
        "hidden": normal(4 * 4 * 64, 256),
        "out": normal(256, 10),
    }
    x = jax.random.normal(next(keys), (rows, 16, 16, 1))
    return cnn_loss, params, (x, jax.random.randint(next(keys), (rows,), 0, 10))


def transformer(
    stacked: bool,
    tied: bool = False,
    rows: int = 64,
    tokens: int = 64,
    width: int = 128,
    heads: int = 4,
    layers: int = 2,
    vocabulary: int = 512,
) -> Model:
    keys = iter(jax.random.split(jax.random.key(0), 20))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * 0.05
    shapes = {
        "queries": (width, width),
        "keys": (width, width),
        "values": (width, width),
        "mixed": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    layer = {name: normal(layers, *shape) for name, shape in shapes.items()}
    layer |= {"scale 1": jnp.ones((layers, width)), "scale 2": jnp.ones((layers, width))}
    params: dict[str, Any] = {
        "tokens": normal(vocabulary, width),
        "positions": normal(tokens, width),
        "layers": layer,
    }
    if not tied:
        params["out"] = normal(width, vocabulary)
    if not stacked:
        params["layers"] = [jax.tree.map(lambda a, i=i: a[i], layer) for i in range(layers)]
    x, y = (jax.random.randint(next(keys), (rows, tokens), 0, vocabulary) for _ in range(2))
    one_layer = functools.partial(_layer, heads=heads)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = params["tokens"][x] + params["positions"]
        if stacked:
            step = jax.checkpoint(lambda h, layer: (one_layer(layer, h), None))
            h, _ = lax.scan(step, h, params["layers"])
        else:
            for layer in params["layers"]:
                h = one_layer(layer, h)
        scores = jax.nn.log_softmax(h @ (params["tokens"].T if tied else params["out"]))
        return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))

    return loss, params, (x, y)


def _layer(p: Any, h: jax.Array, heads: int) -> jax.Array:
    normed = _normalised(h) * p["scale 1"]
    split = lambda z: z.reshape(*z.shape[:-1], heads, -1)
    q, k, v = (split(normed @ p[name]) for name in ("queries", "keys", "values"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    h = h + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(h.shape) @ p["mixed"]
    return h + jax.nn.gelu((_normalised(h) * p["scale 2"]) @ p["up"]) @ p["down"]


def _normalised(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
