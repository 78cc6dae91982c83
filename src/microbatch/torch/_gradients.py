"""Where gradients go: restored after a failure, kept aside, or summed in a wider precision."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from microbatch._errors import DistributedError, MicrobatchError


class Restorer:
    """Puts ``.grad`` back after a failure: where it was None, and with `copies` also where it was not.

    Leaves may be added until they first receive a gradient.
    """

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._known: dict[int, torch.Tensor] = {}
        self.incomplete = False
        """Whether a gradient that existed before has no copy."""

    def add(self, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Remembers the gradients of `leaves`; returns those that were not known."""
        new = list({id(leaf): leaf for leaf in leaves if id(leaf) not in self._known}.values())
        for leaf in new:
            self._known[id(leaf)] = leaf
            if leaf.grad is None:
                self._before[id(leaf)] = (leaf, None)
            elif self._copies:
                self._before[id(leaf)] = (leaf, leaf.grad.detach().clone())
            else:
                self.incomplete = True
        return new

    def restore(self) -> None:
        """Puts back what was remembered."""
        for leaf, before in self._before.values():
            if before is None:
                leaf.grad = None
            elif leaf.grad is not None and leaf.grad.layout is before.layout is torch.strided:
                leaf.grad.detach().copy_(before)
            else:  # A sparse gradient takes no values through a detached view of it.
                leaf.grad = before


@contextmanager
def kept_aside(leaves: Sequence[torch.Tensor]) -> Generator[None]:
    """``.grad`` of the leaves is None inside, and what it was before afterwards."""
    before = {id(leaf): (leaf, leaf.grad) for leaf in leaves}
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in before.values():
            leaf.grad = grad


class WideSums:
    """Gradients summed in `dtype` beside their leaves, each as soon as it exists, and cast once at the end.

    Args:
      where: the words that open a message.
      dtype: at least as wide as the leaves' own.
    """

    def __init__(self, where: str, dtype: torch.dtype, has_wrappers: bool) -> None:
        if not dtype.is_floating_point:
            raise MicrobatchError(
                f"{where}: accumulator_dtype={dtype} is not a floating-point dtype.\nUse torch.float32."
            )
        if has_wrappers:
            raise DistributedError(
                f"{where}: accumulator_dtype works on the gradients of one process, and a wrapper exchanges them in "
                "its own precision.\n"
                "Use fully_shard's MixedPrecisionPolicy(reduce_dtype=torch.float32), or keep the parameters of "
                "DistributedDataParallel in float32 under autocast."
            )
        self._dtype = dtype
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._earlier: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._handles: dict[int, Any] = {}

    def add(self, leaves: Iterable[torch.Tensor]) -> None:
        """Sums the gradients of these leaves from now on, where their own precision is lower."""
        for leaf in leaves:
            narrower = (
                leaf.is_floating_point()
                and torch.finfo(leaf.dtype).eps > torch.finfo(self._dtype).eps
            )
            if id(leaf) in self._handles or not narrower:
                continue
            self._handles[id(leaf)] = leaf.register_post_accumulate_grad_hook(self._take)
            if leaf.grad is not None:
                self._earlier[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def settle(self, leaves: Iterable[torch.Tensor]) -> None:
        """Casts the sums of these leaves already, and sums nothing more for them."""
        for leaf in leaves:
            if id(leaf) in self._handles:
                self._handles.pop(id(leaf)).remove()
            if id(leaf) in self._sums:
                leaf.grad = self._sums.pop(id(leaf))[1].to(leaf.dtype)

    def finish(self) -> None:
        """Casts the sums into ``.grad``, together with what was there before."""
        self._release()
        while self._sums:  # One by one, so that each sum is freed as soon as it is cast.
            key, (leaf, total) = self._sums.popitem()
            if key in self._earlier:
                _, earlier = self._earlier[key]
                earlier.copy_(total.add_(earlier))
            else:
                leaf.grad = total.to(leaf.dtype)
        for leaf, earlier in self._earlier.values():
            leaf.grad = earlier

    def abandon(self) -> None:
        """Forgets the sums; ``.grad`` is what it was."""
        self._release()
        for leaf, _ in self._sums.values():
            leaf.grad = None
        for leaf, earlier in self._earlier.values():
            leaf.grad = earlier

    def _take(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        if id(leaf) in self._sums:
            self._sums[id(leaf)][1].add_(grad)
        else:
            self._sums[id(leaf)] = (leaf, grad.to(self._dtype))

    def _release(self) -> None:
        for handle in self._handles.values():
            handle.remove()
