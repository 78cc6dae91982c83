"""What `gradient_accumulation` accepts, the same for the arrays of every front."""

from collections.abc import Callable, Iterable
from typing import Any

from microbatch._checks import check_size
from microbatch._errors import AccumulatorError, MicrobatchError, MicrobatchSizeError

_WHERE = "gradient_accumulation"


def first_gradients(
    micro_batches_grads: Iterable[Any],
    accumulation_steps: int,
    leaves_of: Callable[[Any, str], list[tuple[str, Any]]],
) -> list[Any]:
    """The first `accumulation_steps` gradients, once all of them are alike and can be averaged.

    Args:
      micro_batches_grads: one gradient per microbatch: arrays, or trees of them.
      accumulation_steps: K, how many count.
      leaves_of: the leaves of a tree, each with its path, which starts with the given name.
    """
    if not isinstance(micro_batches_grads, Iterable):
        raise MicrobatchError(
            f"{_WHERE}: micro_batches_grads is a {type(micro_batches_grads).__name__}.\n"
            "Give a list with one gradient per microbatch."
        )
    gradients = list(micro_batches_grads)
    if not gradients:
        raise MicrobatchError(
            f"{_WHERE}: micro_batches_grads is empty.\nGive one gradient per microbatch."
        )
    steps = check_size(_WHERE, "accumulation_steps", accumulation_steps)
    if steps > len(gradients):
        count = f"{len(gradients)} gradient{'s' * (len(gradients) != 1)}"
        raise MicrobatchSizeError(
            f"{_WHERE}: accumulation_steps={steps}, and there are {count}.\n"
            f"Use at most {len(gradients)}, or give more gradients."
        )
    first = leaves_of(gradients[0], "micro_batches_grads[0]")
    for path, leaf in first:
        _check_can_average(path, leaf)
    for index, gradient in enumerate(gradients[1:], start=1):
        _check_alike(first, leaves_of(gradient, f"micro_batches_grads[{index}]"), index)
    return gradients[:steps]


def _check_alike(first: list[tuple[str, Any]], other: list[tuple[str, Any]], index: int) -> None:
    start, own = len("micro_batches_grads[0]"), len(f"micro_batches_grads[{index}]")
    if [path[start:] for path, _ in first] != [path[own:] for path, _ in other]:
        raise MicrobatchError(
            f"{_WHERE}: micro_batches_grads[{index}] has the leaves {_paths(other)}, and the first has "
            f"{_paths(first)}.\nGive gradients of the same parameters."
        )
    for (path, leaf), (other_path, other_leaf) in zip(first, other, strict=True):
        if _shape(leaf) != _shape(other_leaf):
            raise MicrobatchError(
                f"{_WHERE}: {other_path} has shape {_shape(other_leaf)}, and {path} has "
                f"{_shape(leaf)}.\nGive gradients of the same parameters."
            )
        _check_can_average(other_path, other_leaf)


def _check_can_average(path: str, leaf: Any) -> None:
    dtype = str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.")
    if not dtype.startswith(("float", "bfloat", "complex")):
        raise AccumulatorError(
            f"{_WHERE}: {path} has dtype {dtype}, which cannot hold a mean.\n"
            "Give floating-point gradients, for example of dtype float32."
        )


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _paths(leaves: list[tuple[str, Any]]) -> str:
    return ", ".join(path for path, _ in leaves) or "nothing"
