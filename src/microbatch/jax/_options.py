"""What `microbatch` was asked for, and what can be refused of it without a call."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from microbatch._accumulation import Accumulator, Carry
from microbatch._checks import check_choice, check_declared, check_function, check_size
from microbatch._errors import MicrobatchError, MicrobatchSizeError
from microbatch._splitting import Auto, Order, Remainder, Split
from microbatch.jax._accumulators import checked_dtype
from microbatch.jax._devices import Reduce
from microbatch.jax._differentiate import Differentiate
from microbatch.jax._outputs import accumulators_of


@dataclass(frozen=True)
class Options:
    """What `microbatch` was asked for, checked; see there."""

    where: str
    signature: inspect.Signature | None
    argnums: tuple[int, ...]
    argnames: tuple[str, ...]
    in_axes: Any
    microbatch_size: int | Auto | None
    num_microbatches: int | None
    num_real_microbatches: Any
    accumulator: Any
    order: Order
    remainder: Remainder
    weight_fn: Callable[..., Any] | None
    accumulator_dtype: Any
    key_argnums: tuple[int, ...]
    differentiate: Differentiate
    checkpoint_policy: Callable[..., Any] | None
    mesh: Any = None
    batch_spec: Any = None
    reduce: Reduce = "once"
    memory_budget: int | str | None = None


def checked(options: Options, *, declared: bool = True) -> Options:
    """Refuses what can be refused without a call; `declared`: the batch arguments are declared on `fun` itself."""
    where = options.where
    for name in ("weight_fn", "checkpoint_policy"):
        if getattr(options, name) is not None:
            check_function(where, name, getattr(options, name))
    if options.microbatch_size is not None and options.num_microbatches is not None:
        raise MicrobatchSizeError(
            f"{where}: microbatch_size and num_microbatches are both given.\nGive one of them."
        )
    sizes: dict[str, Any] = {}
    for name in ("microbatch_size", "num_microbatches"):
        value = getattr(options, name)
        is_auto = name == "microbatch_size" and isinstance(value, str) and value == "auto"
        sizes[name] = value if value is None or is_auto else check_size(where, name, value)
    if declared:
        check_declared(where, options.signature, options.argnums, options.argnames)
    check_choice(where, "order", options.order, ("strided", "contiguous"))
    check_choice(where, "remainder", options.remainder, ("error", "allow"))
    modes = ("auto", "in_forward", "recompute", "store")
    check_choice(where, "differentiate", options.differentiate, modes)
    check_choice(where, "reduce", options.reduce, ("once", "each"))
    accumulators_of(where, options.accumulator)
    dtype = checked_dtype(where, options.accumulator_dtype)
    if options.checkpoint_policy is not None and options.differentiate == "in_forward":
        raise MicrobatchError(
            f'{where}: differentiate="in_forward" keeps no residuals, and checkpoint_policy says which to keep.\n'
            'Leave checkpoint_policy out, or use differentiate="auto".'
        )
    return dataclasses.replace(options, **sizes, accumulator_dtype=dtype)


def carries_of(options: Options) -> list[Carry]:
    """The states that are handed on, in the order of the accumulator's tree."""
    kinds = accumulators_of(options.where, options.accumulator)
    return [kind for kind in kinds if isinstance(kind, Carry)]


def real_count(where: str, value: Any) -> Any:
    """`num_real_microbatches` as an int or a traced int32 scalar."""
    if value is None:
        return None
    if hasattr(value, "dtype"):
        is_integer = jnp.issubdtype(value.dtype, jnp.integer)
    else:
        is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_integer or np.shape(value) != ():
        raise MicrobatchSizeError(
            f"{where}: num_real_microbatches={value!r} is not an integer.\n"
            "Use an int, or a traced integer scalar."
        )
    if isinstance(value, jax.Array):
        # A count past int32 is more than all, and stays so.
        widest, own = jnp.iinfo(jnp.int32), jnp.iinfo(value.dtype)
        return jnp.clip(value, max(own.min, widest.min), min(own.max, widest.max)).astype(jnp.int32)
    return int(value)


def is_whole(options: Options, split: Split, count: Any) -> bool:
    """Whether the only microbatch is the batch, so that `fun` itself is the answer."""
    kinds = accumulators_of(options.where, options.accumulator)
    custom = any(isinstance(kind, Accumulator) for kind in kinds)
    runs = count is None or (isinstance(count, int) and count >= 1)
    return split.num_microbatches == 1 and runs and not custom and options.weight_fn is None


def memory_key(options: Options) -> tuple[Any, ...]:
    """Everything about the options that changes memory."""
    names = (
        "argnums argnames in_axes accumulator order accumulator_dtype differentiate "
        "checkpoint_policy mesh batch_spec reduce"
    )
    return tuple(repr(getattr(options, name)) for name in names.split())
