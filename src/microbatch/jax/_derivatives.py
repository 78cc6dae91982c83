"""The loops that a loop's derivative is made of: with gradients beside the values, of tangents, and of pullbacks.

Each is a `Loop` with another step; nothing here runs.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from microbatch._accumulation import EXTREMES, AccumulationType, Accumulator
from microbatch.jax._accumulators import CONCAT, RULES, SUM, Moment, Output, carry_dtype
from microbatch.jax._fold import Arrays, Loop, clamped, divisor, last_to_run, only, which_run
from microbatch.jax._rows import filled, take

StepResult = tuple[list[Any], list[Any]]


@dataclass(frozen=True)
class Active:
    """Which inputs are differentiated: positions among the shared arrays, and among the rows."""

    shared: tuple[int, ...]
    rows: tuple[int, ...]

    def of(self, shared: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        """The active ones, shared first."""
        return only(shared, self.shared) + only(rows, self.rows)

    def replaced(
        self, shared: Sequence[Any], rows: Sequence[Any], moving: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """All of them, with others in the active places."""
        shared, rows, found = list(shared), list(rows), iter(moving)
        for i in self.shared:
            shared[i] = next(found)
        for i in self.rows:
            rows[i] = next(found)
        return shared, rows


def with_gradients(
    loop: Loop, arrays: Arrays, scalars: Sequence[int], active: Active
) -> tuple[Loop, Arrays]:
    """The loop whose step also gives the gradients of the outputs `scalars`, one pullback each.

    Gradients of rows are weighted, and with a weight function also divided by the total weight: a large weight
    alone would leave the range of a narrow dtype.
    """
    positions = [first_value(loop, i) for i in scalars]
    num_shared, num_inputs = len(active.shared), len(arrays.shared)
    divided_here = active.rows and arrays.weights is not None
    runs = runs_of(loop, arrays)
    totals = [
        jnp.asarray(divisor(loop, loop.outputs[i], arrays.weights, runs) if divided_here else 1.0)
        for i in scalars
    ]

    def step(at: Moment, shared: Any, states: Any, rows: Any) -> StepResult:
        shared, totals = shared[:num_inputs], shared[num_inputs:]

        def of_moving(*moving: Any) -> tuple[list[Any], Any]:
            shared_now, rows_now = active.replaced(shared, rows, moving)
            values, new_states = loop.step(at, shared_now, states, rows_now)
            return only(values, positions), (values, new_states)

        moving = active.of(shared, rows)
        pullbacks, (values, new_states) = _scalar_pullbacks(of_moving, len(scalars), moving)
        gradients = []
        for pullback, i, total in zip(pullbacks, scalars, totals, strict=True):
            of_shared_and_rows = pullback()
            weight = None if loop.outputs[i].kind is SUM else at.weight
            if divided_here and weight is not None:
                weight = divided(weight, total)
            gradients += of_shared_and_rows[:num_shared]
            gradients += [scaled(g, weight) for g in of_shared_and_rows[num_shared:]]
        return values + gradients, new_states

    outputs = list(loop.outputs)
    for i in scalars:
        outputs += _gradient_outputs(loop, arrays, active, loop.outputs[i].kind)
    extended = replace(loop, step=step, outputs=tuple(outputs))
    return extended, replace(arrays, shared=[*arrays.shared, *totals])


def with_winners(loop: Loop) -> Loop:
    """The loop whose MAX and MIN also tell which microbatch attained them; the first one at a tie."""

    def with_winner(output: Output) -> Output:
        if output.kind not in EXTREMES:
            return output
        winner = _winner(output)
        return replace(output, kind=winner, treedef=jax.tree.structure(0), extreme=output.kind)

    return replace(loop, outputs=tuple(map(with_winner, loop.outputs)))


def tangent_loop(
    loop: Loop,
    arrays: Arrays,
    active: Active,
    positions: Sequence[int],
    winners: dict[int, Any],
    tangents: Sequence[Any],
) -> tuple[Loop, Arrays]:
    """The loop over the microbatches' tangents, accumulated as their values are.

    Args:
      loop: the loop that is differentiated.
      arrays: its arrays.
      active: its inputs that move.
      positions: the outputs whose tangents are wanted.
      winners: which microbatch attained each MAX and MIN, by output.
      tangents: the tangents of the active inputs.
    """
    wanted = [first_value(loop, i) for i in positions]
    num_shared, num_rows, moving_shared = len(arrays.shared), len(arrays.rows), len(active.shared)
    extremes = tuple(winners)

    def step(at: Moment, shared: Any, states: Any, rows: Any) -> StepResult:
        shared, extra = shared[:num_shared], shared[num_shared:]
        rows, row_tangents = rows[:num_rows], rows[num_rows:]
        won = dict(zip(extremes, extra[moving_shared:], strict=True))

        def of_moving(*moving: Any) -> StepResult:
            shared_now, rows_now = active.replaced(shared, rows, moving)
            values, new_states = loop.step(at, shared_now, states, rows_now)
            return only(values, wanted), new_states

        along = [*extra[:moving_shared], *row_tangents]
        _, out, new_states = jax.jvp(of_moving, active.of(shared, rows), along, has_aux=True)
        # The tangent of a maximum is that of the microbatch that attained it; the others add zeros.
        chosen = [
            jnp.where(won[i] == at.index, t, 0) if i in won else t
            for i, t in zip(positions, out, strict=True)
        ]
        return chosen, new_states

    summed = lambda output: replace(output, kind=SUM) if output.kind in EXTREMES else output
    return replace(
        loop,
        step=step,
        rows=loop.rows + tuple(only(loop.rows, active.rows)),
        outputs=tuple(summed(loop.outputs[i]) for i in positions),
    ), replace(
        arrays,
        shared=[*arrays.shared, *tangents[:moving_shared], *winners.values()],
        rows=[*arrays.rows, *tangents[moving_shared:]],
    )


def pullback_loop(
    loop: Loop,
    arrays: Arrays,
    active: Active,
    cotangents: dict[int, Any],
    winners: dict[int, Any],
) -> tuple[Loop, Arrays]:
    """The loop over the microbatches' pullbacks: gradients of shared arrays summed, of rows side by side.

    Args:
      loop: the loop that is differentiated.
      arrays: its arrays.
      active: its inputs whose cotangents are wanted.
      cotangents: what each output receives, by output.
      winners: which microbatch attained each MAX and MIN, by output.
    """
    runs = runs_of(loop, arrays)
    by_rows = [i for i in cotangents if loop.outputs[i].kind is CONCAT]
    whole = [i for i in cotangents if i not in by_rows]
    per_weight = []
    for i in whole:
        wide = cotangents[i].astype(carry_dtype(SUM, cotangents[i].dtype))
        per_weight.append(divided(wide, divisor(loop, loop.outputs[i], arrays.weights, runs)))
    last = jnp.asarray(last_to_run(loop.split, runs))
    num_shared, num_rows, extremes = len(arrays.shared), len(arrays.rows), tuple(winners)

    def step(at: Moment, shared: Any, states: Any, rows: Any) -> StepResult:
        shared, extra = shared[:num_shared], iter(shared[num_shared:])
        received = dict(zip(by_rows, rows[num_rows:], strict=True))
        rows = rows[:num_rows]
        received |= {i: next(extra) for i in whole}
        won = {i: next(extra) for i in extremes}
        last = next(extra)

        def of_moving(*moving: Any) -> StepResult:
            shared_now, rows_now = active.replaced(shared, rows, moving)
            return loop.step(at, shared_now, states, rows_now)

        values, pullback, new_states = jax.vjp(of_moving, *active.of(shared, rows), has_aux=True)
        seeds = [zero_tangent(value) for value in values]
        for i, cotangent in received.items():
            position = first_value(loop, i)
            value = values[position]
            share = _share(loop.outputs[i], at, cotangent, won.get(i), last)
            seeds[position] = share.reshape(value.shape).astype(value.dtype)
        return list(pullback(seeds)), new_states

    return replace(
        loop,
        step=step,
        rows=loop.rows + tuple(loop.outputs[i].rows(loop.split) for i in by_rows),
        outputs=tuple(_gradient_outputs(loop, arrays, active, SUM)),
    ), replace(
        arrays,
        shared=[*arrays.shared, *per_weight, *winners.values(), last],
        rows=[*arrays.rows, *(cotangents[i] for i in by_rows)],
    )


def runs_of(loop: Loop, arrays: Arrays) -> Any:
    """Which microbatches run, see `which_run`."""
    count = clamped(arrays.count, loop.split.num_microbatches)
    return which_run(loop.split, arrays.weights, count)


def zero_tangent(value: Any) -> Any:
    """The zero tangent of a value, of dtype float0 for integers and keys."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return lax.full_like(value, 0)
    return np.zeros(value.shape, jax.dtypes.float0)


