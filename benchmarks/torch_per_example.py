"""Per-example clipping in PyTorch: beside `torch.func` and Opacus; and checkpointing as another way to save memory."""

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

import microbatch.torch as mb
from benchmarks._harness import Bar, Contender, Workload
from benchmarks._torch import Ways, peak_bytes, whole_batch
from benchmarks._torch import contenders as training_contenders
from benchmarks.torch_training import GPT

MEAN = mb.AccumulationType.MEAN
Batch = tuple[torch.Tensor, ...]
# The loss of each example, and a step: makes the mean of the clipped gradients, by parameter.
Losses = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Step = Callable[[Batch], list[torch.Tensor]]


def workloads() -> list[Workload]:
    """Clipping for two models, and a deep MLP with checkpoints."""
    torch.manual_seed(0)
    return [_mlp(), _gpt(), _checkpointed()]


def squared_errors(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean(-1)


def text_losses(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none").mean(-1)


def _mlp(rows: int = 128, size: int = 32, width: int = 512, layers: int = 3) -> Workload:
    stack = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
    batch = (torch.randn(rows, width), 30 * torch.randn(rows, width))
    title = f"PyTorch, per-example clipping: an MLP of {layers} × {width}, {rows} rows, {size} a microbatch"
    return _workload("mlp", title, nn.Sequential(*stack), squared_errors, batch, size)


def _gpt(rows: int = 64, size: int = 8, tokens: int = 64, vocabulary: int = 512) -> Workload:
    ids = torch.randint(0, vocabulary, (rows, tokens + 1))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    title = f"PyTorch, per-example clipping: a GPT of 2 × 128, {rows} × {tokens} tokens, {size} a microbatch"
    return _workload("gpt", title, GPT(128, 2, vocabulary), text_losses, batch, size)


def _workload(
    name: str, title: str, model: nn.Module, losses: Losses, batch: Batch, size: int
) -> Workload:
    exact = _one_by_one(copy.deepcopy(model).double(), losses)(
        tuple(t.double() if t.is_floating_point() else t for t in batch)
    )
    steps = {
        "plain gradient": _plain,
        "micro_grad": _micro_grad,
        "vmap(grad), in a loop": _vmap_of_grad,
        "vmap(grad, chunk_size=)": _chunked_vmap_of_grad,
        "Opacus, hooks": _opacus_hooks,
        "Opacus, ghost clipping": _opacus_ghosts,
    }

    def contender(name: str, make: Callable[..., Step]) -> Contender:
        own = copy.deepcopy(model)
        step = make(own, losses, size)
        run = functools.partial(step, batch)
        bytes_beside = peak_bytes(run, [*own.parameters(), *batch])
        error = None if make is _plain else _error(run(), exact)
        return Contender(name, run, bytes_beside, error=error)

    return Workload(
        name=f"torch-per-example-{name}",
        title=title,
        reference="plain gradient",
        contenders=tuple(contender(name, make) for name, make in steps.items()),
        bars=(
            Bar("micro_grad", "time", 1.05, "vmap(grad), in a loop"),
            Bar("micro_grad", "memory", 1.01, "vmap(grad), in a loop"),
            Bar("micro_grad", "time", 1.0, "vmap(grad, chunk_size=)"),
            Bar("micro_grad", "memory", 0.5, "vmap(grad, chunk_size=)"),
            Bar("micro_grad", "time", 1.0, "Opacus, hooks"),
            Bar("micro_grad", "time", 1.0, "Opacus, ghost clipping"),
        ),
        rounds=7,
    )


def _plain(model: nn.Module, losses: Losses, size: int) -> Step:
    """The mean gradient, without anything per example."""

    def step(batch: Batch) -> list[torch.Tensor]:
        model.zero_grad()
        mb.backward(lambda *rows: losses(model, *rows).mean(), *batch, microbatch_size=size)
        return [p.grad for p in model.parameters()]

    return step


def _one_by_one(model: nn.Module, losses: Losses) -> Step:
    """The definition: a loop over examples."""

    def step(batch: Batch) -> list[torch.Tensor]:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for row in zip(*(t.split(1) for t in batch), strict=True):
            found = torch.autograd.grad(losses(model, *row).sum(), list(model.parameters()))
            for sum_, gradient in zip(total, _clipped(found), strict=True):
                sum_ += gradient / len(batch[0])
        return total

    return step


def _micro_grad(model: nn.Module, losses: Losses, size: int) -> Step:
    gradient = mb.micro_grad(
        lambda model, *row: losses(model, *row).mean(),
        batch_argnums=(1, 2),
        microbatch_size=size,
        accumulator=MEAN,
        transform_fn=lambda found: dict(zip(found, _clipped(found.values()), strict=True)),
        metrics_fn=mb.global_norm,
    )
    return lambda batch: list(gradient(model, *batch)[0].values())


def _vmap_of_grad(model: nn.Module, losses: Losses, size: int) -> Step:
    """What a specialist writes: gradients of a microbatch's examples, clipped, summed and released."""
    clipped = _clipped_gradient(model, losses)

    def step(batch: Batch) -> list[torch.Tensor]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        total = [torch.zeros_like(p) for p in parameters.values()]
        for rows in zip(*(t.split(size) for t in batch), strict=True):
            found, _ = torch.func.vmap(clipped, (None, 0, 0))(parameters, *rows)
            for sum_, gradients in zip(total, found, strict=True):
                sum_ += gradients.sum(0)
            del found, gradients
        return [sum_ / len(batch[0]) for sum_ in total]

    return step


def _chunked_vmap_of_grad(model: nn.Module, losses: Losses, size: int) -> Step:
    """`vmap`'s own way to save memory, which joins the gradients of all examples."""
    clipped = _clipped_gradient(model, losses)

    def step(batch: Batch) -> list[torch.Tensor]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found, _ = torch.func.vmap(clipped, (None, 0, 0), chunk_size=size)(parameters, *batch)
        return [gradient.mean(0) for gradient in found]

    return step


def _clipped_gradient(model: nn.Module, losses: Losses) -> Callable[..., Any]:
    """One example's clipped gradient, and its norm."""

    def loss(parameters: dict[str, torch.Tensor], *row: torch.Tensor) -> torch.Tensor:
        run = lambda x: torch.func.functional_call(model, parameters, (x,))
        return losses(run, *(t[None] for t in row)).mean()

    def clipped(parameters: dict[str, torch.Tensor], *row: torch.Tensor) -> Any:
        found = list(torch.func.grad(loss)(parameters, *row).values())
        return _clipped(found), _norm(found)

    return clipped


def _opacus_hooks(model: nn.Module, losses: Losses, size: int) -> Step:
    """Hooks make each layer's per-example gradients; the optimizer clips and sums them, a microbatch at a time."""
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )

    def step(batch: Batch) -> list[torch.Tensor]:
        # Or sums of the last step would be kept.
        for p in model.parameters():
            p.summed_grad = None
        for rows in zip(*(t.split(size) for t in batch), strict=True):
            losses(wrapped, *rows).mean().backward()
            optimizer.clip_and_accumulate()
            for p in model.parameters():
                p.grad_sample = p.grad = None
        return [p.summed_grad / len(batch[0]) for p in model.parameters()]

    return step


def _opacus_ghosts(model: nn.Module, losses: Losses, size: int) -> Step:
    """Norms from activations and cotangents, and a second backward pass of the losses times the clipping factors."""
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="mean")

    def step(batch: Batch) -> list[torch.Tensor]:
        wrapped.zero_grad()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rows in zip(*(t.split(size) for t in batch), strict=True):
            values = losses(wrapped, *rows)
            wrapped.enable_hooks()
            values.mean().backward(retain_graph=True)
            factors = wrapped.get_clipping_coef()
            wrapped.zero_grad()
            wrapped.disable_hooks()
            (factors * values).sum().backward()
            for sum_, p in zip(total, model.parameters(), strict=True):
                sum_ += p.grad / len(batch[0])
            wrapped.zero_grad()
            wrapped.enable_hooks()
        return total

    return step


