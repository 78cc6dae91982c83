"""A `vmap` that fits, in JAX: beside `lax.map(batch_size=)` and `vmap`, forward and backward, and a Jacobian in pieces."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks._harness import Bar, Workload
from benchmarks._jax import contenders, in_float64
from microbatch.jax import AccumulationType, micro_vmap


def centrality(weights: jax.Array, points: jax.Array) -> jax.Array:
    """For each of the points ``[p, d]`` how near the others are: all pairs, as one head of attention."""
    moved = jnp.tanh(points @ weights)
    distances = jnp.sum((moved[:, None] - moved[None]) ** 2, -1)
    return jax.nn.logsumexp(-distances, -1)


def workloads() -> list[Workload]:
    """Outputs side by side, their mean, the gradient through the map, and a Jacobian."""
    return [_map(), _mean(), _gradient(), _jacobian()]


def _problem(sets: int, points: int, width: int = 16) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return (
        jax.random.normal(keys[0], (width, width)) / width**0.5,
        jax.random.normal(keys[1], (sets, points, width)),
    )


def _ways(size: int) -> dict[str, Callable[..., Any]]:
    one = lambda weights: lambda points: centrality(weights, points)
    return {
        "lax.map(batch_size=)": lambda w, x: lax.map(one(w), x, batch_size=size),
        "micro_vmap": micro_vmap(centrality, (None, 0), microbatch_size=size),
        "vmap": jax.vmap(centrality, (None, 0)),
    }


def _usual_bars(mine: str) -> tuple[Bar, ...]:
    return (
        Bar(mine, "time", 1.05, "lax.map(batch_size=)"),
        Bar(mine, "memory", 1.01, "lax.map(batch_size=)"),
    )


def _map(sets: int = 2048, points: int = 64, size: int = 64) -> Workload:
    args = _problem(sets, points)
    ways = _ways(size)
    return Workload(
        name="jax-map",
        title=f"JAX: all pairs of {points} points in {sets:,} sets, {size} sets a microbatch",
        reference="lax.map(batch_size=)",
        contenders=contenders(ways, args, in_float64(ways["vmap"], *args)),
        bars=_usual_bars("micro_vmap"),
    )


def _mean(sets: int = 2048, points: int = 64, size: int = 64) -> Workload:
    args = _problem(sets, points)
    ways = {
        name: lambda w, x, way=way: way(w, x).mean(0)
        for name, way in _ways(size).items()
        if name != "micro_vmap"
    }
    ways["micro_vmap, MEAN"] = micro_vmap(
        centrality, (None, 0), microbatch_size=size, accumulator=AccumulationType.MEAN
    )
    return Workload(
        name="jax-map-mean",
        title=f"JAX: the mean over the sets of the same, {size} sets a microbatch",
        reference="lax.map(batch_size=)",
        contenders=contenders(ways, args, in_float64(ways["vmap"], *args)),
        bars=_usual_bars("micro_vmap, MEAN"),
    )


def _gradient(sets: int = 1024, points: int = 64, size: int = 64) -> Workload:
    args = _problem(sets, points)
    # A function of all outputs together, so that no mean over microbatches is its gradient.
    loss = lambda way: lambda w, x: jnp.sum(jax.nn.softmax(way(w, x), 0) ** 2)
    # What a specialist writes: the points are kept, and a set's residuals are made again.
    again = lambda w, x: lax.map(jax.checkpoint(lambda p: centrality(w, p)), x, batch_size=size)
    checkpointed = "lax.map of a checkpoint"
    every = _ways(size) | {checkpointed: again}
    ways = {name: jax.value_and_grad(loss(way)) for name, way in every.items()}
    return Workload(
        name="jax-map-gradient",
        title=f"JAX: the gradient through the map, {sets:,} sets, {size} a microbatch",
        reference="lax.map(batch_size=)",
        contenders=contenders(ways, args, in_float64(ways["vmap"], *args)),
        bars=(
            Bar("micro_vmap", "time", 1.4, "vmap"),
            Bar("micro_vmap", "memory", 0.25, "lax.map(batch_size=)"),
            Bar("micro_vmap", "time", 1.05, checkpointed),
            Bar("micro_vmap", "memory", 1.05, checkpointed),
        ),
    )


def _jacobian(width: int = 512, hidden: int = 2048, size: int = 32) -> Workload:
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (width, hidden)) / width**0.5
    down = jax.random.normal(keys[1], (hidden, width)) / hidden**0.5
    x = jax.random.normal(keys[2], (width,))

    def network(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jax.nn.gelu(x @ up) @ down
        return x

    def by_map(x: jax.Array) -> jax.Array:
        push = lambda tangent: jax.jvp(network, (x,), (tangent,))[1]
        return lax.map(push, jnp.eye(width), batch_size=size).T

    def by_microbatch(x: jax.Array) -> jax.Array:
        push = lambda x, tangent: jax.jvp(network, (x,), (tangent,))[1]
        return micro_vmap(push, (None, 0), 1, microbatch_size=size)(x, jnp.eye(width))

    return Workload(
        name="jax-jacobian",
        title=f"JAX: the Jacobian of an MLP of {width} → {hidden}, thrice, {size} columns a microbatch",
        reference="lax.map(batch_size=)",
        contenders=contenders(
            {
                "lax.map(batch_size=)": by_map,
                "micro_vmap": by_microbatch,
                "jacfwd": jax.jacfwd(network),
            },
            (x,),
            in_float64(jax.jacfwd(network), x),
        ),
        bars=_usual_bars("micro_vmap"),
    )
