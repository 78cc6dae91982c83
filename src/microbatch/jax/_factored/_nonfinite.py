"""Rules of tests for non-finite entries, which clean or guard gradients (`nan_to_num`, `isfinite`)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from microbatch.jax._factored._algebra import both
from microbatch.jax._factored._context import Context, working_dtype
from microbatch.jax._factored._registry import rule
from microbatch.jax._factored._values import (
    Blocks,
    Cleaned,
    Dense,
    NonFinite,
    Outer,
    Rows,
    Shared,
    Value,
    is_zero,
)

ALL = frozenset({"nan", "inf", "-inf"})


@rule("ne")
def ne(ctx: Context, eqn: JaxprEqn, left: Value, right: Value) -> Value | None:
    """``value != value`` is true for nan only."""
    return NonFinite(left, frozenset({"nan"})) if left is right and _testable(left) else None


@rule("eq")
def eq(ctx: Context, eqn: JaxprEqn, left: Value, right: Value) -> Value | None:
    """``value == inf``."""
    if not isinstance(right, Shared) or right.shape != () or not _testable(left):
        return None
    try:
        number = float(np.asarray(right.array))
    except TypeError:
        return None
    if not np.isinf(number):
        return None
    return NonFinite(left, frozenset({"inf" if number > 0 else "-inf"}))


@rule("is_finite")
def is_finite(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """True for entries that are neither nan nor infinite."""
    return NonFinite(value, frozenset({"finite"})) if _testable(value) else None


@rule("reduce_and")
def reduce_and(ctx: Context, eqn: JaxprEqn, value: Value) -> Value | None:
    """Whether all entries are finite: all factors are, and their largest product is."""
    if not isinstance(value, NonFinite) or value.kinds != {"finite"}:
        return None
    if len(eqn.params["axes"]) != len(value.shape):
        return None
    finite = _all_finite(value.of)
    return None if finite is None else Dense(finite)


def select(which: NonFinite, if_false: Value, if_true: Value) -> Value | None:
    """``where(isnan(value), 0, value)`` and ``where(isfinite(value), value, 0)``."""
    finite = which.kinds == {"finite"}
    kept, replaced = (if_true, if_false) if finite else (if_false, if_true)
    if kept is not which.of or not is_zero(replaced):
        return None
    kinds = ALL if finite else which.kinds
    if isinstance(kept, Cleaned):
        kept, kinds = kept.of, kinds | kept.kinds
    return cleaned(kept) if kinds == ALL else Cleaned(kept, kinds)


def cleaned(value: Value) -> Value | None:
    """The value with zeros for all entries that are not finite.

    A factor's entry that is not finite makes all entries of the product in its row so, whatever it meets; so
    the rows are zeroed in the factors, for all tokens. (Finite factors whose product overflows stay.)
    """
    if isinstance(value, Blocks):
        parts = tuple(map(cleaned, value.parts))
        return None if None in parts else Blocks(parts, value.axis)
    if isinstance(value, Dense):
        return Dense(jnp.where(jnp.isfinite(value.array), value.array, 0))
    if isinstance(value, Outer):
        finite = None if value.scale is None else jnp.isfinite(value.scale)
        lhs, rhs = (
            jnp.where(jnp.all(jnp.isfinite(f), value.num_stack + 1, keepdims=True), f, 0)
            for f in (value.lhs, value.rhs)
        )
        return dataclasses.replace(value, lhs=lhs, rhs=rhs, keep=both(value.keep, finite))
    if isinstance(value, Rows):
        finite = None if value.scale is None else jnp.isfinite(value.scale)
        flat = value.update.reshape(*value.update.shape[:2], -1)
        meet = (value.index[:, :, None] == value.index[:, None, :]).astype(jnp.float32)
        bad = jnp.einsum("bst,btx->bsx", meet, (~jnp.isfinite(flat)).astype(jnp.float32)) > 0
        update = jnp.where(bad, 0, flat).reshape(value.update.shape)
        return dataclasses.replace(value, update=update, keep=both(value.keep, finite))
    return None


def _testable(value: Value) -> bool:
    if isinstance(value, Cleaned):
        return _testable(value.of)
    if isinstance(value, Blocks):
        return all(isinstance(part, (Outer, Rows, Dense)) for part in value.parts)
    return isinstance(value, (Outer, Rows))


def _all_finite(value: Value):
    if isinstance(value, Blocks):
        parts = [_all_finite(part) for part in value.parts]
        return None if any(p is None for p in parts) else jnp.all(jnp.stack(parts), 0)
    if isinstance(value, Dense):
        return jnp.all(jnp.isfinite(value.array), tuple(range(1, value.array.ndim)))
    if not isinstance(value, (Outer, Rows)):
        return None
    factors = (value.lhs, value.rhs) if isinstance(value, Outer) else (value.update,)
    tokens = value.tokens if isinstance(value, Outer) else value.index.shape[1]
    if tokens > 1 and jnp.finfo(value.dtype).max < jnp.finfo(jnp.float32).max:
        return None  # a bound on a sum of tokens may leave float16's range where the sum does not
    bound = float(tokens)
    for factor in factors:
        at = value.num_stack if isinstance(value, Outer) else 0
        axes = tuple(d for d in range(factor.ndim) if d != at)
        bound = bound * jnp.max(jnp.abs(factor.astype(working_dtype(factor.dtype))), axes)
    if value.scale is not None:
        bound = bound * jnp.abs(value.scale)
    finite = jnp.isfinite(bound.astype(value.dtype))
    return finite if value.keep is None else finite | ~value.keep
