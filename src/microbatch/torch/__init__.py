"""Microbatching in PyTorch: a training step on a batch of any size, and the transformations it is made of."""

from microbatch._accumulation import AccumulationType, Accumulator, Carry
from microbatch.torch._training import backward, backward_window, value_and_grad, windows

__all__ = [
    "AccumulationType",
    "Accumulator",
    "Carry",
    "backward",
    "backward_window",
    "value_and_grad",
    "windows",
]
