"""Derivatives of the loop in the memory of one microbatch.

The loop is one function with its own derivative rule. Real scalars that are summed or averaged have their gradients made
while their values are ("in_forward"): the tangent is the inner product with those gradients. Every other output's tangent
is a linear map whose transpose is another loop, which evaluates each microbatch again ("recompute"). Both loops are
again such functions, so higher derivatives are bounded, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from microbatch._accumulation import EXTREMES, AccumulationType, Accumulator
from microbatch._errors import MicrobatchError
from microbatch.jax._accumulators import CONCAT, RULES, SUM, Moment, Output, carry_dtype
from microbatch.jax._fold import (
    Arrays,
    Loop,
    clamped,
    divisor,
    fold,
    last_to_run,
    only,
    which_run,
)
from microbatch.jax._linear import linear_map
from microbatch.jax._rows import filled, take

Differentiate = Literal["auto", "in_forward", "recompute", "store"]
Result = tuple[list[Any], list[Any]]


@dataclass(frozen=True)
class Active:
    """Which inputs are differentiated: positions among the shared arrays and among the rows."""

    shared: tuple[int, ...]
    rows: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.shared or self.rows)


def evaluate(loop: Loop, arrays: Arrays, where: str, differentiate: Differentiate) -> Result:
    """Runs the loop so that its derivatives are bounded in memory; see `fold`."""
    if differentiate == "store":
        return fold(loop, arrays, reversible=True)
    if any(output.is_custom for output in loop.outputs):
        # A custom accumulator's derivative needs its carries: those are kept, each microbatch is evaluated again.
        step = jax.checkpoint(loop.step, prevent_cse=False)
        return fold(replace(loop, step=step), arrays, reversible=True)
    static_count = arrays.count if isinstance(arrays.count, int) else None

    def with_count(arrays: Arrays) -> Arrays:
        return arrays if static_count is None else replace(arrays, count=static_count)

    @jax.custom_jvp
    def run(arrays: Arrays) -> Result:
        return fold(loop, with_count(arrays))

    def rule(primals: tuple[Arrays], tangents: tuple[Arrays]) -> tuple[Result, Result]:
        return _jvp(loop, with_count(*primals), *tangents, where, differentiate)

    run.defjvp(rule, symbolic_zeros=True)
    return run(arrays if static_count is None else replace(arrays, count=None))


def _jvp(
    loop: Loop, arrays: Arrays, tangents: Arrays, where: str, differentiate: Differentiate
) -> tuple[Result, Result]:
    active = Active(_moving(tangents.shared), _moving(tangents.rows))
    if _moving(tangents.states):
        raise _through_carry(where)
    scalars = [
        i
        for i, output in enumerate(loop.outputs)
        if output.is_linear_scalar and differentiate in ("auto", "in_forward")
    ]
    others = [
        i
        for i, output in enumerate(loop.outputs)
        if i not in scalars and jnp.issubdtype(output.type.dtype, jnp.inexact)
    ]
    moving = only(tangents.shared, active.shared) + only(tangents.rows, active.rows)
    moving = list(map(jnp.asarray, moving))
    extended = _with_gradients(_with_winners(loop), arrays, scalars, active)
    results, states = evaluate(extended, arrays, where, "recompute")
    winners = {i: results[i][1] for i, output in enumerate(loop.outputs) if output.kind in EXTREMES}
    values = [result[0] if i in winners else result for i, result in enumerate(results)]
    values, gradients = values[: len(loop.outputs)], values[len(loop.outputs) :]

    out = [_zero_tangent(value) for value in values]
    per_scalar = len(moving)
    for k, i in enumerate(scalars):
        mine = gradients[k * per_scalar : (k + 1) * per_scalar]
        out[i] = _inner_products(loop, arrays, active, loop.outputs[i], mine, moving, values[i])
    if others and moving:
        allowed = differentiate != "in_forward"
        linear = _Linear(loop, active, tuple(others), where, allowed)
        for i, tangent in zip(others, linear(arrays, winners, moving, values), strict=True):
            out[i] = tangent
    state_tangents = _refusing_tangents(where, states, moving)
    return (values, states), (out, state_tangents)


def _with_gradients(loop: Loop, arrays: Arrays, scalars: Sequence[int], active: Active) -> Loop:
    """The loop whose step also gives the gradients of `scalars`, one pullback each."""
    if not scalars or not active:
        return loop
    positions = [_first_value(loop, i) for i in scalars]

    def step(at: Moment, shared: Any, states: Any, rows: Any) -> tuple[list[Any], list[Any]]:
        def of_active(*moving: Any) -> tuple[list[Any], Any]:
            values, new_states = loop.step(at, *_with_moving(active, shared, states, rows, moving))
            return only(values, positions), (values, new_states)

        moving = only(shared, active.shared) + only(rows, active.rows)
        ys, pullback, (values, new_states) = _vjp(of_active, *moving)
        gradients = []
        for k, i in enumerate(scalars):
            units = [jnp.ones_like(y) if j == k else jnp.zeros_like(y) for j, y in enumerate(ys)]
            of_moving = pullback(units)
            weight = None if loop.outputs[i].kind is SUM else at.weight
            gradients += of_moving[: len(active.shared)]
            gradients += [_scaled(g, weight) for g in of_moving[len(active.shared) :]]
        return values + gradients, new_states

    outputs = list(loop.outputs)
    for i in scalars:
        outputs += _gradient_outputs(loop, arrays, active, loop.outputs[i].kind)
    return replace(loop, step=step, outputs=tuple(outputs))


def _gradient_outputs(
    loop: Loop, arrays: Arrays, active: Active, kind: AccumulationType
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
        tail = (aval.update(shape=_with_size(aval.shape, rows.axis, left)),) if left else None
        outputs.append(Output(CONCAT, (aval,), tail, axis=rows.axis))
    return outputs


def _inner_products(
    loop: Loop,
    arrays: Arrays,
    active: Active,
    output: Output,
    gradients: list[Any],
    moving: list[Any],
    value: jax.Array,
) -> jax.Array:
    """The tangent of a scalar: its gradients times the inputs' tangents, summed."""
    count = len(active.shared)
    of_shared = [_dot(g, t) for g, t in zip(gradients[:count], moving[:count], strict=True)]
    of_rows = [_dot(g, t) for g, t in zip(gradients[count:], moving[count:], strict=True)]
    total = sum(of_shared)
    if of_rows:
        total = total + _divided(
            sum(of_rows), divisor(loop, output, arrays.weights, _runs(loop, arrays))
        )
    return jnp.asarray(total, value.dtype) if moving else jnp.zeros_like(value)


