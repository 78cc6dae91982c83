"""Values that `vmap` maps together: all of them, or none.

Where one input of a function with a derivative rule of its own is mapped, JAX may find an output that does not depend on
it not mapped, and the same output of the rule, whose tangent does, mapped. Once the function is in a traced
program (under `jit` or `checkpoint`), the two would be taken for one another, and derivatives come out wrong.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from microbatch.jax._linear import mapped_axes, vmap_options


def together(values: Sequence[Any], witnesses: Sequence[Any]) -> list[Any]:
    """`values`, which are mapped over axis 0 wherever one of them or of `witnesses` is mapped."""
    return together_p.bind(*values, *witnesses, count=len(values)) if values else []


together_p = Primitive("microbatch_together")
together_p.multiple_results = True


def _evaluate(*args: Any, count: int) -> list[Any]:
    return list(args[:count])


def _jvp(primals: Any, tangents: Any, *, count: int) -> tuple[list[Any], list[Any]]:
    out = together_p.bind(*primals, count=count)
    return out, list(tangents[:count])


def _batch(axis_data: Any, args: Any, dims: Any, *, count: int) -> tuple[list[Any], list[Any]]:
    axes = mapped_axes(dims)
    if all(axis is None for axis in axes):
        return together_p.bind(*args, count=count), [dims[0]] * count
    options = vmap_options(axis_data)
    out = jax.vmap(lambda values: values, (axes[:count],), 0, **options)(list(args[:count]))
    return together_p.bind(*out, *args[count:], count=count), [0] * count


together_p.def_impl(_evaluate)
together_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
ad.primitive_jvps[together_p] = _jvp
batching.fancy_primitive_batchers[together_p] = _batch
mlir.register_lowering(together_p, mlir.lower_fun(_evaluate, multiple_results=True))
