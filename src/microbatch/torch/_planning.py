"""Which microbatch size fits, in PyTorch: from shapes alone, without allocating anything."""

import functools
import statistics
import time as clock
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from microbatch._accumulation import AccumulationType, as_accumulator
from microbatch._checks import (
    as_argnames,
    as_argnums,
    check_choice,
    check_size,
    locate,
    name_of,
    signature_of,
)
from microbatch._errors import BudgetError, PlanError
from microbatch._identity import Recent, function_key
from microbatch._memory import Budget, host_memory_bytes, resolve_budget
from microbatch._planning import (
    Plan,
    Search,
    candidate_sizes,
    line_through,
    logger,
    lower_to,
    make_plan,
    search,
)
from microbatch.torch._batch import Batch, batch_of
from microbatch.torch._discovery import discover
from microbatch.torch._simulation import Work, fake_peak, real_peak, run_once

# What shapes do not tell on CUDA: the libraries' workspaces, and what fragmentation wastes.
CUDA_WORKSPACE_BYTES = 128 * 2**20
CUDA_FRAGMENTATION = 0.05

_plans: Recent[Plan] = Recent(256)


def plan(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    accumulator: Any = AccumulationType.MEAN,
    *,
    argnames: str | Sequence[str] = (),
    in_dims: Any = 0,
    remainder: str = "allow",
    memory_budget: int | str | None = None,
    time: bool = False,
    candidates: Sequence[int] | None = None,
    backward: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulator_dtype: torch.dtype | None = None,
    probe: bool = False,
    device: torch.device | str | None = None,
    process_group: Any = None,
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
      remainder: "allow" also considers sizes that leave a smaller last microbatch (divisors are preferred: one is taken
        if it is more than half the largest size that fits); "error" does not.
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
      process_group: whose processes agree on the smallest of their sizes; by default all.

    Returns:
      A function of `fun`'s arguments, which may be tensors of shapes alone (``device="meta"`` or fake), to a `Plan`.

    Raises:
      PlanError: shapes are not enough; the message names the operation and its line.
      BudgetError: the budget cannot be read, or the device's memory is unknown.
      BatchError: the batch arguments have no rows, or unequal ones.

    >>> weight = torch.zeros(256, 256, requires_grad=True)          # 256 KiB, and as much for its gradient
    >>> loss = lambda x: (x @ weight).relu().square().mean()        # the batch: 1,024 rows of 1 KiB
    >>> found = plan(loss, memory_budget="3MiB")(torch.zeros(1024, 256))
    >>> found.microbatch_size, found.helps
    (256, True)
    """
    where = f"plan({name_of(fun)})"
    check_choice(where, "remainder", remainder, ("error", "allow"))
    concat = _is_concat(accumulator)

    def planned(*args: Any, **kwargs: Any) -> Plan:
        target, arguments, dims = bundle(where, fun, argnums, argnames, in_dims, args, kwargs)
        batch = batch_of(where, target, arguments, dims)
        place = torch.device(device) if device is not None else device_of(fun, (args, kwargs))
        work = Work(where, target, batch, concat, backward, optimizer, accumulator_dtype, place)
        return _plan(
            work,
            name_of(fun),
            remainder == "allow",
            memory_budget,
            time=time,
            candidates=candidates,
            probe=probe,
            group=process_group,
        )

    return planned


def resolve_auto(
    microbatch_size: Any,
    where: str,
    fun: Callable[..., Any],
    batch: Batch,
    *,
    memory_budget: int | str | None = None,
    concat: bool = False,
    backward: bool | None = None,
    remainder: str = "allow",
    accumulator_dtype: torch.dtype | None = None,
    process_group: Any = None,
) -> Any:
    """`microbatch_size`, or where it is ``"auto"`` the size that a plan finds.

    One line in every function that takes a size::

        microbatch_size = resolve_auto(microbatch_size, where, fun, batch, memory_budget=memory_budget)

    Plans are remembered by `function_key` and the batch's shapes. With several processes every one must call it, each
    time: they agree on the smallest size.

    Raises:
      BudgetError: nothing fits; the message has the numbers.
    """
    if not (isinstance(microbatch_size, str) and microbatch_size == "auto"):
        if memory_budget is not None:
            raise BudgetError(
                f'{where}: memory_budget={memory_budget!r} is used with microbatch_size="auto" only.\n'
                f'Use microbatch_size="auto", or leave memory_budget out.'
            )
        return microbatch_size
    place = device_of(fun, batch.args)
    work = Work(where, fun, batch, concat, backward, None, accumulator_dtype, place)
    key = (
        function_key(fun, _describe),
        tuple(_shape_key(leaf) for leaf in tree_leaves(batch.args)),
        str(batch.dims),
        (memory_budget, concat, backward, remainder, accumulator_dtype, str(place)),
    )

    def make() -> Plan:
        return _plan(work, name_of(fun), remainder == "allow", memory_budget, agree=False)

    found = _agreed(_plans.get(key, make), place, process_group, remainder == "allow")
    if found.microbatch_size is None:
        raise BudgetError(
            f"{where}: {found.explanation}\nRaise memory_budget, or give microbatch_size a number."
        )
    return found.microbatch_size


def device_budget(memory_budget: int | str | None, device: torch.device, where: str) -> Budget:
    """The budget on a device, from its total memory."""
    if device.type == "cuda":
        total: int | None = (
            torch.cuda.mem_get_info(device)[1] if torch.cuda.is_available() else None
        )
    else:
        total = host_memory_bytes() if device.type == "cpu" else None
    return resolve_budget(memory_budget, total, str(device), where=where)


def _plan(
    work: Work,
    name: str,
    remainder: bool,
    memory_budget: int | str | None,
    *,
    time: bool = False,
    candidates: Sequence[int] | None = None,
    probe: bool = False,
    group: Any = None,
    agree: bool = True,
) -> Plan:
    budget = device_budget(memory_budget, work.device, work.where)
    rows = work.batch.batch_size
    sizes = _sizes(work.where, rows, candidates, remainder)
    if probe:
        found = _probe_really(work, sizes, budget.bytes)
    else:
        found = search(
            lambda size: _with_margin(fake_peak(work, size), work), rows, budget.bytes, sizes
        )
    seconds = _measure(work, found, sizes) if time and found.microbatch_size is not None else None
    made = make_plan(
        found,
        sizes,
        budget,
        name=name,
        framework="torch",
        batch_size=rows,
        remainder=remainder,
        seconds=seconds,
    )
    if agree:
        made = _agreed(made, work.device, group, remainder)
    logger.info("%s: microbatch_size=%s. %s", work.where, made.microbatch_size, made.explanation)
    return made


def _sizes(
    where: str, rows: int, candidates: Sequence[int] | None, remainder: bool
) -> tuple[int, ...]:
    if candidates is None:
        return candidate_sizes(rows, remainder=remainder)
    sizes = sorted({min(check_size(where, "candidates", size), rows) for size in candidates})
    if not sizes:
        raise PlanError(f"{where}: candidates is empty.\nGive at least one size, or leave it out.")
    return tuple(sizes)


def _probe_really(work: Work, sizes: Sequence[int], budget_bytes: int) -> Search:
    """The line through two small real runs: nothing larger is run, so the answer itself is a prediction."""
    small = [s for s in sizes if s < work.batch.batch_size][:4] or list(sizes)
    probed = {s: _with_margin(real_peak(work, s), work) for s in {small[0], small[-1]}}
    line = line_through(probed)
    fitting = [s for s in sizes if line(s) <= budget_bytes]
    return Search(max(fitting, default=None), probed, line, affine=True)


def _with_margin(count: int, work: Work) -> int:
    if work.device.type != "cuda":
        return count
    return int(count * (1 + CUDA_FRAGMENTATION)) + CUDA_WORKSPACE_BYTES


def _measure(work: Work, found: Search, sizes: Sequence[int]) -> dict[int, float]:
    """Seconds a batch takes at the largest sizes that fit, one per halving, at most five."""
    budget_size = found.microbatch_size or 0
    chosen: list[int] = []
    for size in sorted((s for s in sizes if s <= budget_size), reverse=True):
        if len(chosen) < 5 and (not chosen or size <= 0.6 * chosen[-1]):
            chosen.append(size)
    seconds = {}
    for size in chosen:
        run = functools.partial(run_once, work, size)
        run()
        seconds[size] = statistics.median(_timed(run, work.device) for _ in range(3))
    return seconds


def _timed(run: Callable[[], float], device: torch.device) -> float:
    """Seconds of the whole batch, from a run of a share of it."""
    _wait(device)
    start = clock.perf_counter()
    share = run()
    _wait(device)
    return (clock.perf_counter() - start) / share


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(made: Plan, device: torch.device, group: Any, remainder: bool) -> Plan:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return made
    on = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    size = torch.tensor(made.microbatch_size or 0, device=on)
    dist.all_reduce(size, op=dist.ReduceOp.MIN, group=group)
    return lower_to(made, int(size), candidate_sizes(made.batch_size, remainder=remainder))


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


def _is_concat(accumulator: Any) -> bool:
    return as_accumulator(accumulator) is AccumulationType.CONCAT


def device_of(fun: Callable[..., Any], args: Any) -> torch.device:
    """Where the work happens: on the parameters' device, else the batch's."""
    tensors = [t for _, t in discover(fun, args).named_leaves()]
    tensors += [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
    devices = [t.device for t in tensors if t.device.type != "meta"]
    accelerators = [d for d in devices if d.type != "cpu"]
    return next(iter((*accelerators, *devices)), torch.device("cpu"))


def _describe(value: Any) -> Hashable | None:
    if isinstance(value, torch.nn.Module):
        trained = tuple(p.requires_grad for p in value.parameters())
        modes = tuple(module.training for module in value.modules())
        return ("module", id(value), weakref.ref(value), modes, trained)
    if isinstance(value, torch.Tensor):
        return _shape_key(value)
    return None


def _shape_key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), str(leaf.dtype), str(leaf.device), leaf.requires_grad)
    return leaf if isinstance(leaf, str | int | float | bool | None) else type(leaf).__name__
