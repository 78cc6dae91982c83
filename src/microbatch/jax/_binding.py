"""From a call to flat lists: which leaves are rows, which are states, which every microbatch shares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from microbatch._checks import Leaf, Slot
from microbatch._errors import BatchError


@dataclass(frozen=True)
class Call:
    """One call of the function, flattened.

    Attributes:
      leaves: every leaf of the arguments, in order.
      treedef: the structure of ``(args, kwargs)``.
      rows: which leaves belong to batch arguments.
      axes: the batch axis of each of them, not negative.
      states: which leaves are carried from microbatch to microbatch, one tuple per Carry.
      shared: which other leaves are arrays; the rest is passed on as it is.
      keys: which shared leaves get the microbatch's index folded in.
    """

    leaves: tuple[Any, ...]
    treedef: Any
    rows: tuple[int, ...]
    axes: tuple[int, ...]
    states: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]
    keys: tuple[int, ...]

    def with_arrays(
        self, shared: Sequence[Any], states: Sequence[Any], rows: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's ``(args, kwargs)`` with other arrays in their places."""
        leaves = list(self.leaves)
        state_places = [i for places in self.states for i in places]
        for places, values in (
            (self.shared, shared),
            (state_places, states),
            (self.rows, rows),
        ):
            for i, value in zip(places, values, strict=True):
                leaves[i] = value
        return self.treedef.unflatten(leaves)


def batch_leaves(
    where: str,
    slots: Sequence[Slot],
    in_axes: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Leaf]:
    """Every leaf of the batch arguments with its path, shape (None where it is no array) and axis."""
    found = []
    for slot, axes in zip(slots, in_axes, strict=True):
        value = args[slot.key] if isinstance(slot.key, int) else kwargs[slot.key]
        leaves = jax.tree_util.tree_leaves_with_path(value)
        for (path, leaf), axis in zip(leaves, leaf_axes(where, slot, axes, value), strict=True):
            if axis is not None:
                words = f"{slot.name}{jax.tree_util.keystr(path)}"
                found.append(Leaf(words, _shape(leaf), axis))
    return found


def leaf_axes(where: str, slot: Slot, axes: Any, value: Any) -> list[int | None]:
    """One batch axis per leaf of an argument; None for a leaf that every microbatch sees whole."""
    entries, treedef = jax.tree.flatten(axes, is_leaf=lambda axis: axis is None)
    try:
        subtrees = treedef.flatten_up_to(value)
    except ValueError as error:
        raise BatchError(
            f"{where}: in_axes={axes!r} is not a prefix of {slot.name}, a tree {jax.tree.structure(value)}.\n"
            "Give one axis for the whole argument, or one per part of it."
        ) from error
    return [
        axis
        for axis, subtree in zip(entries, subtrees, strict=True)
        for _ in jax.tree.leaves(subtree)
    ]


def flatten_call(
    where: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: Sequence[Slot],
    in_axes: Sequence[Any],
    carried: Sequence[Slot],
    keys: Sequence[Slot],
) -> Call:
    """Sorts the leaves of a call by their argument."""
    paths, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    place = [argument_of(path) for path, _ in paths]
    leaves = tuple(leaf for _, leaf in paths)
    in_slot = lambda slot: tuple(i for i, key in enumerate(place) if key == slot.key)
    axis_of: dict[int, int] = {}
    for slot, axes in zip(batch, in_axes, strict=True):
        value = args[slot.key] if isinstance(slot.key, int) else kwargs[slot.key]
        found = zip(in_slot(slot), leaf_axes(where, slot, axes, value), strict=True)
        axis_of |= {i: axis % leaves[i].ndim for i, axis in found if axis is not None}
    states = tuple(in_slot(slot) for slot in carried)
    taken = {*axis_of, *(i for places in states for i in places)}
    shared = tuple(i for i, leaf in enumerate(leaves) if i not in taken and is_array(leaf))
    key_places = {slot.key for slot in keys}
    for (path, leaf), key in zip(paths, place, strict=True):
        if key in key_places:
            check_key(where, jax.tree_util.keystr(path[1:]), leaf)
    return Call(
        leaves=leaves,
        treedef=treedef,
        rows=tuple(sorted(axis_of)),
        axes=tuple(axis_of[i] for i in sorted(axis_of)),
        states=states,
        shared=shared,
        keys=tuple(k for k, i in enumerate(shared) if place[i] in key_places),
    )


def check_key(where: str, path: str, leaf: Any) -> None:
    """Refuses what `key_argnums` names and is no single random key, of either kind; `path` is among the arguments."""
    dtype: Any = getattr(leaf, "dtype", None)
    shape: Any = getattr(leaf, "shape", None)
    new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (shape == () if new else dtype == jnp.uint32 and len(shape) == 1):
        words = type(leaf).__name__ if dtype is None else f"{dtype}{list(shape)}"
        raise BatchError(
            f"{where}: key_argnums names args{path}, a {words}, which is no random key.\n"
            "Pass jax.random.key(seed) there, or take it out of key_argnums."
        )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced; numbers, strings and functions of Python, also in an array, are passed on as they are."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, jax.Array)


def hoisted(fun: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], list[Any], Any, Any]:
    """`fun` as a program that closes over no array.

    Args:
      fun: a function of flat lists of arrays.
      *args: example lists.

    Returns:
      The program ``(consts, *lists) -> leaves``, the arrays that `fun` closed over, the output's types as a tree, and
      the program's equations.
    """
    closed, out_tree = jax.make_jaxpr(fun, return_shape=True)(*args)
    jaxpr, out_avals = closed.jaxpr, closed.out_avals
    types = jax.tree.unflatten(jax.tree.structure(out_tree), out_avals)

    def program(consts: Sequence[Any], *lists: Sequence[Any]) -> list[Any]:
        called = ClosedJaxpr(jaxpr, list(consts))
        out = jaxpr_as_fun(called)(*(x for values in lists for x in values))
        # An output that is a literal comes back as a Python number.
        return [
            x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)
            for x, aval in zip(out, out_avals, strict=True)
        ]

    return program, list(closed.consts), types, jaxpr


def argument_of(path: tuple[Any, ...]) -> int | str:
    """Which argument a leaf of ``(args, kwargs)`` belongs to: its number, or its name."""
    return path[1].idx if path[0].idx == 0 else path[1].key


def _shape(leaf: Any) -> tuple[int, ...] | None:
    if is_array(leaf) or isinstance(leaf, bool | int | float | complex):
        return np.shape(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return None
    return tuple(leaf.shape) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None
