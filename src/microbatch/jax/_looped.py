"""From one call to a loop and its arrays, and from the loop's results to what the call returns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from microbatch._accumulation import EXTREMES, Carry
from microbatch._errors import AccumulatorError, EmptyStream
from microbatch._splitting import Split
from microbatch.jax._accumulators import Moment, as_weight
from microbatch.jax._binding import Call, hoisted
from microbatch.jax._convolutions import has_convolution
from microbatch.jax._devices import Devices, check_outputs
from microbatch.jax._differentiate import evaluate
from microbatch.jax._fold import Arrays, Loop
from microbatch.jax._options import Options
from microbatch.jax._outputs import OutputPlan, plan_outputs
from microbatch.jax._put_off import once_reduced
from microbatch.jax._rows import Rows, take, take_tail
from microbatch.jax._spread import weights_of_shards
from microbatch.jax._stateful import evaluated


def looped(
    fun: Callable[..., Any],
    options: Options,
    split: Split,
    call: Call,
    count: Any,
    devices: Devices | None,
) -> Any:
    """What the call returns, from more than one microbatch."""
    where = options.where
    cuts = tuple(Rows(axis, split.microbatch_size, split.full, split.order) for axis in call.axes)
    shared = [call.leaves[i] for i in call.shared]
    states = [jnp.asarray(call.leaves[i]) for places in call.states for i in places]
    rows = [jnp.asarray(call.leaves[i]) for i in call.rows]

    def flat_fun(shared: Any, states: Any, rows: Any) -> Any:
        args, kwargs = call.with_arrays(shared, states, rows)
        return evaluated(where, fun, args, kwargs)

    full_rows, tail_rows = _example_rows(split, cuts, rows, devices)
    program, consts, types, equations = _traced(flat_fun, shared, states, full_rows, devices)
    tail_program, tail_consts, tail_types = program, [], None
    if split.tail:
        tail_program, tail_consts, tail_types, _ = _traced(flat_fun, shared, states, tail_rows)
    plan = plan_outputs(where, options.accumulator, types, tail_types)
    _check_states(where, plan, call)
    for part in plan.parts:
        if part.accumulator in EXTREMES and split.batch_size == 0:
            raise EmptyStream(
                f"{where}: {part.accumulator.name} of zero rows has no value (output{part.path}).\n"
                "Give at least one row."
            )
    outputs = plan.outputs(options.accumulator_dtype)
    if devices is not None:
        check_outputs(where, devices, outputs, split.microbatch_size // devices.shards)
        outputs = tuple(map(devices.of_all, outputs))
    # The step outlives the call in traced programs: it holds on to none of its arrays.
    given, hoisted_count, keys = len(shared), len(consts), call.keys
    carried = [i for part in plan.carried for i in part.values]
    accumulated = [i for part in plan.parts if part not in plan.carried for i in part.values]

    def step(at: Moment, shared: Any, states: Any, rows: Any) -> tuple[list[Any], list[Any]]:
        arguments, found = shared[:given], shared[given:]
        for i in keys:
            arguments[i] = jax.random.fold_in(arguments[i], at.index)
        is_tail = bool(split.tail) and rows[0].shape[cuts[0].axis] != split.microbatch_size
        if is_tail:
            out = tail_program(found[hoisted_count:], arguments, states, rows)
        else:
            out = program(found[:hoisted_count], arguments, states, rows)
        return [out[i] for i in accumulated], [out[i] for i in carried]

    if options.checkpoint_policy is not None:
        step = jax.checkpoint(step, policy=options.checkpoint_policy, prevent_cse=False)
    loop = Loop(
        step=step,
        split=split,
        rows=cuts,
        outputs=outputs,
        weighted=options.weight_fn is not None,
        convolves=has_convolution(equations),
        devices=devices,
        reduce=options.reduce,
    )
    arrays = Arrays(
        shared=[*shared, *consts, *tail_consts],
        states=states,
        rows=rows,
        weights=_weights(options, split, call, cuts, shared, states, rows, devices),
        count=count,
    )
    mode = "store" if options.checkpoint_policy is not None else options.differentiate
    results, final_states = evaluate(loop, arrays, where, mode)
    return plan.assemble(results, final_states)


def _traced(
    fun: Callable[..., Any],
    shared: list[Any],
    states: list[Any],
    rows_fn: Any,
    devices: Devices | None = None,
) -> Any:
    """`hoisted`, with the types of rows that are described and never computed."""
    found: list[Any] = []

    def trace() -> None:
        found.extend(hoisted(fun, shared, states, rows_fn()))

    if devices is None:
        jax.eval_shape(trace)
    else:
        # Traced as it will run: on one device's part of the mesh, where it sees whole arrays.
        shared = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(jnp.asarray, shared)]
        jax.eval_shape(devices.over(trace, (), None))
    return found


def _example_rows(
    split: Split, cuts: Sequence[Rows], rows: Sequence[Any], devices: Devices | None
) -> tuple[Any, Any]:
    """What makes the rows of a full microbatch, and of the tail, for their types."""

    def full() -> list[Any]:
        if devices is None:
            return [take(x, cut, 0) for x, cut in zip(rows, cuts, strict=True)]
        size = split.microbatch_size // devices.shards
        return [
            jnp.zeros((*x.shape[: c.axis], size, *x.shape[c.axis + 1 :]), x.dtype)
            for x, c in zip(rows, cuts, strict=True)
        ]

    return full, lambda: [take_tail(x, cut) for x, cut in zip(rows, cuts, strict=True)]


def _weights(
    options: Options,
    split: Split,
    call: Call,
    cuts: Sequence[Rows],
    shared: list[Any],
    states: list[Any],
    rows: list[Any],
    devices: Devices | None,
) -> jax.Array | None:
    """One weight per microbatch, before anything else runs: ``[num_microbatches]``, or that of each shard."""
    weight_fn = options.weight_fn
    if weight_fn is None:
        return None
    shared, rows = jax.tree.map(lax.stop_gradient, (shared, rows))

    def weight(rows: list[Any]) -> jax.Array:
        args, kwargs = call.with_arrays(shared, states, rows)
        return as_weight(options.where, weight_fn(*args, **kwargs))

    def weights(rows: list[Any], cuts: Sequence[Rows]) -> jax.Array:
        of_full = lambda i: weight([take(x, cut, i) for x, cut in zip(rows, cuts, strict=True)])
        parts = []
        if split.full:
            parts.append(lax.map(of_full, jnp.arange(split.full)))
        if split.tail:
            tail = [take_tail(x, cut) for x, cut in zip(rows, cuts, strict=True)]
            parts.append(weight(tail)[None])
        return jnp.concatenate([*parts, jnp.zeros(0)])

    if devices is not None:
        return weights_of_shards(devices, weights, rows, cuts)
    return once_reduced(lambda rows: weights(rows, cuts), rows[0], cuts[0])(rows)


def _check_states(where: str, plan: OutputPlan, call: Call) -> None:
    """Refuses a carried output that is not of the argument's structure, shapes and dtypes."""
    for part, places in zip(plan.carried, call.states, strict=True):
        came = [(x.shape, x.dtype) for x in part.leaves]
        wanted = [(x.shape, x.dtype) for x in (jax.typeof(call.leaves[i]) for i in places)]
        if came != wanted:
            assert isinstance(part.accumulator, Carry)
            raise AccumulatorError(
                f"{where}: output{part.path} is carried to argument {part.accumulator.argnum}, and they differ:\n"
                f"  output:   {', '.join(f'{d}{list(s)}' for s, d in came) or 'nothing'}\n"
                f"  argument: {', '.join(f'{d}{list(s)}' for s, d in wanted) or 'nothing'}\n"
                "Return the new state with the structure, shapes and dtypes of the old one."
            )
