"""What the compiler says that a program takes; nothing is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from microbatch._errors import PlanError
from microbatch.jax._binding import hoisted, is_array
from microbatch.jax._scratch import fused_bytes, scratch_bytes


@dataclass(frozen=True)
class Program:
    """A compiled program, and what it would be called with.

    Attributes:
      call: runs it once and waits for the result.
      total_bytes: temporaries, arguments and outputs, less what is shared between the two, on one device. Arrays that
        the function closes over count as arguments.
      scratch_bytes: what kernels may take beside that, which no compiler says: an estimate, 0 but on a CPU.
    """

    call: Callable[[], Any]
    total_bytes: int
    scratch_bytes: int


def compile_program(where: str, fun: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
    """Compiles ``fun(*args, **kwargs)`` for the arguments' shapes (they may be `jax.ShapeDtypeStruct`).

    Leaves that are no arrays are part of the program. A `fun` that is jitted already is compiled with its own options
    (donated arguments, static ones).
    """
    if hasattr(fun, "lower"):
        described = as_shapes(args, kwargs)
        traced = fun.trace(*described[0], **described[1])
        compiled, consts = traced.lower().compile(), traced.jaxpr.consts
        # A donated argument must not be the caller's.
        copied = lambda: jax.tree.map(lambda x: jnp.copy(x) if is_array(x) else x, (args, kwargs))
        call = lambda: (lambda a, k: jax.block_until_ready(fun(*a, **k)))(*copied())
        closed_over = sum(x.nbytes for x in consts)
        return _program(where, compiled, traced.jaxpr.jaxpr, call, closed_over)
    arrays = _arrays((args, kwargs))
    specs = [spec_of(x) for x in arrays]
    # Closed-over arrays become arguments: as constants the compiler would not count them, and inside an outer trace
    # they may be tracers, which cannot be compiled.
    program, consts, _, jaxpr = hoisted(_over_arrays(fun, args, kwargs), specs)
    compiled = jax.jit(program).lower([spec_of(x) for x in consts], specs).compile()
    call = lambda: jax.block_until_ready(compiled(consts, arrays))
    return _program(where, compiled, jaxpr, call, 0)


def output_bytes(fun: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes of what ``fun(*args, **kwargs)`` returns, from shapes."""
    return tree_bytes(output_types(fun, args, kwargs))


def output_types(fun: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    described = as_shapes(args, kwargs)
    return jax.eval_shape(_over_arrays(fun, *described), _arrays(described))


def as_shapes(args: Any, kwargs: dict[str, Any]) -> Any:
    """``(args, kwargs)`` with shapes in place of arrays."""
    return jax.tree.map(lambda x: spec_of(x) if is_traced(x) else x, (tuple(args), kwargs))


def tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))


def is_traced(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def spec_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and, where it is fixed, sharding."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, jax.core.Tracer):
        kind = jax.typeof(x)
        sharding = None if kind.sharding.mesh.empty else kind.sharding
        return jax.ShapeDtypeStruct(
            kind.shape, kind.dtype, sharding=sharding, weak_type=kind.weak_type
        )
    if isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=x.sharding if x.committed else None,
            weak_type=getattr(x, "weak_type", False),  # arrays of keys have none
        )
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))


def default_device() -> jax.Device:
    """Where a program runs whose arguments may be anywhere."""
    default = jax.config.jax_default_device  # pyrefly: ignore[missing-attribute]
    return default if isinstance(default, jax.Device) else jax.local_devices()[0]


def _program(
    where: str, compiled: Any, jaxpr: Jaxpr, call: Callable[[], Any], extra_bytes: int
) -> Program:
    stats = compiled.memory_analysis()
    if stats is None:
        raise PlanError(
            f"{where}: this backend does not say how much memory a compiled program takes.\n"
            "Give microbatch_size a number."
        )
    total = (
        stats.temp_size_in_bytes
        + stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.generated_code_size_in_bytes
        + extra_bytes
    )
    on_cpu = default_device().platform == "cpu"
    scratch = scratch_bytes(jaxpr) + fused_bytes(compiled.as_text()) if on_cpu else 0
    return Program(call, total, scratch)


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_traced(leaf)]


def _over_arrays(
    fun: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Callable[[Sequence[Any]], Any]:
    """`fun` of its array leaves alone, as a list; the others stay as they are."""
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs))

    def flat(arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        filled = [next(given) if is_traced(leaf) else leaf for leaf in leaves]
        args, kwargs = treedef.unflatten(filled)
        return fun(*args, **kwargs)

    return flat
