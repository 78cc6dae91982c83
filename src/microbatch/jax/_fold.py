"""The loop: one microbatch after another, folded into the accumulators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from microbatch._accumulation import AccumulationType
from microbatch._splitting import Split
from microbatch.jax._accumulators import Moment, Output, finalize, init, update
from microbatch.jax._convolutions import canonical_convolutions
from microbatch.jax._devices import Devices, Reduce
from microbatch.jax._rows import Rows, take, take_tail

Step = Callable[[Moment, list[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""``step(moment, shared, states, rows) -> (values, states)``: one microbatch, on flat lists of arrays."""


@dataclass(frozen=True)
class Loop:
    """Everything about a loop but its arrays.

    Attributes:
      step: evaluates one microbatch. It closes over no array.
      split: where microbatches start and end.
      rows: how each batch leaf is cut.
      outputs: how the step's values are accumulated, in order.
      weighted: whether a weight function was given, so that MEAN divides by what ran.
      convolves: whether the step holds a convolution, see `_convolutions`.
      devices: over which devices the rows lie; None where that is left to the types or the compiler.
      reduce: whether sums that end sharded like the rows are reduced once or in each microbatch.
    """

    step: Step
    split: Split
    rows: tuple[Rows, ...]
    outputs: tuple[Output, ...]
    weighted: bool = False
    convolves: bool = False
    devices: Devices | None = None
    reduce: Reduce = "once"

    @property
    def pieces(self) -> int:
        """In how many pieces a microbatch is evaluated, one on each device."""
        return 1 if self.devices is None else self.devices.shards


@dataclass(frozen=True)
class Arrays:
    """A loop's arrays.

    Attributes:
      shared: what every microbatch sees whole.
      states: what one microbatch hands to the next.
      rows: the batch's leaves.
      weights: one weight per microbatch; None where nothing is weighted.
      count: how many microbatches run, an integer or a traced one; None for all.
    """

    shared: list[Any]
    states: list[Any]
    rows: list[Any]
    weights: Any = None
    count: Any = None


jax.tree_util.register_dataclass(
    Arrays, data_fields=["shared", "states", "rows", "weights", "count"], meta_fields=[]
)


def static_count_apart(arrays: Arrays) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
    """The arrays without a count that is known already, and what puts it back: it is the loop's bound, and no array."""
    count = arrays.count
    if not isinstance(count, int):
        return arrays, lambda arrays: arrays
    return replace(arrays, count=None), lambda arrays: replace(arrays, count=count)


def fold(loop: Loop, arrays: Arrays, *, reversible: bool = False) -> tuple[list[Any], list[Any]]:
    """Runs the loop: one result per output, and the last states.

    Args:
      loop: what to do.
      arrays: what to do it on.
      reversible: whether JAX must be able to differentiate the loop itself. Then a microbatch that is skipped
        is one branch of a `cond`; otherwise the loop visits only those that run.
    """
    split = loop.split
    step = canonical_convolutions(loop.step) if loop.convolves else loop.step
    weights, count = arrays.weights, clamped(arrays.count, split.num_microbatches)
    runs = which_run(split, weights, count)
    before = None if weights is None else jnp.cumsum(weights_that_ran(weights, runs)) - weights

    def advance(carry: Any, index: Any, rows: list[Any], tail: bool) -> Any:
        accumulators, states = carry
        at = moment(split, weights, before, index, tail)
        values, states = step(at, arrays.shared, states, rows)
        updated, start = [], 0
        for output, accumulator in zip(loop.outputs, accumulators, strict=True):
            stop = start + len(output.types)
            updated.append(update(output, split, accumulator, values[start:stop], at, tail=tail))
            start = stop
        return updated, states

    def advance_full(index: Any, carry: Any) -> Any:
        rows = [take(x, rows, index) for x, rows in zip(arrays.rows, loop.rows, strict=True)]
        return advance(carry, index, rows, tail=False)

    def advance_tail(carry: Any) -> Any:
        rows = [take_tail(x, rows) for x, rows in zip(arrays.rows, loop.rows, strict=True)]
        return advance(carry, split.full, rows, tail=True)

    carry = ([init(output, split) for output in loop.outputs], arrays.states)
    if split.full:
        carry = _run_full(split.full, count, weights, runs, advance_full, carry, reversible)
    if split.tail:
        if weights is None and not isinstance(count, jax.Array):
            carry = advance_tail(carry) if count is None else carry
        else:
            carry = lax.cond(runs[split.full], advance_tail, _same, carry)
    accumulators, states = carry
    total = total_weight(loop, weights, runs)
    results = [
        finalize(output, split, accumulator, total)
        for output, accumulator in zip(loop.outputs, accumulators, strict=True)
    ]
    return results, states


