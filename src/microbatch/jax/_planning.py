"""Which microbatch size fits, in JAX: the compiler's own figures, never a run."""

import statistics
import time as clock
from collections.abc import Callable, Sequence
from typing import Any

import jax

from microbatch._accumulation import AccumulationType
from microbatch._checks import (
    as_argnames,
    as_argnums,
    batch_size_of,
    locate,
    name_of,
    per_argument,
    signature_of,
)
from microbatch._errors import PlanError
from microbatch._planning import Plan
from microbatch._search import refuse_sizes, sizes_of
from microbatch.jax._binding import batch_leaves
from microbatch.jax._compiled import Program, compile_program, output_bytes
from microbatch.jax._memory import agreed, device_budget, make_plan_for
from microbatch.jax._microbatch import microbatch


def plan(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    accumulator: Any = AccumulationType.SUM,
    *,
    memory_budget: int | str | None = None,
    time: bool = False,
    candidates: Sequence[int] | None = None,
    step_fn: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    argnames: str | Sequence[str] = (),
    in_axes: int | Sequence[int] = 0,
    remainder: str = "error",
    **options: Any,
) -> Callable[..., Plan]:
    """Finds the largest microbatch size of `fun` that fits in memory, without running it.

    The function returned by ``plan(fun, argnums, accumulator)`` is equivalent to::

        def planned(*args, **kwargs):
            fits = [m for m in divisors(rows(args))
                    if compiled_bytes(step_fn(microbatch(fun, argnums, m, accumulator)), *args) <= memory_budget]
            return Plan(max(fits))

    where `compiled_bytes` are the temporaries, arguments and outputs of the compiled program, less what it aliases, on
    one device. Arrays that the functions close over count as arguments. Bytes are nearly always affine in the size: two
    sizes are compiled, the line through them gives the answer, and the answer is compiled too; at most four
    compilations, however large the batch. Where they are not affine the plan says so, and halves on compiled sizes.

    Args:
      fun: what is given to `microbatch`: ``value_and_grad(loss)``, or a loss with `step_fn`.
      argnums: as in `microbatch`; the batch arguments are ``[B, ...]``.
      accumulator: as in `microbatch`.
      memory_budget: bytes, ``"12GiB"``, or ``"80%"`` of one device's total memory; by default 0.9 of it. (On a CPU: of
        physical memory or the control group's limit, whichever is smaller.) Of what happens to be free nothing
        depends, so that two runs choose alike.
      time: also measure seconds of at most five sizes that fit, and choose the fastest. This runs the program.
      candidates: the only sizes to consider.
      step_fn: makes what must fit of the microbatched function: ``jax.value_and_grad``, or a whole training step. It is
        called with the same arguments; where it returns a jitted function that one's donations count.
      argnames: as in `microbatch`.
      in_axes: as in `microbatch`.
      remainder: as in `microbatch`. With "allow", sizes that leave a smaller last microbatch are considered, too;
        a divisor is taken where it is more than half of the largest size that fits.
      **options: `microbatch`'s other keywords.

    Returns:
      A function of `fun`'s arguments, which may be `jax.ShapeDtypeStruct`, to a `Plan`.

    Raises:
      BudgetError: the budget cannot be read, or the device's memory is unknown.
      PlanError: there is nothing to try; or `time` without arrays.
      BatchError: the batch arguments have no rows, or unequal ones.

    >>> import jax.numpy as jnp
    >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    >>> w, x = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((4096, 256), "float32")
    >>> found = plan(jax.value_and_grad(loss), 1, AccumulationType.MEAN, memory_budget="6MiB")(w, x)
    >>> found.batch_size, found.fits, found.predicted_bytes <= 6 * 2**20
    (4096, True, True)
    """
    where = f"plan({name_of(fun)})"
    refuse_sizes(where, options)
    options = {"argnames": argnames, "in_axes": in_axes, "remainder": remainder, **options}
    # Refuses what is wrong before there is a call.
    microbatch(fun, argnums, 1, accumulator, **options)
    numbers, names = as_argnums(where, argnums), as_argnames(where, argnames)

    def planned(*args: Any, **kwargs: Any) -> Plan:
        batch = locate(where, signature_of(fun), numbers, names, args, kwargs)
        axes = per_argument(where, "in_axes", in_axes, batch)
        rows, _ = batch_size_of(where, batch_leaves(where, batch, axes, args, kwargs))
        leaves = jax.tree.leaves((args, kwargs))
        if time and any(isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer) for x in leaves):
            raise PlanError(
                f"{where}: time=True runs the program, and some arguments are shapes alone.\nPass arrays."
            )
        sizes = sizes_of(where, rows, candidates, remainder=remainder == "allow")

        def target(size: int) -> Callable[..., Any]:
            small = microbatch(fun, argnums, size, accumulator, **options)
            return small if step_fn is None else step_fn(small)

        make = lambda: make_plan_for(
            where,
            name_of(fun),
            lambda size: compile_program(where, target(size), args, kwargs),
            rows,
            output_bytes(target(max(rows, 1)), args, kwargs),
            device_budget(memory_budget, leaves, where),
            remainder=remainder == "allow",
            sizes=sizes,
            time_fn=_seconds if time else None,
        )
        return agreed(make, sizes)

    return planned


def _seconds(program: Program) -> float:
    """Seconds of a call: the median of three, after one that warms up."""
    program.call()
    taken = []
    for _ in range(3):
        start = clock.perf_counter()
        program.call()
        taken.append(clock.perf_counter() - start)
    return statistics.median(taken)
