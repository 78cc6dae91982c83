"""The accumulators on tensors: each part of the output as a fold over the microbatches, added in place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from microbatch._accumulation import (
    EXTREMES,
    AccumulationType,
    Accumulator,
    Carry,
    accumulates_wider,
    leaf_rule,
)
from microbatch._errors import AccumulatorError, EmptyStream
from microbatch._outputs import (
    Part,
    assemble,
    check_can_average,
    check_can_weigh,
    check_has_order,
    parts_of,
)
from microbatch._splitting import Split
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._internals import is_transformed


class Step(NamedTuple):
    """Which microbatch is being added.

    Attributes:
      index: its place among all microbatches.
      rows: how many it has.
      weight: its weight; None for 1.
      total: the weight of those before it.
      first: whether it is the first that is added.
    """

    index: int
    rows: int
    weight: float | None = None
    total: float = 0
    first: bool = False


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


@dataclass(frozen=True)
class Layout:
    """What one microbatch's output looks like, without its memory: `parts` hold shapes, dtypes and devices."""

    where: str
    accumulator: Any
    template: Any
    parts: list[Part]
    numbers: tuple[type | None, ...]
    """For each leaf the Python type of a number, or None for a tensor."""

    @classmethod
    def of(cls, where: str, accumulator: Any, output: Any) -> "Layout":
        """The layout of `output`; an accumulator that is not its prefix is refused."""
        found = parts_of(where, accumulator, output)
        numbers = []
        for part in found:
            for path, leaf in leaves_with_paths(part.value, part.path):
                numbers.append(_number_type(where, path, leaf))
        specs = [
            Part(entry, path, map_leaves(lambda leaf: spec_of(as_tensor(leaf)), value))
            for entry, path, value in found
        ]
        return cls(where, accumulator, map_leaves(lambda _: _LEAF, output), specs, tuple(numbers))

    def flatten(self, output: Any) -> list[Any]:
        """The values of the parts: a tensor where a part is one leaf, a tree where it is a subtree."""
        if self.template is _LEAF and isinstance(output, torch.Tensor):
            return [output]
        return [
            part.value if isinstance(part.accumulator, Carry) else map_leaves(as_tensor, part.value)
            for part in parts_of(self.where, self.accumulator, output)
        ]

    def assemble(self, results: Sequence[Any]) -> Any:
        """The whole output from the parts' results, numbers as numbers again."""
        numbers = iter(self.numbers)
        restored = []
        for part, result in zip(self.parts, results, strict=True):
            kinds = [next(numbers) for _ in leaves_with_paths(part.value)]
            stays = not isinstance(part.accumulator, AccumulationType) or (
                part.accumulator is AccumulationType.CONCAT
            )
            number = None if stays else kinds[0]
            restored.append(result if number is None else _as_number(result, number))
        return assemble(self.accumulator, self.template, restored)


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


_LEAF = object()
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


def refuse_extremes(where: str, parts: Sequence[Part]) -> None:
    """MAX and MIN of zero rows have no value."""
    for accumulator, path, _ in parts:
        if accumulator in EXTREMES:
            raise EmptyStream(
                f"{where}: {accumulator.name} of zero rows has no value ({path}).\n"
                "Give at least one row."
            )


def output_rows(found: int, rows: int) -> Callable[[int], int]:
    """How many rows an output has for a microbatch of so many, told from one microbatch."""
    if rows and found % rows == 0:
        return lambda count: found // rows * count
    return lambda count: found


def concat_place(split: Split, index: int, full: int, tail: int) -> slice:
    """Where the rows of microbatch `index` belong, if a full one has `full` rows and the last one `tail`."""
    in_full = split.full * full
    if index >= split.full:
        return slice(in_full, in_full + tail)
    if split.order == "strided":
        return slice(index, in_full, split.full)
    return slice(index * full, (index + 1) * full)


def take(tensor: torch.Tensor, axis: int, rows: slice) -> torch.Tensor:
    """The rows along `axis`: a view."""
    if rows.step in (None, 1):
        return tensor.narrow(axis, rows.start, rows.stop - rows.start)
    return tensor[(slice(None),) * axis + (rows,)]


