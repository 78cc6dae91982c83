"""The transformation of the JAX front."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from microbatch._accumulation import EXTREMES, AccumulationType, Accumulator, Carry, as_accumulator
from microbatch._checks import (
    as_argnames,
    as_argnums,
    batch_size_of,
    check_choice,
    check_declared,
    check_size,
    locate,
    name_of,
    per_argument,
    signature_of,
)
from microbatch._errors import (
    AccumulatorError,
    BatchError,
    EmptyStream,
    MicrobatchError,
    MicrobatchSizeError,
)
from microbatch._splitting import Auto, Order, Remainder, Split, make_split
from microbatch.jax._accumulators import Moment
from microbatch.jax._binding import Call, batch_leaves, flatten_call, hoisted
from microbatch.jax._convolutions import has_convolution
from microbatch.jax._devices import (
    Devices,
    Reduce,
    check_outputs,
    check_sharded,
    find_devices,
    refused_carry,
)
from microbatch.jax._differentiate import Differentiate, evaluate
from microbatch.jax._fold import Arrays, Loop
from microbatch.jax._memory import resolve_auto
from microbatch.jax._outputs import OutputPlan, of_single_microbatch, plan_outputs
from microbatch.jax._put_off import once_reduced
from microbatch.jax._rows import Rows, explicit_shards, take, take_tail
from microbatch.jax._spread import weights_of_shards
from microbatch.jax._stateful import evaluated


@dataclass(frozen=True)
class Options:
    """What `microbatch` was asked for, checked; see there."""

    where: str
    signature: inspect.Signature | None
    argnums: tuple[int, ...]
    argnames: tuple[str, ...]
    in_axes: Any
    microbatch_size: int | Auto | None
    num_microbatches: int | None
    num_real_microbatches: Any
    accumulator: Any
    order: Order
    remainder: Remainder
    weight_fn: Callable[..., Any] | None
    accumulator_dtype: Any
    key_argnums: tuple[int, ...]
    differentiate: Differentiate
    checkpoint_policy: Callable[..., Any] | None
    mesh: Any = None
    batch_spec: Any = None
    reduce: Reduce = "once"
    memory_budget: int | str | None = None


def microbatch(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    microbatch_size: int | Auto | None,
    accumulator: Any = AccumulationType.SUM,
    *,
    argnames: str | Sequence[str] = (),
    in_axes: int | Sequence[int] = 0,
    num_real_microbatches: int | jax.Array | None = None,
    num_microbatches: int | None = None,
    order: Order = "strided",
    remainder: Remainder = "error",
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: Any = None,
    key_argnums: int | Sequence[int] = (),
    differentiate: Differentiate = "auto",
    checkpoint_policy: Callable[..., Any] | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    batch_spec: jax.sharding.PartitionSpec | str | None = None,
    reduce: Reduce = "once",
    memory_budget: int | str | None = None,
) -> Callable[..., Any]:
    """Evaluates `fun` on a batch piece by piece and returns what the whole batch would have returned.

    The function returned is equivalent to::

        def microbatched(*args):
            carry = init(typeof(fun(*first microbatch)))
            for i in range(num_microbatches):
                carry = update(carry, fun(*(microbatch i of the batch arguments, the other arguments)), i)
            return finalize(carry)

    in the memory of one microbatch and one accumulator, also when it is differentiated.

    Args:
      fun: the function of a whole batch. Its batch arguments are trees of arrays ``[B, ...]``; it is called with
        ``[m, ...]`` in their places.
      argnums: which positional arguments have a batch axis; negative numbers count from the end.
      microbatch_size: m, rows in a microbatch; "auto" is the largest that fits, as `plan` finds it by compiling, never by
        running out. None (without `num_microbatches`) returns `fun`.
      accumulator: how the outputs combine: a kind of `AccumulationType`, an `Accumulator`, a `Carry`, or a tree of
        these that is a prefix of the output. MEAN is Σ wᵢxᵢ / Σ wᵢ.
      argnames: which arguments, by name, have a batch axis.
      in_axes: the batch axis, one for all or one per batch argument (argnums first); negative axes are
        resolved leaf by leaf.
      num_real_microbatches: stop after so many, clamped to 0 … n; may be traced, so that it changes without a
        recompilation. SUM is the sum of those; MEAN still divides by all n, unless `weight_fn` is given;
        RUNNING_MEAN is the mean of those; CONCAT has zeros in the rows that did not run.
      num_microbatches: instead of `microbatch_size`: at most so many microbatches.
      order: "strided": microbatch i holds rows i, i + n, …, which keeps a batch that is sharded along its rows
        where it is; "contiguous": rows i·m … i·m + m − 1. Neither copies the batch.
      remainder: "error" refuses a batch that m does not divide; "allow" makes the last B mod m rows the last microbatch.
      weight_fn: maps `fun`'s arguments, with one microbatch of the batch arguments, to that microbatch's weight in
        MEAN, in any unit (rows, valid tokens). No derivative flows through it. A microbatch of weight 0 is
        skipped: nothing in it reaches a value or a gradient. A total of 0 gives zeros. Default: rows.
      accumulator_dtype: the dtype of sums and means while they accumulate. Default: the output's own, float32
        for float16 and bfloat16. The result is cast back once.
      key_argnums: arguments that are random keys; the microbatch's index is folded into them. So microbatches draw
        different numbers, and other ones than the whole batch would. All other arguments, keys included, are
        the same in every microbatch.
      differentiate: "auto": the gradients of real scalars with SUM or MEAN are made while their values are, and every
        other output's derivative evaluates each microbatch again; "in_forward": only the former, anything
        else is refused; "recompute": only the latter; "store": keeps all residuals, in memory ∝ B.
      checkpoint_policy: keeps residuals as this policy of `jax.checkpoint` says, and recomputes the others.
      mesh: a mesh whose devices hold the rows. Each device folds its own rows and they combine once, after the loop;
        the other arguments are whole on each. `fun` then sees m rows / shards, one piece of a microbatch, and
        SUM and MEAN are over all pieces. Custom accumulators, Carry and LAST are refused, and `fun` may not
        constrain the axes of the rows. Not needed on a mesh with explicit axes.
      batch_spec: over which axes of the mesh the rows lie, for example ``P("data")``. Default: the only axis.
      reduce: where parameters are sharded over the axes of the rows: "once" holds whole sums on each device and
        scatters them after the loop, "each" holds them in shards and scatters each microbatch.
      memory_budget: with "auto", what one device may use: bytes, ``"12GiB"``, or ``"80%"`` of its memory. Default: 90%.

    Returns:
      A function of the same arguments.

    Raises:
      MicrobatchSizeError: a size that is not a positive integer or does not divide the batch.
      BatchError: batch arguments that `fun` does not have, that hold scalars, or whose rows differ.
      AccumulatorError: an accumulator that does not fit the output; MEAN of integers.

    ========================  ==========================================================
    input                     result
    ========================  ==========================================================
    one microbatch            `fun` itself, bit for bit
    zero rows                 SUM and MEAN zeros, CONCAT empty, MAX and MIN refused
    all weights zero          MEAN zeros, never NaN
    a NaN of weight ≠ 0       NaN, as the whole batch would give
    a scalar with CONCAT      ``[num_microbatches]``, one entry a microbatch
    ========================  ==========================================================

    The mean of four rows from two microbatches, and its gradient:

    >>> from microbatch import AccumulationType
    >>> loss = lambda w, x: jnp.mean((w * x) ** 2)
    >>> small = microbatch(loss, 1, microbatch_size=2, accumulator=AccumulationType.MEAN)
    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> float(small(1.0, x)), float(jax.grad(small)(1.0, x))
    (7.5, 15.0)
    """
    where = f"microbatch({name_of(fun)})"
    options = Options(
        where=where,
        signature=signature_of(fun),
        argnums=as_argnums(where, argnums),
        argnames=as_argnames(where, argnames),
        in_axes=in_axes,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        num_real_microbatches=num_real_microbatches,
        accumulator=accumulator,
        order=order,
        remainder=remainder,
        weight_fn=weight_fn,
        accumulator_dtype=accumulator_dtype,
        key_argnums=as_argnums(where, key_argnums),
        differentiate=differentiate,
        checkpoint_policy=checkpoint_policy,
        mesh=mesh,
        batch_spec=batch_spec,
        reduce=reduce,
        memory_budget=memory_budget,
    )
    if microbatch_size is None and num_microbatches is None:
        return fun
    options = checked(options)

    @functools.wraps(fun)
    def microbatched(*args: Any, **kwargs: Any) -> Any:
        return run(fun, options, args, kwargs)

    return microbatched


def run(
    fun: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call of the microbatched function."""
    where = options.where
    place = functools.partial(locate, where, options.signature, args=args, kwargs=kwargs)
    batch = place(options.argnums, options.argnames)
    carries = _carries(options.accumulator)
    carried = tuple(place((carry.argnum,), ())[0] for carry in carries)
    keys = place(options.key_argnums, ())
    for slot in (*carried, *keys):
        if slot in batch:
            raise BatchError(
                f"{where}: {slot.name} is a batch argument and cannot be carried or be a key.\n"
                "Take it out of argnums and argnames, or out of Carry and key_argnums."
            )
    in_axes = per_argument(where, "in_axes", options.in_axes, batch)
    batch_size, subject = batch_size_of(where, batch_leaves(where, batch, in_axes, args, kwargs))
    size = resolve_auto(
        options.microbatch_size,
        where,
        fun,
        functools.partial(_of_size, fun, options),
        batch,
        batch_size,
        args,
        kwargs,
        memory_budget=options.memory_budget,
        remainder=options.remainder,
        key=_memory_key(options),
    )
    split = make_split(
        batch_size,
        size,
        options.num_microbatches,
        order=options.order,
        remainder=options.remainder,
        subject=f"{where}: {subject}",
    )
    count = _count(where, options.num_real_microbatches)
    if _is_whole(options, split, count):
        out = fun(*args, **kwargs)
        leaves = jax.tree.map(jnp.asarray, out)
        plan = plan_outputs(where, options.accumulator, leaves, None)
        return of_single_microbatch(plan, jax.tree.leaves(leaves))
    call = flatten_call(where, args, kwargs, batch, in_axes, carried, keys)
    devices = find_devices(where, options.mesh, options.batch_spec, options.reduce)
    if devices is None:
        first = call.leaves[call.rows[0]]
        check_sharded(where, subject, split, explicit_shards(first, call.axes[0]))
    else:
        check_sharded(where, subject, split, devices.shards)
        if carries:
            raise refused_carry(where)
    return _looped(fun, options, split, call, count, devices)


