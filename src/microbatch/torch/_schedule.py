"""Which microbatches of a call run, with which weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microbatch._accumulation import Step
from microbatch._checks import check_weight
from microbatch._errors import MicrobatchError
from microbatch._splitting import Split
from microbatch.torch._weights import as_weight, merged, stacked


@dataclass(frozen=True)
class Schedule:
    """Which microbatches run, in order, and what their outputs are divided by."""

    split: Split
    steps: tuple[Step, ...]
    total: float
    """The weight that MEAN divides by."""

    @property
    def ran(self) -> float:
        """The weight of the microbatches that run."""
        return sum(1 if step.weight is None else step.weight for step in self.steps)

    @property
    def complete(self) -> bool:
        """Whether all microbatches run."""
        return len(self.steps) == self.split.num_microbatches


def schedule_of(
    where: str,
    split: Split,
    weight_of: Callable[[int], Any] | None,
    limit: int | torch.Tensor | None,
) -> Schedule:
    """The schedule of a call; all weights are read at once, before anything runs.

    Args:
      where: the words that open a message.
      split: the microbatches.
      weight_of: what `weight_fn` gives for microbatch i; None where rows weigh.
      limit: how many may run; None for all.
    """
    count = split.num_microbatches
    if limit is not None:
        count = max(0, min(count, int(limit)))
    indices = list(range(count))
    weights: Sequence[float | None]
    if weight_of is not None:
        read = _read_weights(where, weight_of, indices)
        total = sum(read)
        indices = [index for index, weight in zip(indices, read) if weight != 0]
        weights = [weight for weight in read if weight != 0]
    elif split.tail:
        weights = [split.size(index) for index in indices]
        total = split.batch_size
    else:
        weights = [None] * count
        total = split.num_microbatches
    steps: list[Step] = []
    before = 0.0
    for index, weight in zip(indices, weights, strict=True):
        steps.append(Step(index, split.size(index), weight, before, first=not steps))
        before += 1 if weight is None else weight
    return Schedule(split, tuple(steps), total)


def _read_weights(where: str, weight_of: Callable[[int], Any], indices: list[int]) -> list[float]:
    with torch.no_grad():
        found = [as_weight(where, weight_of(index)) for index in indices]
        try:
            together = stacked(found)
            read = [] if together is None else together.tolist()
        except RuntimeError as error:
            raise MicrobatchError(
                f"{where}: the weights depend on an axis that torch.func.vmap maps over, so they cannot be read.\n"
                "Compute them outside of vmap, or leave weight_fn out."
            ) from error
    weights = merged(found, read)
    for index, weight in zip(indices, weights, strict=True):
        check_weight(where, weight, index)
    return [*weights]
