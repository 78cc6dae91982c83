"""The accumulators on tensors: each part of the output as a fold over the microbatches, added in place."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from microbatch._accumulation import (
    EXTREMES,
    AccumulationType,
    Accumulator,
    Carry,
    Step,
    leaf_rule,
)
from microbatch._outputs import (
    Part,
    changed_type,
    check_can_average,
    check_can_weigh,
    check_has_order,
)
from microbatch._splitting import Split
from microbatch.torch._rows import as_rows, concat_place, row_counts, take
from microbatch.torch._tensors import carry_dtype, dtype_name, limits, type_words


class Fold(NamedTuple):
    """One part of the output over the microbatches.

    Attributes:
      init: the first carry.
      update: ``update(carry, value, step)``; may reuse the carry's memory.
      finalize: ``finalize(carry, total)``, in the dtype of the output.
      alone: ``alone(value, step)``: the result where the only microbatch is the whole batch.
      winners: where the values of MAX and MIN came from: the microbatch's index, elementwise.
    """

    init: Callable[[], Any]
    update: Callable[[Any, Any, Step], Any]
    finalize: Callable[[Any, Any], Any]
    alone: Callable[[Any, Step], Any] = lambda value, step: value
    winners: Callable[[Any], list[torch.Tensor]] = lambda carry: []


class _Ops:
    """`ArrayOps` for tensors. Under transformations of `torch.func` a carry cannot be changed in place."""

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place

    def zeros(self, spec: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(spec.shape, dtype=dtype, device=spec.device)

    def lowest(self, spec: torch.Tensor) -> torch.Tensor:
        return torch.full(spec.shape, limits(spec.dtype)[0], dtype=spec.dtype, device=spec.device)

    def highest(self, spec: torch.Tensor) -> torch.Tensor:
        return torch.full(spec.shape, limits(spec.dtype)[1], dtype=spec.dtype, device=spec.device)

    def add(self, carry: torch.Tensor, value: torch.Tensor, weight: float | None) -> torch.Tensor:
        alpha = 1 if weight is None else weight
        if self._in_place:
            return carry.add_(value, alpha=alpha)
        return torch.add(carry, value.to(carry.dtype), alpha=alpha)

    def blend(
        self, carry: torch.Tensor, value: torch.Tensor, weight: float | None, total: float
    ) -> torch.Tensor:
        weight = 1 if weight is None else weight
        # Two products, not carry + share · (value − carry): an infinite carry stays what it is.
        kept = total / (total + weight)
        carry = carry.mul_(kept) if self._in_place else carry * kept
        return self.add(carry, value, 1 - kept)

    def divide(self, carry: torch.Tensor, total: float) -> torch.Tensor:
        if not total or total == 1:
            return carry
        return carry.div_(total) if self._in_place else carry / total

    def maximum(self, carry: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.maximum(carry, value)

    def minimum(self, carry: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.minimum(carry, value)

    def replace(self, carry: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value


_IN_PLACE = _Ops(in_place=True)
_FUNCTIONAL = _Ops(in_place=False)


class FoldOptions(NamedTuple):
    """What the folds of one call have in common.

    Attributes:
      where: opens the messages.
      split: the microbatches.
      accumulator_dtype: overrides the dtype of sums and means.
      weighted: whether the weights come from `weight_fn`.
      tracked: whether autograd or a transformation follows the accumulation itself.
      row_axis: where CONCAT finds the rows.
      complete: whether every microbatch runs.
    """

    where: str
    split: Split
    accumulator_dtype: torch.dtype | None = None
    weighted: bool = False
    tracked: bool = False
    row_axis: int = 0
    complete: bool = True


def make_fold(part: Part, options: FoldOptions, rows: int) -> Fold:
    """The fold of one part, whose value is the spec of a microbatch of `rows` rows."""
    accumulator, path, value = part
    if isinstance(accumulator, Carry):
        return Fold(lambda: value, lambda before, state, step: state, lambda state, total: state)
    if isinstance(accumulator, Accumulator):
        if options.split.tail:
            check_can_weigh(options.where, accumulator, path)
        return _custom(accumulator, value, options.weighted)
    if accumulator is AccumulationType.CONCAT:
        concat = _concat_pieces if options.tracked else _concat_rows
        return concat(part, options, rows)
    if accumulator in EXTREMES and not options.tracked:
        return _extreme(part, options)
    return _reduced(part, options)


def refuse_change(
    where: str,
    kind: AccumulationType,
    path: str,
    index: int,
    before: torch.Tensor,
    now: torch.Tensor,
) -> NoReturn:
    """An output whose type changes from one microbatch to the next does not combine."""
    raise changed_type(
        where, kind, path, f"microbatch {index}", type_words(before), type_words(now)
    )


def _reduced(part: Part, options: FoldOptions) -> Fold:
    """SUM, MEAN, RUNNING_MEAN, LAST, and, where autograd follows, MAX and MIN."""
    kind, path, spec = part
    assert isinstance(kind, AccumulationType)
    _check_kind(options.where, kind, path, spec.dtype)
    rule = leaf_rule(kind, _FUNCTIONAL if options.tracked else _IN_PLACE)
    dtype = carry_dtype(spec.dtype, options.accumulator_dtype) if rule.wide else spec.dtype
    adds = kind in (AccumulationType.SUM, AccumulationType.MEAN)

    def update(carry: torch.Tensor, value: torch.Tensor, step: Step) -> torch.Tensor:
        if kind is not AccumulationType.LAST and (
            value.shape != spec.shape or not torch.can_cast(value.dtype, spec.dtype)
        ):
            refuse_change(options.where, kind, path, step.index, spec, value)
        if step.first and adds and not options.tracked:
            # Written, not added to zeros: −0.0 keeps its sign.
            carry.copy_(value)
            unweighted = kind is AccumulationType.SUM or step.weight in (None, 1)
            return carry if unweighted else carry.mul_(step.weight)
        return rule.update(carry, value, step.weight, step.total)

    return Fold(
        init=lambda: rule.init(spec, dtype),
        update=update,
        finalize=lambda carry, total: rule.finalize(carry, total).to(spec.dtype),
    )


def _extreme(part: Part, options: FoldOptions) -> Fold:
    """MAX and MIN with the index of the first microbatch that has the value, for the derivative."""
    kind, path, spec = part
    assert isinstance(kind, AccumulationType)
    _check_kind(options.where, kind, path, spec.dtype)
    rule = leaf_rule(kind, _IN_PLACE)

    def init() -> Any:
        first = torch.zeros(spec.shape, dtype=torch.int32, device=spec.device)
        return rule.init(spec, spec.dtype), first

    def update(carry: Any, value: torch.Tensor, step: Step) -> Any:
        if value.shape != spec.shape or not torch.can_cast(value.dtype, spec.dtype):
            refuse_change(options.where, kind, path, step.index, spec, value)
        best, winner = carry
        new = rule.update(best, value, None, None)
        if step.first:
            return new, winner.fill_(step.index)
        return new, winner.masked_fill_(new != best, step.index)

    return Fold(
        init=init,
        update=update,
        finalize=lambda carry, total: carry[0],
        winners=lambda carry: [carry[1]],
    )


def _custom(accumulator: Accumulator, spec: Any, weighted: bool) -> Fold:
    def update(carry: Any, value: Any, step: Step) -> Any:
        if not accumulator.takes_weight:
            return accumulator.update(carry, value, step.index)
        weight = step.weight if weighted else step.rows
        return accumulator.update(carry, value, step.index, weight=1 if weight is None else weight)

    return Fold(
        init=lambda: accumulator.init(spec),
        update=update,
        finalize=lambda carry, total: accumulator.finalize(carry),
        alone=lambda value, step: accumulator.finalize(update(accumulator.init(spec), value, step)),
    )


def _concat_rows(part: Part, options: FoldOptions, rows: int) -> Fold:
    """Every output is written where its rows belong, into one tensor for the whole batch."""
    spec, axis, split = as_rows(part.value, options.row_axis), options.row_axis, options.split
    full, tail = row_counts(spec, axis, split, rows)
    shape = list(spec.shape)
    shape[axis] = split.full * full + tail
    make = torch.empty if options.complete else torch.zeros

    def update(buffer: torch.Tensor, value: torch.Tensor, step: Step) -> torch.Tensor:
        value = as_rows(value, axis)
        room = take(buffer, axis, concat_place(split, step.index, full, tail))
        if value.shape != room.shape or not torch.can_cast(value.dtype, spec.dtype):
            refuse_change(
                options.where, AccumulationType.CONCAT, part.path, step.index, spec, value
            )
        room.copy_(value)
        return buffer

    return Fold(
        init=lambda: make(shape, dtype=spec.dtype, device=spec.device),
        update=update,
        finalize=lambda buffer, total: buffer,
        alone=lambda value, step: as_rows(value, axis),
    )


def _concat_pieces(part: Part, options: FoldOptions, rows: int) -> Fold:
    """Outputs are kept and joined at the end, for where autograd or a transformation follows them."""
    spec, axis, split = as_rows(part.value, options.row_axis), options.row_axis, options.split
    full, tail = row_counts(spec, axis, split, rows)

    def piece(pieces: dict[int, torch.Tensor], index: int) -> torch.Tensor:
        if index in pieces:
            return pieces[index]
        shape = list(spec.shape)
        shape[axis] = full if index < split.full else tail
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    def finalize(pieces: dict[int, torch.Tensor], total: Any) -> torch.Tensor:
        ordered = [piece(pieces, index) for index in range(split.num_microbatches)]
        if split.order == "contiguous" or split.full <= 1:
            return torch.cat(ordered, axis)
        in_full = torch.stack(ordered[: split.full], axis + 1).flatten(axis, axis + 1)
        return torch.cat([in_full, *ordered[split.full :]], axis)

    return Fold(
        init=dict,
        update=lambda pieces, value, step: {**pieces, step.index: as_rows(value, axis)},
        finalize=finalize,
        alone=lambda value, step: as_rows(value, axis),
    )


def _check_kind(where: str, kind: AccumulationType, path: str, dtype: torch.dtype) -> None:
    inexact = dtype.is_floating_point or dtype.is_complex
    check_can_average(where, kind, path, dtype_name(dtype), inexact)
    check_has_order(where, kind, path, dtype_name(dtype), not dtype.is_complex)
