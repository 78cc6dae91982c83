"""Per-example functions on a batch that does not fit: a `vmap` in microbatches, and gradients made with it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from microbatch._checks import as_argnums, as_positions, check_function, name_of
from microbatch._errors import BatchError, MicrobatchError
from microbatch._splitting import Auto, Order, Remainder
from microbatch.jax._accumulators import CONCAT, SUM
from microbatch.jax._differentiate import Differentiate
from microbatch.jax._examples import Engine, Norms, Spec, check, explain_examples, run_examples


class Aux(NamedTuple):
    """What `micro_grad` returns beside the gradients, per example.

    Attributes:
      values: the function's values ``[B]``.
      metrics: `metrics_fn` of each example's gradient ``[B, ...]``.
      aux: the function's auxiliary output ``[B, ...]``; None without `has_aux`.
    """

    values: Any
    metrics: Any
    aux: Any


def micro_vmap(
    fun: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    microbatch_size: int | Auto | None = None,
    vmap_fn: Callable[..., Any] = jax.vmap,
    accumulator: Any = CONCAT,
    num_real_microbatches: int | jax.Array | None = None,
    num_microbatches: int | None = None,
    order: Order = "strided",
    remainder: Remainder = "error",
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: Any = None,
    key_argnums: int | Sequence[int] = (),
    differentiate: Differentiate = "auto",
    engine: Engine = "auto",
    norms: Norms = "gram",
    memory_budget: int | str | None = None,
) -> Callable[..., Any]:
    """A `jax.vmap` that fits: examples are mapped a microbatch at a time, and their outputs combined.

    Equivalent to ``combine([fun(example) for example in batch])``, where `combine` stacks the outputs ``[B, ...]``
    for CONCAT and reduces over the examples for every other accumulator.

    Args:
      fun: the function of one example.
      in_axes: as `jax.vmap`'s: an integer, None, or a sequence with an entry (a tree) per positional argument.
        Keyword arguments are mapped over axis 0.
      out_axes: where CONCAT puts the examples; 0 for everything else.
      microbatch_size: examples in a microbatch; "auto" is the largest number that fits; None maps all at once.
      vmap_fn: what maps; `jax.vmap` or a partial of it with keywords keeps the factored engine, any other
        function is called as ``vmap_fn(fun, in_axes, out_axes)`` and runs as given.
      accumulator: how the examples' outputs combine, a tree that is a prefix of the output. SUM and MEAN of integers
        and booleans are `jnp.sum`'s and `jnp.mean`'s: counts and shares. An `Accumulator` needs its `aggregate`.
      num_real_microbatches: see `microbatch`.
      num_microbatches: see `microbatch`.
      order: see `microbatch`.
      remainder: see `microbatch`.
      weight_fn: maps the arguments of `fun` to one example's weight in MEAN. An example of weight 0 contributes
        exactly nothing, whatever it holds; CONCAT, and what an `aggregate` is called with, have zeros in its row.
      accumulator_dtype: see `microbatch`.
      key_argnums: arguments that are random keys, not mapped; the example's index in the batch is folded into
        them, so that results do not depend on the microbatch size.
      differentiate: see `microbatch`.
      engine: "auto" keeps products of two per-example values as factors where that is cheaper, "factored" wherever
        it can, "vmap" never. The results are the same.
      norms: "gram" takes norms over many tokens from products of factors where that is cheaper; where tokens nearly cancel
        they lose digits relative to (Σₜ‖aₜ‖‖gₜ‖)². "safe" takes them from entries.
      memory_budget: see `microbatch`.

    Returns:
      A function of the arguments of `fun`, each with an additional axis of examples. Its `explain`, called with the
      same arguments (their shapes suffice), is a table of how each statistic is computed, and what made it dense.

    >>> micro_vmap(lambda x: x**2, microbatch_size=2)(jnp.arange(4)).tolist()
    [0, 1, 4, 9]
    """
    where = f"micro_vmap({name_of(fun)})"
    for name, value in (("fun", fun), ("vmap_fn", vmap_fn)):
        check_function(where, name, value)
    spec = Spec(
        where=where,
        fun=fun,
        in_axes=in_axes,
        out_axes=out_axes,
        vmap_fn=vmap_fn,
        accumulator=accumulator,
        weight_fn=weight_fn,
        key_argnums=as_argnums(where, key_argnums, "key_argnums"),
        engine=engine,
        norms=norms,
        options={
            "microbatch_size": microbatch_size,
            "num_microbatches": num_microbatches,
            "num_real_microbatches": num_real_microbatches,
            "order": order,
            "remainder": remainder,
            "accumulator_dtype": accumulator_dtype,
            "differentiate": differentiate,
            "memory_budget": memory_budget,
        },
    )
    check(spec)

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return run_examples(spec, args, kwargs)

    # pyrefly: ignore[missing-attribute]
    mapped.explain = lambda *args, **kwargs: explain_examples(spec, args, kwargs)
    return mapped


def micro_grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    *,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    microbatch_size: int | Auto | None = None,
    accumulator: Any = SUM,
    transform_fn: Callable[[Any], Any] = lambda gradients: gradients,
    metrics_fn: Callable[[Any], Any] = lambda gradients: None,
    num_real_microbatches: int | jax.Array | None = None,
    num_microbatches: int | None = None,
    order: Order = "strided",
    remainder: Remainder = "error",
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: Any = None,
    key_argnums: int | Sequence[int] = (),
    differentiate: Differentiate = "auto",
    engine: Engine = "auto",
    norms: Norms = "gram",
    memory_budget: int | str | None = None,
) -> Callable[..., Any]:
    """Per-example gradients: each transformed, then combined, at the price of a plain gradient where the algebra allows.

    Equivalent to::

        grads, values = zip(*[value_and_grad(fun, argnums)(params, example) for example in batch])
        combine([transform_fn(g) for g in grads]), Aux(values, [metrics_fn(g) for g in grads], aux)

    Args:
      fun: a loss, called with one example; with `keep_batch_dim` as a batch of one ``[1, ...]``.
      has_aux: whether `fun` returns ``(loss, aux)``.
      argnums: what to differentiate.
      batch_argnums: which positional arguments hold examples along axis 0. Keyword arguments do, too.
      keep_batch_dim: whether `fun` expects a batch axis; keys and keyword arguments never get one.
      microbatch_size: examples in a microbatch; "auto" is the largest number that fits; None takes all at once.
      accumulator: how the transformed gradients combine, a tree that is a prefix of them.
      transform_fn: maps one example's gradient to a tree.
      metrics_fn: maps one example's gradient to a tree that is returned per example.
      num_real_microbatches: see `microbatch`.
      num_microbatches: see `microbatch`.
      order: see `microbatch`.
      remainder: see `microbatch`.
      weight_fn: maps the arguments of `fun` to one example's weight, see `micro_vmap`.
      accumulator_dtype: see `microbatch`.
      key_argnums: see `micro_vmap`.
      differentiate: see `microbatch`.
      engine: see `micro_vmap`.
      norms: see `micro_vmap`; clipping for privacy wants "safe".
      memory_budget: see `microbatch`.

    Returns:
      A function of the same arguments that returns ``(gradients, Aux(values, metrics, aux))``. Its `explain`, called
      with the same arguments (their shapes suffice), is a table of how each statistic is computed, and what made it dense.

    The gradient of ½(w·x − y)² at w = 0, x = 1 is −y; its mean, the mean of its square, and its norm:

    >>> from microbatch import AccumulationType
    >>> def loss(params, features, targets):
    ...     return 0.5 * jnp.mean((features @ params - targets) ** 2)
    >>> (mean, square), aux = micro_grad(
    ...     loss,
    ...     batch_argnums=(1, 2),
    ...     accumulator=AccumulationType.MEAN,
    ...     transform_fn=lambda g: (g, g**2),
    ...     metrics_fn=jnp.linalg.norm,
    ... )(jnp.zeros(1), jnp.ones((4, 1)), jnp.array([0.0, 2.0, 4.0, 6.0]))
    >>> mean.tolist(), square.tolist(), aux.values.tolist(), aux.metrics.tolist()
    ([-3.0], [14.0], [0.0, 2.0, 8.0, 18.0], [0.0, 2.0, 4.0, 6.0])
    """
    where = f"micro_grad({name_of(fun)})"
    for name, value in (("fun", fun), ("transform_fn", transform_fn), ("metrics_fn", metrics_fn)):
        check_function(where, name, value)
    batch = as_argnums(where, batch_argnums, "batch_argnums")
    if not batch or min(batch) < 0:
        raise BatchError(
            f"{where}: batch_argnums={batch_argnums!r} names no positional argument.\n"
            "Give one or more numbers from 0."
        )
    numbers = as_argnums(where, argnums)
    if not numbers:
        raise BatchError(f"{where}: argnums=() differentiates nothing.\nGive one or more numbers.")
    given = numbers if isinstance(argnums, Sequence) else numbers[0]
    with_aux = functools.partial(_loss_and_aux, where, fun, has_aux)
    value_and_grad = jax.value_and_grad(with_aux, given, has_aux=True)

    def as_batch_of_one(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not keep_batch_dim:
            return args
        one = lambda leaf: jnp.expand_dims(leaf, 0)
        return tuple(jax.tree.map(one, a) if i in batch else a for i, a in enumerate(args))

    def example_grad(*args: Any, **kwargs: Any) -> Any:
        (value, aux), gradients = value_and_grad(*as_batch_of_one(args), **kwargs)
        gradients = jax.tree_util.tree_map_with_path(_named, gradients)
        return transform_fn(gradients), Aux(value, metrics_fn(gradients), aux)

    def example_weight(*args: Any, **kwargs: Any) -> Any:
        assert weight_fn is not None
        return weight_fn(*as_batch_of_one(args), **kwargs)

    spec = Spec(
        where=where,
        fun=functools.wraps(fun)(example_grad),
        in_axes=batch,
        out_axes=0,
        vmap_fn=jax.vmap,
        accumulator=(accumulator, CONCAT),
        weight_fn=None if weight_fn is None else example_weight,
        key_argnums=as_argnums(where, key_argnums, "key_argnums"),
        engine=engine,
        norms=norms,
        options={
            "microbatch_size": microbatch_size,
            "num_microbatches": num_microbatches,
            "num_real_microbatches": num_real_microbatches,
            "order": order,
            "remainder": remainder,
            "accumulator_dtype": accumulator_dtype,
            "differentiate": differentiate,
            "memory_budget": memory_budget,
        },
    )
    check(spec)

    def of_call(args: tuple[Any, ...]) -> Spec:
        _check_differentiable(where, as_positions(where, "argnums", numbers, len(args)), args)
        in_axes = tuple(0 if i in batch else None for i in range(len(args)))
        return dataclasses.replace(spec, in_axes=in_axes)

    @functools.wraps(fun)
    def gradients_of(*args: Any, **kwargs: Any) -> tuple[Any, Aux]:
        return run_examples(of_call(args), args, kwargs)

    # pyrefly: ignore[missing-attribute]
    gradients_of.explain = lambda *args, **kwargs: explain_examples(of_call(args), args, kwargs)
    return gradients_of


def _named(path: Any, gradient: jax.Array) -> jax.Array:
    """`gradient` under the name that `explain` prints."""
    return checkpoint_name(gradient, f"gradient{jax.tree_util.keystr(path)}")


def _loss_and_aux(
    where: str, fun: Callable[..., Any], has_aux: bool, /, *args: Any, **kwargs: Any
) -> tuple[jax.Array, Any]:
    """One example's loss and the rest; what has no gradient by its type is refused."""
    output = fun(*args, **kwargs)
    if has_aux and not (isinstance(output, tuple) and len(output) == 2):
        raise MicrobatchError(
            f"{where}: has_aux=True, and the function returned a {_words(output)}.\n"
            "Return (loss, aux)."
        )
    loss, aux = output if has_aux else (output, None)
    real = hasattr(loss, "dtype") and jnp.issubdtype(loss.dtype, jnp.floating)
    if not (real and loss.shape == ()) and not isinstance(loss, float):
        advice = (
            "Return (loss, aux) with has_aux=True."
            if isinstance(loss, tuple)
            else "Reduce it, for example by .mean(), and give its real part."
        )
        raise MicrobatchError(
            f"{where}: the loss of one example is a {_words(loss)}, not one real number.\n{advice}"
        )
    return loss, aux


def _words(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def _check_differentiable(where: str, positions: tuple[int, ...], args: tuple[Any, ...]) -> None:
    for position in positions:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[position]):
            dtype = getattr(leaf, "dtype", None)
            if not isinstance(leaf, float | complex) and (
                dtype is None or not jnp.issubdtype(dtype, jnp.inexact)
            ):
                raise BatchError(
                    f"{where}: argnums names args[{position}]{jax.tree_util.keystr(path)}, a {_words(leaf)}, which has no "
                    "gradient.\nPass floating-point arrays there, or name another argument."
                )
