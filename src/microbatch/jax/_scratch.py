"""Memory that XLA's kernels on a CPU take beside what the compiler plans: estimated from the operations."""

import math
import re
from typing import Any

from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

# Measured (JAX 0.10.2, two cores): a batched product copies one operand, a convolution its padded input, the gradient
# of a filter both; freed copies of other threads stay resident.
OPERANDS_HELD = 3


def scratch_bytes(jaxpr: Jaxpr) -> int:
    """Bytes that convolutions and batched products may take while they run: three times the largest operand of one.

    Plain matrix products take next to nothing. On accelerators the compiler's figure holds everything.
    """
    return OPERANDS_HELD * _largest_operand(jaxpr)


def fused_bytes(program_text: str) -> int:
    """The largest array inside the kernels into which XLA on a CPU fuses matrix products, which it does not count.

    Measured: a loss of 262,144 rows took 256 MiB, one hidden layer, where the compiler's figure for temporaries was 0.
    """
    named = set(re.findall(r"kind=kCustom, calls=%?([\w.\-]+)", program_text))
    found, inside = 0, False
    for line in program_text.splitlines():
        if line.endswith("{"):
            inside = line.strip().lstrip("%").split(" ")[0] in named
        elif inside and " parameter(" not in line:
            for dtype, sizes in re.findall(r"= (\w+)\[([\d,]+)\]", line):
                found = max(found, _array_bytes(dtype, sizes))
    return found


def _array_bytes(dtype: str, sizes: str) -> int:
    width = 1 if dtype in ("pred", "s8", "u8") else int(re.sub(r"\D", "", dtype) or 8) // 8
    return max(width, 1) * math.prod(int(size) for size in sizes.split(","))


def _largest_operand(jaxpr: Jaxpr) -> int:
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive is conv_general_dilated_p or _is_batched_product(eqn):
            found = max(found, *(_bytes(x.aval) for x in eqn.invars))
        for inner in jaxprs_in_params(eqn.params):
            found = max(found, _largest_operand(inner))
    return found


def _is_batched_product(eqn: Any) -> bool:
    if eqn.primitive is not dot_general_p:
        return False
    (_, batch) = eqn.params["dimension_numbers"]
    return bool(batch[0])


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