def _of_size(fun: Callable[..., Any], options: Options, size: int) -> Callable[..., Any]:
    """The microbatched function of another size."""
    options = dataclasses.replace(options, microbatch_size=size, memory_budget=None)
    return lambda *args, **kwargs: run(fun, options, args, kwargs)


def _memory_key(options: Options) -> tuple[Any, ...]:
    """Everything about the options that changes memory."""
    names = (
        "argnums argnames in_axes accumulator order accumulator_dtype differentiate "
        "checkpoint_policy mesh batch_spec reduce"
    )
    return tuple(repr(getattr(options, name)) for name in names.split())


def _looped(
    fun: Callable[..., Any],
    options: Options,
    split: Split,
    call: Call,
    count: Any,
    devices: Devices | None,
) -> Any:
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
    given, hoisted_count = len(shared), len(consts)
    carried = [i for part in plan.carried for i in part.values]
    accumulated = [i for part in plan.parts if part not in plan.carried for i in part.values]

    def step(at: Moment, shared: Any, states: Any, rows: Any) -> tuple[list[Any], list[Any]]:
        arguments, found = shared[:given], shared[given:]
        for i in call.keys:
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
        if split.full and devices is None:
            return [take(x, cut, 0) for x, cut in zip(rows, cuts, strict=True)]
        size = split.microbatch_size // (1 if devices is None else devices.shards)
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
        value = jnp.asarray(weight_fn(*args, **kwargs))
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.number):
            raise MicrobatchError(
                f"{options.where}: weight_fn returned shape {value.shape} of dtype {value.dtype}.\n"
                "Return one number per microbatch, for example mask.sum()."
            )
        return value.astype(jnp.result_type(float))

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


