"""The digits network in PyTorch, every step on all rows as one batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from microbatch import AccumulationType
from microbatch._planning import Plan
from microbatch.cli._digits import Digits
from microbatch.cli._problem import Problem
from microbatch.torch import backward, plan

LEARNING_RATE = 2e-2


def network(seed: int) -> nn.Module:
    """Two 3 × 3 convolutions (32 and 64 channels) and two dense layers (128 and 10)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * 4 * 64, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean cross-entropy over the rows of ``[B, 1, 8, 8]`` images and ``[B]`` labels."""

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    return loss


def problem(digits: Digits, seed: int = 0) -> Problem:
    """The loss of the network on all training rows; its gradient is the parameters'."""
    return Problem(
        loss_of(network(seed)),
        (_images(digits.images), torch.from_numpy(digits.labels).long()),
        argnums=(0, 1),
        accumulator=AccumulationType.MEAN,
        options={"remainder": "allow"},
        framework="torch",
    )


class Trainer:
    """What the demo asks of PyTorch; see `microbatch.cli._demo.Trainer`."""

    framework = "torch"

    def __init__(self, digits: Digits, seed: int, steps: int) -> None:
        self._seed, self._steps = seed, steps
        self._problem = problem(digits, seed)
        self._test = (_images(digits.test_images), torch.from_numpy(digits.test_labels).long())

    def plan(self, memory: int | str | None) -> Plan:
        """The size that fits, found from shapes."""
        return self._plan(memory_budget=memory)

    def whole_bytes(self) -> int:
        """Peak tensor bytes of the whole batch in the ordinary way, found from shapes."""
        rows = len(self._problem.args[0])
        return self._plan(memory_budget="1TiB", candidates=(rows,)).predicted_bytes

    def start(self, microbatch_size: int | None) -> tuple[Callable[[], float], Callable[[], float]]:
        """A run from the first parameters: its step, which returns the loss, and its test accuracy."""
        model = network(self._seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self._steps)

        def step() -> float:
            optimizer.zero_grad()
            value = self._backward(model, microbatch_size)
            optimizer.step()
            # Once per optimizer step, whatever the number of microbatches.
            schedule.step()
            return float(value)

        @torch.no_grad()
        def accuracy() -> float:
            images, labels = self._test
            return float((model(images).argmax(-1) == labels).float().mean())

        return step, accuracy

    def gradient(self, microbatch_size: int | None, *, wide: bool = False) -> list[np.ndarray]:
        """The first gradient's leaves; with `wide`, computed in float64."""
        model = network(self._seed)
        if wide:
            images, labels = self._problem.args
            model.double()
            loss_of(model)(images.double(), labels).backward()
        else:
            self._backward(model, microbatch_size)
        return [p.grad.numpy() for p in model.parameters() if p.grad is not None]

    def _plan(self, **keywords: Any) -> Plan:
        p = self._problem
        return plan(p.fun, p.argnums, p.accumulator, **p.options, **keywords)(*p.args)

    def _backward(self, model: nn.Module, microbatch_size: int | None) -> Tensor:
        if microbatch_size is not None:
            return backward(loss_of(model), *self._problem.args, microbatch_size=microbatch_size)
        value = loss_of(model)(*self._problem.args)
        value.backward()
        return value.detach()


def _images(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images)[:, None]
