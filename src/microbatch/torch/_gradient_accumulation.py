"""The textbook's gradient accumulation, for PyTorch tensors."""

from collections.abc import Iterable
from typing import Any

import torch

from microbatch._gradient_accumulation import first_gradients
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._tensors import carry_dtype


def gradient_accumulation(micro_batches_grads: Iterable[Any], accumulation_steps: int) -> Any:
    """The mean of the first K gradients, one per microbatch.

    Equivalent to::

        sum(micro_batches_grads[:K]) / K

    which is the gradient of the whole batch where each microbatch's loss is a mean over equally many rows.

    Args:
      micro_batches_grads: a sequence of tensors, or of trees of them (dicts, lists, tuples), all of one structure and
        one shape per leaf, in a floating or complex dtype.
      accumulation_steps: K, with 1 ≤ K ≤ the number of gradients; later gradients are ignored.

    Returns:
      A gradient like one of them, in its dtype; float16 and bfloat16 are summed in float32. With K = 1, the first
      gradient itself.

    Raises:
      MicrobatchSizeError: K is not an integer, less than 1 or more than there are.
      AccumulatorError: integer gradients.
      MicrobatchError: no gradients, or unequal structures or shapes.

    >>> gradients = [torch.tensor([1.0, 0.0]), torch.tensor([3.0, 2.0]), torch.tensor([100.0, 100.0])]
    >>> gradient_accumulation(gradients, 2).tolist()
    [2.0, 1.0]
    """
    gradients = first_gradients(micro_batches_grads, accumulation_steps, leaves_with_paths)
    return gradients[0] if len(gradients) == 1 else map_leaves(_mean, *gradients)


def _mean(first: Any, *others: Any) -> torch.Tensor:
    tensor = torch.as_tensor(first)
    total = tensor.to(carry_dtype(tensor.dtype, None), copy=True)
    for other in others:
        total += other
    return (total / (1 + len(others))).to(tensor.dtype)
