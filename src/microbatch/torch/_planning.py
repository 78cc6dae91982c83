"""Which microbatch size fits, in PyTorch: from shapes alone, without allocating anything."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from microbatch._accumulation import AccumulationType, as_accumulator
from microbatch._checks import as_argnames, as_argnums, check_choice, locate, name_of, signature_of
from microbatch._errors import PlanError
from microbatch._planning import Plan
from microbatch._search import refuse_sizes, sizes_of
from microbatch._splitting import Remainder
from microbatch.torch._batch import batch_of
from microbatch.torch._memory import agreed, device_of, plan_work
from microbatch.torch._microbatch import microbatch
from microbatch.torch._simulation import Work


def plan(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    accumulator: Any = AccumulationType.SUM,
    *,
    argnames: str | Sequence[str] = (),
    in_dims: Any = 0,
    remainder: Remainder | None = None,
    memory_budget: int | str | None = None,
    time: bool = False,
    candidates: Sequence[int] | None = None,
    backward: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulator_dtype: torch.dtype | None = None,
    probe: bool = False,
    device: torch.device | str | None = None,
    process_group: Any = None,
    **options: Any,
) -> Callable[..., Plan]:
    """Finds the largest microbatch size of `fun` that fits in memory, without running it.

    The function returned by ``plan(fun)`` is equivalent to::

        def planned(*args, **kwargs):
            fits = [m for m in sizes(rows(args)) if peak_bytes(fun, m, args) <= memory_budget]
            return Plan(max(fits))

    where `peak_bytes` follows shapes through two microbatches (forward, backward, accumulation, and the optimizer's step
    where one is given) on fake tensors: nothing is allocated, and gradients, buffers and random state stay as they are.
    Counted are the tensors that are alive at once, parameters and the whole batch included. On CUDA 128 MiB for
    libraries' workspaces and 5% for fragmentation are added.

    Args:
      fun: what is given to `microbatch` or `backward`. Modules and tensors that it closes over are found.
      argnums: positions of the batch arguments, ``[B, ...]``; None for every argument that has rows, as in `backward`.
      accumulator: how outputs combine, as in `microbatch`.
      argnames: batch arguments that are passed by name.
      in_dims: the dimension with the rows, one for all or one per batch argument.
      remainder: as in `microbatch`, and its default where `argnums` or `argnames` are given; without them "allow", as in
        `backward`. With "allow", sizes that leave a smaller last microbatch are considered, too: the most even cut into
        each number of pieces.
      memory_budget: bytes, ``"12GiB"``, or ``"80%"`` of the device's total memory; by default 0.9 of it. Of what happens
        to be free nothing depends, so that two runs choose alike.
      time: also measure seconds, on the real tensors, of at most five sizes that fit, and choose the fastest.
      candidates: the only sizes to consider.
      backward: whether gradients are part of what must fit; by default where `fun` returns a loss (a scalar with a graph).
      optimizer: whose state and step must fit too.
      accumulator_dtype: as in `backward`: gradients are held in buffers of this dtype.
      probe: measure two small real runs and draw the line through them, where `fun` stops shape propagation (`.item()`,
        indexing with a boolean mask, `.numpy()`).
      device: what is planned for; by default where the batch or the parameters are.
      **options: `microbatch`'s other keywords, which change no memory (`order`, `weight_fn`, ...).
      process_group: whose processes agree on the smallest of their sizes; by default all.

    Returns:
      A function of `fun`'s arguments, which may be tensors of shapes alone (``device="meta"`` or fake), to a `Plan`.

    Raises:
      PlanError: shapes are not enough (the message names the operation and its line), or there is nothing to try.
      BudgetError: the budget cannot be read, or the device's memory is unknown.
      BatchError: the batch arguments have no rows, or unequal ones.

    >>> weight = torch.zeros(256, 256, requires_grad=True)          # 256 KiB, and as much for its gradient
    >>> loss = lambda x: (x @ weight).relu().square().mean()        # the batch: 1,024 rows of 1 KiB
    >>> found = plan(loss, memory_budget="3MiB")(torch.zeros(1024, 256))
    >>> found.microbatch_size, found.helps
    (256, True)
    """
    where = f"plan({name_of(fun)})"
    refuse_sizes(where, options)
    is_for_backward = argnums is None and not argnames
    if remainder is None:
        remainder = "allow" if is_for_backward else "error"
    check_choice(where, "remainder", remainder, ("error", "allow"))
    _check_optimizer(where, optimizer)
    options |= {"argnames": argnames, "in_dims": in_dims, "remainder": remainder}
    options |= {"accumulator_dtype": accumulator_dtype}
    # Refuses what is wrong before there is a call.
    if is_for_backward:
        inspect.signature(microbatch).bind(fun, argnums, 1, accumulator, **options)
    else:
        microbatch(fun, () if argnums is None else argnums, 1, accumulator, **options)
    concat = as_accumulator(accumulator) is AccumulationType.CONCAT

    def planned(*args: Any, **kwargs: Any) -> Plan:
        target, values, dims = bundle(where, fun, argnums, argnames, in_dims, args, kwargs)
        batch = batch_of(where, target, values, dims)
        place = torch.device(device) if device is not None else device_of(fun, (args, kwargs))
        work = Work(where, target, batch, concat, backward, optimizer, accumulator_dtype, place)
        allow = remainder == "allow"

        def make() -> tuple[Plan, Sequence[int]]:
            sizes = sizes_of(where, batch.batch_size, candidates, remainder=allow)
            own = plan_work(
                work, name_of(fun), memory_budget, sizes, remainder=allow, time=time, probe=probe
            )
            return own, sizes

        return agreed(make, place, process_group)

    return planned


def _check_optimizer(where: str, optimizer: Any) -> None:
    """Refuses what is no optimizer, and one whose step evaluates the loss itself."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            f"{where}: optimizer={optimizer!r:.60} is not a torch.optim.Optimizer.\n"
            "Give the optimizer whose state and step must fit, or leave it out."
        )
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        raise PlanError(
            f"{where}: the step of {type(optimizer).__name__} needs a closure, which planning has not.\n"
            "Leave optimizer= out, and memory_budget= room for its state."
        ) from None


def bundle(
    where: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int] | None,
    argnames: str | Sequence[str],
    in_dims: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """`fun` of positional arguments alone, those arguments, and each one's dimensions (None for "not a batch")."""
    if argnums is None and not argnames and not kwargs:
        return fun, args, in_dims
    # The closure must not hold the arguments themselves, which would then be found as its own tensors.
    count, names = len(args), tuple(kwargs)

    @functools.wraps(fun)
    def positional(*values: Any) -> Any:
        return fun(*values[:count], **dict(zip(names, values[count:], strict=True)))

    del positional.__wrapped__
    values = (*args, *kwargs.values())
    if argnums is None and not argnames:
        return positional, values, in_dims
    numbers = () if argnums is None else as_argnums(where, argnums)
    slots = locate(where, signature_of(fun), numbers, as_argnames(where, argnames), args, kwargs)
    dims = [in_dims] * len(slots) if isinstance(in_dims, int) else list(in_dims)
    chosen = {slot.key: dim for slot, dim in zip(slots, dims, strict=True)}
    return positional, values, tuple(chosen.get(key) for key in (*range(len(args)), *names))
