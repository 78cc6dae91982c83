"""The one read of a call: weights of all microbatches, and what the processes tell one another before the first."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from microbatch._errors import DistributedError, MicrobatchError


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
    check: Callable[[Sequence[Sequence[float]]], None],
    groups: Sequence[Any] = (),
    device: torch.device | None = None,
    failure: Exception | None = None,
) -> Totals:
    """Weights as numbers, with one host synchronisation whatever their number, and one small all-reduce per group.

    Args:
      where: the words that open a message.
      columns: weights by weight function and microbatch: numbers, or tensors of one element.
      num_microbatches: of this process.
      check: refuses weights that cannot be, of this process; the others then refuse their calls too.
      groups: process groups to sum over, one after another; empty for a single process.
      device: where the collective's tensor is.
      failure: what this process refused; every process of the groups then raises.

    Raises:
      DistributedError: another process refused its call.
    """
    flat = [_checked(where, weight) for column in columns for weight in column]
    tensors = [weight for weight in flat if isinstance(weight, torch.Tensor)]
    # Numbers stay on the host; tensors, wherever they are, are read together.
    host = [0.0 if isinstance(weight, torch.Tensor) else float(weight) for weight in flat]
    home = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    stacked = (
        torch.stack([t.to(home, _wide(home)).reshape(()) for t in tensors]) if tensors else None
    )
    if not groups:
        weights = _by_column(host, stacked.tolist() if stacked is not None else [], flat, columns)
        check(weights)
        return Totals(weights, tuple(map(sum, weights)), even=True)
    device = device or home
    owner = [c for c, column in enumerate(columns) for _ in column]
    sums = [0.0] * len(columns)
    for column, number in zip(owner, host):
        sums[column] += number
    # The count and its square tell in one sum whether all counts are equal: n·Σc² = (Σc)² only then.
    refused = (failure is not None) + sum(not _possible(number) for number in host)
    head = [1.0, num_microbatches, num_microbatches**2, refused]
    told = torch.tensor([*head, *sums], dtype=_wide(device)).to(device)
    if stacked is not None:
        stacked = stacked.to(device, _wide(device))
        columns_of = [c for c, w in zip(owner, flat) if isinstance(w, torch.Tensor)]
        told.index_add_(0, torch.tensor(columns_of).to(device) + len(head), stacked)
        told[3] += (~((stacked >= 0) & stacked.isfinite())).sum()
    for group in groups:
        dist.all_reduce(told, group=group)
    numbers = torch.cat([told] if stacked is None else [told, stacked]).tolist()
    processes, count, squares, failed, *rest = numbers
    if failure is not None:
        raise failure
    weights = _by_column(host, rest[len(columns) :], flat, columns)
    check(weights)
    if failed:
        raise DistributedError(
            f"{where}: another process refused its call, so this one cannot run; its own error says why.\n"
            "Fix what that process reports; nothing was changed here."
        )
    return Totals(
        weights,
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
    host: list[float], read: list[float], flat: Sequence[Any], columns: Sequence[Sequence[Any]]
) -> tuple[tuple[float, ...], ...]:
    from_tensors = iter(read)
    merged = iter(
        next(from_tensors) if isinstance(weight, torch.Tensor) else number
        for number, weight in zip(host, flat)
    )
    return tuple(tuple(next(merged) for _ in column) for column in columns)


def _checked(where: str, weight: Any) -> Any:
    """A number, or a tensor of one element."""
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else ""
        raise MicrobatchError(
            f"{where}: weight_fn gave a {type(weight).__name__}{shape}.\n"
            "Give one number per microbatch, for example (labels != -100).sum()."
        ) from None


def _possible(weight: float) -> bool:
    return math.isfinite(weight) and weight >= 0


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
