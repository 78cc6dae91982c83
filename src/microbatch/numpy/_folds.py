"""The accumulators on NumPy arrays: each part of the output as a fold over the microbatches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from microbatch._accumulation import (
    EXTREMES,
    AccumulationType,
    Accumulator,
    Carry,
    Step,
    accumulates_wider,
    leaf_rule,
)
from microbatch._errors import AccumulatorError
from microbatch._outputs import Part, changed_type, check_can_average, check_can_weigh
from microbatch._trees import leaves_with_paths, map_leaves


class Fold(NamedTuple):
    """One part of the output over the microbatches.

    Attributes:
      init: the first carry.
      update: ``update(carry, value, step)``; may reuse the carry's memory.
      finalize: ``finalize(carry, total)``, in the dtype of the output.
      skip: ``skip(carry, step)`` where a microbatch does not run; None where that changes nothing.
      alone: ``alone(value, step)``: the result where the only microbatch is the whole batch.
      leaves: the carry as a list of arrays and numbers, to be saved.
      from_leaves: its inverse.
    """

    init: Callable[[], Any]
    update: Callable[[Any, Any, Step], Any]
    finalize: Callable[[Any, Any], Any]
    skip: Callable[[Any, Step], Any] | None = None
    alone: Callable[[Any, Step], Any] = lambda value, step: value
    leaves: Callable[[Any], list[Any]] = lambda carry: [carry]
    from_leaves: Callable[[list[Any]], Any] = lambda leaves: leaves[0]


class _Ops:
    """`ArrayOps` for NumPy; the carry's memory is reused."""

    def zeros(self, spec: np.ndarray, dtype: Any) -> np.ndarray:
        return np.zeros(spec.shape, dtype)

    def lowest(self, spec: np.ndarray) -> np.ndarray:
        return np.full(spec.shape, _limits(spec.dtype)[0], spec.dtype)

    def highest(self, spec: np.ndarray) -> np.ndarray:
        return np.full(spec.shape, _limits(spec.dtype)[1], spec.dtype)

    def add(self, carry: np.ndarray, value: Any, weight: Any | None) -> np.ndarray:
        if weight is not None:
            value = np.multiply(value, weight, dtype=carry.dtype)
        return np.add(carry, value, out=carry)

    def blend(self, carry: np.ndarray, value: Any, weight: Any, total: Any) -> np.ndarray:
        weight = 1 if weight is None else weight
        # Two products, not carry + share · (value − carry): an infinite carry stays what it is.
        np.multiply(carry, total / (total + weight), out=carry)
        return self.add(carry, value, weight / (total + weight))

    def divide(self, carry: np.ndarray, total: Any) -> np.ndarray:
        return np.divide(carry, total, out=carry) if total else carry

    def maximum(self, carry: np.ndarray, value: Any) -> np.ndarray:
        return np.maximum(carry, value, out=carry)

    def minimum(self, carry: np.ndarray, value: Any) -> np.ndarray:
        return np.minimum(carry, value, out=carry)

    def replace(self, carry: Any, value: Any) -> Any:
        return value


_OPS = _Ops()


def make_folds(
    where: str,
    parts: Sequence[Part],
    concat: Callable[[Part], Fold],
    *,
    initial: Callable[[Carry], Any],
    accumulator_dtype: np.dtype | None,
    ragged: bool,
) -> list[Fold]:
    """One fold per part of the output.

    Args:
      where: opens the messages.
      parts: the parts of one microbatch's output; of their values, only the types matter.
      concat: makes the fold of a CONCAT leaf.
      initial: the argument that a `Carry` starts from.
      accumulator_dtype: overrides the dtype of sums and means.
      ragged: whether a microbatch may have fewer rows.
    """

    def make(part: Part) -> Fold:
        accumulator, path, value = part
        if isinstance(accumulator, Carry):
            return _carried(accumulator, value, initial)
        if isinstance(accumulator, Accumulator):
            if ragged:
                check_can_weigh(where, accumulator, path)
            return _custom(accumulator, value)
        if accumulator is AccumulationType.CONCAT:
            return concat(part)
        if accumulator is AccumulationType.LAST:
            return _last(value)
        return _reduced(where, accumulator, path, value, accumulator_dtype)

    return [make(part) for part in parts]


def refuse_change(
    where: str, kind: AccumulationType, path: str, index: int, before: np.ndarray, now: np.ndarray
) -> NoReturn:
    """An output whose type changes from one microbatch to the next does not combine."""
    raise changed_type(
        where, kind, path, f"microbatch {index}", type_words(before), type_words(now)
    )


def restore(carry: Any, like: Any) -> Any:
    """`carry` in the dtype and type of `like`: an array, a NumPy scalar or a Python number."""
    if isinstance(like, np.ndarray):
        return carry.astype(like.dtype, copy=False)
    result = carry.astype(np.asarray(like).dtype, copy=False)
    return result[()] if isinstance(like, np.generic) else result.item()


