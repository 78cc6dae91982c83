"""Microbatching in PyTorch: a training step on a batch of any size, and the transformations it is made of."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "microbatch.torch needs PyTorch.\nInstall it with: pip install 'microbatch[torch]'"
    ) from error

from microbatch._accumulation import AccumulationType, Accumulator, Carry
from microbatch.torch._gradient_accumulation import gradient_accumulation
from microbatch.torch._microbatch import microbatch, reshape_batch_axis
from microbatch.torch._per_example import micro_vmap
from microbatch.torch._per_example_gradients import Aux, micro_grad
from microbatch.torch._planning import plan
from microbatch.torch._stream import accumulate
from microbatch.torch._trainer import TrainerMixin
from microbatch.torch._training import backward, backward_window, value_and_grad, windows
from microbatch.torch._transforms import (
    NoiseScale,
    clip_by_global_norm,
    global_norm,
    noise_scale,
    per_example_moments,
    squared_norm,
)
from microbatch.torch._verification import verify

__all__ = [
    "AccumulationType",
    "Accumulator",
    "Aux",
    "Carry",
    "NoiseScale",
    "TrainerMixin",
    "accumulate",
    "backward",
    "backward_window",
    "clip_by_global_norm",
    "global_norm",
    "gradient_accumulation",
    "micro_grad",
    "micro_vmap",
    "microbatch",
    "noise_scale",
    "per_example_moments",
    "plan",
    "reshape_batch_axis",
    "squared_norm",
    "value_and_grad",
    "verify",
    "windows",
]
