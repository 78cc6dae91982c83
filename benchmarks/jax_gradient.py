"""Gradient accumulation in JAX: an MLP and a convolution network, through the loop and around it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks._harness import Bar, Workload
from benchmarks._jax import contenders, in_float64
from microbatch.jax import AccumulationType, microbatch

MEAN = AccumulationType.MEAN


def mlp_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in params:
        x = jax.nn.gelu(x @ layer)
    return jnp.mean((x - y) ** 2)


def cnn_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for filters in params["filters"]:
        x = lax.conv_general_dilated(
            x, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(x.shape[0], -1) @ params["hidden"])
    scores = jax.nn.log_softmax(x @ params["out"])
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], 1))


def workloads() -> list[Workload]:
    """The two gradients."""
    return [_mlp(), _cnn()]


def _mlp(rows: int = 4096, size: int = 256, width: int = 512, layers: int = 4) -> Workload:
    keys = iter(jax.random.split(jax.random.key(0), layers + 2))
    params = [jax.random.normal(next(keys), (width, width)) / width**0.5 for _ in range(layers)]
    x, y = (jax.random.normal(next(keys), (rows, width)) for _ in range(2))
    return Workload(
        name="jax-mlp",
        title=f"JAX: gradient of an MLP of {layers} × {width}, {rows:,} rows, {size} a microbatch",
        reference="scan by hand",
        contenders=contenders(
            _ways(mlp_loss, size),
            (params, x, y),
            in_float64(jax.value_and_grad(mlp_loss), params, x, y),
            compile_rounds=7,
        ),
        bars=(
            Bar("microbatch(value_and_grad)", "time", 1.03, "scan by hand"),
            Bar("microbatch(value_and_grad)", "memory", 1.01, "scan by hand"),
            Bar("microbatch(value_and_grad)", "compile", 1.2, "scan by hand"),
            Bar("value_and_grad(microbatch)", "time", 1.05, "scan by hand"),
            Bar("value_and_grad(microbatch)", "memory", 1.05, "scan by hand"),
            Bar("… recompute", "time", 1.6, "scan by hand"),
            Bar("… recompute", "memory", 1.05, "scan by hand"),
        ),
    )


def _cnn(rows: int = 256, size: int = 16) -> Workload:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * 0.05
    params = {
        "filters": [normal(3, 3, 1, 32), normal(3, 3, 32, 64)],
        "hidden": normal(4 * 4 * 64, 256),
        "out": normal(256, 10),
    }
    x = jax.random.normal(next(keys), (rows, 16, 16, 1))
    y = jax.random.randint(next(keys), (rows,), 0, 10)
    return Workload(
        name="jax-cnn",
        title=f"JAX: gradient of a CNN (3×3×32, 3×3×64, pooling, two dense), {rows} images, {size} a microbatch",
        reference="whole batch",
        contenders=contenders(
            _ways(cnn_loss, size),
            (params, x, y),
            in_float64(jax.value_and_grad(cnn_loss), params, x, y),
        ),
        bars=(
            Bar("microbatch(value_and_grad)", "time", 1.0, "whole batch"),
            Bar("value_and_grad(microbatch)", "time", 1.0, "whole batch"),
            Bar("… recompute", "time", 1.6, "whole batch"),
            Bar("value_and_grad(microbatch)", "memory", 0.15, "whole batch"),
            Bar("… recompute", "memory", 0.15, "whole batch"),
        ),
    )


def _ways(loss: Any, size: int) -> dict[str, Any]:
    through = lambda **options: jax.value_and_grad(microbatch(loss, (1, 2), size, MEAN, **options))
    return {
        "whole batch": jax.value_and_grad(loss),
        "scan by hand": scan_by_hand(loss, size),
        "optax.microbatching": optax.microbatching.microbatch(
            jax.value_and_grad(loss), (1, 2), size, optax.microbatching.AccumulationType.MEAN
        ),
        "microbatch(value_and_grad)": microbatch(jax.value_and_grad(loss), (1, 2), size, MEAN),
        "value_and_grad(microbatch)": through(),
        "… recompute": through(differentiate="recompute"),
    }


def scan_by_hand(loss: Any, size: int) -> Any:
    """What a specialist writes."""

    def gradient(params: Any, *batch: jax.Array) -> Any:
        count = batch[0].shape[0] // size
        cut = [a.reshape(count, size, *a.shape[1:]) for a in batch]
        add = lambda total, new: jax.tree.map(jnp.add, total, new)
        step = lambda total, rows: (add(total, jax.value_and_grad(loss)(params, *rows)), None)
        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        total, _ = lax.scan(step, zero, cut)
        return jax.tree.map(lambda a: a / count, total)

    return gradient
