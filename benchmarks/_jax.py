"""JAX functions as contenders: compiled once, their memory as the compiler states it, their error against float64."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._harness import Contender


def contenders(
    functions: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...],
    exact: Any = None,
    compile_rounds: int = 1,
) -> tuple[Contender, ...]:
    """One contender per function of `args`.

    Args:
      functions: by name.
      args: the arguments of all of them.
      exact: the right result in float64, a tree whose leaves are compared one by one; None skips the errors.
      compile_rounds: how often each is compiled, for a median.
    """
    compiled = compiled_in_turn(functions, args, compile_rounds)
    return tuple(_contender(name, *found, args, exact) for name, found in compiled.items())


def in_float64(fun: Callable[..., Any], *args: Any) -> Any:
    """`fun` on float64 arguments."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            args,
        )
        return jax.block_until_ready(jax.jit(fun)(*wide))


def _contender(
    name: str, compiled: Any, compile_seconds: float, args: Any, exact: Any
) -> Contender:
    out = jax.block_until_ready(compiled(*args))
    return Contender(
        name,
        run=lambda: jax.block_until_ready(compiled(*args)),
        memory_bytes=compiled.memory_analysis().temp_size_in_bytes,
        compile_seconds=compile_seconds,
        error=None if exact is None else relative_error(out, exact),
    )


def compiled_in_turn(
    functions: Mapping[str, Callable[..., Any]], args: Any, rounds: int
) -> dict[str, tuple[Any, float]]:
    """Each function's compiled program, and the median time to trace and compile it; they take turns."""
    programs: dict[str, Any] = {}
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, fun in functions.items():
            jax.clear_caches()
            start = time.perf_counter()
            # A fresh function each time: JAX remembers those that it has traced.
            programs[name] = jax.jit(lambda *a, fun=fun: fun(*a)).lower(*args).compile()
            taken[name].append(time.perf_counter() - start)
    return {name: (programs[name], statistics.median(taken[name])) for name in functions}


def relative_error(got: Any, exact: Any) -> float:
    """The largest error of a leaf, relative to that leaf's largest entry."""
    with jax.enable_x64(True):
        errors = jax.tree.map(
            lambda a, b: (
                jnp.abs(jnp.asarray(a, jnp.float64) - b).max() / (jnp.abs(b).max() + 1e-300)
            ),
            got,
            exact,
        )
        return float(max(jax.tree.leaves(errors)))
