"""Differentiating through `microbatch` in PyTorch: a contrastive loss over many pairs, and a head with a large vocabulary."""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import microbatch.torch as mb
from benchmarks._harness import Bar, Workload
from benchmarks._torch import Loss, Ways, contenders, whole_batch


class Encoders(nn.Module):
    """Two encoders and a learned temperature."""

    def __init__(self, width: int, hidden: int, out: int = 128) -> None:
        super().__init__()
        stack = lambda: nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, out),
        )
        self.left, self.right = stack(), stack()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)


def contrastive(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    logits = scale.exp() * left @ right.T
    target = torch.arange(len(left))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def head_loss(head: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(features), labels, reduction="sum")


def workloads() -> list[Workload]:
    """A gradient cache, and a head cut along its tokens."""
    torch.manual_seed(0)
    return [_contrastive(), _head()]


def _contrastive(
    pairs: int = 2048, size: int = 64, width: int = 512, hidden: int = 2048
) -> Workload:
    def loss(model: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return contrastive(*model(left, right), model.scale)

    def by_microbatch(model: Any, _: Loss, batch: tuple[torch.Tensor, ...]) -> None:
        encode = mb.microbatch(model, (0, 1), size, mb.AccumulationType.CONCAT)
        contrastive(*encode(*batch), model.scale).backward()

    ways: Ways = {
        "gradient cache by hand": functools.partial(_two_passes, size=size),
        "microbatch(encode)": by_microbatch,
        "whole batch": whole_batch,
    }
    batch = (torch.randn(pairs, width), torch.randn(pairs, width))
    return Workload(
        name="torch-contrastive",
        title=f"PyTorch: contrastive gradient, {pairs:,} pairs, {size} a microbatch",
        reference="gradient cache by hand",
        contenders=contenders(Encoders(width, hidden), loss, batch, ways),
        bars=(
            Bar("microbatch(encode)", "time", 1.05, "gradient cache by hand"),
            Bar("microbatch(encode)", "memory", 1.01, "gradient cache by hand"),
        ),
        rounds=5,
    )


def _two_passes(model: Any, _: Loss, batch: tuple[torch.Tensor, ...], size: int) -> None:
    """Encode without graphs, take the gradient of the embeddings, and encode again for each microbatch."""
    pieces = list(zip(*(side.split(size) for side in batch), strict=True))
    with torch.no_grad():
        encoded = [model(*piece) for piece in pieces]
    sides = [torch.cat(side).requires_grad_() for side in zip(*encoded, strict=True)]
    del encoded
    contrastive(*sides, model.scale).backward()
    grads = zip(*(side.grad.split(size) for side in sides), strict=True)
    for piece, grad in zip(pieces, grads, strict=True):
        torch.autograd.backward(model(*piece), grad)


def _head(
    tokens: int = 4096, size: int = 512, width: int = 512, vocabulary: int = 32768
) -> Workload:
    def by_microbatch(head: nn.Module, _: Loss, batch: tuple[torch.Tensor, ...]) -> None:
        summed = mb.microbatch(
            functools.partial(head_loss, head), (0, 1), size, mb.AccumulationType.SUM
        )
        summed(*batch).backward()

    features, labels = torch.randn(tokens, width), torch.randint(0, vocabulary, (tokens,))
    ways: Ways = {"whole batch": whole_batch, "microbatch(head)": by_microbatch}
    return Workload(
        name="torch-head",
        title=f"PyTorch: cross-entropy of {tokens:,} × {width} into {vocabulary:,}, {size} tokens a microbatch",
        reference="whole batch",
        contenders=contenders(
            nn.Linear(width, vocabulary, bias=False),
            head_loss,
            (features.requires_grad_(), labels),
            ways,
        ),
        bars=(
            Bar("microbatch(head)", "time", 1.1, "whole batch"),
            Bar("microbatch(head)", "memory", 0.2, "whole batch"),
        ),
        rounds=3,
    )
