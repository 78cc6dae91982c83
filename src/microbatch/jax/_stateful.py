"""Functions that change what they are given: under a trace such a change would be lost, or fail far from its cause."""

from collections.abc import Callable
from typing import Any

import jax

from microbatch._errors import AccumulatorError, MicrobatchError

_RECIPE = (
    "Split the module outside, graphdef, params, state = nnx.split(model, nnx.Param, ...), merge it inside fun, and "
    "return nnx.state(model, nnx.Not(nnx.Param)) as an output with the accumulator Carry(argnum of state); "
    "then nnx.update(model, new_state)."
)


def evaluated(where: str, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """``fun(*args, **kwargs)`` under a trace; refuses a module of flax.nnx whose state changes on the way.

    `args` were made from the caller's by flattening, so that a change of theirs would reach nobody.
    """
    modules = [
        (path, module, jax.tree.leaves(module))
        for path, module in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=_is_module)
        if _is_module(module)
    ]
    try:
        out = fun(*args, **kwargs)
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(f"{where}: fun changes a module that it closes over.\n{_RECIPE}")
        raise
    for path, module, before in modules:
        after = jax.tree.leaves(module)
        if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
            raise MicrobatchError(
                f"{where}: fun changes the state of args{jax.tree_util.keystr(path[1:])}, a {type(module).__name__} (batch "
                f"statistics, a counter of random numbers), and the change would be lost.\n{_RECIPE}"
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise AccumulatorError(
                f"{where}: output{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, which cannot be accumulated.\n"
                "Return arrays or numbers."
            )
    return out


def _is_module(value: Any) -> bool:
    return any(
        cls.__module__.startswith("flax.nnx") and cls.__name__ in ("Module", "Pytree")
        for cls in type(value).__mro__
    )
