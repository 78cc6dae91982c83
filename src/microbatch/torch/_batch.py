"""Which tensors of a call are cut into microbatches, and the cutting."""

import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microbatch._checks import signature_of
from microbatch._errors import BatchError
from microbatch._trees import leaves_with_paths, map_leaves, map_prefix

NOT_SPLIT = -1
# Path, shape and dimension of a tensor that is cut.
_Rows = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True)
class Batch:
    """The arguments of one call; `dims` is a tree like them with the dimension to cut, or `NOT_SPLIT`."""

    args: tuple[Any, ...]
    dims: tuple[Any, ...]
    batch_size: int

    def rows(self, start: int, stop: int) -> tuple[Any, ...]:
        """The arguments with rows start … stop − 1; views, no copies, and the arguments themselves for all rows."""
        if stop - start == self.batch_size:
            return self.args
        return map_leaves(
            lambda leaf, dim: leaf if dim == NOT_SPLIT else leaf.narrow(dim, start, stop - start),
            self.args,
            self.dims,
        )


def batch_of(where: str, fun: Callable[..., Any], args: tuple[Any, ...], in_dims: Any = 0) -> Batch:
    """The batch in `args`: every tensor with a dimension, along `in_dims`.

    Args:
      where: the words that open a message.
      fun: the function that gets the arguments; its parameters' names are used in messages.
      args: trees of tensors, numbers, strings, None and whatever else `fun` takes.
      in_dims: one integer for all, or one entry per argument: an integer, None for "not a batch", or a tree of them
        that is a prefix of the argument. Negative dimensions are resolved tensor by tensor; tensors without a
        dimension are never cut.

    Raises:
      BatchError: no tensor has rows, rows differ, or an object hides tensors that could not be cut.
    """
    names = argument_names(fun, len(args))
    entries = _entries(where, in_dims, args)
    dims = tuple(_dims(where, name, entry, arg) for name, entry, arg in zip(names, entries, args))
    leaves = _split_leaves(names, args, dims)
    if not leaves:
        raise BatchError(
            f"{where}: the arguments hold no tensor with rows.\n"
            "Pass the batch's tensors as positional arguments, or name their dimensions in in_dims."
        )
    sizes = [shape[dim] for _, shape, dim in leaves]
    if len(set(sizes)) > 1:
        _refuse_unequal(where, leaves)
    return Batch(args, dims, sizes[0])


def argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """What to call each positional argument of `fun` in a message."""
    signature = signature_of(fun)
    parameters = list(signature.parameters.values()) if signature else []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [named[i] if i < len(named) else f"args[{i}]" for i in range(count)]


def _entries(where: str, in_dims: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(in_dims, int) and not isinstance(in_dims, bool):
        return (in_dims,) * len(args)
    if isinstance(in_dims, Sequence) and not isinstance(in_dims, str):
        if len(in_dims) == len(args):
            return tuple(in_dims)
        raise BatchError(
            f"{where}: in_dims={in_dims!r} has {len(in_dims)} entries for {len(args)} "
            f"argument{'s' * (len(args) != 1)}.\n"
            "Give one integer for all, or one entry per argument: an integer, None or a tree of them."
        )
    raise BatchError(
        f"{where}: in_dims={in_dims!r} is a {type(in_dims).__name__}.\n"
        "Use an integer, or a tuple with one entry per argument, for example in_dims=(0, None)."
    )


def _dims(where: str, name: str, entry: Any, arg: Any) -> Any:
    paths = iter(leaves_with_paths(arg, name))

    def dim_of(dim: Any, leaf: Any) -> int:
        path, _ = next(paths)
        if dim is None or isinstance(leaf, nn.Module):
            return NOT_SPLIT
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise BatchError(
                f"{where}: in_dims has {dim!r} for {path}.\nUse an integer, or None for not a batch."
            )
        refuse_uncuttable(where, path, leaf)
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return NOT_SPLIT
        if not -leaf.ndim <= dim < leaf.ndim:
            raise BatchError(
                f"{where}: {path} has shape {tuple(leaf.shape)} and no dimension {dim}.\n"
                "Name each argument's dimension in in_dims, for example in_dims=(0, None)."
            )
        return dim % leaf.ndim

    return map_prefix(dim_of, entry, arg, is_prefix_leaf=lambda item: item is None)


def refuse_uncuttable(where: str, path: str, leaf: Any) -> None:
    """Refuses leaves of a batch that have rows, or hide tensors with rows, and cannot be cut."""
    if isinstance(leaf, torch.Tensor):
        _refuse_layout(where, path, leaf)
        return
    if isinstance(leaf, type) or callable(leaf):
        return
    if getattr(leaf, "shape", ()) != () and hasattr(leaf, "__array__"):
        raise BatchError(
            f"{where}: {path} is a {type(leaf).__name__} of shape {tuple(leaf.shape)}, not a tensor.\n"
            "Convert it, for example with torch.as_tensor; or name it None in in_dims if it is not a batch."
        )
    for name, value in _held(leaf):
        if isinstance(value, torch.Tensor) and value.ndim:
            raise BatchError(
                f"{where}: {path} is a {type(leaf).__name__} that holds a tensor in {name}, which cannot be cut.\n"
                "Pass its tensors, or a dict of them; or name it None in in_dims if it is not a batch."
            )


def _refuse_layout(where: str, path: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise BatchError(
            f"{where}: {path} is a nested tensor, which has no rows to cut.\n"
            "Pad it, or make microbatches yourself and use backward_window."
        )
    if tensor.layout is not torch.strided:
        raise BatchError(
            f"{where}: {path} has the layout {tensor.layout}, of which no view of some rows can be taken.\n"
            "Use its to_dense(), or make microbatches yourself and use backward_window; or name it None in in_dims if "
            "it is not a batch."
        )


def _held(item: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by attribute or as one of its items; no attribute is computed."""
    if isinstance(item, set | frozenset | deque):
        yield from ((f"[{i}]", value) for i, value in enumerate(item))
    for kind in type(item).__mro__:
        for name in kind.__dict__.get("__slots__", ()):
            if isinstance(kind.__dict__.get(name), types.MemberDescriptorType):
                yield f".{name}", getattr(item, name, None)
    yield from ((f".{name}", value) for name, value in getattr(item, "__dict__", {}).items())


def _split_leaves(names: list[str], args: tuple[Any, ...], dims: tuple[Any, ...]) -> list[_Rows]:
    found: list[_Rows] = []
    for name, arg, dim in zip(names, args, dims):
        flat = [entry for _, entry in leaves_with_paths(dim)]
        for (path, leaf), entry in zip(leaves_with_paths(arg, name), flat, strict=True):
            if entry != NOT_SPLIT:
                found.append((path, tuple(leaf.shape), entry))
    return found


def _refuse_unequal(where: str, leaves: list[_Rows]) -> None:
    rows = "\n".join(
        f"  {path}: {shape[dim]} along dimension {dim} of shape {shape}"
        for path, shape, dim in leaves
    )
    raise BatchError(
        f"{where}: every tensor is a batch, and these have different numbers of rows:\n{rows}\n"
        "Give them equally many rows, or None in in_dims for what is not a batch, for example in_dims=(0, None)."
    )
