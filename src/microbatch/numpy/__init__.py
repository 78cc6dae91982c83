"""Microbatching of NumPy functions: arrays that fit, memory maps that do not, and streams that never end."""

from microbatch._accumulation import AccumulationType, Accumulator, Carry
from microbatch.numpy._gradient_accumulation import gradient_accumulation
from microbatch.numpy._microbatch import microbatch
from microbatch.numpy._rows import reshape_batch_axis
from microbatch.numpy._stream import accumulate

__all__ = [
    "AccumulationType",
    "Accumulator",
    "Carry",
    "accumulate",
    "gradient_accumulation",
    "microbatch",
    "reshape_batch_axis",
]
