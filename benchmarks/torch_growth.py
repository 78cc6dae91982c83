"""How cost grows in PyTorch: with the rows, and with the number of microbatches."""

from collections.abc import Iterable

import torch
from torch import nn

import microbatch.torch as mb
from benchmarks._harness import Table, growth_table, time_columns
from benchmarks._torch import Ways, contenders, whole_batch
from benchmarks.torch_training import by_hand

WHOLE, HAND, MINE = "whole batch", "loop by hand", "backward"
Batch = tuple[torch.Tensor, ...]


def workloads() -> list[Table]:
    """One table for each thing that may grow."""
    torch.manual_seed(0)
    return [_rows(), _microbatches()]


def _rows(size: int = 256) -> Table:
    cases = [(rows, size, _batch(rows)) for rows in (2**k for k in range(8, 17))]
    title = f"PyTorch: rows grow; the gradient of an MLP of 4 × 128, {size} rows a microbatch"
    return _grown("torch-growth-rows", title, "rows", cases)


def _microbatches(rows: int = 2**14) -> Table:
    batch = _batch(rows)
    cases = [(count, rows // count, batch) for count in (2**k for k in range(9))]
    title = (
        f"PyTorch: more and smaller microbatches; the gradient of an MLP of 4 × 128, {rows:,} rows"
    )
    return _grown("torch-growth-microbatches", title, "microbatches", cases)


def _batch(rows: int, width: int = 128) -> Batch:
    return torch.randn(rows, width), torch.randn(rows, width)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def _grown(
    name: str, title: str, growing: str, cases: Iterable[tuple[int, int, Batch]], width: int = 128
) -> Table:
    """Time and peak bytes of live tensors of each way, case by case."""
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())])
    records = []
    for value, size, batch in cases:
        found = contenders(model, _loss, batch, _ways(size))
        records.append(
            {growing: value}
            | time_columns({way.name: way.run for way in found}, MINE, HAND)
            | {f"{way.name}, MiB": way.memory_bytes / 2**20 for way in found}
        )
    return growth_table(
        records,
        name,
        title,
        "MiB: the most bytes of tensors that are alive at once, beside parameters and batch.",
        mine=MINE,
        against=HAND,
        limits={"s": 1.05, "MiB": 1.01},
    )


def _ways(size: int) -> Ways:
    return {
        WHOLE: whole_batch,
        HAND: lambda model, loss, batch: by_hand(model, loss, batch, size),
        MINE: lambda model, loss, batch: mb.backward(
            lambda *rows: loss(model, *rows), *batch, microbatch_size=size
        ),
    }
