"""Ready `transform_fn`s and statistics for `micro_grad`: clipping, moments, and the gradient noise scale."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from microbatch._checks import check_norm
from microbatch._noise import NoiseScale, check_groups, unbiased

jax.tree_util.register_dataclass(
    NoiseScale, data_fields=["value", "squared_norm", "variance"], meta_fields=["defined"]
)


def squared_norm(tree: Any) -> jax.Array:
    """The sum of squares of all entries of a tree, in float32 or wider: ``[]``.

    Equivalent to ``sum(jnp.sum(abs(leaf) ** 2) for leaf in jax.tree.leaves(tree))``.

    >>> float(squared_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}))
    25.0
    """
    wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in _leaves(tree)]
    parts = [part for leaf in wide for part in _real_parts(leaf)]
    return sum((jnp.sum(jnp.square(part)) for part in parts), start=jnp.zeros((), jnp.float32))


def clip_by_global_norm(max_norm: float) -> Callable[[Any], Any]:
    """A `transform_fn` that scales one example's gradient to a norm of at most `max_norm`.

    Equivalent to::

        def transform_fn(gradient):
            norm = sqrt(sum of squares of all entries of all leaves)
            return tree.map(lambda leaf: leaf * min(1, max_norm / norm), gradient)

    Args:
      max_norm: the bound, in the gradient's unit; a Python number, not negative.

    Returns:
      A function of a gradient tree; leaves keep shapes and dtypes, the norm is taken in float32 or wider.

    Raises:
      MicrobatchError: `max_norm` is negative or nan.

    ======================  ====================================================
    gradient                result
    ======================  ====================================================
    norm 0                  unchanged (zeros), never 0 / 0
    norm <= max_norm        unchanged, bit for bit up to a factor of 1
    max_norm = 0            zeros
    max_norm = inf          unchanged
    nan or infinite entry   nan, as for a whole batch; skip such rows by a weight
    its square overflows    zeros: a norm above 1.8e19 in float32
    ======================  ====================================================

    Source: Abadi et al., Deep Learning with Differential Privacy, arXiv 1607.00133, algorithm 1.

    >>> clipped = clip_by_global_norm(1.0)({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)})
    >>> [round(float(x), 3) for x in (*clipped["w"], clipped["b"])]
    [0.6, 0.0, 0.8]
    """
    bound = check_norm("clip_by_global_norm", "max_norm", max_norm)

    def transform_fn(gradient: Any) -> Any:
        if math.isinf(bound):
            return gradient
        squared = squared_norm(gradient)
        exceeds = jnp.sqrt(squared) > bound
        # No root of a norm of 0 on the way to the scale: its derivative would be nan.
        scale = jnp.where(exceeds, bound / jnp.sqrt(jnp.where(exceeds, squared, 1)), 1)
        scaled = lambda leaf: (
            leaf * jnp.astype(scale, leaf.dtype) if hasattr(leaf, "dtype") else leaf
        )
        return jax.tree.map(scaled, gradient)

    return transform_fn


def per_example_moments() -> Callable[[Any], tuple[Any, Any]]:
    """A `transform_fn` whose mean over the examples is the first two moments ``(E[g], E[g**2])``, entry by entry.

    Equivalent to ``lambda gradient: (gradient, tree.map(square, gradient))``. Use it with ``accumulator=MEAN``;
    ``E[g**2] - E[g]**2`` then is the variance of the examples' gradients.

    Returns:
      A function from a gradient tree to two trees of its shapes and dtypes.

    Source: Dangel et al., BackPACK, arXiv 1912.10985 (second moment and variance).

    >>> mean, square = per_example_moments()({"w": jnp.array([3.0, -1.0])})
    >>> mean["w"].tolist(), square["w"].tolist()
    ([3.0, -1.0], [9.0, 1.0])
    """
    return lambda gradient: (gradient, jax.tree.map(jnp.square, gradient))


def noise_scale(mean_gradient: Any, squared_norms: jax.Array, group_size: int = 1) -> NoiseScale:
    """The simple gradient noise scale: the batch size beyond which more examples hardly improve a step.

    Equivalent to, for ``n`` groups of ``b`` examples and ``B = n * b``::

        big, small = squared_norm(mean_gradient), mean(squared_norms)
        squared = (B * big - b * small) / (B - b)
        variance = (small - big) / (1 / b - 1 / B)
        value = variance / squared

    Args:
      mean_gradient: the mean gradient of all examples, a tree.
      squared_norms: ``[n]``, the squared norms of the mean gradient of each group: of each example
        (``metrics_fn=squared_norm``) or of each microbatch.
      group_size: examples in a group, 1 or the microbatch size.

    Returns:
      A `NoiseScale`, in examples.

    Raises:
      MicrobatchError: `squared_norms` is not one row of numbers.
      MicrobatchSizeError: `group_size` is not a positive integer.

    ==================================  ===============================================
    groups                              value
    ==================================  ===============================================
    one                                 nan and ``defined=False``, never a division by 0
    all gradients equal                 0
    estimated squared norm not above 0  infinite
    a nan gradient                      nan
    ==================================  ===============================================

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162, appendix A.1.

    Two examples with gradients 1 and 3: their variance is 2, and |g|**2 is 2**2 - 2 / 2 = 3.

    >>> estimate = noise_scale(jnp.array([2.0]), jnp.array([1.0, 9.0]))
    >>> float(estimate.variance), float(estimate.squared_norm), round(float(estimate.value), 3)
    (2.0, 3.0, 0.667)
    >>> print(noise_scale(jnp.array([2.0]), jnp.array([4.0])))
    undefined: one group of examples says nothing about noise; use two or more microbatches
    """
    squared_norms = jnp.asarray(squared_norms)
    group_size = check_groups(squared_norms, group_size)
    groups = squared_norms.shape[0]
    if groups == 1:
        nan = jnp.full((), jnp.nan, squared_norms.dtype)
        return NoiseScale(nan, nan, nan, defined=False)
    small, big = jnp.mean(squared_norms), squared_norm(mean_gradient)
    squared, variance = unbiased(big, small, group_size, groups)
    hidden = squared <= 0
    value = jnp.where(hidden, jnp.inf, variance / jnp.where(hidden, 1, squared))
    return NoiseScale(value, squared, variance, defined=True)


def _real_parts(leaf: jax.Array) -> list[jax.Array]:
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def _leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
