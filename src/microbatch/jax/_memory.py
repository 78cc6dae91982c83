"""The microbatch size that fits, found with compiled programs: nothing is run."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from microbatch._checks import Slot
from microbatch._errors import BudgetError, MicrobatchError, PlanError
from microbatch._identity import Recent, function_key
from microbatch._memory import (
    Budget,
    check_budget,
    host_memory_bytes,
    refuse_unused,
    resolve_budget,
)
from microbatch._planning import Plan, logger, lower_to, make_plan
from microbatch._search import candidate_sizes, halvings, search
from microbatch.jax._binding import argument_of
from microbatch.jax._compiled import (
    Program,
    as_shapes,
    compile_program,
    default_device,
    is_traced,
    output_types,
    spec_of,
    tree_bytes,
)

# Buffers are padded, and small ones come and go with the size; more than this is a bend in the line.
SLACK_BYTES = 2**16

_plans: Recent[Plan] = Recent(256)


def make_plan_for(
    where: str,
    name: str,
    program_of: Callable[[int], Program],
    batch_size: int,
    output_bytes: int,
    budget: Budget,
    *,
    remainder: bool,
    sizes: Sequence[int] | None = None,
    time_fn: Callable[[Program], float] | None = None,
) -> Plan:
    """Searches with compiled programs, and measures the sizes that fit where `time_fn` is given."""
    if batch_size < 1:
        raise PlanError(
            f"{where}: the batch has no rows.\nPlan with a batch of the size to be used."
        )
    sizes = sizes or candidate_sizes(batch_size, remainder=remainder)
    programs: dict[int, Program] = {}

    def program(size: int) -> Program:
        if size not in programs:
            programs[size] = program_of(size)
        return programs[size]

    # The whole batch needs no accumulator, nor the copy of it that a loop may make.
    found = search(
        lambda size: program(size).total_bytes + program(size).scratch_bytes,
        batch_size,
        budget.bytes,
        sizes,
        whole_saves=2 * output_bytes,
        slack_bytes=SLACK_BYTES,
        # A smaller last microbatch is a second program to compile.
        prefers_divisors=True,
    )
    seconds = {}
    if time_fn is not None and found.microbatch_size is not None:
        for size in halvings(sizes, found.microbatch_size):
            seconds[size] = time_fn(program(size))
    made = make_plan(
        found,
        sizes,
        budget,
        name=name,
        framework="jax",
        batch_size=batch_size,
        remainder=remainder,
        seconds=seconds,
        margin_of=lambda size: program(size).scratch_bytes,
    )
    logger.info("%s: microbatch_size=%s. %s", where, made.microbatch_size, made.explanation)
    return made


def resolve_auto(
    microbatch_size: Any,
    where: str,
    fun: Callable[..., Any],
    microbatch_fn: Callable[[int], Callable[..., Any]],
    batch: Sequence[Slot],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    memory_budget: int | str | None = None,
    remainder: str = "error",
    key: Hashable = (),
) -> Any:
    """`microbatch_size`, or where it is ``"auto"`` the size that a plan finds.

    One line in every function that takes a size, once its batch is known::

        size = resolve_auto(
            microbatch_size, where, fun, lambda size: microbatch(fun, argnums, size, ...), batch, batch_size,
            args, kwargs, memory_budget=memory_budget, remainder=remainder, key=(every option that matters),
        )

    Works inside a trace. What is being differentiated is planned with its gradient, and so is a loss (outputs that are
    all inexact scalars), because a later `jax.grad` cannot be seen from inside `jit`. Plans are remembered by
    `function_key`, shapes and `key`. With several processes every one must call it: they agree on the smallest size.

    Args:
      microbatch_size: what the user gave; anything but ``"auto"`` is returned as it is.
      where: the words that open a message.
      fun: the user's function, for the key.
      microbatch_fn: makes the microbatched function of a size; it is called with `args` and `kwargs`.
      batch: which arguments are the batch.
      batch_size: rows.
      args: the call's arguments, tracers included.
      kwargs: the call's keywords.
      memory_budget: as in `plan`.
      remainder: as in `microbatch`.
      key: the options that change memory.

    Raises:
      BudgetError: nothing fits; the message has the numbers.
    """
    if not (isinstance(microbatch_size, str) and microbatch_size == "auto"):
        refuse_unused(memory_budget, where)
        return microbatch_size
    check_budget(memory_budget, where)
    if batch_size == 0:
        return 1
    leaves, treedef = jax.tree.flatten((args, kwargs))
    moving = is_differentiated(leaves)
    shapes = tuple(_shape_key(leaf) for leaf in leaves)

    def make() -> Plan:
        described = as_shapes(args, kwargs)
        output = output_types(fun, args, kwargs)
        with_gradient = moving or _is_loss(output)

        def program_of(size: int) -> Program:
            small = microbatch_fn(size)
            if with_gradient:
                constant = set() if moving else {slot.key for slot in batch}
                try:
                    both = _with_gradient(small, constant)
                    return compile_program(where, both, *described)
                except ValueError:
                    if moving:
                        raise
            return compile_program(where, small, *described)

        return make_plan_for(
            where,
            where,
            program_of,
            batch_size,
            tree_bytes(output),
            device_budget(memory_budget, leaves, where),
            remainder=remainder == "allow",
        )

    whole_key = (
        function_key(fun),
        treedef,
        shapes,
        (moving, batch_size, memory_budget, remainder, key),
    )
    sizes = candidate_sizes(max(batch_size, 1), remainder=remainder == "allow")
    with jax.ensure_compile_time_eval():
        found = agreed(lambda: _plans.get(whole_key, make), sizes)
    if found.microbatch_size is None:
        raise BudgetError(
            f"{where}: {found.explanation}\nRaise memory_budget, or give microbatch_size a number."
        )
    return found.microbatch_size


def device_budget(memory_budget: int | str | None, leaves: Sequence[Any], where: str) -> Budget:
    """The budget of one device: of those where the arguments are, or of the default one."""
    devices = _devices(leaves)
    if devices[0].platform == "cpu":
        total = host_memory_bytes()
        # Several CPU devices of one process share the machine's memory.
        total = None if total is None else total // len(devices)
        label = "cpu" if len(devices) == 1 else f"each of {len(devices)} cpu devices"
        return resolve_budget(memory_budget, total, label, where=where)
    stats = [device.memory_stats() or {} for device in devices]
    limits = [s["bytes_limit"] for s in stats if "bytes_limit" in s]
    total = min(limits) if len(limits) == len(devices) else None
    return resolve_budget(memory_budget, total, str(devices[0]), where=where)


def agreed(make: Callable[[], Plan], sizes: Sequence[int]) -> Plan:
    """This process's plan with a size that all processes can hold; every process must call this.

    One whose plan fails takes part as well, or the others would wait for it.
    """
    if jax.process_count() == 1:
        return make()
    from jax.experimental import multihost_utils

    smallest = lambda size: int(multihost_utils.process_allgather(np.int32(size)).min())
    try:
        own = make()
    except MicrobatchError:
        smallest(0)
        raise
    return lower_to(own, smallest(own.microbatch_size or 0), sizes)


def is_differentiated(values: Sequence[Any]) -> bool:
    """Whether an array is being differentiated at the moment."""
    # No public name tells what a tracer is for; a test fails when these move.
    return any(type(value).__name__ in ("JVPTracer", "LinearizeTracer") for value in values)


def _with_gradient(fun: Callable[..., Any], constant: set[int | str]) -> Callable[..., Any]:
    """Value and gradient of `fun`, with respect to every inexact array but those of the arguments `constant`."""

    def both(*args: Any, **kwargs: Any) -> Any:
        paths, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in paths]
        moving = [
            i
            for i, (path, leaf) in enumerate(paths)
            if argument_of(path) not in constant and _is_inexact(leaf)
        ]

        def of(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            filled = list(leaves)
            for i, array in zip(moving, arrays, strict=True):
                filled[i] = array
            args, kwargs = treedef.unflatten(filled)
            out = jax.tree.leaves(fun(*args, **kwargs))
            return [x for x in out if _is_inexact(x)], [x for x in out if not _is_inexact(x)]

        values, pullback, others = jax.vjp(of, [leaves[i] for i in moving], has_aux=True)
        return values, others, pullback([jnp.ones_like(x) for x in values])

    return both


def _is_inexact(leaf: Any) -> bool:
    return is_traced(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _is_loss(output: Any) -> bool:
    leaves = jax.tree.leaves(output)
    return bool(leaves) and all(
        x.shape == () and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves
    )


def _devices(leaves: Sequence[Any]) -> list[jax.Device]:
    """This process's devices among those where the arguments are fixed, else the default one."""
    placed = [spec_of(x).sharding for x in leaves if is_traced(x)]
    found: set[jax.Device] = set()
    for sharding in placed:
        if sharding is not None and hasattr(sharding, "device_set"):
            found |= _concrete(sharding)
    local = [d for d in found if d.process_index == jax.process_index()]
    return local or [default_device()]


def _concrete(sharding: Any) -> set[jax.Device]:
    try:
        return set(sharding.device_set)
    except (ValueError, AttributeError):  # an abstract mesh has no devices
        return set()


def _shape_key(leaf: Any) -> Hashable:
    if is_traced(leaf):
        spec = spec_of(leaf)
        return (spec.shape, str(spec.dtype), spec.weak_type, str(spec.sharding))
    return function_key(leaf)
