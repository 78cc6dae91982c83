"""A training step in PyTorch: `backward` beside the loop that one would write by hand, and beside Accelerate's."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import microbatch.torch as mb
from benchmarks._harness import Bar, Workload
from benchmarks._torch import Loss, Ways, contenders, whole_batch


class Block(nn.Module):
    """A transformer layer that normalises first."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))))


def token_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


def count_tokens(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (labels[:, 1:] != -100).sum()


def workloads() -> list[Workload]:
    """The two training steps, and one whose texts have different lengths."""
    torch.manual_seed(0)
    return [_mlp(), _gpt(), _ragged()]


def _mlp(rows: int = 4096, size: int = 256, width: int = 512, layers: int = 4) -> Workload:
    stack = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
    batch = (torch.randn(rows, width), torch.randn(rows, width))

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((model(x) - y) ** 2).mean()

    return Workload(
        name="torch-mlp",
        title=f"PyTorch: gradient of an MLP of {layers} × {width}, {rows:,} rows, {size} a microbatch",
        reference="loop by hand",
        contenders=contenders(nn.Sequential(*stack), loss, batch, _usual_ways(rows, size)),
        bars=_usual_bars(),
    )


def _gpt(rows: int = 64, size: int = 4, tokens: int = 128, vocabulary: int = 8192) -> Workload:
    ids = torch.randint(0, vocabulary, (rows, tokens + 1))
    return Workload(
        name="torch-gpt",
        title=f"PyTorch: gradient of a GPT of 4 × 256, {rows} × {tokens} tokens, {size} rows a microbatch",
        reference="loop by hand",
        contenders=contenders(
            GPT(256, 4, vocabulary), token_loss, (ids, ids), _usual_ways(rows, size)
        ),
        bars=_usual_bars(),
        rounds=7,
    )


def _ragged(rows: int = 32, size: int = 2, tokens: int = 128, vocabulary: int = 256) -> Workload:
    ids = torch.randint(0, vocabulary, (rows, tokens))
    lengths = torch.linspace(8, tokens, rows).long()[torch.randperm(rows)]
    labels = ids.masked_fill(torch.arange(tokens) >= lengths[:, None], -100)
    ways: Ways = {
        "whole batch": whole_batch,
        "backward, by tokens": lambda model, loss, batch: mb.backward(
            lambda *rows: loss(model, *rows), *batch, microbatch_size=size, weight_fn=count_tokens
        ),
        "mean of means by hand": lambda model, loss, batch: by_hand(model, loss, batch, size),
    }
    return Workload(
        name="torch-tokens",
        title=f"PyTorch: a GPT of 2 × 64 on texts of 8 to {tokens} tokens, {size} of {rows} texts a microbatch",
        reference="whole batch",
        contenders=contenders(GPT(64, 2, vocabulary), token_loss, (ids, labels), ways),
        bars=(Bar("backward, by tokens", "error", 2.0, "whole batch"),),
    )


def _usual_ways(rows: int, size: int) -> Ways:
    # Made once for all steps, as in a training loop.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=rows // size)
    return {
        "loop by hand": lambda model, loss, batch: by_hand(model, loss, batch, size),
        "backward": lambda model, loss, batch: mb.backward(
            lambda *rows: loss(model, *rows), *batch, microbatch_size=size
        ),
        "Accelerate accumulate": lambda model, loss, batch: _accelerate(
            accelerator, model, loss, batch, size
        ),
        "whole batch": whole_batch,
    }


def _usual_bars() -> tuple[Bar, ...]:
    return (
        Bar("backward", "time", 1.03, "loop by hand"),
        Bar("backward", "memory", 1.01, "loop by hand"),
        Bar("backward", "time", 1.0, "Accelerate accumulate"),
    )


def by_hand(model: nn.Module, loss: Loss, batch: tuple[torch.Tensor, ...], size: int) -> Any:
    total: Any = 0.0
    rows = len(batch[0])
    for start in range(0, rows, size):
        piece = [tensor[start : start + size] for tensor in batch]
        share = loss(model, *piece) * (len(piece[0]) / rows)
        share.backward()
        total += share.detach()
    return total


def _accelerate(
    accelerator: Accelerator,
    model: nn.Module,
    loss: Loss,
    batch: tuple[torch.Tensor, ...],
    size: int,
) -> None:
    for start in range(0, len(batch[0]), size):
        with accelerator.accumulate(model):
            piece = [tensor[start : start + size] for tensor in batch]
            accelerator.backward(loss(model, *piece))
