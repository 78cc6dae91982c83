"""Where the microbatches of a call come from: one batch that is cut, or a window of ready ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microbatch._checks import check_size
from microbatch._errors import BatchError, EmptyStream
from microbatch._splitting import Split
from microbatch._trees import map_prefix
from microbatch.torch._batch import NOT_SPLIT, Batch, batch_of
from microbatch.torch._carried import CarriedArguments
from microbatch.torch._distributed import Sync
from microbatch.torch._memory import device_of, resolve_auto
from microbatch.torch._reduction import Reduction, WeightFn
from microbatch.torch._simulation import Work, fake_peak


@dataclass(frozen=True)
class Options:
    """The keywords that `backward`, `backward_window` and `value_and_grad` share; documented there."""

    reduction: Reduction | Mapping[str, Reduction] = "mean"
    weight_fn: WeightFn | Mapping[str, WeightFn | None] | None = None
    has_aux: bool = False
    sync: Sync = "auto"
    sync_modules: Sequence[nn.Module] | nn.Module | None = None
    process_group: Any = None
    backward_fn: Callable[[torch.Tensor], Any] | None = None
    accumulator_dtype: torch.dtype | None = None
    rollback: bool = False
    allow_row_mixing: bool = False
    allow_hooks: bool = False
    device: torch.device | str | None = None


@dataclass(frozen=True)
class Source:
    """Where microbatches come from: arguments with the dimension of each tensor's rows, and the rows of each."""

    args: Callable[[int], tuple[Any, ...]]
    take: Callable[[CarriedArguments, int], tuple[Any, ...]]
    rows: Callable[[int], int]
    count: int
    predict: Callable[[], int | None]
    """The peak bytes that shapes predict for this size; None where they do not."""
    microbatch_size: int | None
    """None where the microbatches came as such."""
    batch_size: int


@dataclass(frozen=True)
class Preparation:
    """How a call gets its `Source`.

    Attributes:
      check: looks at the arguments, and gives what `cut` needs.
      cut: makes the source; gets the process group to agree with others in, or None for all.
      agrees: whether `cut` talks to the other processes, so that all of them must get there.
    """

    check: Callable[[], Any]
    cut: Callable[[Any, Any], Source]
    agrees: bool = False


def check_microbatch_size(where: str, microbatch_size: int | str | None) -> None:
    """Refuses sizes that are not positive integers, "auto" or None."""
    if microbatch_size is not None and microbatch_size != "auto":
        check_size(where, "microbatch_size", microbatch_size)


def cutting(
    where: str,
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    in_dims: Any,
    microbatch_size: int | str | None,
    memory_budget: int | str | None,
    options: Options,
) -> Preparation:
    """How one batch is checked and cut."""
    check_microbatch_size(where, microbatch_size)

    def cut(batch: Batch, group: Any) -> Source:
        size = resolve_auto(
            microbatch_size,
            where,
            loss_fn,
            batch,
            memory_budget=memory_budget,
            backward=True,
            accumulator_dtype=options.accumulator_dtype,
            process_group=options.process_group or group,
        )
        return _cut(batch, size, lambda: _predicted(where, loss_fn, batch, size, options))

    return Preparation(
        check=lambda: batch_of(where, loss_fn, args, in_dims),
        cut=cut,
        agrees=microbatch_size == "auto",
    )


def _predicted(
    where: str, loss_fn: Callable[..., Any], batch: Batch, size: int | None, options: Options
) -> int | None:
    """What a plan would say of this size; asked only after memory ran out, so whatever stops it stops only that."""
    try:
        device = device_of(loss_fn, batch.args)
        work = Work(where, loss_fn, batch, False, True, None, options.accumulator_dtype, device)
        return fake_peak(work, size or batch.batch_size)
    except Exception:
        return None


def _cut(batch: Batch, size: int | None, predict: Callable[[], int | None]) -> Source:
    """The microbatches of one batch."""
    rows = max(batch.batch_size, 1)
    split = Split(batch.batch_size, min(size or rows, rows))

    def bounds(index: int) -> tuple[int, int]:
        span = split.rows(index)
        return span.start, span.stop

    return Source(
        args=lambda i: batch.rows(*bounds(i)),
        take=lambda carried, i: carried.take(batch.args, batch.dims, *bounds(i)),
        rows=split.size,
        predict=predict,
        # A batch without rows still runs once, as a zero: for its gradients of zero, and for the other processes.
        count=max(split.num_microbatches, 1),
        microbatch_size=split.microbatch_size,
        batch_size=batch.batch_size,
    )


def ready(
    where: str, loss_fn: Callable[..., Any], microbatches: list[tuple[Any, ...]], in_dims: Any
) -> Preparation:
    """Microbatches that came as such."""
    return Preparation(
        check=lambda: microbatches,
        cut=lambda window, _: _ready(where, loss_fn, window, in_dims),
    )


def _ready(
    where: str, loss_fn: Callable[..., Any], microbatches: list[tuple[Any, ...]], in_dims: Any
) -> Source:
    if not microbatches:
        raise EmptyStream(
            f"{where}: the window has no microbatch.\nSkip the step, or take windows from windows(loader, k)."
        )
    uncut = [map_prefix(lambda _, leaf: NOT_SPLIT, 0, m) for m in microbatches]

    def rows(index: int) -> int:
        try:
            return batch_of(where, loss_fn, microbatches[index], in_dims).batch_size
        except BatchError as error:
            raise BatchError(
                f"{error}\nIn microbatch {index} of the window, which its rows should weigh; a weight_fn weighs it too."
            ) from None

    return Source(
        args=microbatches.__getitem__,
        take=lambda carried, i: carried.take(microbatches[i], uncut[i], 0, 0),
        rows=rows,
        count=len(microbatches),
        predict=lambda: None,
        microbatch_size=None,
        batch_size=len(microbatches),
    )
