"""What the rules of one run share: the microbatch's size, the choices made for it, and a record of what happened."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from microbatch.jax._factored import _values as values

Site = tuple
"""Where a factored value was made: the positions of its equation and of the calls around it."""

FLOPS_PER_BYTE = 8.0
"""Multiply-adds that cost as much as moving one byte, a compromise between a CPU's caches and an accelerator."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that was done to the values made at `sites`."""

    sites: tuple
    statistic: str  # "made", "norm", "sum", "entries"
    how: str  # "factored", "Gram", "dense"
    primitive: str
    shape: tuple[int, ...]
    flops: float
    bytes: float
    factor_bytes: float = 0.0


@dataclasses.dataclass
class Recorder:
    """Collects events and the names that a program gives to its values."""

    events: list[Event] = dataclasses.field(default_factory=list)
    labels: dict[Site, str] = dataclasses.field(default_factory=dict)
    named: dict[str, tuple] = dataclasses.field(default_factory=dict)


class ForcedDense(Exception):
    """Entries were asked of a value in a place that wants to know before they are made; `slot` is that of a carry."""

    def __init__(self, slot: tuple | None = None):
        super().__init__(slot)
        self.slot = slot


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything a rule may look at besides its equation and values.

    batch_size: examples in the microbatch. unused: sites whose factors would be of no use. as_arrays: sites whose
    values are cheaper as arrays.
    strict: refuse to make entries (raise `ForcedDense`) instead of making them. repeats: steps of the loops around. dry: only shapes and the record matter, so zeros stand for costly results.
    """

    batch_size: int
    vmap_fn: Callable
    norms: str
    recorder: Recorder
    unused: frozenset = frozenset()
    as_arrays: frozenset = frozenset()
    path: tuple = ()
    primitive: str = ""
    strict: bool = False
    repeats: int = 1
    dry: bool = False

    def at(self, index: int, primitive: str) -> "Context":
        """The same context at an equation."""
        return dataclasses.replace(self, path=(*self.path, index), primitive=primitive)

    def note(self, value, statistic: str, how: str, *, flops=0.0, entries=0.0, factors=0.0):
        """Records one event; `entries` are those of an array written or read for it, `factors` those of its factors."""
        size = jnp.dtype(value.dtype).itemsize
        self.recorder.events.append(
            Event(
                values.sites_of(value),
                statistic,
                how,
                self.primitive,
                tuple(value.shape),
                flops * self.repeats,
                entries * size * self.repeats,
                factors * size * self.repeats,
            )
        )

    def label(self, name: str, value):
        """Records the name that the program gives to a value."""
        for site in values.sites_of(value):
            self.recorder.labels.setdefault(site, name)
        self.recorder.named[name] = (
            type(value).__name__,
            tuple(value.shape),
            values.sites_of(value),
        )


def working_dtype(dtype) -> Any:
    """At least float32: the dtype in which statistics are accumulated."""
    return jnp.promote_types(dtype, jnp.float32)


def preferred(dtype) -> Any:
    """The accumulator's dtype of a matrix product whose result is rounded to `dtype`."""
    return working_dtype(dtype) if jax.dtypes.issubdtype(dtype, jnp.floating) else dtype