@dataclass(frozen=True)
class _Linear:
    """The tangents of the outputs at `positions` as a linear map, and its transpose, each a loop.

    Attributes:
      loop: the loop whose derivative it is.
      active: its inputs that move.
      positions: which outputs.
      where: opens the messages.
      allowed: False refuses to evaluate it ("in_forward" was asked for).
    """

    loop: Loop
    active: Active
    positions: tuple[int, ...]
    where: str
    allowed: bool

    def __call__(self, arrays: Arrays, winners: dict[int, Any], moving: Any, values: Any) -> Any:
        leaves, treedef = jax.tree.flatten((arrays, winners))
        static = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, int)}

        def restored(residuals: list[Any]) -> tuple[Arrays, dict[int, Any]]:
            found = iter(residuals)
            return jax.tree.unflatten(
                treedef, [static[i] if i in static else next(found) for i in range(len(leaves))]
            )

        def forward(residuals: list[Any], tangents: list[Any]) -> list[Any]:
            return self.forward(*restored(residuals), tangents)

        def transposed(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
            return self.transposed(*restored(residuals), cotangents, types)

        types = [jax.typeof(t) for t in moving]
        residuals = [leaf for i, leaf in enumerate(leaves) if i not in static]
        out_types = [jax.typeof(values[i]) for i in self.positions]
        return linear_map(forward, transposed, residuals, moving, out_types)

    def forward(self, arrays: Arrays, winners: dict[int, Any], tangents: list[Any]) -> list[Any]:
        """One loop over the microbatches' tangents, accumulated as their values are."""
        self._check()
        loop, active, count = self.loop, self.active, len(self.active.shared)
        positions = [_first_value(loop, i) for i in self.positions]
        kept = len(arrays.shared), len(arrays.rows)
        picked = list(winners.values())

        def step(at: Moment, shared: Any, states: Any, rows: Any) -> tuple[list[Any], list[Any]]:
            shared, tangents = shared[: kept[0]], shared[kept[0] :]
            row_tangents = rows[kept[1] :]
            won = dict(zip(winners, tangents[count:], strict=True))
            rows = rows[: kept[1]]

            def of_active(*moving: Any) -> tuple[list[Any], list[Any]]:
                values, new = loop.step(at, *_with_moving(active, shared, states, rows, moving))
                return only(values, positions), new

            moving = only(shared, active.shared) + only(rows, active.rows)
            along = [*tangents[:count], *row_tangents]
            _, out, new_states = jax.jvp(of_active, moving, along, has_aux=True)
            chosen = [
                jnp.where(won[i] == at.index, t, 0) if i in won else t
                for i, t in zip(self.positions, out, strict=True)
            ]
            return chosen, new_states

        outputs = []
        for i in self.positions:
            output = loop.outputs[i]
            # The tangent of a maximum is that of the microbatch that attained it; the others add zeros.
            kind = SUM if output.kind in EXTREMES else output.kind
            outputs.append(replace(output, kind=kind))
        row_cuts = tuple(loop.rows[i] for i in active.rows)
        tangent_loop = replace(loop, step=step, outputs=tuple(outputs), rows=loop.rows + row_cuts)
        extended = replace(
            arrays,
            shared=arrays.shared + tangents[:count] + picked,
            rows=arrays.rows + tangents[count:],
        )
        results, _ = evaluate(tangent_loop, extended, self.where, "recompute")
        return results

    def transposed(
        self, arrays: Arrays, winners: dict[int, Any], cotangents: list[Any], types: list[Any]
    ) -> list[Any]:
        """One loop over the microbatches' pullbacks: shared gradients summed, rows' side by side."""
        self._check()
        loop, active = self.loop, self.active
        given = {i: ct for i, ct in zip(self.positions, cotangents, strict=True) if ct is not None}
        if not given:
            return [jnp.zeros(t.shape, t.dtype) for t in types]
        runs = _runs(loop, arrays)
        concatenated = [i for i in given if loop.outputs[i].kind is CONCAT]
        whole = [i for i in given if i not in concatenated]
        scaled = {}
        for i in whole:
            wide = given[i].astype(carry_dtype(SUM, given[i].dtype))
            scaled[i] = _divided(wide, divisor(loop, loop.outputs[i], arrays.weights, runs))
        last = jnp.asarray(last_to_run(loop.split, runs))
        kept = len(arrays.shared), len(arrays.rows)

        def step(at: Moment, shared: Any, states: Any, rows: Any) -> tuple[list[Any], list[Any]]:
            extra, shared = iter(shared[kept[0] :]), shared[: kept[0]]
            pulled = {i: next(extra) for i in whole}
            won = {i: next(extra) for i in winners}
            last = next(extra)
            from_rows = dict(zip(concatenated, rows[kept[1] :], strict=True))
            rows = rows[: kept[1]]

            def of_active(*moving: Any) -> tuple[list[Any], list[Any]]:
                return loop.step(at, *_with_moving(active, shared, states, rows, moving))

            moving = only(shared, active.shared) + only(rows, active.rows)
            values, pullback, new_states = _vjp(of_active, *moving)
            seeds = [_zero_tangent(value) for value in values]
            for i in given:
                output, at_value = loop.outputs[i], _first_value(loop, i)
                value = values[at_value]
                if i in from_rows:
                    seed = from_rows[i].reshape(value.shape)
                else:
                    seed = _microbatch_cotangent(output, at, pulled[i], won.get(i), last)
                seeds[at_value] = seed.astype(value.dtype)
            return list(pullback(seeds)), new_states

        cuts = tuple(loop.outputs[i].rows(loop.split) for i in concatenated)
        pulling = replace(
            loop,
            step=step,
            rows=loop.rows + cuts,
            outputs=tuple(_gradient_outputs(loop, arrays, active, SUM)),
        )
        extended = replace(
            arrays,
            shared=[*arrays.shared, *scaled.values(), *winners.values(), last],
            rows=[*arrays.rows, *(given[i] for i in concatenated)],
        )
        gradients, _ = evaluate(pulling, extended, self.where, "recompute")
        return [g.astype(t.dtype) for g, t in zip(gradients, types, strict=True)]

    def _check(self) -> None:
        if not self.allowed:
            raise MicrobatchError(
                f'{self.where}: differentiate="in_forward" makes gradients of real scalars with SUM or MEAN, and '
                'another output is differentiated.\nUse differentiate="auto" or "recompute".'
            )


def _microbatch_cotangent(output: Output, at: Moment, whole: Any, won: Any, last: Any) -> Any:
    """What one microbatch's value receives of the result's cotangent (already divided by the total weight)."""
    if output.kind is AccumulationType.LAST:
        return jnp.where(at.index == last, whole, 0)
    if output.kind in EXTREMES:
        return jnp.where(won == at.index, whole, 0)
    return whole if output.kind is SUM else _scaled(whole, at.weight)


def _with_winners(loop: Loop) -> Loop:
    """The loop whose MAX and MIN also tell which microbatch attained them; the first one at a tie."""
    outputs = [
        replace(output, kind=_winner(output), treedef=jax.tree.structure(0))
        if output.kind in EXTREMES
        else output
        for output in loop.outputs
    ]
    return replace(loop, outputs=tuple(outputs))


def _winner(output: Output) -> Accumulator:
    rule = RULES[output.kind]
    maximum = output.kind is AccumulationType.MAX

    def start(_: Any) -> tuple[Any, Any]:
        return rule.init(output.type, output.dtype), filled(output.type, -1, jnp.int32)

    def compare(carry: Any, value: Any, index: Any) -> tuple[Any, Any]:
        best, winner = carry
        beats = (value > best) if maximum else (value < best)
        beats |= (value != value) & (best == best) | (winner < 0)
        return jnp.where(beats, value, best), jnp.where(beats, index, winner)

    return Accumulator(start, compare, lambda carry: carry)


def _through_carry(where: str) -> MicrobatchError:
    return MicrobatchError(
        f"{where}: a derivative was asked through a Carry, and none flows there.\n"
        "Apply jax.lax.stop_gradient to the carried argument inside fun, or take the derivative inside fun."
    )


def _refusing_tangents(where: str, states: list[Any], moving: list[Any]) -> list[Any]:
    """Tangents of the last states: never silently zero, refused when someone needs them."""

    def refuse(*_: Any) -> Any:
        raise _through_carry(where)

    tangents = [_zero_tangent(state) for state in states]
    inexact = [i for i, s in enumerate(states) if jnp.issubdtype(s.dtype, jnp.inexact)]
    if inexact and moving:
        types = [jax.typeof(states[i]) for i in inexact]
        for i, tangent in zip(inexact, linear_map(refuse, refuse, [], moving, types), strict=True):
            tangents[i] = tangent
    return tangents


def _vjp(fun: Any, *primals: Any) -> Any:
    """`jax.vjp` with an auxiliary output; a function without reverse mode is told the way out."""
    try:
        return jax.vjp(fun, *primals, has_aux=True)
    except ValueError as error:
        if "everse-mode differentiation" not in str(error):
            raise
        raise MicrobatchError(
            "microbatch: fun has no reverse mode (a while_loop inside it, for example).\n"
            'Use differentiate="store", which keeps forward mode.'
        ) from error


def _first_value(loop: Loop, position: int) -> int:
    return sum(len(output.types) for output in loop.outputs[:position])


def _with_moving(active: Active, shared: Any, states: Any, rows: Any, moving: Any) -> Any:
    """Shared arrays, states and rows with the moving ones in their places."""
    shared, rows, found = list(shared), list(rows), iter(moving)
    for i in active.shared:
        shared[i] = next(found)
    for i in active.rows:
        rows[i] = next(found)
    return shared, states, rows


def _moving(tangents: list[Any]) -> tuple[int, ...]:
    return tuple(
        i
        for i, t in enumerate(tangents)
        if not isinstance(t, SymbolicZero) and jnp.result_type(t) != jax.dtypes.float0
    )


def _runs(loop: Loop, arrays: Arrays) -> Any:
    count = clamped(arrays.count, loop.split.num_microbatches)
    return which_run(loop.split, arrays.weights, count)


def _zero_tangent(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)


def _dot(gradient: jax.Array, tangent: jax.Array) -> jax.Array:
    # The loss is real: its tangent is the real part, and JAX's gradients are not conjugated.
    return jnp.sum(jnp.real(gradient * tangent.astype(gradient.dtype)))


def _scaled(value: jax.Array, weight: Any) -> jax.Array:
    if weight is None:
        return value
    wide = carry_dtype(SUM, value.dtype)
    return (value.astype(wide) * jnp.asarray(weight, wide)).astype(value.dtype)


def _divided(value: Any, total: Any) -> Any:
    if isinstance(total, int | float):
        return value / total if total not in (0, 1) else value
    total = jnp.asarray(total, value.dtype)
    return jnp.where(total == 0, 0, value / jnp.where(total == 0, 1, total))


def _with_size(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])
