"""The gradients of one call's inputs, collected while autograd makes them, microbatch by microbatch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from microbatch._errors import GraphError
from microbatch._splitting import Split
from microbatch.torch._graph import reach_of
from microbatch.torch._internals import graph_clock, is_transformed, own_hooks_only
from microbatch.torch._tensors import carry_dtype


class GradientSums:
    """Sums for what microbatches share, in float32 or wider, and rows for what has rows.

    A hook adds each gradient to its sum at the moment when autograd has it, and hands on zeros that take no memory: the
    gradients of one microbatch never exist side by side.

    Args:
      where: the words that open a message.
      tensors: all inputs of the call.
      places: per input, where a microbatch's rows are; None for shared.
      real: per input, whether the function uses the tensor itself.
      needed: which inputs need a gradient.
    """

    def __init__(
        self,
        where: str,
        tensors: Sequence[torch.Tensor],
        places: Sequence[Any],
        real: Sequence[bool],
        needed: Sequence[int],
    ) -> None:
        self._where = where
        self._places = places
        self._needed = tuple(needed)
        self._tensors = {i: tensors[i] for i in needed}
        self._shared = {
            i: tensors[i] if real[i] else tensors[i].detach().requires_grad_()
            for i in needed
            if places[i] is None
        }
        self._rows: dict[int, torch.Tensor] = {}
        self._nothing: dict[int, torch.Tensor] = {}
        self._lane = 0
        self._sums: list[dict[int, torch.Tensor]] = [{}]
        self._known = {id(leaf) for leaf in self._shared.values()}
        self._known |= {id(t) for t, is_real in zip(tensors, real, strict=True) if is_real}
        self._since = 0

    def add_leaves(self, leaves: dict[int, torch.Tensor]) -> None:
        """Adds inputs that turned out to be used, by their place among the inputs."""
        self._needed = (*self._needed, *leaves)
        self._tensors.update(leaves)
        self._shared.update(leaves)
        self._known |= {id(leaf) for leaf in leaves.values()}

    def know(self, leaves: Sequence[torch.Tensor]) -> None:
        """Leaves that may be reached and get no gradient."""
        self._known |= {id(leaf) for leaf in leaves}

    def open_lanes(self, lanes: int) -> None:
        """Makes so many independent sets of sums."""
        self._sums = [{} for _ in range(lanes)]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """The hooks are on inside; users' own hooks are off, for they are meant for the whole gradient."""
        with own_hooks_only(list(self._shared.values())):
            handles = [
                leaf.register_hook(lambda gradient, i=i: self._take(i, gradient))
                for i, leaf in self._shared.items()
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def leaves(self, given: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        """The inputs of one microbatch, those that need a gradient as leaves of their own."""
        self._rows = {
            i: given[i].detach().requires_grad_() for i in self._needed if i not in self._shared
        }
        self._since = graph_clock()
        own = {**self._shared, **self._rows}
        return [own.get(i, tensor) for i, tensor in enumerate(given)]

    def check(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Refuses outputs whose graph leads into an earlier one; returns the leaves that are not inputs."""
        if any(is_transformed(output) for output in outputs):
            raise GraphError(
                _message(self._where, "a tensor of an outer torch.func transformation")
            )
        reached = reach_of(*outputs, since=self._since)
        if reached.earlier is not None:
            what = f"a tensor that was computed before the call (by {reached.earlier})"
            raise GraphError(_message(self._where, what))
        known = self._known | {id(leaf) for leaf in self._rows.values()}
        return [leaf for key, leaf in reached.leaves.items() if key not in known]

    def add(
        self,
        outputs: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor | None],
        split: Split,
        index: int,
        *,
        lane: int = 0,
        keep_graph: bool = False,
    ) -> None:
        """Adds the gradients of one microbatch's outputs, weighted by their cotangents."""
        live = [
            (output, cotangent)
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if cotangent is not None and output.requires_grad
        ]
        if not live:
            return
        outputs, given = zip(*live, strict=True)
        unknown = self.check(outputs)
        if unknown:
            what = (
                f"a leaf of shape {tuple(unknown[0].shape)} that the first microbatch did not use"
            )
            raise GraphError(_message(self._where, what))
        self._lane = lane
        wanted = [*self._rows.values(), *self._shared.values()]
        found = torch.autograd.grad(
            outputs, wanted, given, allow_unused=True, retain_graph=keep_graph
        )
        for i, gradient in zip(self._rows, found):
            if gradient is not None:
                self._place(i, gradient, split, index)

    def results(self) -> list[torch.Tensor | None]:
        """One gradient per needed input, in its dtype, None where there was none. The sums are given away."""
        sums = self._sums[0]
        return [sums.pop(i).to(self.dtype(i)) if i in sums else None for i in self._needed]

    def sums(self, lane: int) -> dict[int, torch.Tensor]:
        """The sums as they are held, by input."""
        return self._sums[lane]

    def dtype(self, i: int) -> torch.dtype:
        """The dtype of input i."""
        return self._tensors[i].dtype

    def _take(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        sums = self._sums[self._lane]
        total = sums.get(i)
        if total is None:
            # A copy: autograd may give the same memory to several inputs.
            sums[i] = gradient.to(carry_dtype(gradient.dtype, None), copy=True)
            self._nothing[i] = _nothing_like(gradient)
        elif total.layout is gradient.layout is torch.strided:
            total.add_(gradient)
        else:
            sums[i] = total + gradient
        return self._nothing[i]

    def _place(self, i: int, gradient: torch.Tensor, split: Split, index: int) -> None:
        sums = self._sums[self._lane]
        if i not in sums:
            sums[i] = torch.zeros_like(self._tensors[i], requires_grad=False)
        self._places[i].take(sums[i], split, index).copy_(gradient)


def _message(where: str, what: str) -> str:
    return (
        f"{where}: the function uses {what}; its gradient cannot be followed from here.\n"
        "Pass the tensor as an argument, or compute it inside the function."
    )


def _nothing_like(gradient: torch.Tensor) -> torch.Tensor:
    """Zeros of the same kind that take no memory."""
    if gradient.layout is not torch.strided:
        return torch.zeros_like(gradient)
    return gradient.new_zeros(()).expand(gradient.shape)