def scaled(value: jax.Array, weight: Any) -> jax.Array:
    """`value` times a weight, in float32 or wider; None is 1."""
    if weight is None:
        return value
    wide = carry_dtype(SUM, value.dtype)
    return (value.astype(wide) * jnp.asarray(weight, wide)).astype(value.dtype)


def divided(value: Any, total: Any) -> Any:
    """`value` over a total weight; zeros where that is zero."""
    if isinstance(total, int | float):
        return value / total if total not in (0, 1) else value
    total = jnp.asarray(total, value.dtype)
    return jnp.where(total == 0, 0, value / jnp.where(total == 0, 1, total))


def first_value(loop: Loop, position: int) -> int:
    """Where the values of an output start among those of a step."""
    return sum(len(output.types) for output in loop.outputs[:position])


def _gradient_outputs(
    loop: Loop, arrays: Arrays, active: Active, kind: AccumulationType | Accumulator
) -> list[Output]:
    """How gradients are accumulated: of shared arrays as `kind` in float32 or wider, of rows side by side."""
    outputs = []
    for i in active.shared:
        aval = jax.typeof(arrays.shared[i])
        wide = carry_dtype(SUM, aval.dtype)
        outputs.append(Output(kind, (aval.update(dtype=wide),), dtype=wide))
    for i in active.rows:
        rows, leaf = loop.rows[i], arrays.rows[i]
        (aval,) = jax.make_jaxpr(lambda x, rows=rows: take(x, rows, 0))(leaf).out_avals
        left = leaf.shape[rows.axis] - rows.size * rows.count
        shape = (*aval.shape[: rows.axis], left, *aval.shape[rows.axis + 1 :])
        outputs.append(
            Output(CONCAT, (aval,), (aval.update(shape=shape),) if left else None, axis=rows.axis)
        )
    return outputs