def _run_full(
    full: int, count: Any, weights: Any, runs: Any, advance: Any, carry: Any, reversible: bool
) -> Any:
    if weights is None and not isinstance(count, jax.Array):
        return lax.fori_loop(0, full if count is None else min(count, full), advance, carry)
    if reversible:

        def visit(carry: Any, index: Any) -> tuple[Any, None]:
            go = lambda carry: advance(index, carry)
            return lax.cond(runs[index], go, _same, carry), None

        return lax.scan(visit, carry, jnp.arange(full))[0]
    if weights is None:
        return lax.fori_loop(0, jnp.minimum(count, full), advance, carry)
    # Those that run, in order, before those that do not: skipping costs nothing, and what is skipped cannot leak.
    order = jnp.argsort(~runs[:full], stable=True)
    return lax.fori_loop(0, jnp.sum(runs[:full]), lambda i, c: advance(order[i], c), carry)


def _same(carry: Any) -> Any:
    return carry


def clamped(count: Any, num_microbatches: int) -> Any:
    """`count` within 0 … num_microbatches; None where that is all of them."""
    if count is None:
        return None
    if isinstance(count, int):
        count = min(max(count, 0), num_microbatches)
        return None if count == num_microbatches else count
    return jnp.clip(count, 0, num_microbatches)


def which_run(split: Split, weights: Any, count: Any) -> Any:
    """One bool per microbatch, or None where all run."""
    if weights is None and count is None:
        return None
    runs = jnp.arange(split.num_microbatches) < (split.num_microbatches if count is None else count)
    return runs if weights is None else runs & (weights != 0)


def weights_that_ran(weights: jax.Array, runs: Any) -> jax.Array:
    """The weights, zero where the microbatch did not run."""
    return jnp.where(runs, weights, 0)


def moment(split: Split, weights: Any, before: Any, index: Any, tail: bool) -> Moment:
    """The moment of microbatch `index`; without a weight function a microbatch weighs its rows / microbatch_size."""
    if weights is not None:
        return Moment(index, weights[index], before[index])
    weight = split.tail / split.microbatch_size if tail else None
    return Moment(index, weight, index)


def total_weight(loop: Loop, weights: Any, runs: Any) -> Any:
    """What MEAN divides by: the weights that ran, or all rows where there is no weight function."""
    if weights is not None:
        return jnp.sum(weights_that_ran(weights, runs))
    return loop.split.batch_size / loop.split.microbatch_size * loop.pieces


def running_total(loop: Loop, weights: Any, runs: Any) -> Any:
    """What RUNNING_MEAN divides by: the weights that ran."""
    if weights is not None or runs is None:
        return total_weight(loop, weights, runs)
    split = loop.split
    sizes = jnp.array([split.size(i) / split.microbatch_size for i in range(len(runs))])
    return jnp.sum(jnp.where(runs, sizes, 0)) * loop.pieces


def divisor(loop: Loop, output: Output, weights: Any, runs: Any) -> Any:
    """What the sum of an output's weighted values is divided by: 1 for SUM."""
    match output.kind:
        case AccumulationType.MEAN:
            return total_weight(loop, weights, runs)
        case AccumulationType.RUNNING_MEAN:
            return running_total(loop, weights, runs)
    return 1


def last_to_run(split: Split, runs: Any) -> Any:
    """The index of the last microbatch that runs; −1 where none does."""
    if runs is None:
        return split.num_microbatches - 1
    return jnp.max(jnp.where(runs, jnp.arange(split.num_microbatches), -1), initial=-1)


def only(values: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """The values at `positions`."""
    return [values[i] for i in positions]
