"""JAX functions as contenders: compiled once, their memory as the compiler states it, their error against float64."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._harness import Contender


def contenders(
    functions: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], exact: Any = None
) -> tuple[Contender, ...]:
    """One contender per function of `args`.

    Args:
      functions: by name.
      args: the arguments of all of them.
      exact: the right result in float64, a tree whose leaves are compared one by one; None skips the errors.
    """
    return tuple(_contender(name, fun, args, exact) for name, fun in functions.items())


def in_float64(fun: Callable[..., Any], *args: Any) -> Any:
    """`fun` on float64 arguments."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            args,
        )
        return jax.block_until_ready(jax.jit(fun)(*wide))


def _contender(name: str, fun: Callable[..., Any], args: Any, exact: Any) -> Contender:
    compiled, compile_seconds = _compiled(fun, args)
    out = jax.block_until_ready(compiled(*args))
    return Contender(
        name,
        run=lambda: jax.block_until_ready(compiled(*args)),
        memory_bytes=compiled.memory_analysis().temp_size_in_bytes,
        compile_seconds=compile_seconds,
        error=None if exact is None else _error(out, exact),
    )


def _compiled(fun: Callable[..., Any], args: Any, repeats: int = 3) -> tuple[Any, float]:
    """The compiled program, and the median time to trace and compile it."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        # A fresh function each time: JAX remembers those that it has traced.
        compiled = jax.jit(lambda *a: fun(*a)).lower(*args).compile()
        taken.append(time.perf_counter() - start)
        jax.clear_caches()
    return compiled, statistics.median(taken)


def _error(got: Any, exact: Any) -> float:
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
