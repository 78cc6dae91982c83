"""Lesson 1, JAX: the gradient of a sum over all rows, one equal part after another in a compiled loop.

Gradients of sums add up; means of unequal or rescaled parts do not. That is the whole of gradient accumulation.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp

from microbatch import AccumulationType
from microbatch.jax import microbatch
from microbatch.lessons._bars import bars
from microbatch.lessons._exercise import Case, Exercise, Refused


def microbatched_grads(
    w: Any, b: Any, x_full: jax.Array, y_full: jax.Array, n_microbatches: float
) -> jax.Array:
    """d/dw of Σ (w·x − y)², added up over `n_microbatches` contiguous equal parts.

    Equivalent to::

        total = 0
        for x, y in zip(jnp.split(x_full, n), jnp.split(y_full, n)):
            total += jax.grad(lambda w: jnp.sum((w * x - y) ** 2))(w)

    Args:
      w: the weight, a scalar; the same in every part.
      b: a bias that the model does not use.
      x_full: inputs, ``[N]``, floating point.
      y_full: targets, ``[N]``, of the same dtype.
      n_microbatches: how many parts; a whole number that divides N. Floats such as 2.0, as configuration files
        have them, are made integers. Static under `jax.jit`.

    Raises:
      ValueError: 2.5 or 0.0 parts, or a number of parts that does not divide N.
      TypeError: a traced number of parts, or arrays that are not of one floating dtype.

    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> float(microbatched_grads(1.0, 0.0, x, jnp.zeros(4), 2.0))
    60.0
    """
    del b
    parts = _whole_number(n_microbatches)
    x_full, y_full = _floating(x_full, y_full)
    return microbatch(
        jax.grad(_squared_error),
        argnums=(1, 2),
        microbatch_size=None,
        num_microbatches=parts,
        accumulator=AccumulationType.SUM,
        order="contiguous",
    )(jnp.asarray(w, x_full.dtype), x_full, y_full)


def picture() -> list[str]:
    """The lesson's numbers as lines of text."""
    x, y = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.zeros(4)
    halves = [(x[:2], y[:2]), (x[2:], y[2:])]
    first, second = (float(microbatched_grads(1.0, 0.0, *half, 1.0)) for half in halves)
    total = float(microbatched_grads(1.0, 0.0, x, y, 2.0))
    mean_gradient = jax.grad(lambda w, x, y: jnp.mean((w * x - y) ** 2))
    means = [float(mean_gradient(1.0, *half)) for half in halves]
    return [
        "d/dw Σ (w·x − y)²  at w=1, x=[1, 2, 3, 4], y=0, in two parts",
        "",
        *bars([("part 1", first), ("part 2", second), ("total", total)]),
        "",
        "Sums add up: the total is the whole batch's gradient. Means do not:",
        "",
        *bars(
            [("mean of 4 rows", float(mean_gradient(1.0, x, y))), ("sum of 2 means", sum(means))]
        ),
        "",
        f"Divide the total by the rows ({total:g} / 4 = {total / 4:g}), "
        f"never add up the parts' means ({means[0]:g} + {means[1]:g} = {sum(means):g}).",
    ]


def _squared_error(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((w * x - y) ** 2)


def _whole_number(count: Any) -> int:
    if isinstance(count, jax.core.Tracer):
        raise TypeError(
            "microbatched_grads: n_microbatches is traced, but it decides shapes.\n"
            'Make it static: jax.jit(microbatched_grads, static_argnames="n_microbatches").'
        )
    number = float(count)
    if not number.is_integer() or number < 1:
        raise ValueError(
            f"microbatched_grads: n_microbatches={count!r} is not a whole number of 1 or more.\n"
            "Use one that divides the rows, for example 2 or 2.0."
        )
    return operator.index(int(number))


def _floating(x: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    x, y = jnp.asarray(x), jnp.asarray(y)
    if x.dtype != y.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"microbatched_grads: x_full is {x.dtype} and y_full {y.dtype}; both must be of one floating dtype.\n"
            "Convert them first, for example with .astype(jnp.float32)."
        )
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(
            f"microbatched_grads: x_full is {x.shape} and y_full {y.shape}; both must be [N].\n"
            "Flatten them first, for example with .reshape(-1)."
        )
    return x, y


def _cases() -> tuple[Case, ...]:
    x, y = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.zeros(4)
    return (
        Case(
            "typical",
            "microbatched_grads(1.0, 0.0, [1, 2, 3, 4], zeros(4), 2.0)",
            lambda f: f(1.0, 0.0, x, y, 2.0),
            60.0,
            (
                "Split the rows into two equal parts and add up the gradients of the parts.",
                "Part 1 is [1, 2] and gives 10; part 2 is [3, 4] and gives 50.",
                "Reshape x to (n, N // n), scan over it, and carry total + grad(sum((w*x − y)**2)).",
            ),
        ),
        Case(
            "one part",
            "microbatched_grads(1.0, 0.0, [1, 2, 3, 4], zeros(4), 1.0)",
            lambda f: f(1.0, 0.0, x, y, 1.0),
            60.0,
            (
                "One part is the whole batch.",
                "The answer must not depend on the number of parts.",
                "If you get 15, the loss is a mean; the exercise asks for the sum.",
            ),
        ),
        Case(
            "the mean against the sum",
            "microbatched_grads(2.0, 5.0, [1, 2, 3, 4], [1, 1, 1, 1], 4.0)",
            lambda f: f(2.0, 5.0, x, jnp.ones(4), 4.0),
            100.0,
            (
                "The loss is a sum over rows: nothing is divided, neither by rows nor by parts.",
                "b = 5 must not change anything; w stays 2 in every part.",
                "Σ 2·x·(2x − 1) over x = 1, 2, 3, 4 is 2 + 12 + 30 + 56 = 100.",
            ),
        ),
        Case(
            "an array of one row",
            "microbatched_grads(3.0, 0.0, [2], [0], 1.0)",
            lambda f: f(3.0, 0.0, jnp.array([2.0]), jnp.array([0.0]), 1.0),
            24.0,
            (
                "The shapes come from the arguments; nothing in the function should say 4.",
                "The gradient is a scalar, shape (), like w.",
                "2·x·(w·x − y) = 2·2·6 = 24.",
            ),
        ),
        Case(
            "a count that cannot be",
            "microbatched_grads(1.0, 0.0, [1, 2, 3, 4], zeros(4), 2.5)",
            lambda f: f(1.0, 0.0, x, y, 2.5),
            Refused(),
            (
                "What are two and a half parts?",
                "int(2.5) silently becomes 2. Check before you convert.",
                "if not float(n).is_integer(): raise ValueError(...)",
            ),
        ),
        Case(
            "a wrong dtype",
            "microbatched_grads(1.0, 0.0, int array, int array, 2.0)",
            lambda f: f(1.0, 0.0, jnp.arange(4), jnp.arange(4), 2.0),
            Refused(),
            (
                "Integers have no gradient; arrays of one floating dtype are asked for.",
                "Refuse before anything runs, and say which dtype came.",
                "if not jnp.issubdtype(x_full.dtype, jnp.floating): raise TypeError(...)",
            ),
        ),
    )


EXERCISE = Exercise(
    function="microbatched_grads",
    task="microbatched_grads(w, b, x_full, y_full, n_microbatches): d/dw of Σ (w·x − y)² in equal contiguous parts",
    cases=_cases(),
)
