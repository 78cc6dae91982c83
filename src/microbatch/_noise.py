"""The gradient noise scale, whatever the arrays."""

import dataclasses
from typing import Any

from microbatch._checks import check_size
from microbatch._errors import MicrobatchError


@dataclasses.dataclass(frozen=True)
class NoiseScale:
    """What `noise_scale` estimates; its numbers are arrays of the framework.

    Attributes:
      value: the noise scale in examples ``[]``; nan if it is undefined, infinite if the noise hides the gradient.
      squared_norm: of the true gradient, an unbiased estimate ``[]``; it may be negative.
      variance: the trace of the covariance of one example's gradient, an unbiased estimate ``[]``.
      defined: False for a single group, from which noise cannot be told.
    """

    value: Any
    squared_norm: Any
    variance: Any
    defined: bool

    def __str__(self) -> str:
        if not self.defined:
            return "undefined: one group of examples says nothing about noise; use two or more microbatches"
        return f"{self.value:.6g} examples"


def check_groups(squared_norms: Any, group_size: Any) -> int:
    """`group_size`, after a look at the norms of the groups."""
    shape = tuple(squared_norms.shape)
    if len(shape) != 1 or shape[0] == 0:
        raise MicrobatchError(
            f"noise_scale: squared_norms has shape {shape}, not one number per group.\n"
            "Pass the [n] squared norms of the n groups, for example aux.metrics of metrics_fn=squared_norm."
        )
    return check_size("noise_scale", "group_size", group_size)


def unbiased(big: Any, small: Any, group_size: int, groups: int) -> tuple[Any, Any]:
    """The true gradient's squared norm and one example's variance.

    Args:
      big: the squared norm of the mean gradient of all examples.
      small: the mean squared norm of the groups' mean gradients.
      group_size: examples in a group.
      groups: two or more.
    """
    all_examples = groups * group_size
    squared = (all_examples * big - group_size * small) / (all_examples - group_size)
    return squared, (small - big) / (1 / group_size - 1 / all_examples)
