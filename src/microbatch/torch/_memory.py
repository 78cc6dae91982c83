"""How many bytes a microbatch size takes, and the size that fits: followed on shapes, nothing is allocated."""

import dataclasses
import statistics
import time as clock
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from microbatch._checks import name_of
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
from microbatch._search import (
    Search,
    candidate_sizes,
    halvings,
    line_through,
    predictor,
    search,
)
from microbatch.torch._batch import Batch
from microbatch.torch._discovery import discover
from microbatch.torch._simulation import Work, fake_peaks, real_loop, real_peak

# What shapes do not tell on CUDA: the libraries' workspaces, and what fragmentation wastes.
CUDA_WORKSPACE_BYTES = 128 * 2**20
CUDA_FRAGMENTATION = 0.05

_plans: Recent[Plan] = Recent(256)


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
        refuse_unused(memory_budget, where)
        return microbatch_size
    check_budget(memory_budget, where)
    place = device_of(fun, batch.args)
    work = Work(where, fun, batch, concat, backward, None, accumulator_dtype, place)
    key = (
        function_key(fun, _describe),
        tuple(_shape_key(leaf) for leaf in tree_leaves(batch.args)),
        str(batch.dims),
        (memory_budget, concat, backward, remainder, accumulator_dtype, str(place)),
    )

    allow = remainder == "allow"
    sizes = candidate_sizes(max(batch.batch_size, 1), remainder=allow)
    make = lambda: plan_work(work, name_of(fun), memory_budget, sizes, remainder=allow)
    found = agreed(lambda: (_plans.get(key, make), sizes), place, process_group)
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


def plan_work(
    work: Work,
    name: str,
    memory_budget: int | str | None,
    sizes: Sequence[int],
    *,
    remainder: bool,
    time: bool = False,
    probe: bool = False,
) -> Plan:
    """This process's plan among `sizes`; with `time` and `probe` it runs the work."""
    budget = device_budget(memory_budget, work.device, work.where)
    rows = work.batch.batch_size
    if rows < 1:
        raise PlanError(
            f"{work.where}: the batch has no rows.\nPlan with a batch of the size to be used."
        )
    if probe:
        found = _probe_really(work, sizes, budget.bytes)
    else:
        with fake_peaks(work) as peak_of:
            with_margin = lambda peak: peak + margin_bytes(peak, work.device)
            found = search(lambda size: with_margin(peak_of(size)), rows, budget.bytes, sizes)
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
        margin_of=lambda size: _margin_within(round(predictor(found, rows)(size)), work.device),
    )
    logger.info("%s: microbatch_size=%s. %s", work.where, made.microbatch_size, made.explanation)
    return made


def agreed(
    make: Callable[[], tuple[Plan, Sequence[int]]], device: torch.device, group: Any
) -> Plan:
    """This process's plan, one of the sizes made with it, lowered to what all processes can hold; each must call this.

    One whose plan fails takes part as well, or the others would wait for it.
    """
    try:
        own, sizes = make()
    except MicrobatchError:
        _smallest(0, device, group)
        raise
    return lower_to(own, _smallest(own.microbatch_size or 0, device, group), sizes)


def _smallest(size: int, device: torch.device, group: Any) -> int:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return size
    on = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    held = torch.tensor(size, device=on)
    dist.all_reduce(held, op=dist.ReduceOp.MIN, group=group)
    return int(held)


def _probe_really(work: Work, sizes: Sequence[int], budget_bytes: int) -> Search:
    """The line through two small real runs: nothing larger is run, so the answer itself is a prediction."""
    small = [s for s in sizes if s < work.batch.batch_size][:4] or list(sizes)
    peaks = {s: real_peak(work, s) for s in {small[0], small[-1]}}
    probed = {s: peak + margin_bytes(peak, work.device) for s, peak in peaks.items()}
    line = line_through(probed)
    fitting = [s for s in sizes if line(s) <= budget_bytes]
    return Search(max(fitting, default=None), probed, line, affine=True)


def margin_bytes(peak_bytes: int, device: torch.device) -> int:
    """What to keep free beside live tensors: nothing on a CPU, libraries' workspaces and fragmentation on CUDA."""
    if device.type != "cuda":
        return 0
    return int(peak_bytes * CUDA_FRAGMENTATION) + CUDA_WORKSPACE_BYTES


def _margin_within(total_bytes: int, device: torch.device) -> int:
    """The margin in a total that contains it."""
    if device.type != "cuda":
        return 0
    return total_bytes - int((total_bytes - CUDA_WORKSPACE_BYTES) / (1 + CUDA_FRAGMENTATION))


def _measure(work: Work, found: Search, sizes: Sequence[int]) -> dict[int, float]:
    """Seconds a batch and its step take at the largest sizes that fit, one per halving, at most five."""
    seconds = {}
    for size in halvings(sizes, found.microbatch_size or 0):
        with real_loop(work) as loop:
            loop.run_two(size)
            loop.step()
        # Known by now, so that nothing is run to find it out.
        work = dataclasses.replace(work, backward=loop.backward)
        seconds[size] = statistics.median(_seconds_of_batch(work, size) for _ in range(3))
    return seconds


def _seconds_of_batch(work: Work, size: int) -> float:
    """What all microbatches take, from two of them, and the step after the last."""
    rows = work.batch.batch_size
    with real_loop(work) as loop:
        of_two = _timed(lambda: loop.run_two(size), work.device)
        of_step = _timed(loop.step, work.device)
    return of_two * rows / min(2 * size, rows) + of_step


def _timed(run: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    start = clock.perf_counter()
    run()
    _wait(device)
    return clock.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
