"""The transformation of the JAX front."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from microbatch._accumulation import AccumulationType
from microbatch._checks import (
    as_argnames,
    as_argnums,
    batch_size_of,
    check_function,
    locate,
    name_of,
    per_argument,
    signature_of,
)
from microbatch._errors import BatchError
from microbatch._splitting import Auto, Order, Remainder, make_split
from microbatch.jax._binding import batch_leaves, flatten_call
from microbatch.jax._devices import Reduce, check_sharded, find_devices, refused_carry
from microbatch.jax._differentiate import Differentiate
from microbatch.jax._looped import looped
from microbatch.jax._memory import resolve_auto
from microbatch.jax._options import Options, carries_of, checked, is_whole, memory_key, real_count
from microbatch.jax._outputs import of_single_microbatch, plan_outputs
from microbatch.jax._rows import explicit_shards


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
        constrain the axes of the rows. On a mesh with explicit axes, or inside `jax.shard_map`, `fun` sees all m rows, and
        its sums over devices are put off until after the loop without this argument (not under "store" or `vmap`).
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
    check_function(where, "fun", fun)
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
        key_argnums=as_argnums(where, key_argnums, "key_argnums"),
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
    carries = carries_of(options)
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
        key=memory_key(options),
    )
    split = make_split(
        batch_size,
        size,
        options.num_microbatches,
        order=options.order,
        remainder=options.remainder,
        subject=f"{where}: {subject}",
    )
    count = real_count(where, options.num_real_microbatches)
    if is_whole(options, split, count):
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
    return looped(fun, options, split, call, count, devices)


def _of_size(fun: Callable[..., Any], options: Options, size: int) -> Callable[..., Any]:
    """The microbatched function of another size."""
    options = dataclasses.replace(options, microbatch_size=size, memory_budget=None)
    return lambda *args, **kwargs: run(fun, options, args, kwargs)
