"""The three fronts behind one small adapter each, so that a law is written once."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Front:
    """One front and its arrays.

    Attributes:
      name: of the front.
      module: with `microbatch` and the others.
      xp: the framework's array functions (``amax``, ``einsum``, …), the same names in all three.
      axes: the keyword that names the batch axes.
      from_numpy: an array of the framework; float64 becomes float32 where that is its habit.
      to_numpy: its inverse.
      bfloat16: the name of that dtype in the framework.
      value_and_grad: of a scalar function's first argument; None where nothing is differentiated.
    """

    name: str
    module: ModuleType
    xp: Any
    axes: str
    from_numpy: Callable[[np.ndarray], Any]
    to_numpy: Callable[[Any], np.ndarray]
    bfloat16: Any
    value_and_grad: Callable[[Any], Any] | None = None

    def arrays(self, tree: Any) -> Any:
        """`tree` with the framework's arrays in place of NumPy's."""
        is_array = lambda leaf: isinstance(leaf, np.ndarray | np.generic)
        return mapped(lambda leaf: self.from_numpy(leaf) if is_array(leaf) else leaf, tree)

    def results(self, tree: Any) -> Any:
        """`tree` with NumPy's arrays in place of the framework's."""
        return mapped(lambda leaf: leaf if leaf is None else self.to_numpy(leaf), tree)

    def microbatch(
        self, fun: Any, argnums: Any, size: Any, accumulator: Any = None, **options: Any
    ) -> Any:
        """The front's `microbatch`; `in_axes` goes by its name there."""
        if "in_axes" in options:
            options[self.axes] = options.pop("in_axes")
        kinds = () if accumulator is None else (accumulator,)
        return self.module.microbatch(fun, argnums, size, *kinds, **options)


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` of dicts, lists and tuples with ``fn(leaf)`` in place of each leaf."""
    if isinstance(tree, dict):
        return {key: mapped(fn, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(mapped(fn, value) for value in tree)
    return fn(tree)


def _narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _numpy_front() -> Front:
    import ml_dtypes

    module = importlib.import_module("microbatch.numpy")
    return Front("numpy", module, np, "in_axes", _narrow, np.asarray, ml_dtypes.bfloat16)


def _jax_front() -> Front:
    import jax
    import jax.numpy as jnp

    return Front(
        "jax",
        importlib.import_module("microbatch.jax"),
        jnp,
        "in_axes",
        lambda array: jnp.asarray(_narrow(array)),
        np.asarray,
        jnp.bfloat16,
        jax.value_and_grad,
    )


def _torch_front() -> Front:
    import ml_dtypes
    import torch

    def to_numpy(value: Any) -> np.ndarray:
        if not isinstance(value, torch.Tensor):
            return np.asarray(value)
        if value.dtype == torch.bfloat16:
            return value.detach().float().numpy().astype(ml_dtypes.bfloat16)
        return value.detach().numpy()

    def value_and_grad(fun: Any) -> Any:
        def with_value(*args: Any) -> Any:
            gradient, value = torch.func.grad_and_value(fun)(*args)
            return value, gradient

        return with_value

    return Front(
        "torch",
        importlib.import_module("microbatch.torch"),
        torch,
        "in_dims",
        lambda array: torch.as_tensor(np.array(_narrow(array))),
        to_numpy,
        torch.bfloat16,
        value_and_grad,
    )


FRONTS: dict[str, Callable[[], Front]] = {
    "numpy": _numpy_front,
    "jax": _jax_front,
    "torch": _torch_front,
}
