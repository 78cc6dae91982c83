"""Lesson 2, NumPy and PyTorch: the mean of the first K gradients."""

from typing import Any

import numpy as np

from microbatch.lessons._bars import bars
from microbatch.lessons._exercise import Case, Exercise, Refused
from microbatch.numpy import gradient_accumulation


def picture() -> list[str]:
    """The lesson's numbers as lines of text."""
    gradients = [np.array([1.0, 0.0]), np.array([3.0, 2.0]), np.array([100.0, 100.0])]
    first, second = gradient_accumulation(gradients, 1), gradient_accumulation(gradients, 2)
    return [
        "The mean of the first K gradients of [1, 0], [3, 2], [100, 100]",
        "",
        "first entry",
        *bars([("K=1", first[0]), ("K=2", second[0])], width=20),
        "second entry",
        *bars([("K=1", first[1]), ("K=2", second[1])], width=20),
        "",
        f"K=1 gives the first gradient itself, {_plain(first)}; K=2 gives {_plain(second)}.",
        "The surplus gradient [100, 100] belongs to the next step and is not touched.",
        f"[1, 2] and [3, 4] with K=2 give {_plain(gradient_accumulation([np.array([1.0, 2.0]), np.array([3.0, 4.0])], 2))}.",
        *_in_torch(),
    ]


def _in_torch() -> list[str]:
    try:
        import torch

        from microbatch.torch import gradient_accumulation as accumulate_tensors
    except ImportError:
        return ["PyTorch is not installed; with it, tensors work alike."]
    mean = accumulate_tensors([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], 2)
    return [f"The same with PyTorch tensors: {_plain(mean.numpy())}."]


def _plain(values: np.ndarray) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _cases() -> tuple[Case, ...]:
    def floats(*rows: Any) -> list[np.ndarray]:
        return [np.array(row, dtype=np.float64) for row in rows]

    return (
        Case(
            "typical",
            "gradient_accumulation([[1, 2], [3, 4]], 2)",
            lambda f: f(floats([1, 2], [3, 4]), 2),
            np.array([2.0, 3.0]),
            (
                "Add the gradients entry by entry.",
                "Then divide by how many you added.",
                "sum(micro_batches_grads[:K]) / K",
            ),
        ),
        Case(
            "K=1",
            "gradient_accumulation([[1, 2], [3, 4]], 1)",
            lambda f: f(floats([1, 2], [3, 4]), 1),
            np.array([1.0, 2.0]),
            (
                "K says how many gradients count, not how many were given.",
                "With K=1 the answer is the first gradient itself.",
                "Take micro_batches_grads[:1] before you add.",
            ),
        ),
        Case(
            "surplus gradients",
            "gradient_accumulation([[1, 0], [3, 2], [100, 100]], 2)",
            lambda f: f(floats([1, 0], [3, 2], [100, 100]), 2),
            np.array([2.0, 1.0]),
            (
                "Only the first accumulation_steps gradients count.",
                "Neither the sum nor the divisor may see the third.",
                "Loop over micro_batches_grads[:accumulation_steps] and divide by accumulation_steps.",
            ),
        ),
        Case(
            "2-D arrays and scalars",
            "gradient_accumulation([[[1, 2], [3, 4]], …], 2) and gradient_accumulation([1.0, 3.0], 2)",
            lambda f: (
                f(floats([[1, 2], [3, 4]], [[3, 2], [1, 0]]), 2),
                f(floats(1.0, 3.0), 2),
            ),
            (np.array([[2.0, 2.0], [2.0, 2.0]]), np.array(2.0)),
            (
                "A gradient has its parameter's shape, whatever that is.",
                "Add whole arrays rather than their entries; then every shape works.",
                "total = total + gradient, starting from the first one, needs no shape.",
            ),
        ),
        Case(
            "the mean against the sum",
            "gradient_accumulation([[4], [8], [12], [16]], 4)",
            lambda f: f(floats([4], [8], [12], [16]), 4),
            np.array([10.0]),
            (
                "If you get 40, you have the sum: the step would be four times too long.",
                "Each microbatch's gradient is already a mean over its rows.",
                "Divide by accumulation_steps once, after the sum.",
            ),
        ),
        Case(
            "a wrong dtype",
            "gradient_accumulation([[1, 2], [3, 4]] as int64, 2)",
            lambda f: f([np.array([1, 2]), np.array([3, 4])], 2),
            Refused(),
            (
                "Gradients are floating point; integers point to a mistake upstream.",
                "Refuse before you add, and say which dtype came.",
                "if not np.issubdtype(g.dtype, np.inexact): raise TypeError(...)",
            ),
        ),
    )


EXERCISE = Exercise(
    function="gradient_accumulation",
    task="gradient_accumulation(micro_batches_grads, accumulation_steps): the mean of the first accumulation_steps gradients",
    cases=_cases(),
)

__all__ = ["EXERCISE", "gradient_accumulation", "picture"]
