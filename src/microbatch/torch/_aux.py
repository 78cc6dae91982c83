"""What a loss function returns besides the loss, over all microbatches."""

from collections.abc import Mapping
from typing import Any

import torch

from microbatch._errors import MicrobatchError
from microbatch._trees import map_leaves


def unpack(where: str, output: Any, has_aux: bool) -> tuple[dict[str | None, torch.Tensor], Any]:
    """The losses by key (None for a single one) and the rest of what the loss function returned."""
    aux = None
    if has_aux and not hasattr(output, "loss"):
        if not isinstance(output, tuple) or len(output) != 2:
            raise MicrobatchError(
                f"{where}: has_aux=True, and the loss function returned a {type(output).__name__}.\n"
                "Return (loss, aux), or an output with a .loss."
            )
        output, aux = output
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        aux = output if has_aux and aux is None else aux
        output = output.loss
    elif hasattr(output, "loss") and output.loss is None:
        raise MicrobatchError(
            f"{where}: the loss function returned a {type(output).__name__} whose .loss is None.\n"
            "Give the model labels, or return a tensor of one element."
        )
    losses = dict(output) if isinstance(output, Mapping) else {None: output}
    if not losses:
        raise MicrobatchError(
            f"{where}: the loss function returned an empty mapping.\n"
            "Return a tensor of one element, a mapping of them, or an output with a .loss."
        )
    for key, loss in losses.items():
        label = "the loss" if key is None else f"the loss {key!r}"
        if not isinstance(loss, torch.Tensor):
            advice = (
                "Return (loss, aux) with has_aux=True."
                if isinstance(loss, tuple)
                else (
                    "Return a tensor of one element, a mapping of them, or an output with a .loss."
                )
            )
            raise MicrobatchError(
                f"{where}: {label} is a {type(loss).__name__}, not a tensor.\n{advice}"
            )
        if loss.numel() != 1:
            raise MicrobatchError(
                f"{where}: {label} has shape {tuple(loss.shape)}, not one element.\n"
                'Reduce it: .mean() with reduction="mean", or .sum() with reduction="sum".'
            )
    return losses, aux


def detach(aux: Any) -> Any:
    """`aux` without its graphs."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, aux)


def join(where: str, auxes: list[Any]) -> Any:
    """The aux of the batch: 0-d tensors stacked, tensors concatenated along their rows, other values as lists.

    >>> join("backward(loss)", [{"n": torch.tensor(1), "id": "a"}, {"n": torch.tensor(2), "id": "b"}])
    {'n': tensor([1, 2]), 'id': ['a', 'b']}
    """

    def join_leaves(*leaves: Any) -> Any:
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return list(leaves)
        if leaves[0].ndim == 0:
            return torch.stack(leaves)
        return torch.cat(leaves)

    first, *rest = auxes
    try:
        return map_leaves(join_leaves, first, *rest)
    except (MicrobatchError, RuntimeError) as error:
        raise MicrobatchError(
            f"{where}: the aux of the microbatches cannot be joined: {error}\n"
            "Return one structure from every microbatch, and tensors that differ in their rows alone."
        ) from error
