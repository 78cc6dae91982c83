"""Tensors that a function sees without being given them, and the same function with others in their places."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from microbatch.torch._internals import before_compiling, is_transformed, swap_member

Replace = Callable[[torch.Tensor], torch.Tensor]
_LARGEST_CONTAINER = 4096


class Member(NamedTuple):
    """A parameter or buffer where it is."""

    module: nn.Module
    name: str
    tensor: torch.Tensor


def matters(tensor: torch.Tensor) -> bool:
    """Whether a derivative or a transformation of `torch.func` goes through the tensor."""
    return tensor.requires_grad or is_transformed(tensor)


def captured_tensors(fun: Callable[..., Any]) -> list[torch.Tensor]:
    """Tensors that matter in closures, defaults, partials and the containers there, each once."""
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if matters(tensor):
            found.setdefault(id(tensor), tensor)
        return tensor

    rebind(fun, note)
    return list(found.values())


def members_of(modules: Sequence[nn.Module]) -> list[Member]:
    """Parameters and buffers that matter, each place once; a tied one is there several times."""
    return [
        Member(module, name, tensor)
        for module in modules
        for members in (module._parameters, module._buffers)
        for name, tensor in members.items()
        if tensor is not None and matters(tensor)
    ]


@contextmanager
def installed(members: Sequence[Member]) -> Iterator[None]:
    """The modules with these tensors in their places."""
    before: list[Member] = []
    try:
        for module, name, tensor in members:
            before.append(Member(module, name, swap_member(module, name, tensor)))
        yield
    finally:
        for module, name, tensor in reversed(before):
            swap_member(module, name, tensor)


@contextmanager
def in_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """The modules in training or evaluation mode, as they were when these pairs were made."""
    changed = [(module, training) for module, training in modes if module.training != training]
    for module, training in changed:
        module.training = training
    try:
        yield
    finally:
        for module, training in changed:
            module.training = not training


def rebind(fun: Callable[..., Any], replace: Replace) -> Callable[..., Any]:
    """`fun` itself where nothing is replaced, else the same program over other tensors.

    Closure cells without a replaced tensor stay the same cells, so what a function writes outside itself still arrives.
    """
    return _rebound(fun, replace, {})


def _rebound(item: Any, replace: Replace, known: dict[int, Any]) -> Any:
    again = functools.partial(_rebound, replace=replace, known=known)
    if isinstance(item, torch.Tensor):
        return replace(item)
    if isinstance(item, nn.Module | type | types.ModuleType | str | int | float | None):
        return item
    if id(item) in known:
        return known[id(item)]
    known[id(item)] = item
    if isinstance(item, functools.partial):
        func, args = again(item.func), again(item.args)
        keywords = again(item.keywords)
        if func is not item.func or args is not item.args or keywords is not item.keywords:
            known[id(item)] = functools.partial(func, *args, **keywords)
    elif isinstance(item, types.FunctionType):
        known[id(item)] = _rebound_function(item, again)
    elif isinstance(item, types.MethodType):
        func = again(item.__func__)
        if func is not item.__func__:
            known[id(item)] = types.MethodType(func, item.__self__)
    elif type(item) in (dict, list) or isinstance(item, tuple):
        known[id(item)] = _rebound_container(item, again)
    return known[id(item)]


def _rebound_container(item: Any, again: Callable[[Any], Any]) -> Any:
    if len(item) > _LARGEST_CONTAINER:
        return item
    if isinstance(item, Mapping):
        entries = {key: again(value) for key, value in item.items()}
        same = all(entries[key] is item[key] for key in entries)
        return item if same else entries
    values = [again(value) for value in item]
    if all(new is old for new, old in zip(values, item, strict=True)):
        return item
    return type(item)._make(values) if hasattr(item, "_fields") else type(item)(values)


def _rebound_function(fun: types.FunctionType, again: Callable[[Any], Any]) -> types.FunctionType:
    # What a compiler has wrapped would be compiled anew in every call.
    if before_compiling(fun) is not None:
        return fun
    cells = []
    for cell in fun.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a name that is not bound yet
            cells.append(cell)
            continue
        new = again(content)
        cells.append(cell if new is content else types.CellType(new))
    defaults, kwdefaults = again(fun.__defaults__), again(fun.__kwdefaults__)
    same = (
        all(new is old for new, old in zip(cells, fun.__closure__ or (), strict=True))
        and defaults is fun.__defaults__
        and kwdefaults is fun.__kwdefaults__
    )
    if same:
        return fun
    rebound = types.FunctionType(
        fun.__code__, fun.__globals__, fun.__name__, defaults, tuple(cells) or None
    )
    rebound.__kwdefaults__ = kwdefaults
    rebound.__dict__.update(fun.__dict__)
    return rebound
