"""What a loss function works with: its modules, tensors and other objects, found without running it."""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from microbatch.torch._internals import before_compiling, is_compiled

_DEPTH = 3
_LARGEST_CONTAINER = 1024


@dataclass
class Found:
    """Everything that a function reaches: by closure, ``__self__``, partial, argument or global name."""

    modules: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)
    """Every module, submodules included, by identity, with its name."""
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    objects: list[tuple[str, Any]] = field(default_factory=list)
    """Anything else: optimizers, accelerators, generators."""
    compiled: bool = False
    """Whether something was wrapped by `torch.compile`."""
    _leaves: tuple[tuple[int, int], list[tuple[str, torch.Tensor]]] | None = None

    def add_module(self, name: str, module: nn.Module) -> None:
        """Adds a module with all its submodules."""
        for path, child in module.named_modules():
            self.modules.setdefault(id(child), (f"{name}.{path}" if path else name, child))
            self.compiled |= is_compiled(child)

    def named_leaves(self) -> list[tuple[str, torch.Tensor]]:
        """Every leaf that can receive a gradient, once, with a name."""
        size = (len(self.modules), len(self.tensors))
        if self._leaves is None or self._leaves[0] != size:
            self._leaves = (size, list(self._walk_leaves()))
        return self._leaves[1]

    def graph_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors that were computed before the call and carry a graph."""
        return [(name, tensor) for name, tensor in self.tensors if tensor.grad_fn is not None]

    def _walk_leaves(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for name, module in self.modules.values():
            for path, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{name}.{path}", parameter
        for name, tensor in self.tensors:
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def discover(fun: Callable[..., Any], args: Any = (), found: Found | None = None) -> Found:
    """Everything that `fun` and `args` hold; nothing of it is run, and no attribute is computed."""
    found = Found() if found is None else found
    seen: set[int] = set()
    _visit(found, seen, "the loss function", fun, _DEPTH)
    _visit_tensorless(found, seen, args)
    return found


def _visit_tensorless(found: Found, seen: set[int], args: Any) -> None:
    """Modules in arguments; their tensors are arguments and dealt with as such."""
    pending = [args]
    while pending:
        item = pending.pop()
        if isinstance(item, nn.Module):
            _visit(found, seen, type(item).__name__, item, _DEPTH)
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple) and len(item) <= _LARGEST_CONTAINER:
            pending.extend(item)


def _visit(found: Found, seen: set[int], name: str, item: Any, depth: int) -> None:
    if depth < 0 or id(item) in seen or isinstance(item, _PLAIN):
        return
    seen.add(id(item))
    visit = functools.partial(_visit, found, seen)
    if isinstance(item, nn.Module):
        found.add_module(name, item)
        # What a module holds beside its submodules, as a LightningModule may.
        for key, value in vars(item).items():
            if not key.startswith("_") and isinstance(
                value, nn.Module | torch.Tensor | torch.Generator | list | tuple | dict
            ):
                visit(f"{name}.{key}", value, depth - 1)
    elif isinstance(item, torch.Tensor):
        found.tensors.append((name, item))
    elif isinstance(item, functools.partial):
        visit(name, item.func, depth)
        for key, value in [*enumerate(item.args), *item.keywords.items()]:
            visit(f"partial argument {key!r}", value, depth - 1)
    elif isinstance(item, types.MethodType):
        visit("self", item.__self__, depth)
        visit(name, item.__func__, depth)
    elif isinstance(item, types.FunctionType):
        _visit_function(found, visit, item, depth)
    elif isinstance(item, Mapping):
        if len(item) <= _LARGEST_CONTAINER:
            for key, value in list(item.items()):
                visit(f"{name}[{key!r}]", value, depth - 1)
    elif isinstance(item, list | tuple | set):
        if len(item) <= _LARGEST_CONTAINER:
            for index, value in enumerate(item):
                visit(f"{name}[{index}]", value, depth - 1)
    else:
        _visit_object(found, visit, name, item, depth)


def _visit_function(
    found: Found, visit: Callable[..., None], fun: types.FunctionType, depth: int
) -> None:
    wrapped = inspect.unwrap(fun)
    if wrapped is not fun and isinstance(wrapped, types.FunctionType):
        visit(wrapped.__name__, wrapped, depth)
    original = before_compiling(fun)
    if original is not None:
        found.compiled = True
        visit(fun.__name__, original, depth)
    for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or ()):
        try:
            visit(name, cell.cell_contents, depth - 1)
        except ValueError:  # a name that is not bound yet
            continue
    for value in (*(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).values()):
        visit(f"a default of {fun.__name__}", value, depth - 1)
    for name in _global_names(fun.__code__):
        if name in fun.__globals__:
            value = fun.__globals__[name]
            # Another module's function would lead through its whole package.
            foreign = (
                isinstance(value, types.FunctionType) and value.__globals__ is not fun.__globals__
            )
            if not foreign:
                visit(name, value, depth - 1)


def _visit_object(
    found: Found, visit: Callable[..., None], name: str, item: Any, depth: int
) -> None:
    if type(item).__module__.partition(".")[0] in ("torch", "numpy", "jax"):
        if isinstance(item, torch.optim.Optimizer | torch.Generator):
            found.objects.append((name, item))
        return
    attributes = getattr(item, "__dict__", None)
    if not isinstance(attributes, dict):
        return
    found.objects.append((name, item))
    call = type(item).__dict__.get("__call__")
    if isinstance(call, types.FunctionType):
        visit(name, call, depth)
    for key, value in list(attributes.items()):
        visit(f"{name}.{key}", value, depth - 1)


@functools.lru_cache(maxsize=512)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or code inside it, loads as globals; attributes of the same name are not meant."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_global_names(constant))
    return tuple(dict.fromkeys(names))


_PLAIN = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType,
    torch.dtype, torch.device,
)  # fmt: skip