def carry_dtype(dtype: torch.dtype, override: torch.dtype | None) -> torch.dtype:
    """The dtype in which sums of `dtype` are held."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    if override is not None:
        return torch.promote_types(override, torch.complex64) if dtype.is_complex else override
    if dtype is torch.complex32:
        return torch.complex64
    return torch.float32 if accumulates_wider(dtype_name(dtype)) else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name without its package: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def as_tensor(leaf: Any) -> torch.Tensor:
    """A leaf of the output as a tensor; Python numbers in Python's own precision."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    dtype = {float: torch.float64, complex: torch.complex128}.get(type(leaf))
    return torch.as_tensor(leaf, dtype=dtype)


def spec_of(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape, dtype and device of `tensor` that take no memory."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def refuse_change(
    where: str,
    kind: AccumulationType,
    path: str,
    index: int,
    before: torch.Tensor,
    now: torch.Tensor,
) -> NoReturn:
    """An output whose type changes from one microbatch to the next does not combine."""
    advice = {
        AccumulationType.CONCAT: "Return equally many rows for each row of the microbatch, in one dtype."
    }.get(kind, "Use CONCAT for outputs with rows, or return one shape and dtype.")
    raise AccumulatorError(
        f"{where}: {path} is {_type_words(now)} in microbatch {index} and {_type_words(before)} "
        f"before it; {kind.name} cannot combine them.\n{advice}"
    )


def _reduced(part: Part, options: FoldOptions) -> Fold:
    """SUM, MEAN, RUNNING_MEAN, LAST, and, where autograd follows, MAX and MIN."""
    kind, path, spec = part
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
    spec, axis, split = _as_rows(part.value, options.row_axis), options.row_axis, options.split
    full, tail = row_counts(spec, axis, split, rows)
    shape = list(spec.shape)
    shape[axis] = split.full * full + tail
    make = torch.empty if options.complete else torch.zeros

    def update(buffer: torch.Tensor, value: torch.Tensor, step: Step) -> torch.Tensor:
        value = _as_rows(value, axis)
        room = take(buffer, axis, concat_place(split, step.index, full, tail))
        if value.shape != room.shape or not torch.can_cast(value.dtype, spec.dtype):
            refuse_change(options.where, part.accumulator, part.path, step.index, spec, value)
        room.copy_(value)
        return buffer

    return Fold(
        init=lambda: make(shape, dtype=spec.dtype, device=spec.device),
        update=update,
        finalize=lambda buffer, total: buffer,
        alone=lambda value, step: _as_rows(value, axis),
    )


def _concat_pieces(part: Part, options: FoldOptions, rows: int) -> Fold:
    """Outputs are kept and joined at the end, for where autograd or a transformation follows them."""
    spec, axis, split = _as_rows(part.value, options.row_axis), options.row_axis, options.split
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
        update=lambda pieces, value, step: {**pieces, step.index: _as_rows(value, axis)},
        finalize=finalize,
        alone=lambda value, step: _as_rows(value, axis),
    )


def row_counts(spec: torch.Tensor, axis: int, split: Split, rows: int) -> tuple[int, int]:
    """Rows of a full microbatch's output and of the last, smaller one's, told from one of `rows` rows."""
    per = output_rows(spec.shape[axis] if spec.ndim > axis else 1, rows)
    return per(split.microbatch_size), per(split.tail) if split.tail else 0


def _as_rows(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """A scalar as one row."""
    return tensor if tensor.ndim > axis else tensor.unsqueeze(axis)


def _check_kind(where: str, kind: AccumulationType, path: str, dtype: torch.dtype) -> None:
    inexact = dtype.is_floating_point or dtype.is_complex
    check_can_average(where, kind, path, dtype_name(dtype), inexact)
    check_has_order(where, kind, path, dtype_name(dtype), not dtype.is_complex)


def _number_type(where: str, path: str, leaf: Any) -> type | None:
    if isinstance(leaf, torch.Tensor):
        return None
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)
    raise AccumulatorError(
        f"{where}: {path} is a {type(leaf).__name__}, which cannot be accumulated.\n"
        "Return tensors or numbers."
    )


def _as_number(result: torch.Tensor, number: type) -> Any:
    return result if is_transformed(result) else number(result.item())


def limits(dtype: torch.dtype) -> tuple[Any, Any]:
    """The lowest and the highest value of a real dtype."""
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    if dtype is torch.bool:
        return False, True
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _type_words(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
