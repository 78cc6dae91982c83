"""The JAX front."""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "microbatch.jax needs JAX.\nInstall it with: pip install 'microbatch[jax]'"
    ) from error

from microbatch._accumulation import AccumulationType, Accumulator, Carry
from microbatch.jax._gradient_accumulation import gradient_accumulation
from microbatch.jax._microbatch import microbatch
from microbatch.jax._multi_steps import weighted_multi_steps
from microbatch.jax._per_example import Aux, micro_grad, micro_vmap
from microbatch.jax._planning import plan
from microbatch.jax._rows import reshape_batch_axis
from microbatch.jax._stream import accumulate
from microbatch.jax._transforms import (
    NoiseScale,
    clip_by_global_norm,
    noise_scale,
    per_example_moments,
    squared_norm,
)
from microbatch.jax._verification import verify

__all__ = [
    "AccumulationType",
    "Accumulator",
    "Aux",
    "Carry",
    "NoiseScale",
    "accumulate",
    "clip_by_global_norm",
    "gradient_accumulation",
    "micro_grad",
    "micro_vmap",
    "microbatch",
    "noise_scale",
    "per_example_moments",
    "plan",
    "reshape_batch_axis",
    "squared_norm",
    "verify",
    "weighted_multi_steps",
]
