"""Ready `transform_fn`s and statistics for `micro_grad`: clipping, moments, and the gradient noise scale."""

import math
from collections.abc import Callable
from typing import Any

import torch

from microbatch._checks import check_norm
from microbatch._noise import NoiseScale, check_groups, unbiased
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._tensors import carry_dtype

MANY = 2**17


def squared_norm(tree: Any) -> torch.Tensor:
    """The sum of squares of all entries of a tree of tensors, in float32 or wider: ``[]``.

    >>> squared_norm({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}).item()
    25.0
    """
    squares = [_sum_of_squares(leaf) for _, leaf in leaves_with_paths(tree)]
    return torch.stack(squares).sum() if squares else torch.zeros(())


def _sum_of_squares(leaf: torch.Tensor) -> torch.Tensor:
    wide = leaf.to(carry_dtype(leaf.dtype, None))
    entries = (torch.view_as_real(wide) if wide.is_complex() else wide).reshape(-1)
    # Few squares cost less than a function of one's own costs under `torch.func`.
    return _SumOfSquares.apply(entries) if len(entries) >= MANY else entries.square().sum()


class _SumOfSquares(torch.autograd.Function):
    """``x.square().sum()`` of a vector, without an array of squares.

    In short pieces: the norm of a long vector loses digits on a CPU.
    """

    PIECE = 128
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        whole = len(x) - len(x) % _SumOfSquares.PIECE
        pieces = x[:whole].view(-1, _SumOfSquares.PIECE)
        norm = torch.linalg.vector_norm
        return norm(pieces, dim=1).square().sum() + norm(x[whole:]).square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
        (x,), (cotangent,) = ctx.saved_tensors, cotangents
        return 2 * cotangent * x

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        (x,), (tangent,) = ctx.saved_tensors, tangents
        return 2 * (x * tangent).sum()


def global_norm(tree: Any) -> torch.Tensor:
    """The Euclidean norm over all entries of a tree of tensors, accurate enough to decide a clipping: ``[]``.

    A sum of squares in short pieces, in float32 or wider: on a CPU, `torch.linalg.vector_norm` of two million float32
    entries was seen 3e-5 too low, this one 2e-8 off.

    >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0])}).item()
    5.0
    """
    return squared_norm(tree).sqrt()


def clip_by_global_norm(max_norm: float) -> Callable[[Any], Any]:
    """A `transform_fn` that scales one example's gradient to a norm of at most `max_norm`.

    Equivalent to::

        def transform_fn(gradient):
            factor = min(1, max_norm / global_norm(gradient))
            return {name: leaf * factor for name, leaf in gradient.items()}

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

    >>> clipped = clip_by_global_norm(1.0)({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)})
    >>> [round(x, 3) for x in (*clipped["w"].tolist(), clipped["b"].item())]
    [0.6, 0.0, 0.8]
    """
    bound = check_norm("clip_by_global_norm", "max_norm", max_norm)

    def transform_fn(gradient: Any) -> Any:
        if math.isinf(bound):
            return gradient
        squared = squared_norm(gradient)
        exceeds = squared.sqrt() > bound
        # No root of a norm of 0 on the way to the factor: its derivative would be nan.
        factor = torch.where(exceeds, bound / torch.where(exceeds, squared, 1.0).sqrt(), 1.0)
        return map_leaves(lambda leaf: leaf * factor.to(leaf.dtype), gradient)

    return transform_fn


def per_example_moments() -> Callable[[Any], tuple[Any, Any]]:
    """A `transform_fn` whose mean over the examples is the first two moments ``(E[g], E[g**2])``, entry by entry.

    Equivalent to ``lambda gradient: (gradient, {name: leaf**2 for name, leaf in gradient.items()})``. Use it with
    ``accumulator=MEAN``; ``E[g**2] - E[g]**2`` then is the variance of the examples' gradients.

    Returns:
      A function from a gradient tree to two trees of its shapes and dtypes.

    Source: Dangel et al., BackPACK, arXiv 1912.10985 (second moment and variance).

    >>> mean, square = per_example_moments()({"w": torch.tensor([3.0, -1.0])})
    >>> mean["w"].tolist(), square["w"].tolist()
    ([3.0, -1.0], [9.0, 1.0])
    """
    return lambda gradient: (gradient, map_leaves(torch.square, gradient))


def noise_scale(mean_gradient: Any, squared_norms: torch.Tensor, group_size: int = 1) -> NoiseScale:
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

    >>> estimate = noise_scale(torch.tensor([2.0]), torch.tensor([1.0, 9.0]))
    >>> estimate.variance.item(), estimate.squared_norm.item(), round(estimate.value.item(), 3)
    (2.0, 3.0, 0.667)
    >>> print(noise_scale(torch.tensor([2.0]), torch.tensor([4.0])))
    undefined: one group of examples says nothing about noise; use two or more microbatches
    """
    squared_norms = torch.as_tensor(squared_norms)
    group_size = check_groups(squared_norms, group_size)
    groups = len(squared_norms)
    if groups == 1:
        nan = torch.full_like(squared_norms[0], math.nan)
        return NoiseScale(nan, nan, nan, defined=False)
    small = squared_norms.mean(dtype=torch.promote_types(squared_norms.dtype, torch.float32))
    big = squared_norm(mean_gradient)
    squared, variance = unbiased(big, small, group_size, groups)
    value = torch.where(squared <= 0, math.inf, variance / squared)
    return NoiseScale(value, squared, variance, defined=True)
