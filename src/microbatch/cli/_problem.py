"""What `plan` and `verify` are asked about on the command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A function, the arguments of one call with the whole batch, and how its pieces would be combined.

    A target of ``microbatch plan`` and ``microbatch verify`` is a function without parameters that returns one::

        def problem():
            return Problem(jax.value_and_grad(loss), (params, x, y), argnums=(1, 2), accumulator=MEAN)

    Attributes:
      fun: called as ``fun(*args)``.
      args: one call's arguments, the batch arguments with all their rows ``[B, ...]``. For `plan` shapes suffice
        (`jax.ShapeDtypeStruct`).
      argnums: which of `args` are batch arguments.
      accumulator: how outputs combine: one kind, or a tree of kinds that is a prefix of the output.
      options: further keywords of `microbatch`, such as ``{"in_axes": 1}``.
      framework: ``"jax"`` or ``"torch"``; by default, that of the arrays in `args`.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: int | tuple[int, ...]
    accumulator: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    framework: str | None = None
