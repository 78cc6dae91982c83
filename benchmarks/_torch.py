"""PyTorch training steps as contenders: their peak bytes beside parameters and batch, and their error against float64."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks._harness import Contender
from microbatch.torch._tracking import TensorBytes

Loss = Callable[..., torch.Tensor]
Ways = Mapping[str, Callable[[nn.Module, Loss, tuple[torch.Tensor, ...]], Any]]


def whole_batch(model: nn.Module, loss: Loss, batch: tuple[torch.Tensor, ...]) -> None:
    """The plain step."""
    loss(model, *batch).backward()


def peak_bytes(run: Callable[[], Any], held: Sequence[torch.Tensor]) -> int:
    """The most bytes of tensors that are alive at once while it runs, beside those `held` anyway."""
    with TensorBytes() as tracked:
        tracked.hold(held)
        before = tracked.live_bytes
        run()
    return tracked.peak_bytes - before


def contenders(
    model: nn.Module, loss: Loss, batch: tuple[torch.Tensor, ...], ways: Ways
) -> tuple[Contender, ...]:
    """Each way with its peak bytes and its gradient's relative error, both from one run."""
    exact = copy.deepcopy(model).double()
    wide = tuple(t.double() if t.is_floating_point() else t for t in batch)
    whole_batch(exact, loss, wide)
    held = [*model.parameters(), *batch]

    def contender(name: str, way: Callable[..., Any]) -> Contender:
        def run() -> None:
            for leaf in held:
                leaf.grad = None
            way(model, loss, batch)

        return Contender(name, run, peak_bytes(run, held), error=_error(model, exact))

    return tuple(contender(name, way) for name, way in ways.items())


def _error(model: nn.Module, exact: nn.Module) -> float:
    pairs = [(p.grad, e.grad) for p, e in zip(model.parameters(), exact.parameters(), strict=True)]
    off = sum(float(((g.double() - e) ** 2).sum()) for g, e in pairs)
    return math.sqrt(off / sum(float((e**2).sum()) for _, e in pairs))
