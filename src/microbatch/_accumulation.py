"""What an accumulator is and which kinds there are; framework-free.

A kind is three functions of one output leaf. They are written here once, over the few array functions of a front
(`ArrayOps`), so that a kind means the same thing in every front.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from microbatch._checks import signature_of
from microbatch._errors import AccumulatorError


class AccumulationType(enum.Enum):
    """How the outputs of the microbatches combine into the output of the whole batch."""

    MEAN = 1
    """Σ wᵢxᵢ / Σ wᵢ over the microbatches; the weights are rows unless `weight_fn` says otherwise."""
    SUM = 2
    """Σ xᵢ."""
    RUNNING_MEAN = 3
    """The mean of the microbatches that ran, also when the loop stops early."""
    CONCAT = 4
    """The outputs' rows (axis 0), in the batch's own row order."""
    MAX = 5
    """The elementwise maximum."""
    MIN = 6
    """The elementwise minimum."""
    LAST = 7
    """The output of the last microbatch that ran."""


@dataclass(frozen=True)
class Accumulator:
    """One's own way to combine outputs, as the program that it stands for::

        carry = init(typeof(x_0))
        for i, x in enumerate(outputs):
            carry = update(carry, x, i)
        return finalize(carry)

    Attributes:
      init: makes the first carry from the shape and dtype of one microbatch's output (a tree of them).
      update: ``update(carry, value, index)``. With a keyword ``weight`` it also receives the microbatch's
        weight, and may then be used with a last microbatch of fewer rows.
      finalize: makes the result from the last carry.
      aggregate: combines a stack of per-example outputs ``[m, ...]`` into one microbatch's output; only
        `micro_vmap` and `micro_grad` call it.
    """

    init: Callable[[Any], Any]
    update: Callable[..., Any]
    finalize: Callable[[Any], Any]
    aggregate: Callable[[Any], Any] | None = None

    @property
    def takes_weight(self) -> bool:
        """Whether `update` has a parameter ``weight``."""
        signature = signature_of(self.update)
        return signature is not None and "weight" in signature.parameters


@dataclass(frozen=True)
class Carry:
    """Marks an output that becomes argument `argnum` of the next microbatch; the last one is returned.

    Batch statistics, a chain of keys and an optimizer's state are carried this way. No derivative flows
    through it.
    """

    argnum: int


def as_accumulator(value: Any) -> AccumulationType | Accumulator | Carry | None:
    """`value` as one of this library's accumulators, or None where it is a tree or something else.

    Kinds of the same name from another library, and objects with the four attributes, are accepted.
    """
    if isinstance(value, AccumulationType | Accumulator | Carry):
        return value
    if isinstance(value, enum.Enum):
        if value.name in AccumulationType.__members__:
            return AccumulationType[value.name]
        names = ", ".join(AccumulationType.__members__)
        raise AccumulatorError(f"unknown accumulator {value!r}. Use one of {names}.")
    if not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("init", "update", "finalize", "aggregate")
    ):
        return Accumulator(value.init, value.update, value.finalize, value.aggregate)
    return None


def is_accumulator(value: Any) -> bool:
    """Whether `value` is one accumulator, not a tree of them."""
    return as_accumulator(value) is not None


class ArrayOps(Protocol):
    """The array functions that the kinds need from a front. `add` may reuse the carry's memory."""

    def zeros(self, spec: Any, dtype: Any) -> Any: ...
    def lowest(self, spec: Any) -> Any: ...
    def highest(self, spec: Any) -> Any: ...
    def add(self, carry: Any, value: Any, weight: Any | None) -> Any: ...
    def blend(self, carry: Any, value: Any, weight: Any, total: Any) -> Any: ...
    def divide(self, carry: Any, total: Any) -> Any: ...
    def maximum(self, carry: Any, value: Any) -> Any: ...
    def minimum(self, carry: Any, value: Any) -> Any: ...
    def replace(self, carry: Any, value: Any) -> Any: ...


class Rule(NamedTuple):
    """One kind on one leaf.

    Attributes:
      init: ``init(spec, dtype)`` from an output's shape and the accumulation dtype.
      update: ``update(carry, value, weight, total)``; `weight` is None for 1, `total` the weight before this
        microbatch.
      finalize: ``finalize(carry, total)``, still in the accumulation dtype.
      needs_total: whether `total` matters to `update` or `finalize`.
      wide: whether low precisions are accumulated in a wider dtype (a selection is exact in its own).
    """

    init: Callable[[Any, Any], Any]
    update: Callable[[Any, Any, Any, Any], Any]
    finalize: Callable[[Any, Any], Any]
    needs_total: bool = False
    wide: bool = False


def leaf_rule(kind: AccumulationType, ops: ArrayOps) -> Rule:
    """The functions of `kind` in the array functions of a front; CONCAT is a matter of rows, not of algebra."""

    def kept(carry: Any, total: Any) -> Any:
        return carry

    rules = {
        AccumulationType.SUM: Rule(
            ops.zeros, lambda carry, x, weight, total: ops.add(carry, x, None), kept, wide=True
        ),
        AccumulationType.MEAN: Rule(
            ops.zeros,
            lambda carry, x, weight, total: ops.add(carry, x, weight),
            ops.divide,
            needs_total=True,
            wide=True,
        ),
        AccumulationType.RUNNING_MEAN: Rule(
            ops.zeros, ops.blend, kept, needs_total=True, wide=True
        ),
        AccumulationType.MAX: Rule(
            lambda spec, dtype: ops.lowest(spec),
            lambda carry, x, weight, total: ops.maximum(carry, x),
            kept,
        ),
        AccumulationType.MIN: Rule(
            lambda spec, dtype: ops.highest(spec),
            lambda carry, x, weight, total: ops.minimum(carry, x),
            kept,
        ),
        AccumulationType.LAST: Rule(
            ops.zeros, lambda carry, x, weight, total: ops.replace(carry, x), kept
        ),
    }
    return rules[kind]


class Step(NamedTuple):
    """Which microbatch is being added to a carry.

    Attributes:
      index: its place among all microbatches.
      rows: how many it has.
      weight: its weight, relative where all are; None for 1.
      total: the weight of those before it, in the unit of `weight`.
      own_weight: its weight as custom accumulators are told it: what `weight_fn` says, or rows.
      first: whether it is the first that is added.
    """

    index: int
    rows: int
    weight: Any = None
    total: Any = 0
    own_weight: Any = None
    first: bool = False


def accumulates_wider(dtype_name: str) -> bool:
    """Whether sums of this dtype are held in float32: a hundred bfloat16 ones already lose count."""
    return dtype_name.startswith(("float16", "bfloat16", "float8", "float4"))


MEANS = (AccumulationType.MEAN, AccumulationType.RUNNING_MEAN)
EXTREMES = (AccumulationType.MAX, AccumulationType.MIN)