def _share(output: Output, at: Moment, cotangent: Any, won: Any, last: Any) -> Any:
    """What one microbatch's value receives of the output's cotangent, already divided by the total weight."""
    if output.kind is AccumulationType.LAST:
        return jnp.where(at.index == last, cotangent, 0)
    if output.kind in EXTREMES:
        return jnp.where(won == at.index, cotangent, 0)
    return cotangent if output.kind in (SUM, CONCAT) else scaled(cotangent, at.weight)


def _winner(output: Output) -> Accumulator:
    """MAX or MIN together with the index of the microbatch that attained it."""
    assert isinstance(output.kind, AccumulationType)
    rule = RULES[output.kind]
    is_max = output.kind is AccumulationType.MAX

    def start(_: Any) -> tuple[Any, Any]:
        return rule.init(output.type, output.dtype), filled(output.type, -1, jnp.int32)

    def compare(carry: Any, value: Any, index: Any) -> tuple[Any, Any]:
        best, winner = carry
        beats = (value > best) if is_max else (value < best)
        beats |= jnp.isnan(value) & ~jnp.isnan(best) | (winner < 0)
        return jnp.where(beats, value, best), jnp.where(beats, index, winner)

    return Accumulator(start, compare, lambda carry: carry)


def _scalar_pullbacks(
    fun: Any, count: int, primals: Sequence[Any]
) -> tuple[list[Callable[[], list[Any]]], Any]:
    """What makes the gradient of each of `count` scalars, and the auxiliary output.

    One linearization serves them all, and each is transposed alone: seeds of zeros would be multiplied out.
    """
    if not count:
        return [], fun(*primals)[1]
    if count == 1:
        (y,), pullback, aux = jax.vjp(fun, *primals, has_aux=True)
        return [lambda: list(pullback([jnp.ones_like(y)]))], aux
    ys, linear, aux = jax.linearize(fun, *primals, has_aux=True)

    def gradient_of(k: int) -> list[Any]:
        transposed = jax.linear_transpose(lambda *tangents: linear(*tangents)[k], *primals)
        return list(transposed(jnp.ones_like(ys[k])))

    return [functools.partial(gradient_of, k) for k in range(count)], aux
