"""How cost grows in PyTorch: with the rows, and with the number of microbatches."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import microbatch.torch as mb
from benchmarks._harness import Bar, Table, seconds_in_turn, table_of
from benchmarks.torch_training import by_hand
from microbatch.torch._tracking import TensorBytes

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
    name: str, title: str, varying: str, cases: Iterable[tuple[int, int, Batch]], width: int = 128
) -> Table:
    """Time and peak bytes of live tensors of each way, case by case."""
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())])
    records = []
    for value, size, batch in cases:
        ways = {
            WHOLE: lambda batch=batch: _loss(model, *batch).backward(),
            HAND: lambda batch=batch, size=size: by_hand(model, _loss, batch, size),
            MINE: lambda batch=batch, size=size: mb.backward(
                lambda *rows: _loss(model, *rows), *batch, microbatch_size=size
            ),
        }
        taken = seconds_in_turn(list(ways.values()))
        records.append(
            {varying: value}
            | {f"{way}, s": s for way, s in zip(ways, taken, strict=True)}
            | {f"{way}, MiB": _peak_mib(model, batch, run) for way, run in ways.items()}
        )
    last = records[-1]
    reached = lambda figure: last[f"{MINE}, {figure}"] / last[f"{HAND}, {figure}"]
    subject = f"{MINE}, {last[varying]:,} {varying},"
    return table_of(
        records,
        name,
        title,
        x=varying,
        panels=tuple(tuple(f"{way}, {figure}" for way in ways) for figure in ("s", "MiB")),
        bars=(
            (Bar(subject, "time", 1.05, HAND), reached("s")),
            (Bar(subject, "memory", 1.01, HAND), reached("MiB")),
        ),
        note="MiB: the most bytes of tensors that are alive at once, beside parameters and batch.",
    )


def _peak_mib(model: nn.Module, batch: Batch, run: Callable[[], Any]) -> float:
    model.zero_grad()
    with TensorBytes() as tracked:
        held = [*model.parameters(), *batch]
        tracked.hold(held)
        run()
    return (tracked.peak_bytes - sum(t.nbytes for t in held)) / 2**20