def checked(options: Options, *, declared: bool = True) -> Options:
    """Refuses what can be refused without a call; `declared`: the batch arguments are declared on `fun` itself."""
    where = options.where
    if options.microbatch_size is not None and options.num_microbatches is not None:
        raise MicrobatchSizeError(
            f"{where}: microbatch_size and num_microbatches are both given.\nGive one of them."
        )
    sizes = {}
    for name in ("microbatch_size", "num_microbatches"):
        value = getattr(options, name)
        is_auto = name == "microbatch_size" and isinstance(value, str) and value == "auto"
        sizes[name] = value if value is None or is_auto else check_size(where, name, value)
    if declared:
        check_declared(where, options.signature, options.argnums, options.argnames)
    check_choice(where, "order", options.order, ("strided", "contiguous"))
    check_choice(where, "remainder", options.remainder, ("error", "allow"))
    modes = ("auto", "in_forward", "recompute", "store")
    check_choice(where, "differentiate", options.differentiate, modes)
    check_choice(where, "reduce", options.reduce, ("once", "each"))
    if options.accumulator_dtype is not None and not jnp.issubdtype(
        options.accumulator_dtype, jnp.floating
    ):
        raise AccumulatorError(
            f"{where}: accumulator_dtype={options.accumulator_dtype!r} is not a floating-point dtype.\n"
            "Use for example accumulator_dtype=jnp.float32."
        )
    return dataclasses.replace(options, **sizes)


