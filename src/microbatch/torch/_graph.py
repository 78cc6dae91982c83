"""Looking at the autograd graph of a loss: which leaves it reaches, and through which nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Reach:
    """What a backward from a tensor would visit."""

    leaves: dict[int, torch.Tensor]
    """Leaves that would receive a gradient, by identity."""
    nodes: frozenset[Any]
    hides_leaves: bool
    """Whether a node runs a backward of its own (reentrant checkpointing), so that leaves may be missing here."""


def reach_of(*tensors: torch.Tensor) -> Reach:
    """Walks the graph under the tensors; costs microseconds per node and reads no values."""
    leaves = {id(t): t for t in tensors if t.grad_fn is None and t.requires_grad}
    seen: set[Any] = set()
    hides = False
    pending = [tensor.grad_fn for tensor in tensors]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        hides = hides or node.name() == "CheckpointFunctionBackward"
        pending.extend(next_node for next_node, _ in node.next_functions)
    return Reach(leaves, frozenset(seen), hides)


def connected_zero(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A loss of zero whose gradient in each tensor is zero, whatever values, NaN included, lie between."""
    return _ConnectedZero.apply(*tensors)


class _ConnectedZero(torch.autograd.Function):
    """Zero with exact zeros as gradients; a product with zero would let NaN through."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        first = tensors[0]
        return torch.zeros(
            (), dtype=first.dtype if first.is_floating_point() else None, device=first.device
        )

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
