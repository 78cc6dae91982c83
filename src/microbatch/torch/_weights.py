"""What a `weight_fn` gives, as numbers: tensors are read together, wherever they are."""

from collections.abc import Sequence
from typing import Any

import torch

from microbatch._errors import MicrobatchError


def as_weight(where: str, weight: Any) -> float | torch.Tensor:
    """A number, or a tensor of one element that is still to be read."""
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else ""
        raise MicrobatchError(
            f"{where}: weight_fn returned a {type(weight).__name__}{shape}.\n"
            "Return one number per microbatch, for example (labels != -100).sum()."
        ) from None


def stacked(weights: Sequence[float | torch.Tensor]) -> torch.Tensor | None:
    """The tensors among the weights as one, on an accelerator where one of them is there; None without tensors."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if not tensors:
        return None
    home = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([t.to(home, widest(home)) for t in tensors])


def merged(weights: Sequence[float | torch.Tensor], read: Sequence[float]) -> list[float]:
    """The weights as numbers, with what was read of the tensors, in order."""
    from_tensors = iter(read)
    return [next(from_tensors) if isinstance(w, torch.Tensor) else w for w in weights]


def widest(device: torch.device) -> torch.dtype:
    """The widest floating dtype that the device has."""
    return torch.float32 if device.type == "mps" else torch.float64
