"""Differentiating through the loop in JAX: contrastive learning and a cross-entropy head."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks._harness import Bar, Workload
from benchmarks._jax import contenders, in_float64
from microbatch.jax import AccumulationType, microbatch


def encode(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jax.nn.gelu(x @ layer)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def contrastive_loss(a: jax.Array, b: jax.Array) -> jax.Array:
    """InfoNCE with in-batch negatives."""
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(10 * a @ b.T)))


def head_loss(weights: jax.Array, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = hidden @ weights
    chosen = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen)


def workloads() -> list[Workload]:
    """The two applications."""
    return [_contrastive(), _head()]


def _contrastive(rows: int = 2048, size: int = 64, width: int = 512, layers: int = 4) -> Workload:
    keys = iter(jax.random.split(jax.random.key(0), layers + 2))
    params = [jax.random.normal(next(keys), (width, width)) / width**0.5 for _ in range(layers)]
    x, y = (jax.random.normal(next(keys), (rows, width)) for _ in range(2))
    loss = lambda encode: (
        lambda params, x, y: contrastive_loss(encode(params, x), encode(params, y))
    )
    cached = microbatch(encode, 1, size, AccumulationType.CONCAT)
    whole = jax.value_and_grad(loss(encode))
    return Workload(
        name="jax-contrastive",
        title=f"JAX: contrastive loss, MLP encoder, {rows:,} pairs, {size} a microbatch",
        reference="whole batch",
        contenders=contenders(
            {
                "whole batch": whole,
                "gradient cache by hand": gradient_cache(size),
                "microbatch(encode, CONCAT)": jax.value_and_grad(loss(cached)),
            },
            (params, x, y),
            in_float64(whole, params, x, y),
        ),
        bars=(
            Bar("microbatch(encode, CONCAT)", "time", 1.4, "whole batch"),
            Bar("microbatch(encode, CONCAT)", "memory", 0.45, "whole batch"),
            Bar("microbatch(encode, CONCAT)", "error", 2.0, "whole batch"),
            Bar("microbatch(encode, CONCAT)", "time", 1.05, "gradient cache by hand"),
            Bar("microbatch(encode, CONCAT)", "memory", 1.05, "gradient cache by hand"),
        ),
    )


def gradient_cache(size: int) -> Callable[..., Any]:
    """What a specialist writes: encode, take the gradient of the embeddings, and encode again for each microbatch."""

    def gradient(params: Any, *sides: jax.Array) -> Any:
        cut = [side.reshape(-1, size, *side.shape[1:]) for side in sides]
        encoded = [lax.map(functools.partial(encode, params), side) for side in cut]
        joined = [e.reshape(-1, e.shape[-1]) for e in encoded]
        value, grads = jax.value_and_grad(contrastive_loss, (0, 1))(*joined)

        def step(total: Any, rows: Any) -> tuple[Any, None]:
            pieces, cotangents = rows
            both = lambda params: [encode(params, piece) for piece in pieces]
            (found,) = jax.vjp(both, params)[1](cotangents)
            return jax.tree.map(jnp.add, total, found), None

        cotangents = [g.reshape(e.shape) for g, e in zip(grads, encoded, strict=True)]
        zero = jax.tree.map(jnp.zeros_like, params)
        return value, lax.scan(step, zero, (cut, cotangents))[0]

    return gradient


def _head(
    tokens: int = 4096, size: int = 256, width: int = 512, vocabulary: int = 32768
) -> Workload:
    keys = iter(jax.random.split(jax.random.key(0), 3))
    weights = jax.random.normal(next(keys), (width, vocabulary)) * 0.05
    hidden = jax.random.normal(next(keys), (tokens, width))
    chosen = jax.random.randint(next(keys), (tokens,), 0, vocabulary)
    small = lambda **options: microbatch(head_loss, (1, 2), size, **options)
    of = lambda fun: jax.value_and_grad(fun, (0, 1))
    return Workload(
        name="jax-head",
        title=f"JAX: cross-entropy of {tokens:,} tokens × {width} into {vocabulary:,}, {size} a microbatch",
        reference="whole batch",
        contenders=contenders(
            {
                "whole batch": of(head_loss),
                "microbatch, in forward": of(small()),
                "microbatch, recompute": of(small(differentiate="recompute")),
            },
            (weights, hidden, chosen),
            in_float64(of(head_loss), weights, hidden, chosen),
        ),
        bars=(
            Bar("microbatch, in forward", "time", 1.25, "whole batch"),
            Bar("microbatch, in forward", "memory", 0.1, "whole batch"),
            Bar("microbatch, in forward", "error", 2.0, "whole batch"),
        ),
        rounds=5,
    )
