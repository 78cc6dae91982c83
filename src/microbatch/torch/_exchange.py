"""Before the first microbatch: all weights, read at once, and what the processes tell one another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from microbatch._checks import check_weight
from microbatch._errors import DistributedError
from microbatch.torch._distributed import Wrappers
from microbatch.torch._guards import Guard
from microbatch.torch._reduction import Terms
from microbatch.torch._sources import Preparation, Source
from microbatch.torch._weights import as_weight, merged, stacked, widest


@dataclass(frozen=True)
class Totals:
    """Weights by column and microbatch, and each column's total over the processes."""

    weights: tuple[tuple[float, ...], ...]
    totals: tuple[float, ...]
    even: bool
    """Whether every process has equally many microbatches."""


def weigh(
    where: str, terms: Terms, prepare: Preparation, guard: Guard, wrappers: Wrappers
) -> tuple[Source, Totals]:
    """The microbatches and all their weights; a refusal is told to every process before it is raised."""
    groups, device = wrappers.groups, wrappers.device
    failure: Exception | None = None
    source: Source | None = None
    columns: list[list[Any]] = [[] for _ in terms.weight_fns]

    def read(count: int, failure: Exception | None = None) -> Totals:
        return read_weights(where, columns, count, groups, device, failure)

    try:
        guard.check_found()
        checked = prepare.check()
        if prepare.agrees and groups:
            read(0)
        source = prepare.cut(checked, groups[0] if len(groups) == 1 else None)
        columns = _columns(where, terms, source)
    except Exception as error:
        if not groups or isinstance(error, DistributedError):
            raise
        failure = error
    totals = read(source.count if source is not None else 0, failure)
    assert source is not None
    return source, totals


def _columns(where: str, terms: Terms, source: Source) -> list[list[Any]]:
    """The weights of every microbatch by weight function; none where no reduction uses them."""
    used = {term.column for term in terms.terms.values() if term.reduction != "sum"}
    with torch.no_grad():
        return [
            []
            if column not in used
            else [
                as_weight(where, source.rows(i) if fn is None else fn(*source.args(i)))
                for i in range(source.count)
            ]
            for column, fn in enumerate(terms.weight_fns)
        ]


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
      columns: weights by weight function and microbatch, as `as_weight` gives them.
      num_microbatches: of this process.
      groups: process groups to sum over, one after another; empty for a single process.
      device: where the collective's tensor is.
      failure: what this process refused; every process of the groups then raises.

    Raises:
      MicrobatchError: a weight that cannot be, of this process; the others then refuse their calls too.
      DistributedError: another process refused its call.
    """
    flat = [weight for column in columns for weight in column]
    # Numbers stay on the host; tensors, wherever they are, are read together.
    host = [0.0 if isinstance(weight, torch.Tensor) else weight for weight in flat]
    tensors = stacked(flat)
    if not groups:
        weights = _by_column(merged(flat, [] if tensors is None else tensors.tolist()), columns)
        _check(where, weights)
        return Totals(weights, tuple(map(sum, weights)), even=True)
    device = device or (torch.device("cpu") if tensors is None else tensors.device)
    owner = [c for c, column in enumerate(columns) for _ in column]
    sums = [0.0] * len(columns)
    for column, number in zip(owner, host):
        sums[column] += number
    # The count and its square tell in one sum whether all counts are equal: n·Σc² = (Σc)² only then.
    refused = (failure is not None) + sum(not _possible(number) for number in host)
    head = [1.0, num_microbatches, num_microbatches**2, refused]
    told = torch.tensor([*head, *sums], dtype=widest(device)).to(device)
    if tensors is not None:
        tensors = tensors.to(device, widest(device))
        columns_of = [c for c, w in zip(owner, flat) if isinstance(w, torch.Tensor)]
        told.index_add_(0, torch.tensor(columns_of).to(device) + len(head), tensors)
        told[3] += (~((tensors >= 0) & tensors.isfinite())).sum()
    for group in groups:
        dist.all_reduce(told, group=group)
    numbers = torch.cat([told] if tensors is None else [told, tensors]).tolist()
    processes, count, squares, failed, *rest = numbers
    if failure is not None:
        raise failure
    weights = _by_column(merged(flat, rest[len(columns) :]), columns)
    _check(where, weights)
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
    weights: Sequence[float], columns: Sequence[Sequence[Any]]
) -> tuple[tuple[float, ...], ...]:
    remaining = iter(weights)
    return tuple(tuple(next(remaining) for _ in column) for column in columns)


def _check(where: str, columns: Sequence[Sequence[float]]) -> None:
    for weights in columns:
        for index, weight in enumerate(weights):
            check_weight(where, weight, index)


def _possible(weight: float) -> bool:
    return math.isfinite(weight) and weight >= 0
