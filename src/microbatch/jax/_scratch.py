"""Memory that XLA's kernels on a CPU take beside what the compiler plans: estimated from the operations."""

from typing import Any

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from microbatch.jax._programs import inner_programs

# Measured (JAX 0.10.2, two cores): a batched product copies one operand, a convolution its padded input, the gradient
# of a filter both; freed copies of other threads stay resident.
OPERANDS_HELD = 3


def scratch_bytes(jaxpr: Jaxpr) -> int:
    """Bytes that convolutions and batched products may take while they run: three times the largest operand of one.

    Plain matrix products take next to nothing. On accelerators the compiler's figure holds everything.
    """
    return OPERANDS_HELD * _largest_operand(jaxpr)


def _largest_operand(jaxpr: Jaxpr) -> int:
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive is conv_general_dilated_p or _is_batched_product(eqn):
            found = max(found, *(_bytes(x.aval) for x in eqn.invars))
        for inner in inner_programs(eqn.params):
            found = max(found, _largest_operand(inner))
    return found


def _is_batched_product(eqn: Any) -> bool:
    if eqn.primitive is not dot_general_p:
        return False
    (_, batch) = eqn.params["dimension_numbers"]
    return bool(batch[0])


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
