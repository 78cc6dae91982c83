"""The one read of a call: weights of all microbatches, and what the processes tell one another before the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from microbatch._errors import DistributedError, MicrobatchError

OK, FAILED = 0.0, 1.0


@dataclass(frozen=True)
class Totals:
    """Weights by column and microbatch, and each column's total over the processes."""

    weights: tuple[tuple[float, ...], ...]
    totals: tuple[float, ...]
    even: bool
    """Whether every process has equally many microbatches."""


def read_weights(
    where: str,
    columns: Sequence[Sequence[Any]],
    num_microbatches: int,
    groups: Sequence[Any] = (),
    device: torch.device | None = None,
    failure: Exception | None = None,
) -> Totals:
    """Weights as numbers, with one host synchronisation whatever their number, and one small all-reduce per group.

    Args:
      where: the words that open a message.
      columns: weights by weight function and microbatch: numbers, or tensors of one element.
      num_microbatches: of this process.
      groups: process groups to sum over, one after another; empty for a single process.
      device: where the collective's tensor is.
      failure: what this process refused; every process of the groups then raises.

    Raises:
      DistributedError: another process refused its call.
    """
    flat = [weight for column in columns for weight in column]
    on_device = [w for w in flat if isinstance(w, torch.Tensor) and w.device.type != "cpu"]
    home = on_device[0].device if on_device else torch.device("cpu")
    wide = torch.float32 if home.type == "mps" else torch.float64
    if on_device:
        local = torch.stack([torch.as_tensor(w, device=home).to(wide).reshape(()) for w in flat])
    else:
        local = torch.tensor([_number(where, w) for w in flat], dtype=wide)
    if not groups:
        weights = _by_column(local.tolist(), columns)
        return Totals(weights, tuple(map(sum, weights)), even=True)
    lengths = [len(column) for column in columns]
    sums = (
        [part.sum() for part in local.split(lengths)]
        if flat
        else [local.new_zeros(())] * len(columns)
    )
    # The count and its square tell in one sum whether all counts are equal: n·Σc² = (Σc)² only then.
    head = [1.0, num_microbatches, num_microbatches**2, OK if failure is None else FAILED]
    told = (
        torch.cat([torch.tensor(head, dtype=wide), torch.stack(sums).to("cpu")])
        if not on_device
        else (torch.cat([torch.tensor(head, dtype=wide, device=home), torch.stack(sums)]))
    )
    told = told.to(device or home)
    for group in groups:
        dist.all_reduce(told, group=group)
    numbers = torch.cat([told, local.to(told.device)]).tolist()
    processes, count, squares, failed, *rest = numbers
    if failure is not None:
        raise failure
    if failed:
        raise DistributedError(
            f"{where}: another process refused its call, so this one cannot run; its own error says why.\n"
            "Fix what that process reports; nothing was changed here."
        )
    return Totals(
        _by_column(rest[len(columns) :], columns),
        tuple(rest[: len(columns)]),
        even=processes * squares == count * count,
    )


def sum_over(
    values: list[torch.Tensor], groups: Sequence[Any], device: torch.device | None
) -> list[torch.Tensor]:
    """0-d tensors summed over the processes, with one all-reduce per group."""
    if not groups or not values:
        return values
    wide = torch.stack([value.to(device) for value in values])
    for group in groups:
        dist.all_reduce(wide, group=group)
    return list(wide)


def _by_column(
    numbers: list[float], columns: Sequence[Sequence[Any]]
) -> tuple[tuple[float, ...], ...]:
    remaining = iter(numbers)
    return tuple(tuple(next(remaining) for _ in column) for column in columns)


def _number(where: str, weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else ""
        raise MicrobatchError(
            f"{where}: weight_fn gave a {type(weight).__name__}{shape}.\n"
            "Give one number per microbatch, for example (labels != -100).sum()."
        ) from None
