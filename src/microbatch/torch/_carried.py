"""Arguments that were computed before the call: cut from their graph, and one backward into it at the end."""

from collections.abc import Sequence
from typing import Any

import torch

from microbatch._trees import map_leaves
from microbatch.torch._batch import NOT_SPLIT
from microbatch.torch._internals import acts_after_gradient, acts_on_gradient


class CarriedArguments:
    """Takes over tensors that need a gradient, and hands their gradients on once, after the last microbatch.

    A tensor that is cut gets its gradient row by row into one buffer (slicing it under autograd would make a gradient
    of the whole batch's size per microbatch); one that is not is detached once for all microbatches. A leaf that is not
    cut, such as a parameter, is left alone, unless it has hooks: they are for the whole gradient.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, args: Any, dims: Any, start: int, stop: int) -> Any:
        """The rows start … stop − 1 of `args` with their own leaves in place of tensors that need a gradient."""
        self._pieces = []

        def piece_of(leaf: Any, dim: int) -> Any:
            is_tensor = isinstance(leaf, torch.Tensor)
            if dim == NOT_SPLIT:
                return self._detached(leaf) if is_tensor and _is_taken_over(leaf) else leaf
            if not leaf.requires_grad:
                return leaf.narrow(dim, start, stop - start)
            if id(leaf) not in self._rows:
                self._rows[id(leaf)] = (leaf, torch.zeros_like(leaf, requires_grad=False))
            piece = leaf.detach().narrow(dim, start, stop - start).requires_grad_()
            self._pieces.append((piece, self._rows[id(leaf)][1].narrow(dim, start, stop - start)))
            return piece

        return map_leaves(piece_of, args, dims)

    def collect(self) -> None:
        """Keeps the gradients of the microbatch that was taken last, after its backward."""
        for piece, rows in self._pieces:
            if piece.grad is not None:
                rows.add_(piece.grad)
        self._pieces = []

    def pieces(self) -> list[torch.Tensor]:
        """The leaves of the current microbatch that stand for rows."""
        return [piece for piece, _ in self._pieces]

    def shared(self) -> list[torch.Tensor]:
        """The leaves that stand for carried arguments in all microbatches."""
        return [detached for _, detached in self._shared.values()]

    def finish(self, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """One backward into the graphs that the arguments came with."""
        pairs = list(self._rows.values())
        pairs += [(t, d.grad) for t, d in self._shared.values() if d.grad is not None]
        roots: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        for tensor, grad in pairs:
            is_leaf = tensor.grad_fn is None
            if is_leaf and inputs is not None and all(tensor is not leaf for leaf in inputs):
                continue
            if is_leaf and tensor.grad is None and not _has_hooks(tensor):
                tensor.grad = grad  # As it is: autograd would copy it.
            else:
                roots.append(tensor)
                grads.append(grad)
        if roots:
            torch.autograd.backward(roots, grads, inputs=inputs)

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._shared:
            self._shared[id(tensor)] = (tensor, tensor.detach().requires_grad_())
        return self._shared[id(tensor)][1]


def _is_taken_over(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None or (tensor.requires_grad and _has_hooks(tensor))


def _has_hooks(leaf: torch.Tensor) -> bool:
    return acts_on_gradient(leaf) or acts_after_gradient(leaf)
