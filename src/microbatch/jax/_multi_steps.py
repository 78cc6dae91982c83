"""An optax optimizer for loops that must call it once per microbatch."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from microbatch._checks import check_size
from microbatch._errors import MicrobatchError
from microbatch.jax._accumulators import SUM, carry_dtype

if TYPE_CHECKING:
    import optax

_WHERE = "weighted_multi_steps"


class WeightedMultiStepsState(NamedTuple):
    """The state of `weighted_multi_steps`.

    Attributes:
      mini_step: calls since the last optimizer step; 0 right after one.
      gradient_step: optimizer steps so far.
      total: the weight since the last optimizer step, relative to `first`.
      first: the first weight of them that is not zero.
      gradients: Σ wᵢgᵢ, in float32 for lower precisions.
      inner_state: the wrapped optimizer's own state.
    """

    mini_step: Any
    gradient_step: Any
    total: Any
    first: Any
    gradients: Any
    inner_state: Any


def weighted_multi_steps(
    optimizer: "optax.GradientTransformation", every: int
) -> "optax.GradientTransformationExtraArgs":
    """Makes `optimizer` step once in `every` calls, along the weighted mean of their gradients.

    The transformation returned is equivalent to::

        def update(gradients, state, params, *, weight=1.0, **extra):
            calls.append((weight, gradients))
            if len(calls) < every:
                return zeros, state
            mean = sum(w * g for w, g in calls) / sum(w for w, _ in calls)
            calls.clear()
            return optimizer.update(mean, state, params, **extra)

    so that masked losses of microbatches with unequal numbers of valid tokens add up to the batch's. Where the loop is
    yours, `accumulate` or `microbatch` do the same without a state to keep, and without calls that give zeros.

    Args:
      optimizer: any optax transformation. It is called at optimizer steps only: its schedules, counts and averages advance
        once per `every` calls.
      every: calls per optimizer step.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Its ``update`` takes the keyword `weight`, one number in any unit
      (rows, valid tokens; it may be traced), and passes other keywords of the last call on to `optimizer`. Between
      optimizer steps the updates are zeros. ``state.mini_step == 0`` tells, after a call, that the optimizer has stepped:
      that is when an average of the parameters advances. The state is a tree of arrays, for `jax.jit`, `jax.lax.scan` and
      checkpoints.

    Raises:
      MicrobatchSizeError: `every` is not a positive integer.
      MicrobatchError: a weight that is not one number; integer gradients.
      ImportError: optax is not installed.

    ==================  ===================================================
    calls               the optimizer sees
    ==================  ===================================================
    ``every=1``         the gradients themselves
    a weight of 0       nothing of that call, NaN included
    all weights 0       zeros
    bfloat16 gradients  their mean, accumulated in float32 and rounded once
    ==================  ===================================================

    >>> import optax
    >>> optimizer = weighted_multi_steps(optax.sgd(1.0), every=2)
    >>> params = jnp.array(0.0)
    >>> state = optimizer.init(params)
    >>> for gradient, tokens in [(jnp.array(4.0), 1), (jnp.array(8.0), 3)]:
    ...     updates, state = optimizer.update(gradient, state, params, weight=tokens)
    ...     print(float(updates), int(state.gradient_step))
    0.0 0
    -7.0 1
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"{_WHERE} needs optax.\nInstall it with: pip install optax") from error
    every = check_size(_WHERE, "every", every)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> WeightedMultiStepsState:
        zero = jnp.zeros((), jnp.result_type(float))
        count = jnp.zeros((), jnp.int32)
        gradients = jax.tree.map(lambda p: jnp.zeros_like(p, _wide(p)), params)
        return WeightedMultiStepsState(count, count, zero, zero, gradients, inner.init(params))

    def update(
        updates: Any,
        state: WeightedMultiStepsState,
        params: Any = None,
        *,
        weight: Any = 1.0,
        **extra: Any,
    ) -> tuple[Any, WeightedMultiStepsState]:
        _check(updates, weight)
        weight = jnp.asarray(weight, state.total.dtype)
        first = jnp.where(state.total == 0, weight, state.first)
        # Relative to the first weight, so that a single call is that call's gradients, bit for bit.
        share = weight / jnp.where(first == 0, 1, first)
        total = state.total + share

        def add(before: Any, g: Any) -> Any:
            # By selection: a product with zero would let a NaN through. The first is written, not added to zeros.
            more = share * jnp.where(weight == 0, 0, g).astype(before.dtype)
            return jnp.where(state.total == 0, more, before + more)

        def mean_of(gradients: Any, like: Any) -> Any:
            mean = jnp.where(total == 0, 0, gradients / jnp.where(total == 0, 1, total))
            return mean.astype(jnp.result_type(like))

        gradients = jax.tree.map(add, state.gradients, updates)
        mean = jax.tree.map(mean_of, gradients, updates)

        def step(mean: Any, inner_state: Any) -> tuple[Any, Any]:
            return inner.update(mean, inner_state, params, **extra)

        def rest(mean: Any, inner_state: Any) -> tuple[Any, Any]:
            types, _ = jax.eval_shape(step, mean, inner_state)
            return jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), types), inner_state

        steps = state.mini_step == every - 1
        out, inner_state = lax.cond(steps, step, rest, mean, state.inner_state)
        cleared = lambda x: jnp.where(steps, 0, x).astype(x.dtype)
        return out, WeightedMultiStepsState(
            cleared(state.mini_step + 1),
            state.gradient_step + steps,
            cleared(total),
            cleared(first),
            jax.tree.map(cleared, gradients),
            inner_state,
        )

    # Its protocol asks for an update of any state.
    return optax.GradientTransformationExtraArgs(init, update)  # pyrefly: ignore[bad-argument-type]


def _wide(param: Any) -> Any:
    dtype = jnp.result_type(param)
    return carry_dtype(SUM, dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def _check(updates: Any, weight: Any) -> None:
    if jnp.shape(weight) != () or not jnp.isrealobj(weight):
        raise MicrobatchError(
            f"{_WHERE}: weight has shape {jnp.shape(weight)}.\n"
            "Give one real number per call, for example weight=mask.sum()."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise MicrobatchError(
                f"{_WHERE}: gradients{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}.\n"
                "Give floating-point gradients; wrap the optimizer in optax.masked for other leaves."
            )
