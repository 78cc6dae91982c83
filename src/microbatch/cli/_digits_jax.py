"""The digits network in plain JAX, every step on all rows as one batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries import optimizers

from microbatch import AccumulationType
from microbatch._planning import Plan
from microbatch.cli._digits import Digits
from microbatch.cli._problem import Problem
from microbatch.jax import microbatch, plan

LEARNING_RATE = 7e-3
_NUMBERS = ("NHWC", "HWIO", "NHWC")


def init(key: jax.Array) -> dict[str, Any]:
    """Parameters of two 3 × 3 convolutions (32 and 64 channels) and two dense layers (128 and 10)."""
    keys = jax.random.split(key, 4)

    def layer(key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        fan_in = int(np.prod(shape[:-1]))
        weight = jax.random.normal(key, shape) * np.sqrt(2 / fan_in, dtype=np.float32)
        return {"w": weight, "b": jnp.zeros(shape[-1])}

    shapes = {
        "conv1": (3, 3, 1, 32),
        "conv2": (3, 3, 32, 64),
        "dense1": (4 * 4 * 64, 128),
        "dense2": (128, 10),
    }
    return {name: layer(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def logits(params: dict[str, Any], images: jax.Array) -> jax.Array:
    """``[B, 8, 8]`` images to ``[B, 10]`` logits."""
    x = images[..., None]
    for name in ("conv1", "conv2"):
        weight, bias = params[name]["w"], params[name]["b"]
        convolved = jax.lax.conv_general_dilated(
            x, weight, (1, 1), "SAME", dimension_numbers=_NUMBERS
        )
        x = jax.nn.relu(convolved + bias)
    x = x.reshape(-1, 4, 2, 4, 2, 64).mean(axis=(2, 4)).reshape(-1, 4 * 4 * 64)
    x = jax.nn.relu(x @ params["dense1"]["w"] + params["dense1"]["b"])
    return x @ params["dense2"]["w"] + params["dense2"]["b"]


def loss(params: dict[str, Any], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy over the rows."""
    logs = jax.nn.log_softmax(logits(params, images))
    return -jnp.take_along_axis(logs, labels[:, None], axis=1).mean()


def problem(digits: Digits, seed: int = 0) -> Problem:
    """Loss and gradient of the network on all training rows."""
    args = (init(jax.random.key(seed)), jnp.asarray(digits.images), jnp.asarray(digits.labels))
    return Problem(
        jax.value_and_grad(loss),
        args,
        argnums=(1, 2),
        accumulator=AccumulationType.MEAN,
        options={"remainder": "allow"},
        framework="jax",
    )


class Trainer:
    """What the demo asks of JAX; see `microbatch.cli._demo.Trainer`."""

    framework = "jax"

    def __init__(self, digits: Digits, seed: int, steps: int) -> None:
        self._problem = problem(digits, seed)
        self._test = (jnp.asarray(digits.test_images), jnp.asarray(digits.test_labels))
        rate = lambda step: LEARNING_RATE * (1 + jnp.cos(jnp.pi * step / steps)) / 2
        # Of JAX itself: with optax, whoever runs the demo in PyTorch would install JAX.
        self._init, self._update, self._params = optimizers.adam(rate)
        self._accuracy = jax.jit(lambda p, x, y: (logits(p, x).argmax(-1) == y).mean())
        # Compiled once for each microbatch size, however often a run starts anew.
        self._step = functools.cache(self._compile_step)

    def plan(self, memory: int | str | None) -> Plan:
        """The size that fits, found by compiling."""
        return self._plan(memory_budget=memory)

    def whole_bytes(self) -> int:
        """Temporaries, arguments and outputs of the compiled whole-batch gradient."""
        rows = len(self._problem.args[1])
        return self._plan(memory_budget="1TiB", candidates=(rows,)).predicted_bytes

    def start(self, microbatch_size: int | None) -> tuple[Callable[[], float], Callable[[], float]]:
        """A run from the first parameters: its step, which returns the loss, and its test accuracy."""
        params, *batch = self._problem.args
        count, state = 0, self._init(params)
        step = self._step(microbatch_size)

        def advance() -> float:
            nonlocal count, state
            state, value = step(count, state, *batch)
            count += 1
            return float(value)

        return advance, lambda: float(self._accuracy(self._params(state), *self._test))

    def gradient(self, microbatch_size: int | None, *, wide: bool = False) -> list[np.ndarray]:
        """The first gradient's leaves; with `wide`, computed in float64."""
        if not wide:
            return _leaves(jax.jit(self._gradient_fn(microbatch_size))(*self._problem.args)[1])
        with jax.enable_x64(True):
            params, images, labels = self._problem.args
            as_double = lambda x: jnp.asarray(np.asarray(x, np.float64))
            params, images = jax.tree.map(as_double, params), as_double(images)
            return _leaves(jax.jit(self._problem.fun)(params, images, labels)[1])

    def _plan(self, **keywords: Any) -> Plan:
        p = self._problem
        return plan(p.fun, p.argnums, p.accumulator, **p.options, **keywords)(*p.args)

    def _gradient_fn(self, microbatch_size: int | None) -> Callable[..., Any]:
        p = self._problem
        return microbatch(p.fun, p.argnums, microbatch_size, p.accumulator, **p.options)

    def _compile_step(self, microbatch_size: int | None) -> Callable[..., Any]:
        gradient_fn = self._gradient_fn(microbatch_size)

        @jax.jit
        def step(count: int, state: Any, images: jax.Array, labels: jax.Array) -> Any:
            value, gradient = gradient_fn(self._params(state), images, labels)
            return self._update(count, gradient, state), value

        return step


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
