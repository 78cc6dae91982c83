"""What a value of one example's program can be while a whole microbatch of `B` examples is run.

Every class is a pytree, so that values pass through `lax.scan` and `jit`. Shapes in the docstrings name the axes of the
stored arrays; `shape` of a value is always the shape that *one example* sees.
"""

import dataclasses
import math
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp

Axis = tuple[str, int]
"""A stored axis of an `Outer`: its group (`"stack"`, `"lhs"`, `"rhs"`) and its index in the group."""


@dataclass_transform(frozen_default=True, eq_default=False)
def _value(*meta: str):
    """Registers a frozen dataclass as a pytree; `meta` are the fields that are not arrays."""

    def register(cls):
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        data = [name for name in names if name not in meta]
        return jax.tree_util.register_dataclass(cls, data, list(meta))

    return register


@_value()
class Shared:
    """The same for all examples: `array` is the value itself."""

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.shape(self.array)

    @property
    def dtype(self):
        return jax.dtypes.result_type(self.array)


@_value()
class Dense:
    """One value per example: `array` is ``[B, *shape]``."""

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    @property
    def dtype(self):
        return self.array.dtype


@_value("shape", "dtype", "per_example")
class Fill:
    """One number spread over `shape`: `number` is ``[]``, ``[B]`` if `per_example`, None for a known zero."""

    number: Any
    shape: tuple[int, ...]
    dtype: Any
    per_example: bool

    @property
    def is_zero(self) -> bool:
        return self.number is None


@_value("dims", "dtype", "precision", "sites")
class Outer:
    """A sum over tokens `c` of products: ``scale[b] * sum_c lhs[.., b, c, ..] * rhs[.., b, c, ..]``.

    lhs: ``[*stack, B, tokens, *lhs axes]``; rhs: ``[*stack, B, tokens, *rhs axes]``.
    scale: ``[B]`` or None. keep: bool ``[B]`` or None; where it is False the value is exactly zero,
    whatever the factors hold.
    dims: for each dimension of the value, the stored axes it is made of, in row-major order; none for size 1.
    sites: the equations it comes from, see `Recorder`.
    """

    lhs: Any
    rhs: Any
    scale: Any
    keep: Any
    dims: tuple[tuple[Axis, ...], ...]
    dtype: Any
    precision: Any = None
    sites: tuple = ()

    @property
    def num_stack(self) -> int:
        return sum(group == "stack" for dim in self.dims for group, _ in dim)

    @property
    def tokens(self) -> int:
        return self.lhs.shape[self.num_stack + 1]

    @property
    def batch_size(self) -> int:
        return self.lhs.shape[self.num_stack]

    def axis_size(self, axis: Axis) -> int:
        group, index = axis
        if group == "stack":
            return self.lhs.shape[index]
        factor = self.lhs if group == "lhs" else self.rhs
        return factor.shape[self.num_stack + 2 + index]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(map(self.axis_size, dim)) for dim in self.dims)

    @property
    def is_array(self) -> bool:
        """Whether one factor holds no axes: the other holds the entries."""
        return self.tokens == 1 and 1 in self.widths[1:]

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of entries of the stack, lhs and rhs axes."""
        stack = self.num_stack
        return (
            math.prod(self.lhs.shape[:stack]),
            math.prod(self.lhs.shape[stack + 2 :]),
            math.prod(self.rhs.shape[stack + 2 :]),
        )


@_value("table", "shape", "dtype", "sites")
class Rows:
    """Updates added to some rows of a table of zeros: ``zeros(table).at[index[b]].add(scale[b] * update[b])``.

    index: integers ``[B, T]``, in bounds; update: ``[B, T, *table[1:]]``; `shape` is a view of `table`.
    """

    index: Any
    update: Any
    scale: Any
    keep: Any
    table: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    sites: tuple = ()


@_value("axis")
class Blocks:
    """Values of equal rank concatenated along `axis`, as `ravel_pytree` makes."""

    parts: tuple
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self):
        return self.parts[0].dtype


@_value()
class Sum:
    """A sum of values of one shape that have no common factors (tied embeddings: `Outer` and `Rows`)."""

    terms: tuple

    @property
    def shape(self) -> tuple[int, ...]:
        return self.terms[0].shape

    @property
    def dtype(self):
        return self.terms[0].dtype


@_value("dtype")
class Product:
    """The entrywise product of two values of one shape, not yet reduced; ``scale`` is ``[B]`` or None."""

    left: Any
    right: Any
    scale: Any
    keep: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.left.shape


@_value("kinds")
class NonFinite:
    """The entrywise test whether `of` is one of `kinds`: ``"nan"``, ``"inf"``, ``"-inf"``, ``"finite"``."""

    of: Any
    kinds: frozenset

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def dtype(self):
        return jnp.dtype(bool)


@_value("kinds")
class Cleaned:
    """`of` with its entries of some non-finite `kinds` replaced by zero; all three make an `Outer` again."""

    of: Any
    kinds: frozenset

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def dtype(self):
        return self.of.dtype


@_value("shape", "dtype", "slot")
class Accumulating:
    """A scan's carry that started at zero and has only been added to: the sum of `terms`, each per step."""

    terms: tuple
    shape: tuple[int, ...]
    dtype: Any
    slot: tuple


FACTORED = (Outer, Rows, Blocks, Sum, Product, NonFinite, Cleaned, Accumulating)
"""The values that are not arrays yet."""

Value = (
    Shared
    | Dense
    | Fill
    | Outer
    | Rows
    | Blocks
    | Sum
    | Product
    | NonFinite
    | Cleaned
    | Accumulating
)


def is_factored(value: Value) -> bool:
    """Whether the value's entries do not exist as an array."""
    return isinstance(value, FACTORED)


def is_per_example(value: Value) -> bool:
    """Whether examples may differ in the value."""
    return value.per_example if isinstance(value, Fill) else not isinstance(value, Shared)


def is_zero(value: Value) -> bool:
    """Whether the value is known to be zero in all entries, whatever the data."""
    return isinstance(value, Fill) and value.is_zero


def sites_of(value: Value) -> tuple:
    """The equations that the value's factors come from."""
    if isinstance(value, (Outer, Rows)):
        return value.sites
    if isinstance(value, (Blocks, Sum, Accumulating)):
        parts = value.parts if isinstance(value, Blocks) else value.terms
        return merge_sites(*parts)
    if isinstance(value, Product):
        return merge_sites(value.left, value.right)
    if isinstance(value, (NonFinite, Cleaned)):
        return sites_of(value.of)
    return ()


def merge_sites(*values: Value) -> tuple:
    """The union of the values' sites, each once."""
    return tuple(dict.fromkeys(site for value in values for site in sites_of(value)))
