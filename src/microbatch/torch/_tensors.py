"""What a tensor is without its values: dtypes, in words and by what they can hold, and specs that take no memory."""

from typing import Any

import torch

from microbatch._accumulation import accumulates_wider
from microbatch._errors import AccumulatorError


def as_tensor(leaf: Any) -> torch.Tensor:
    """A leaf of the output as a tensor; Python numbers in Python's own precision."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(leaf, bool | int | float | complex) and not hasattr(leaf, "__array__"):
        raise AccumulatorError(
            f"an output is a {type(leaf).__name__}, which cannot be accumulated.\n"
            "Return tensors or numbers."
        )
    dtype = {float: torch.float64, complex: torch.complex128}.get(type(leaf))
    return torch.as_tensor(leaf, dtype=dtype)


def spec_of(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape, dtype and device of `tensor` that take no memory."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def carry_dtype(dtype: torch.dtype, override: torch.dtype | None) -> torch.dtype:
    """The dtype in which sums of `dtype` are held."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    if override is not None:
        return torch.promote_types(override, torch.complex64) if dtype.is_complex else override
    if dtype is torch.complex32:
        return torch.complex64
    return torch.float32 if accumulates_wider(dtype_name(dtype)) else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name without its package: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def limits(dtype: torch.dtype) -> tuple[Any, Any]:
    """The lowest and the highest value of a real dtype."""
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    if dtype is torch.bool:
        return False, True
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def type_words(tensor: torch.Tensor) -> str:
    """The dtype and the shape: ``"float32[3]"``."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
