"""Modules that synchronise gradients: which there are, what they average over, and when they may speak."""

import weakref
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microbatch._checks import check_choice
from microbatch._errors import DistributedError

Sync = Literal["auto", "last", "every"]
_static_graph_seen: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@dataclass(frozen=True)
class Wrappers:
    """The synchronising modules of one call.

    Attributes:
      ddp: every `DistributedDataParallel`.
      fsdp: every outermost module made by ``fully_shard``.
      groups: process groups that, one after another, sum over all processes.
      world: how many processes the wrappers average over; 1 without a wrapper.
      device: where their parameters are.
    """

    ddp: tuple[DistributedDataParallel, ...] = ()
    fsdp: tuple[Any, ...] = ()
    groups: tuple[Any, ...] = ()
    world: int = 1
    device: torch.device | None = None

    def __bool__(self) -> bool:
        return bool(self.ddp or self.fsdp)


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module synchronises gradients by itself."""
    if isinstance(module, DistributedDataParallel):
        return True
    return _is_initialized() and (_is_fsdp2(module) or _is_fsdp1(module))


def wrappers_of(
    where: str,
    named_modules: Sequence[tuple[str, nn.Module]],
    sync_modules: Sequence[nn.Module] | nn.Module | None,
    process_group: Any,
) -> Wrappers:
    """The wrappers among the modules that were found and the ones that the caller names.

    Raises:
      DistributedError: a wrapper whose average is not known (FSDP1, communication hooks, other divide factors), or
        wrappers over different processes.
    """
    given = [sync_modules] if isinstance(sync_modules, nn.Module) else list(sync_modules or ())
    named = {id(m): (name, m) for name, m in named_modules}
    for position, root in enumerate(given):
        for path, module in root.named_modules():
            named.setdefault(id(module), (f"sync_modules[{position}].{path}".rstrip("."), module))
    ddp: list[DistributedDataParallel] = []
    sharded: list[tuple[str, Any]] = []
    for name, module in named.values():
        if isinstance(module, DistributedDataParallel):
            _check_ddp(where, name, module)
            ddp.append(module)
        elif _is_initialized() and _is_fsdp1(module):
            raise DistributedError(
                f"{where}: {name} is a FullyShardedDataParallel (FSDP1).\n"
                "Use torch.distributed.fsdp.fully_shard, its successor."
            )
        elif _is_initialized() and _is_fsdp2(module):
            _check_fsdp(where, name, module)
            sharded.append((name, module))
    inner = {id(m) for _, root in sharded for m in root.modules() if m is not root}
    fsdp = [module for _, module in sharded if id(module) not in inner]
    if ddp and fsdp:
        raise DistributedError(
            f"{where}: both DistributedDataParallel and fully_shard modules were found.\n"
            "Use one of them; fully_shard with a two-dimensional mesh replicates and shards."
        )
    groupings = {id(g[0]): g for g in [(m.process_group,) for m in ddp]}
    groupings |= {tuple(map(id, g)): g for g in map(_fsdp_groups, fsdp)}
    if len(groupings) > 1:
        raise DistributedError(
            f"{where}: the wrapped modules average over different processes.\n"
            "Call it once for each, with the loss split accordingly."
        )
    averaging: tuple[Any, ...] = next(iter(groupings.values()), ())
    world = 1
    for group in averaging:
        world *= dist.get_world_size(group)
    groups = averaging if process_group is None else (process_group,)
    return Wrappers(tuple(ddp), tuple(fsdp), groups, world, _device(ddp, fsdp, groups))


def check_counts(where: str, wrappers: Wrappers, count: int, even: bool) -> None:
    """Refuses unequal numbers of microbatches where every microbatch communicates."""
    if even:
        return
    if wrappers.fsdp:
        raise DistributedError(
            f"{where}: processes have different numbers of microbatches (this one {count}), and fully_shard "
            "communicates in each.\n"
            "Give every process equally many: drop_last=True in the sampler, or pad with rows of weight 0."
        )
    for module in wrappers.ddp:
        if _first_static(module):
            raise DistributedError(
                f"{where}: processes have different numbers of microbatches (this one {count}), and the first call "
                "with static_graph=True communicates in each.\n"
                "Start with equally many, or leave static_graph out."
            )


def syncs(where: str, wrappers: Wrappers, sync: Sync, even: bool) -> str:
    """ "last" or "every", as the wrappers need it."""
    check_choice(where, "sync", sync, ("auto", "last", "every"))
    if any(_first_static(module) for module in wrappers.ddp):
        return "every"
    if sync == "every" and wrappers.ddp and not even:
        raise DistributedError(
            f'{where}: sync="every" with different numbers of microbatches.\nUse sync="last".'
        )
    if sync == "auto":
        return "every" if wrappers.fsdp else "last"
    return sync


@contextmanager
def synchronising(wrappers: Wrappers, mode: str, is_last: bool) -> Generator[None]:
    """Forward and backward of one microbatch, with gradients exchanged where `mode` and position say so."""
    with ExitStack() as stack:
        for module in wrappers.ddp:
            if mode == "last" and not is_last:
                stack.enter_context(module.no_sync())
        for module in wrappers.fsdp:
            module.set_is_last_backward(is_last)
            module.set_requires_gradient_sync(is_last or mode == "every")
            # Where parameters are also replicated: scattered each time, all-reduced once.
            module.set_requires_all_reduce(is_last)
        yield


def finish(wrappers: Wrappers) -> None:
    """Leaves the wrappers as they are for a plain training step."""
    for module in wrappers.fsdp:
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(True)
        module.set_requires_all_reduce(True)


def mark_finished(wrappers: Wrappers) -> None:
    """Remembers static graphs, whose first call is over."""
    for module in wrappers.ddp:
        if module.static_graph:
            _static_graph_seen.add(module)


def needs_every_leaf(module: DistributedDataParallel) -> bool:
    """Whether the synchronising backward has to reach every parameter."""
    return not module.find_unused_parameters and not module.static_graph


def _check_ddp(where: str, name: str, module: DistributedDataParallel) -> None:
    # DDP has no public list of its communication hooks.
    if module._comm_hooks:
        raise DistributedError(
            f"{where}: {name} has a communication hook, whose average is not known.\n"
            "Use DistributedDataParallel without register_comm_hook."
        )


def _check_fsdp(where: str, name: str, module: Any) -> None:
    for group in _param_groups(module):
        changed = {
            "gradient divide factor": group.gradient_divide_factor is not None,
            "all-reduce hook": group._all_reduce_hook is not None,
            "reduce-scatter": type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter",
        }
        for what, is_changed in changed.items():
            if is_changed:
                raise DistributedError(
                    f"{where}: {name} has a {what} of its own, so what it averages is not known.\n"
                    "Use fully_shard with its defaults."
                )


def _fsdp_groups(module: Any) -> tuple[Any, ...]:
    for child in module.modules():
        for group in _param_groups(child) if _is_fsdp2(child) else ():
            mesh = group.mesh_info.mesh
            return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    return ()


def _param_groups(module: Any) -> Sequence[Any]:
    # fully_shard has no public way to ask for its mesh and its divide factor.
    return module._get_fsdp_state()._fsdp_param_groups


def _first_static(module: DistributedDataParallel) -> bool:
    return module.static_graph and module not in _static_graph_seen


def _device(ddp: Sequence[Any], fsdp: Sequence[Any], groups: Sequence[Any]) -> torch.device | None:
    for module in (*ddp, *fsdp):
        for parameter in module.parameters():
            return parameter.device
    if groups and dist.get_backend(groups[0]) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if groups else None


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_fsdp2(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule  # Costs as much to import as all of the front.

    return isinstance(module, FSDPModule)


def _is_fsdp1(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, FullyShardedDataParallel)
