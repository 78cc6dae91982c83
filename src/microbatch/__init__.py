"""Any batch size, in the memory you have, with the same answer.

The transformations are in the front of your framework: `microbatch.jax`, `microbatch.torch` or `microbatch.numpy`.
Importing this package imports no framework.
"""

from microbatch._accumulation import AccumulationType, Accumulator, Carry
from microbatch._errors import (
    AccumulatorError,
    BatchError,
    BudgetError,
    CheckpointError,
    DifferentError,
    DistributedError,
    EmptyStream,
    GraphError,
    HookError,
    MicrobatchError,
    MicrobatchSizeError,
    OutOfMemory,
    PlanError,
    RowMixingError,
)

__all__ = [
    "AccumulationType",
    "Accumulator",
    "AccumulatorError",
    "BatchError",
    "BudgetError",
    "Carry",
    "CheckpointError",
    "DifferentError",
    "DistributedError",
    "EmptyStream",
    "GraphError",
    "HookError",
    "MicrobatchError",
    "MicrobatchSizeError",
    "OutOfMemory",
    "PlanError",
    "RowMixingError",
]
