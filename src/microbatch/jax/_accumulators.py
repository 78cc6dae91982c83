"""The accumulator kinds on JAX arrays: how each output leaf is carried from microbatch to microbatch."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from microbatch._accumulation import (
    MEANS,
    AccumulationType,
    Accumulator,
    accumulates_wider,
    leaf_rule,
)
from microbatch._errors import AccumulatorError, MicrobatchError
from microbatch._splitting import Split
from microbatch.jax._rows import Rows, filled, join, put, put_tail, rows_buffer

SUM, MEAN, CONCAT = AccumulationType.SUM, AccumulationType.MEAN, AccumulationType.CONCAT


class Moment(NamedTuple):
    """Which microbatch is at hand: its index, its weight (None stands for 1), and the weight before it."""

    index: Any
    weight: Any = None
    total: Any = None


@dataclass(frozen=True)
class Output:
    """How one output leaf, or one subtree with a custom accumulator, is accumulated.

    Attributes:
      kind: the accumulator.
      types: abstract values in a full microbatch: one, or the subtree's leaves.
      tail_types: the same in the tail; None without one.
      treedef: the subtree's structure, for a custom accumulator.
      axis: where CONCAT has its rows.
      dtype: the carry's dtype, for the other kinds.
      extreme: MAX or MIN where the accumulator is this library's own, which also tells who attained it.
    """

    kind: AccumulationType | Accumulator
    types: tuple[Any, ...]
    tail_types: tuple[Any, ...] | None = None
    treedef: Any = None
    axis: int = 0
    dtype: Any = None
    extreme: AccumulationType | None = None

    @property
    def type(self) -> Any:
        """The abstract value of the single leaf."""
        (aval,) = self.types
        return aval

    @property
    def is_custom(self) -> bool:
        """Whether the user wrote the accumulator."""
        return isinstance(self.kind, Accumulator)

    @property
    def is_linear_scalar(self) -> bool:
        """Whether it is a real scalar that is summed or averaged."""
        return (
            self.kind in (SUM, *MEANS)
            and self.type.shape == ()
            and jnp.issubdtype(self.type.dtype, jnp.floating)
        )

    def rows(self, split: Split) -> Rows:
        """How the rows of a CONCAT are cut: as many a microbatch as the output has, one for a scalar."""
        size = self.type.shape[self.axis] if self.type.shape else 1
        return Rows(self.axis, size, split.full, split.order)

    @property
    def tail_rows(self) -> int:
        """Rows of a CONCAT in the tail."""
        if self.tail_types is None:
            return 0
        return self.tail_types[0].shape[self.axis] if self.tail_types[0].shape else 1


class _Ops:
    """The array functions that the kinds are written over."""

    def zeros(self, spec: Any, dtype: Any) -> jax.Array:
        return filled(spec, 0, dtype)

    def lowest(self, spec: Any) -> jax.Array:
        return filled(spec, lowest(spec.dtype), spec.dtype)

    def highest(self, spec: Any) -> jax.Array:
        return filled(spec, highest(spec.dtype), spec.dtype)

    def add(self, carry: jax.Array, value: jax.Array, weight: Any | None) -> jax.Array:
        value = cast(value, carry.dtype)
        if weight is not None:
            # A real weight: a complex one would make NaN of infinity times 1 + 0i.
            value = value * jnp.asarray(weight, real_dtype(carry.dtype))
        # As NumPy adds booleans.
        return lax.bitwise_or(carry, value) if carry.dtype == jnp.bool_ else lax.add(carry, value)

    def blend(self, carry: jax.Array, value: jax.Array, weight: Any, total: Any) -> jax.Array:
        weight = jnp.asarray(1 if weight is None else weight, real_dtype(carry.dtype))
        kept = jnp.asarray(total, weight.dtype)
        kept = kept / (kept + weight)
        return carry * kept + cast(value, carry.dtype) * (1 - kept)

    def divide(self, carry: jax.Array, total: Any) -> jax.Array:
        if isinstance(total, int | float):
            return carry / total if total else carry
        total = total.astype(real_dtype(carry.dtype))
        return jnp.where(total == 0, 0, carry / jnp.where(total == 0, 1, total))

    def maximum(self, carry: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.maximum(carry, value)

    def minimum(self, carry: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.minimum(carry, value)

    def replace(self, carry: jax.Array, value: jax.Array) -> jax.Array:
        return cast(value, carry.dtype)


RULES = {kind: leaf_rule(kind, _Ops()) for kind in AccumulationType if kind is not CONCAT}


def carry_dtype(kind: AccumulationType, dtype: Any, override: Any = None) -> Any:
    """The dtype in which outputs of `dtype` are accumulated: float32 for lower precisions, unless overridden."""
    if kind not in (SUM, *MEANS) or not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    if override is not None:
        complex_override = jnp.promote_types(override, jnp.complex64)
        return complex_override if jnp.issubdtype(dtype, jnp.complexfloating) else override
    return jnp.dtype(jnp.float32) if accumulates_wider(jnp.dtype(dtype).name) else dtype


def checked_dtype(where: str, dtype: Any) -> Any:
    """`accumulator_dtype` as a dtype that can hold means; None stays None."""
    if dtype is None:
        return None
    try:
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.dtype(dtype)
    except TypeError:
        pass  # no dtype at all
    raise AccumulatorError(
        f"{where}: accumulator_dtype={dtype!r} is not a floating-point dtype.\n"
        "Use for example accumulator_dtype=jnp.float32."
    )


def init(output: Output, split: Split) -> Any:
    """The first carry, from shapes alone."""
    if isinstance(output.kind, Accumulator):
        return output.kind.init(jax.tree.unflatten(output.treedef, map(_spec, output.types)))
    if output.kind is CONCAT:
        return rows_buffer(output.type, output.rows(split), output.tail_rows)
    return RULES[output.kind].init(output.type, output.dtype)


def update(
    output: Output,
    split: Split | None,
    carry: Any,
    values: Sequence[Any],
    at: Moment,
    *,
    tail: bool,
) -> Any:
    """The carry with the values of one microbatch added; `tail` tells that it is the last, smaller one.

    Only CONCAT needs the split.
    """
    if isinstance(output.kind, Accumulator):
        weight = {} if not output.kind.takes_weight else {"weight": _weight(at)}
        value = jax.tree.unflatten(output.treedef, values)
        return output.kind.update(carry, value, at.index, **weight)
    (value,) = values
    if output.kind is CONCAT:
        assert split is not None
        rows = output.rows(split)
        return put_tail(carry, value, rows) if tail else put(carry, value, rows, at.index)
    return RULES[output.kind].update(carry, value, at.weight, at.total)


def finalize(output: Output, split: Split, carry: Any, total: Any) -> Any:
    """The result: one array in the output's dtype, or whatever a custom accumulator makes."""
    if isinstance(output.kind, Accumulator):
        return output.kind.finalize(carry)
    if output.kind is CONCAT:
        return join(carry, output.rows(split))
    return cast(RULES[output.kind].finalize(carry, total), output.type.dtype)


