"""The node whose gradients exist already: they were made in the forward pass, and backward only scales them."""

from dataclasses import dataclass, field
from typing import Any

import torch

from microbatch._errors import GraphError
from microbatch.torch._gradient_sums import GradientSums


@dataclass
class Made:
    """Results, and the gradients that were made with them."""

    where: str
    results: list[torch.Tensor]
    lanes: list[int]
    sums: GradientSums | None = field(repr=False)


class InForward(torch.autograd.Function):
    """The node whose gradients exist already; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, made: Made, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.made = made
        ctx.set_materialize_grads(False)
        constant = [t for j, t in enumerate(made.results) if j not in made.lanes]
        ctx.mark_non_differentiable(*constant)
        results, made.results = made.results, []
        return tuple(results)

    @staticmethod
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        made = ctx.made
        if torch.is_grad_enabled():
            # They would count as constants in whatever is made of them, a gradient penalty for example.
            raise GraphError(
                f"{made.where}: create_graph=True asks for derivatives of gradients that were made in the forward pass, "
                'which have none.\nUse differentiate="recompute".'
            )
        sums, made.sums = made.sums, None
        if sums is None:
            raise GraphError(
                f"{made.where}: the gradients were made in the forward pass and have been used; backward runs once.\n"
                'Use differentiate="recompute".'
            )
        gradients: list[torch.Tensor | None] = [None] * (len(ctx.needs_input_grad) - 1)
        for lane, j in enumerate(made.lanes):
            cotangent = cotangents[j]
            if cotangent is None:
                continue
            held = sums.sums(lane)
            for i in list(held):
                scaled = held.pop(i).mul_(cotangent)
                gradients[i] = scaled if gradients[i] is None else gradients[i].add_(scaled)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                gradients[i] = gradient.to(sums.dtype(i))
        return (None, *gradients)
