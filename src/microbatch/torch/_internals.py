"""The private parts of PyTorch that the transformations need, each behind one function; a test fails when one moves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def transforms_active() -> bool:
    """Whether this code runs inside `torch.func.grad`, `vmap` and the like; no public function tells."""
    return torch._C._are_functorch_transforms_active()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether the tensor belongs to a transformation of `torch.func` that is running."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def graph_clock() -> int:
    """A number that grows with every node that autograd makes on this thread."""
    with torch.enable_grad():
        node: Any = _LEAF.view(()).grad_fn
        return node._sequence_nr()


def is_older(node: Any, clock: int) -> bool:
    """Whether autograd made the node before the clock showed this."""
    return node._sequence_nr() < clock


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient ends in the node, None for a node inside the graph.

    Told by the node's type, whose name is not public; other nodes may have a ``variable``, too.
    """
    return node.variable if type(node) is _END else None


# Made here, and not at the first use, which may be among tensors of shapes alone.
with torch.inference_mode(False), torch.enable_grad():
    _LEAF = torch.zeros((), device="cpu", requires_grad=True)
    _VIEW: Any = _LEAF.view(()).grad_fn
    _END = type(_VIEW.next_functions[0][0])


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


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with every change in place, as autograd counts them.

    Reading it needs no value, so nothing waits for the device. An inference tensor has none.
    """
    return -1 if tensor.is_inference() else tensor._version


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` wrapped the module, around it or in place; it leaves no public sign."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def before_compiling(fun: Any) -> Any:
    """The function that `torch.compile` wrapped to make `fun`; None where it did not."""
    return fun.__dict__.get("_torchdynamo_orig_callable")


def shapes_alone() -> FakeTensorMode:
    """A mode in which functions of real modules are followed by shapes alone; no public one does that."""
    return FakeTensorMode(allow_non_fake_inputs=True)