def _reduced(
    where: str, kind: AccumulationType, path: str, value: Any, accumulator_dtype: np.dtype | None
) -> Fold:
    """SUM, MEAN, RUNNING_MEAN, MAX and MIN of one leaf."""
    spec = _numeric(where, kind, path, value)
    check_can_average(where, kind, path, spec.dtype.name, not _is_integer(spec.dtype))
    rule = leaf_rule(kind, _OPS)
    dtype = _carry_dtype(spec.dtype, accumulator_dtype) if rule.wide else spec.dtype
    shape, like = spec.shape, _typed(value)

    def update(carry: np.ndarray, value: Any, step: Step) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != shape or not np.can_cast(array.dtype, spec.dtype):
            refuse_change(where, kind, path, step.index, spec, array)
        if step.first and rule.wide:
            # Written, not added to zeros: −0.0 keeps its sign.
            weighted = kind is AccumulationType.MEAN and step.weight is not None
            carry[...] = np.multiply(array, step.weight, dtype=dtype) if weighted else array
            return carry
        return rule.update(carry, array, step.weight, step.total)

    return Fold(
        init=lambda: rule.init(spec, dtype),
        update=update,
        finalize=lambda carry, total: restore(rule.finalize(carry, total), like),
    )


def _last(value: Any) -> Fold:
    spec, like = spec_of(value), _typed(value)

    def nothing() -> Any:
        return restore(np.zeros(spec.shape, spec.dtype), like)

    return Fold(init=nothing, update=lambda carry, x, step: x, finalize=lambda carry, total: carry)


def _custom(accumulator: Accumulator, value: Any) -> Fold:
    def update(carry: Any, x: Any, step: Step) -> Any:
        if not accumulator.takes_weight:
            return accumulator.update(carry, x, step.index)
        return accumulator.update(carry, x, step.index, weight=step.own_weight)

    spec = map_leaves(spec_of, value)
    init = lambda: accumulator.init(spec)
    return Fold(
        init=init,
        update=update,
        finalize=lambda carry, total: accumulator.finalize(carry),
        alone=lambda x, step: accumulator.finalize(update(init(), x, step)),
        leaves=_leaves,
        from_leaves=lambda leaves: _rebuilt(init(), leaves),
    )


def _carried(carry: Carry, value: Any, initial: Callable[[Carry], Any]) -> Fold:
    like = map_leaves(lambda _: 0, value)
    return Fold(
        init=lambda: initial(carry),
        update=lambda before, state, step: state,
        finalize=lambda state, total: state,
        leaves=_leaves,
        from_leaves=lambda leaves: _rebuilt(like, leaves),
    )


def _leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in leaves_with_paths(tree)]


def _rebuilt(like: Any, leaves: list[Any]) -> Any:
    remaining = iter(leaves)
    return map_leaves(lambda _: next(remaining), like)


def _numeric(where: str, kind: AccumulationType, path: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "SUT" or (array.dtype.kind == "O" and not hasattr(value, "__add__")):
        raise AccumulatorError(
            f"{where}: {path} is a {type(value).__name__}, which {kind.name} cannot combine.\n"
            "Return arrays or numbers, or use LAST for it."
        )
    if array.dtype.kind == "M" and kind not in EXTREMES:
        raise AccumulatorError(
            f"{where}: {path} has dtype {array.dtype.name}; {kind.name} cannot add dates.\n"
            "Return a difference to a fixed date, or use MAX, MIN or LAST for it."
        )
    return spec_of(array)


def refuse_masked(where: str, path: str, value: Any) -> None:
    """A mask would be lost where values are written side by side or added up."""
    if isinstance(value, np.ma.MaskedArray):
        raise AccumulatorError(
            f"{where}: {path} is a masked array, whose mask would be lost.\n"
            "Return value.filled(0) and np.ma.getmaskarray(value), or fill it with what stands for nothing."
        )


def spec_of(value: Any) -> np.ndarray:
    """An array of zeros with the shape and dtype of `value` that takes no memory."""
    array = np.asarray(value)
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _typed(value: Any) -> Any:
    """What `restore` needs of `value`, without its memory."""
    return spec_of(value) if isinstance(value, np.ndarray) else value


def type_words(array: np.ndarray) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


def _carry_dtype(dtype: np.dtype, override: np.dtype | None) -> np.dtype:
    """The dtype in which sums of `dtype` are held."""
    if _is_integer(dtype) or dtype.kind == "O":
        return dtype
    if override is not None:
        return np.promote_types(override, np.complex64) if dtype.kind == "c" else override
    return np.dtype(np.float32) if accumulates_wider(dtype.name) else dtype


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iubm" or dtype.name.startswith(("int", "uint"))


def _limits(dtype: np.dtype) -> tuple[Any, Any]:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min, limits.max
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "mM":  # The lowest integer stands for "not a time".
        limits = np.iinfo(np.int64)
        return np.int64(limits.min + 1).view(dtype), np.int64(limits.max).view(dtype)
    if dtype.kind == "c":
        return complex(-np.inf, -np.inf), complex(np.inf, np.inf)
    return -np.inf, np.inf