def _weight(at: Moment) -> jax.Array:
    return jnp.asarray(1.0 if at.weight is None else at.weight)


def _spec(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def cast(value: jax.Array, dtype: Any) -> jax.Array:
    """`value` in another dtype; itself, and no operation, where it has it."""
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


def as_weight(where: str, value: Any, per: str = "microbatch") -> jax.Array:
    """What a `weight_fn` returned, as a float; refused unless it is one real number."""
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError):
        raise MicrobatchError(
            f"{where}: weight_fn returned a {type(value).__name__}.\n"
            f"Return one real number per {per}, for example mask.sum()."
        ) from None
    is_a = functools.partial(jnp.issubdtype, value.dtype)
    real = is_a(jnp.bool_) or (is_a(jnp.number) and not is_a(jnp.complexfloating))
    if value.shape != () or not real:
        raise MicrobatchError(
            f"{where}: weight_fn returned shape {value.shape} of dtype {value.dtype}.\n"
            f"Return one real number per {per}, for example mask.sum()."
        )
    return value.astype(jnp.result_type(float))


def real_dtype(dtype: Any) -> Any:
    """The dtype of a weight that scales values of `dtype`."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.inexact) else dtype


def lowest(dtype: Any) -> Any:
    """The smallest value of a dtype: what MAX starts from."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if _has_infinity(dtype) else float(jnp.finfo(dtype).min)
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """The largest value of a dtype: what MIN starts from."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf if _has_infinity(dtype) else float(jnp.finfo(dtype).max)
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def _has_infinity(dtype: Any) -> bool:
    """Whether a floating-point dtype has infinities; some of eight bits and fewer have NaN in their place."""
    return bool(np.isinf(np.asarray(np.inf).astype(dtype)))
