"""What a stream carries on the devices from microbatch to microbatch: how it begins, grows and ends."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from microbatch._accumulation import AccumulationType, Accumulator
from microbatch._errors import AccumulatorError
from microbatch.jax._accumulators import CONCAT, RULES, Moment, Output, update
from microbatch.jax._outputs import OutputPlan


class State(NamedTuple):
    """What is carried on the devices from microbatch to microbatch.

    Attributes:
      accumulators: one per output that is neither carried nor concatenated.
      states: the leaves that are handed on.
      total: the weight so far, relative to the first weight.
      lost: what rounding took from it.
      first: the first weight that is not zero.
      ran: how many microbatches ran.
    """

    accumulators: list[Any]
    states: list[Any]
    total: Any
    lost: Any
    first: Any
    ran: Any


class Folded(NamedTuple):
    """The outputs that `State` accumulates, and whether each is held in the dtype of its result."""

    outputs: tuple[Output, ...]
    keeps_dtype: tuple[bool, ...]


def first_state(where: str, outputs: Sequence[Output], states: Sequence[Any]) -> State:
    """The state before the first microbatch."""
    zero = jnp.zeros((), jnp.result_type(float))
    return State(
        [_first_carry(where, output) for output in outputs if output.kind is not CONCAT],
        # Copied: the arguments are the caller's, and the state's memory is used again.
        [jnp.copy(x) for x in states],
        zero,
        zero,
        zero,
        jnp.zeros((), jnp.int32),
    )


def folded_in(
    where: str,
    plan: OutputPlan,
    outputs: Sequence[Output],
    state: State,
    values: list[Any],
    own_weight: Any,
    index: Any,
) -> tuple[State, list[Any]]:
    """The next state, and the rows that the microbatch adds to CONCAT.

    Args:
      where: opens the messages.
      plan: the parts of the output.
      outputs: how they combine.
      state: the one before.
      values: the leaves of the microbatch's output.
      own_weight: the microbatch's weight, not 0.
      index: its place in the stream.
    """
    first = jnp.where(state.ran == 0, own_weight, state.first)
    # Relative to the first weight, so that a stream of one element is that element's output.
    weight = own_weight / first
    total = state.total + state.lost
    carried = [i for part in plan.carried for i in part.values]
    remaining = iter([x for i, x in enumerate(values) if i not in carried])
    updated, pieces = [], []
    accumulators = iter(state.accumulators)
    for output in outputs:
        mine = [next(remaining) for _ in output.types]
        if output.kind is CONCAT:
            pieces.append(jnp.reshape(mine[0], jnp.shape(mine[0]) or (1,)))
            continue
        carry = next(accumulators)
        _check_same(where, output, carry)
        told = own_weight if output.is_custom else weight
        updated.append(update(output, None, carry, mine, Moment(index, told, total), tail=False))
    _check_states(where, plan, state)
    total, lost = _two_sum(state.total, weight)
    states = [values[i].astype(s.dtype) for i, s in zip(carried, state.states, strict=True)]
    return State(updated, states, total, state.lost + lost, first, state.ran + 1), pieces


def results_of(
    folded: Folded, in_place: list[Any], others: list[Any], total: Any, lost: Any, ran: Any
) -> list[Any]:
    """The results, one primitive a leaf where that does: models have thousands.

    Args:
      folded: the outputs.
      in_place: the accumulators of those that keep their dtype.
      others: of the others.
      total: see `State`.
      lost: see `State`.
      ran: see `State`.
    """
    mine, foreign = iter(in_place), iter(others)
    carries = [next(mine) if keeps else next(foreign) for keeps in folded.keeps_dtype]
    outputs = folded.outputs
    kinds = [o.kind for o in outputs]
    wide = [i for i, k in enumerate(kinds) if isinstance(k, AccumulationType) and RULES[k].wide]
    total = total + lost

    def nothing(sums: list[Any]) -> list[Any]:
        return [jnp.zeros_like(x) for x in sums]

    def something(sums: list[Any]) -> list[Any]:
        return [
            _divided(x, total) if kinds[i] is AccumulationType.MEAN else x
            for i, x in zip(wide, sums, strict=True)
        ]

    done = lax.cond(ran == 0, nothing, something, [carries[i] for i in wide])
    for i, x in zip(wide, done, strict=True):
        carries[i] = x
    return [
        output.kind.finalize(carry)
        if isinstance(output.kind, Accumulator)
        else lax.convert_element_type(carry, output.type.dtype)
        for output, carry in zip(outputs, carries, strict=True)
    ]


def _first_carry(where: str, output: Output) -> Any:
    """The carry before the first microbatch, from types alone."""
    if isinstance(output.kind, Accumulator):
        return _custom_carry(where, output, output.kind)
    carry = RULES[output.kind].init(output.type, output.dtype)
    if RULES[output.kind].wide and jnp.issubdtype(carry.dtype, jnp.inexact):
        # −0.0 + x is x, its sign of zero included.
        return lax.neg(carry)
    return carry


def _custom_carry(where: str, output: Output, accumulator: Accumulator) -> Any:
    """The carry of a custom accumulator, in the dtypes that its update gives: they may not change on the way."""
    spec = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in output.types]
    carry = accumulator.init(output.treedef.unflatten(spec))
    at = Moment(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.result_type(float)))
    after = jax.eval_shape(
        lambda carry, *values: update(output, None, carry, values, at, tail=False), carry, *spec
    )
    before = jax.eval_shape(lambda: carry)
    shapes = lambda tree: (jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)])
    if shapes(before) != shapes(after):
        raise AccumulatorError(
            f"{where}: update of a custom accumulator changes the carry:\n"
            f"  init:   {_tree_words(before)}\n"
            f"  update: {_tree_words(after)}\n"
            "Return a carry of the structure and shapes that init gives."
        )
    return jax.tree.map(lambda x, t: jnp.asarray(x, t.dtype), carry, after)


def _divided(value: jax.Array, total: jax.Array) -> jax.Array:
    total = lax.convert_element_type(total, value.dtype)
    return lax.div(value, lax.broadcast(total, value.shape))


def _check_states(where: str, plan: OutputPlan, state: State) -> None:
    came = [_words(x) for part in plan.carried for x in part.leaves]
    wanted = [_words(x) for x in state.states]
    if came != wanted:
        raise AccumulatorError(
            f"{where}: what is carried and the arguments it becomes differ:\n"
            f"  output:   {', '.join(came) or 'nothing'}\n"
            f"  argument: {', '.join(wanted) or 'nothing'}\n"
            "Return the new state with the structure, shapes and dtypes of the old one."
        )


def _check_same(where: str, output: Output, carry: Any) -> None:
    if isinstance(output.kind, Accumulator) or output.type.shape == carry.shape:
        return
    kind = output.kind.name
    raise AccumulatorError(
        f"{where}: an output is {_words(output.type)} in one microbatch and {_words(carry)} in those before; "
        f"{kind} cannot combine them.\n"
        "Use CONCAT for outputs with rows, or return one shape."
    )


def _two_sum(total: Any, weight: Any) -> tuple[Any, Any]:
    """The sum and exactly what rounding took from it: long streams do not stop counting."""
    after = total + weight
    came = after - total
    return after, (total - (after - came)) + (weight - came)


def _words(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _tree_words(tree: Any) -> str:
    return str(jax.tree.map(_words, tree)).replace("'", "")
