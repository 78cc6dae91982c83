"""The private parts of PyTorch that the transformations need, each behind one function; a test fails when one moves."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def transforms_active() -> bool:
    """Whether this code runs inside `torch.func.grad`, `vmap` and the like; no public function tells."""
    return torch._C._are_functorch_transforms_active()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether the tensor belongs to a transformation of `torch.func` that is running."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def graph_clock() -> int:
    """A number that grows with every node that autograd makes on this thread."""
    with torch.enable_grad():
        return _leaf().view(()).grad_fn._sequence_nr()


@functools.cache
def _leaf() -> torch.Tensor:
    return torch.zeros((), device="cpu", requires_grad=True)


class Reached:
    """Where the graph of some tensors ends: leaves, and whether it goes on into a graph that was made before."""

    def __init__(self, outputs: Sequence[torch.Tensor], since: int) -> None:
        self.leaves = [t for t in outputs if t.requires_grad and t.grad_fn is None]
        self.earlier: str | None = None
        ends = _type_of_leaves()
        pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            if type(node) is ends:
                self.leaves.append(node.variable)
            elif node._sequence_nr() < since:
                self.earlier = node.name()
            else:
                for following, _ in node.next_functions:
                    if following is not None and following not in seen:
                        seen.add(following)
                        pending.append(following)


@functools.cache
def _type_of_leaves() -> type:
    with torch.enable_grad():
        return type(_leaf().view(()).grad_fn.next_functions[0][0])


def acts_on_gradient(leaf: torch.Tensor) -> bool:
    """Whether a hook sees the leaf's gradient before it is accumulated; no public function tells."""
    return bool(getattr(leaf, "_backward_hooks", None))


def acts_after_gradient(leaf: torch.Tensor) -> bool:
    """Whether a hook, or an optimizer in backward, runs once the leaf's gradient is accumulated."""
    after = getattr(leaf, "_post_accumulate_grad_hooks", None)
    return bool(getattr(leaf, "_in_backward_optimizers", None) or after)


@contextmanager
def own_hooks_only(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Takes the users' gradient hooks off for the while: they are for the whole gradient, which comes later."""
    kept = [
        (leaf._backward_hooks, dict(leaf._backward_hooks))
        for leaf in leaves
        if leaf._backward_hooks
    ]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def swap_member(module: torch.nn.Module, name: str, value: Any) -> Any:
    """Puts a plain tensor in the place of a parameter or buffer, as `functional_call` does; gives back the old one."""
    members = module._parameters if name in module._parameters else module._buffers
    before = members[name]
    members[name] = value
    return before
