"""The table of laws: what is computed, which arguments are the batch, and how the pieces combine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from microbatch import AccumulationType

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType

ROWS = 12
SIZES = (1, 3, 5, 12, 20)


@dataclass(frozen=True)
class Case:
    """A function of arguments whose whole-batch value is known to be the combination of its microbatches'.

    Attributes:
      name: of the law.
      fun: ``fun(xp, *args)`` in array functions that all frameworks have.
      args: makes the arguments in float64, from a seeded generator.
      argnums: the batch arguments.
      accumulator: how the pieces combine.
      in_axes: where the rows are.
    """

    name: str
    fun: Callable[..., Any]
    args: Callable[[np.random.Generator], tuple[Any, ...]]
    argnums: Any
    accumulator: Any
    in_axes: Any = 0

    def whole(self, args: tuple[Any, ...]) -> Any:
        """The oracle: the whole batch, in NumPy and float64."""
        return self.fun(np, *args)


def values(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers that every float dtype has exactly, so that only the sums round."""
    return rng.integers(-24, 25, shape) / 8.0


def _one(rng):
    return (values(rng, ROWS, 3),)


def _scaled(rng):
    return np.float64(0.5), values(rng, ROWS, 3)


CASES = [
    Case("sum of rows", lambda xp, w, x: (w * x).sum(0), _scaled, 1, SUM),
    Case("mean loss", lambda xp, w, x: ((w * x - 1) ** 2).mean(), _scaled, -1, MEAN),
    Case("running mean", lambda xp, x: xp.tanh(x).mean(0), _one, 0, RUNNING_MEAN),
    Case("rows", lambda xp, x: xp.tanh(x), _one, (0,), CONCAT),
    Case("largest and smallest", lambda xp, x: (xp.amax(x, 0), xp.amin(x, 0)), _one, 0, (MAX, MIN)),
    Case(
        "a tree of kinds",
        lambda xp, w, x: {"rows": x * w, "sum": (x.sum(), x.sum(0)), "mean": [x.mean()]},
        _scaled,
        1,
        {"rows": CONCAT, "sum": SUM, "mean": MEAN},
    ),
    Case(
        "a tree of arguments",
        lambda xp, batch: (batch["x"] * batch["in"][0]).sum() + batch["in"][1].sum(),
        lambda rng: ({"x": values(rng, ROWS, 2), "in": (values(rng, ROWS, 2), values(rng, ROWS))},),
        0,
        SUM,
    ),
    Case(
        "two axes",
        lambda xp, a, b: xp.einsum("bij,kbj->ik", a, b),
        lambda rng: (values(rng, ROWS, 2, 3), values(rng, 4, ROWS, 3)),
        (0, 1),
        SUM,
        in_axes=(0, 1),
    ),
    Case(
        "negative axes by leaf",
        lambda xp, batch: (batch[0] * batch[1]).sum(),
        lambda rng: ([values(rng, ROWS), values(rng, 2, ROWS)],),
        0,
        SUM,
        in_axes=-1,
    ),
    Case(
        "integers",
        lambda xp, x: x.sum(0),
        lambda rng: (rng.integers(-50, 50, (ROWS, 2)).astype(np.int32),),
        0,
        SUM,
    ),
    Case("nothing", lambda xp, x: (x.sum(), None), _one, 0, SUM),
]
