"""What a trial leaves as it was: gradients, buffers, parameters, the optimizer's state, and wrappers."""

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from microbatch.torch._discovery import Found
from microbatch.torch._tracking import tensor_bytes


@contextlib.contextmanager
def gradients_kept(
    found: Found, args: Any, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[list[torch.Tensor]]:
    """Puts back `.grad` of every leaf and the modules' buffers (real runs change their values too); yields the leaves."""
    given = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
    leaves = {id(t): t for _, t in found.named_leaves()}
    for group in optimizer.param_groups if optimizer is not None else ():
        leaves |= {id(p): p for p in group["params"]}
    leaves |= {id(t): t for t in given if t.is_leaf and t.requires_grad}
    grads = {key: leaf.grad for key, leaf in leaves.items()}
    modules = [module for _, module in found.modules.values()]
    buffers = [
        (m, dict(m._buffers), [_copy(b) for b in m._buffers.values()])
        for m in modules
        if m._buffers
    ]
    for leaf in leaves.values():
        leaf.grad = None
    try:
        yield list(leaves.values())
    finally:
        for key, leaf in leaves.items():
            leaf.grad = grads[key]
        for module, held, copies in buffers:
            module._buffers.update(held)
            for buffer, copy in zip(held.values(), copies, strict=True):
                if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                    with torch.no_grad():
                        buffer.copy_(copy)


@contextlib.contextmanager
def parameters_kept(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Takes back what real steps of `optimizer` do to its parameters; the copies lie in the host's memory."""
    groups = optimizer.param_groups if optimizer is not None else []
    copies = [(p, p.detach().to("cpu", copy=True)) for group in groups for p in group["params"]]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, copy in copies:
                parameter.copy_(copy)


@contextlib.contextmanager
def generators_kept(found: Found) -> Iterator[None]:
    """Puts back the generators of random numbers that the function holds."""
    held = [
        (item, item.get_state()) for _, item in found.objects if isinstance(item, torch.Generator)
    ]
    try:
        yield
    finally:
        for generator, state in held:
            generator.set_state(state)


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None or buffer.is_meta else buffer.detach().clone()


@contextlib.contextmanager
def unwrapped(found: Found) -> Iterator[int]:
    """DistributedDataParallel modules call what they wrap, without a reducer; yields the bytes of their buckets."""
    wrappers = [m for _, m in found.modules.values() if isinstance(m, DistributedDataParallel)]
    for wrapper in wrappers:
        wrapper.forward = wrapper.module.forward
    try:
        yield sum(
            tensor_bytes([p for p in w.parameters() if p.requires_grad])
            for w in wrappers
            if not w.gradient_as_bucket_view
        )
    finally:
        for wrapper in wrappers:
            del wrapper.forward


def clone_of(
    optimizer: torch.optim.Optimizer | None, copy: Callable[[torch.Tensor], torch.Tensor]
) -> torch.optim.Optimizer | None:
    """An optimizer with the same options and parameters whose steps leave the original's state alone."""
    if optimizer is None:
        return None
    clone = object.__new__(type(optimizer))
    # A scheduler puts a counting `step` on the instance, bound to the original.
    clone.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
    # Hooks are the user's, and these steps are not.
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    clone.__dict__.update({name: OrderedDict() for name in hooks})
    clone.param_groups = [dict(group) for group in optimizer.param_groups]
    clone.state = defaultdict(
        dict, {p: tree_map_only(torch.Tensor, copy, dict(s)) for p, s in optimizer.state.items()}
    )
    return clone
