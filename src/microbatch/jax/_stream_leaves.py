"""The leaves of a stream: from what an iterable or a checkpoint has to arrays on a device, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from microbatch._errors import MicrobatchError


def refuse_tracers(where: str, leaves: Sequence[Any]) -> None:
    """A stream is read by Python, microbatch by microbatch; no trace can do that."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise MicrobatchError(
            f"{where}: called inside a transformation (jit, grad, vmap, scan), where a stream cannot be read.\n"
            "Transform the function instead, accumulate(jax.value_and_grad(fun), ...), or use microbatch on arrays."
        )


def as_array(leaf: Any) -> Any:
    """A leaf of a microbatch as an array that nobody else writes into; None where it is no array."""
    if isinstance(leaf, jax.core.Tracer):
        refuse_tracers("accumulate", [leaf])
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        return jnp.asarray(leaf)
    if not hasattr(leaf, "__array__") and not hasattr(leaf, "__dlpack__"):
        return None
    try:
        # A copy: the iterable may fill the same array again, and on a CPU the device would see that.
        array = np.array(np.asarray(leaf))
    except (TypeError, RuntimeError):
        # What NumPy has no dtype for, or cannot reach on its device.
        return jnp.array(jax.dlpack.from_dlpack(leaf))
    return None if array.dtype.kind in "OSUMm" else array


def on_device(leaf: Any) -> jax.Array:
    return leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)


def single_device(arrays: Sequence[jax.Array]) -> Any:
    """The device that the arrays are committed to, if it is one; None where they may be moved, or lie on several."""
    devices = {_whole(x.sharding) for x in arrays if x.committed}
    if len(devices) != 1:
        return None
    (sharding,) = devices
    return sharding if len(sharding.device_set) == 1 else None


def _whole(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The same devices for an array of any rank, which is not cut."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def to_host(leaf: Any) -> Any:
    """A leaf as NumPy has it; a random key as its numbers."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def like_saved(saved: np.ndarray, leaf: jax.Array) -> jax.Array:
    """What `to_host` gave, where `leaf` is."""
    array = jnp.array(saved)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return jax.device_put(array, leaf.sharding if leaf.committed else None)


def with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """The leaves with their paths in Python's notation."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]
