"""From a tree of accumulators and the output's types to one entry per output leaf, and back to the result's tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from microbatch._accumulation import (
    EXTREMES,
    MEANS,
    AccumulationType,
    Accumulator,
    Carry,
    as_accumulator,
    is_accumulator,
)
from microbatch._errors import AccumulatorError
from microbatch._outputs import (
    changed_type,
    check_can_average,
    check_can_weigh,
    check_has_order,
    not_a_prefix,
    unknown_accumulator,
)
from microbatch.jax._accumulators import CONCAT, Output, carry_dtype


@dataclass(frozen=True)
class Part:
    """One entry of the accumulator's tree: its place, its accumulator and the output's leaves under it."""

    path: str
    accumulator: AccumulationType | Accumulator | Carry
    treedef: Any
    first: int
    leaves: tuple[Any, ...]
    tail_leaves: tuple[Any, ...] | None

    @property
    def values(self) -> range:
        """Which of the output's leaves it has."""
        return range(self.first, self.first + len(self.leaves))


@dataclass(frozen=True)
class OutputPlan:
    """All parts, and how results become the tree that is returned."""

    parts: tuple[Part, ...]
    treedef: Any

    @property
    def carried(self) -> tuple[Part, ...]:
        """The parts that are handed to the next microbatch."""
        return tuple(part for part in self.parts if isinstance(part.accumulator, Carry))

    def outputs(self, accumulator_dtype: Any) -> tuple[Output, ...]:
        """How everything that is not carried is accumulated."""
        return tuple(
            output
            for part in self.parts
            if not isinstance(part.accumulator, Carry)
            for output in _outputs_of(part, accumulator_dtype)
        )

    def assemble(self, results: Sequence[Any], states: Sequence[Any]) -> Any:
        """The returned tree: results in the order of `outputs`, final states in the order of `carried`."""
        remaining, carried = iter(results), iter(states)
        found = []
        for part in self.parts:
            if isinstance(part.accumulator, Accumulator):
                found.append(next(remaining))
                continue
            source = carried if isinstance(part.accumulator, Carry) else remaining
            found.append(part.treedef.unflatten([next(source) for _ in part.leaves]))
        return self.treedef.unflatten(found)


def accumulators_of(where: str, tree: Any) -> list[Any]:
    """The entries of a tree of accumulators, in this library's types; what is none is refused."""
    entries = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_accumulator)
    for path, entry in entries:
        if not is_accumulator(entry):
            raise unknown_accumulator(where, jax.tree_util.keystr(path), entry)
    return [as_accumulator(entry) for _, entry in entries]


def matched(where: str, accumulator: Any, tree: Any) -> list[Any]:
    """The output's part under each entry of the accumulator's tree, which must be a prefix of it."""
    treedef = jax.tree.structure(accumulator, is_leaf=is_accumulator)
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        raise not_a_prefix(where, str(treedef), str(jax.tree.structure(tree))) from error


def plan_outputs(where: str, accumulator: Any, tree: Any, tail_tree: Any | None) -> OutputPlan:
    """Matches the accumulator's tree, a prefix, with the output's types; refuses what cannot be accumulated.

    Args:
      where: opens the messages.
      accumulator: one kind, or a tree of kinds.
      tree: the output's types in a full microbatch.
      tail_tree: the same in the tail; None without one.
    """
    entries, treedef = jax.tree_util.tree_flatten_with_path(accumulator, is_leaf=is_accumulator)
    subtrees = matched(where, accumulator, tree)
    tails = [None] * len(entries) if tail_tree is None else matched(where, accumulator, tail_tree)
    parts, first = [], 0
    for (path, value), subtree, tail in zip(entries, subtrees, tails, strict=True):
        words, known = jax.tree_util.keystr(path), as_accumulator(value)
        leaves, inner = jax.tree.flatten(subtree)
        tail_leaves = None if tail is None else tuple(jax.tree.leaves(tail))
        assert known is not None
        part = Part(words, known, inner, first, tuple(leaves), tail_leaves)
        _check(where, part, subtree)
        parts.append(part)
        first += len(leaves)
    return OutputPlan(tuple(parts), treedef)


def _check(where: str, part: Part, subtree: Any) -> None:
    kind = part.accumulator
    if isinstance(kind, Accumulator) and part.tail_leaves is not None:
        check_can_weigh(where, kind, f"output{part.path}")
    if not isinstance(kind, AccumulationType):
        return
    for i, (inner, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(subtree)):
        path = f"output{part.path}{jax.tree_util.keystr(inner)}"
        inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
        check_can_average(where, kind, path, leaf.dtype.name, inexact)
        check_combines(where, kind, path, leaf.dtype)
        tail = leaf if part.tail_leaves is None else part.tail_leaves[i]
        if kind in (AccumulationType.SUM, *MEANS, *EXTREMES) and tail.shape != leaf.shape:
            raise changed_type(where, kind, path, "the last microbatch", _words(leaf), _words(tail))


def check_combines(where: str, kind: Any, path: str, dtype: Any) -> None:
    """Refuses extremes of what has no order, and sums of random keys."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
    ordered = not is_key and not jnp.issubdtype(dtype, jnp.complexfloating)
    check_has_order(where, kind, path, dtype.name, ordered)
    if is_key and kind in (AccumulationType.SUM, *MEANS):
        raise AccumulatorError(
            f"{where}: {path} has dtype {dtype.name}, which has no {kind.name}.\n"
            "Use CONCAT or LAST for it, or a Carry where it is the next microbatch's key."
        )


def _words(leaf: Any) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"


def _outputs_of(part: Part, accumulator_dtype: Any) -> list[Output]:
    kind, tails = part.accumulator, part.tail_leaves
    if isinstance(kind, Accumulator):
        return [Output(kind, part.leaves, tails, part.treedef)]
    assert isinstance(kind, AccumulationType)
    return [
        Output(
            kind,
            (leaf,),
            None if tails is None else (tails[i],),
            dtype=carry_dtype(kind, leaf.dtype, accumulator_dtype),
        )
        for i, leaf in enumerate(part.leaves)
    ]


def of_single_microbatch(plan: OutputPlan, leaves: Sequence[Any]) -> Any:
    """The result where the only microbatch is the batch: `fun`'s own output, except that CONCAT stacks scalars."""
    stacked = list(leaves)
    for part in plan.parts:
        if part.accumulator is CONCAT:
            for i in part.values:
                stacked[i] = jnp.reshape(stacked[i], jnp.shape(stacked[i]) or (1,))
    found = [part.treedef.unflatten([stacked[i] for i in part.values]) for part in plan.parts]
    return plan.treedef.unflatten(found)
