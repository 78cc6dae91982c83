"""Looking at the autograd graph of a loss: which leaves it reaches, and through which nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microbatch.torch._internals import is_older, leaf_of


@dataclass(frozen=True)
class Reach:
    """What a backward from some tensors would visit."""

    leaves: dict[int, torch.Tensor]
    """Leaves that would receive a gradient, by identity."""
    nodes: set[Any]
    earlier: str | None
    """The name of a node that was made before the walk's limit, where there is one."""

    @property
    def hides_leaves(self) -> bool:
        """Whether a node runs a backward of its own (reentrant checkpointing), so that leaves may be missing here."""
        return any(node.name() == "CheckpointFunctionBackward" for node in self.nodes)


def reach_of(*tensors: torch.Tensor, since: int = 0) -> Reach:
    """Walks the graph under the tensors; costs microseconds per node and reads no values.

    Args:
      *tensors: where the walk starts.
      since: a `graph_clock`; the walk does not go into nodes that were made before it.
    """
    leaves = {id(t): t for t in tensors if t.grad_fn is None and t.requires_grad}
    earlier: str | None = None
    pending = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        leaf = leaf_of(node)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        elif since and is_older(node, since):
            earlier = node.name()
        else:
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
    return Reach(leaves, seen, earlier)


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