def _carries(accumulator: Any) -> list[Carry]:
    is_leaf = lambda value: as_accumulator(value) is not None
    leaves = jax.tree.leaves(accumulator, is_leaf=is_leaf)
    return [leaf for leaf in leaves if isinstance(leaf, Carry)]


def _count(where: str, value: Any) -> Any:
    """`num_real_microbatches` as an int or a traced int32 scalar."""
    if value is None:
        return None
    if hasattr(value, "dtype"):
        is_integer = jnp.issubdtype(value.dtype, jnp.integer)
    else:
        is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_integer or np.shape(value) != ():
        raise MicrobatchSizeError(
            f"{where}: num_real_microbatches={value!r} is not an integer.\n"
            "Use an int, or a traced integer scalar."
        )
    if isinstance(value, jax.Array):
        return value.astype(jnp.int32)
    return int(value)


def _is_whole(options: Options, split: Split, count: Any) -> bool:
    """Whether the only microbatch is the batch, so that `fun` itself is the answer."""
    is_leaf = lambda value: as_accumulator(value) is not None
    custom = any(
        isinstance(as_accumulator(leaf), Accumulator)
        for leaf in jax.tree.leaves(options.accumulator, is_leaf=is_leaf)
    )
    runs = count is None or (isinstance(count, int) and count >= 1)
    return split.num_microbatches == 1 and runs and not custom and options.weight_fn is None


def _check_states(where: str, plan: OutputPlan, call: Call) -> None:
    """Refuses a carried output that is not of the argument's structure, shapes and dtypes."""
    for part, places in zip(plan.carried, call.states, strict=True):
        came = [(x.shape, x.dtype) for x in part.leaves]
        wanted = [(x.shape, x.dtype) for x in (jax.typeof(call.leaves[i]) for i in places)]
        if came != wanted:
            raise AccumulatorError(
                f"{where}: output{part.path} is carried to argument {part.accumulator.argnum}, and they differ:\n"
                f"  output:   {', '.join(f'{d}{list(s)}' for s, d in came) or 'nothing'}\n"
                f"  argument: {', '.join(f'{d}{list(s)}' for s, d in wanted) or 'nothing'}\n"
                "Return the new state with the structure, shapes and dtypes of the old one."
            )