def _clipped(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One example's gradient clipped to a global norm of 1."""
    gradients = list(gradients)
    factor = (1 / _norm(gradients)).clamp(max=1)
    return [gradient * factor for gradient in gradients]


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()


def _error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    off = sum(float(((a.double() - b) ** 2).sum()) for a, b in zip(found, exact, strict=True))
    return math.sqrt(off / sum(float((b**2).sum()) for b in exact))


def _checkpointed(
    rows: int = 4096, size: int = 256, width: int = 256, layers: int = 16, segments: int = 4
) -> Workload:
    stack = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
    batch = (torch.randn(rows, width), torch.randn(rows, width))

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((model(x) - y) ** 2).mean()

    def by_microbatch(model: nn.Module, _: Any, batch: Batch) -> None:
        mb.backward(lambda *rows: loss(model, *rows), *batch, microbatch_size=size)

    def by_checkpoint(model: nn.Sequential, _: Any, batch: Batch) -> None:
        run = lambda x: checkpoint_sequential(model, segments, x, use_reentrant=False)
        loss(run, *batch).backward()

    def by_both(model: nn.Sequential, _: Any, batch: Batch) -> None:
        run = lambda x: checkpoint_sequential(model, segments, x, use_reentrant=False)
        mb.backward(lambda *rows: loss(run, *rows), *batch, microbatch_size=size)

    ways: Ways = {
        "whole batch": whole_batch,
        "backward": by_microbatch,
        f"checkpoint, {segments} segments": by_checkpoint,
        "backward of a checkpoint": by_both,
    }
    return Workload(
        name="torch-checkpoint",
        title=f"PyTorch: less memory for the same gradient, an MLP of {layers} × {width}, {rows:,} rows, {size} a microbatch",
        reference="whole batch",
        contenders=training_contenders(nn.Sequential(*stack), loss, batch, ways),
        bars=(
            Bar("backward", "time", 1.0, f"checkpoint, {segments} segments"),
            Bar("backward", "memory", 1.0, f"checkpoint, {segments} segments"),
        ),
        rounds=9,
    )
