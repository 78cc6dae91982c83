"""Per-example functions on a batch that does not fit: a `vmap` in microbatches, and gradients made with it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from microbatch._accumulation import (
    MEANS,
    AccumulationType,
    Accumulator,
    Carry,
    as_accumulator,
)
from microbatch._checks import as_argnums, check_choice, name_of, signature_of
from microbatch._errors import AccumulatorError, BatchError
from microbatch._splitting import Auto, Order, Remainder, make_split
from microbatch.jax._accumulators import SUM, carry_dtype, highest, lowest
from microbatch.jax._differentiate import Differentiate
from microbatch.jax._factored import Explanation, evaluate, explain
from microbatch.jax._microbatch import run
from microbatch.jax._options import Options, accumulators_of, checked
from microbatch.jax._stateful import evaluated

Engine = Literal["auto", "factored", "vmap"]
Norms = Literal["gram", "safe"]
CONCAT = AccumulationType.CONCAT
ROW_INDEX = "index of the row in the batch"


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
      accumulator: how the examples' outputs combine, a tree that is a prefix of the output. An `Accumulator`
        needs its `aggregate`.
      num_real_microbatches: see `microbatch`.
      num_microbatches: see `microbatch`.
      order: see `microbatch`.
      remainder: see `microbatch`.
      weight_fn: maps the arguments of `fun` to one example's weight in MEAN. An example of weight 0 contributes
        exactly nothing, whatever it holds; CONCAT has zeros in its row.
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
    spec = _Spec(
        where=f"micro_vmap({name_of(fun)})",
        fun=fun,
        in_axes=in_axes,
        out_axes=out_axes,
        vmap_fn=vmap_fn,
        accumulator=accumulator,
        weight_fn=weight_fn,
        key_argnums=as_argnums(f"micro_vmap({name_of(fun)})", key_argnums),
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
    _check(spec)

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return _run(spec, args, kwargs)

    mapped.explain = lambda *args, **kwargs: _explain(spec, args, kwargs)
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
    batch = as_argnums(where, batch_argnums)
    if not batch or min(batch) < 0:
        raise BatchError(
            f"{where}: batch_argnums={batch_argnums!r} names no positional argument.\n"
            "Give one or more numbers from 0."
        )
    with_aux = fun if has_aux else _with_no_aux(fun)
    value_and_grad = jax.value_and_grad(with_aux, argnums, has_aux=True)

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
        return weight_fn(*as_batch_of_one(args), **kwargs)

    spec = _Spec(
        where=where,
        fun=functools.wraps(fun)(example_grad),
        in_axes=batch,
        out_axes=0,
        vmap_fn=jax.vmap,
        accumulator=(accumulator, CONCAT),
        weight_fn=None if weight_fn is None else example_weight,
        key_argnums=as_argnums(where, key_argnums),
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
    _check(spec)

    def of_call(args: tuple[Any, ...]) -> _Spec:
        in_axes = tuple(0 if i in batch else None for i in range(len(args)))
        return dataclasses.replace(spec, in_axes=in_axes)

    @functools.wraps(fun)
    def gradients_of(*args: Any, **kwargs: Any) -> tuple[Any, Aux]:
        return _run(of_call(args), args, kwargs)

    gradients_of.explain = lambda *args, **kwargs: _explain(of_call(args), args, kwargs)
    return gradients_of


@dataclass(frozen=True)
class _Spec:
    """A per-example transformation: what `micro_vmap` was asked for."""

    where: str
    fun: Callable[..., Any]
    in_axes: Any
    out_axes: Any
    vmap_fn: Callable[..., Any]
    accumulator: Any
    weight_fn: Callable[..., Any] | None
    key_argnums: tuple[int, ...]
    engine: Engine
    norms: Norms
    options: dict[str, Any]


def _check(spec: _Spec) -> None:
    where = spec.where
    check_choice(where, "engine", spec.engine, ("auto", "factored", "vmap"))
    check_choice(where, "norms", spec.norms, ("gram", "safe"))
    moved = any(axis != 0 for axis in jax.tree.leaves(spec.out_axes))
    kinds = accumulators_of(spec.accumulator)
    if moved and any(kind is not CONCAT for kind in kinds):
        raise AccumulatorError(
            f"{where}: out_axes={spec.out_axes!r} needs the examples side by side, and the accumulator is not CONCAT.\n"
            "Use out_axes=0, or accumulator=CONCAT."
        )
    for kind in kinds:
        if isinstance(kind, Carry):
            raise AccumulatorError(
                f"{where}: Carry hands one microbatch's state to the next, and examples are mapped independently.\n"
                "Use microbatch for it."
            )
        if isinstance(kind, Accumulator) and kind.aggregate is None:
            raise AccumulatorError(
                f"{where}: the custom accumulator has no aggregate, which combines the examples of a microbatch.\n"
                "Give it one: a function of [m, ...]."
            )


def _run(spec: _Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call: examples to microbatches' outputs (`reduced`), those to the batch's (`run`)."""
    in_axes = _axes_per_argument(spec, len(args))
    weighted = spec.weight_fn is not None
    kind_of = functools.partial(_kind_in_loop, weighted)
    is_leaf = lambda value: as_accumulator(value) is not None
    kinds = jax.tree.map(as_accumulator, spec.accumulator, is_leaf=is_leaf)
    in_loop = jax.tree.map(kind_of, kinds)
    dtypes: list[Any] = []

    def weights_of(args: Any, kwargs: Any) -> jax.Array:
        kwargs = {name: value for name, value in kwargs.items() if name != ROW_INDEX}
        weights = jax.vmap(lambda a, k: spec.weight_fn(*a, **k), (in_axes, 0))(args, kwargs)
        return jax.lax.stop_gradient(jnp.asarray(weights, jnp.result_type(float)))

    def reduced(*args: Any, **kwargs: Any) -> Any:
        rows = kwargs.pop(ROW_INDEX, None)
        weights = weights_of(args, kwargs) if weighted else None
        out = _on_examples(spec, rows, args, kwargs, in_axes, weights, kinds)
        if not weighted:
            return out
        # Sums stay in the accumulator's dtype until they are divided.
        dtypes[:] = [leaf.dtype for leaf in jax.tree.leaves(out)]
        wide = jax.tree.map(lambda x: x.astype(carry_dtype(SUM, x.dtype)), out)
        return wide, jnp.sum(weights)

    def any_weight(*args: Any, **kwargs: Any) -> jax.Array:
        return jnp.count_nonzero(weights_of(args, kwargs))

    if spec.key_argnums:
        size = _batch_size(args, kwargs, in_axes)
        kwargs = {**kwargs, ROW_INDEX: jnp.arange(size)}
    if spec.options["microbatch_size"] is None and spec.options["num_microbatches"] is None:
        out = reduced(*args, **kwargs)
    else:
        mapped = [i for i, axes in enumerate(in_axes) if jax.tree.leaves(axes)]
        options = Options(
            where=spec.where,
            signature=signature_of(spec.fun),
            argnums=tuple(mapped),
            argnames=tuple(kwargs),
            in_axes=(*(in_axes[i] for i in mapped), *(0 for _ in kwargs)),
            accumulator=(in_loop, SUM) if weighted else in_loop,
            weight_fn=any_weight if weighted else None,
            key_argnums=(),
            checkpoint_policy=None,
            **spec.options,
        )
        out = run(reduced, checked(options, declared=False), args, kwargs)
    if weighted:
        out = _divided(kinds, *out, dtypes)
    return _moved(spec.out_axes, out)


def _on_examples(
    spec: _Spec,
    rows: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: tuple[Any, ...],
    weights: Any,
    kinds: Any,
) -> Any:
    """One microbatch: `fun` on each example, the examples' outputs combined."""
    out = evaluate(*_mapped(spec, rows, args, kwargs, in_axes), **_how(spec, weights, kinds))
    if weights is not None:
        return out
    size = _batch_size(args, kwargs, in_axes)
    mean = lambda kind, part: jax.tree.map(lambda x: x / size, part) if kind in MEANS else part
    return jax.tree.map(mean, kinds, out)


def _explain(spec: _Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """How one microbatch's statistics are computed; from shapes alone."""
    in_axes = _axes_per_argument(spec, len(args))
    is_leaf = lambda value: as_accumulator(value) is not None
    kinds = jax.tree.map(as_accumulator, spec.accumulator, is_leaf=is_leaf)
    batch_size = _batch_size(args, kwargs, in_axes)
    given = spec.options["microbatch_size"], spec.options["num_microbatches"]
    size = batch_size
    if isinstance(given[0], int) or given[1] is not None:
        size = min(make_split(batch_size, *given, remainder="allow").microbatch_size, batch_size)

    def of_microbatch(axis: Any, part: Any) -> Any:
        def describe(leaf: Any) -> Any:
            at = axis % leaf.ndim
            return jax.ShapeDtypeStruct((*leaf.shape[:at], size, *leaf.shape[at + 1 :]), leaf.dtype)

        return part if axis is None else jax.tree.map(describe, part)

    args, kwargs = jax.tree.map(
        of_microbatch, (in_axes, 0), (args, kwargs), is_leaf=lambda axis: axis is None
    )
    rows = jax.ShapeDtypeStruct((size,), jnp.int32) if spec.key_argnums else None
    weights = None if spec.weight_fn is None else jax.ShapeDtypeStruct((size,), jnp.float32)
    return explain(*_mapped(spec, rows, args, kwargs, in_axes), **_how(spec, weights, kinds))


def _mapped(
    spec: _Spec, rows: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_axes: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The function of one example, its arguments and their axes, as the engine takes them."""

    def example(row: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        folded = lambda key: jax.random.fold_in(key, row)
        args = tuple(
            jax.tree.map(folded, a) if i in spec.key_argnums else a for i, a in enumerate(args)
        )
        return evaluated(spec.where, spec.fun, args, kwargs)

    return example, (rows, args, kwargs), (None if rows is None else 0, in_axes, 0)


def _how(spec: _Spec, weights: Any, kinds: Any) -> dict[str, Any]:
    """How the engine maps and combines."""
    is_vmap = spec.vmap_fn is jax.vmap or getattr(spec.vmap_fn, "func", None) is jax.vmap
    # Collectives over the examples need the axis that only a real vmap has.
    is_named = "axis_name" in getattr(spec.vmap_fn, "keywords", {})
    return {
        "aggregate": jax.tree.map(functools.partial(_aggregation, weights), kinds),
        "weight": weights,
        "engine": spec.engine if is_vmap and not is_named else "vmap",
        "norms": spec.norms,
        "vmap_fn": spec.vmap_fn if is_vmap else lambda f, in_axes: spec.vmap_fn(f, in_axes, 0),
    }


def _aggregation(weights: Any, kind: Any) -> Any:
    """How the examples of one microbatch combine, for the engine."""
    kept = lambda x, other: (
        x if weights is None else jnp.where(_column(weights != 0, x), x, other(x.dtype))
    )
    match kind:
        case AccumulationType.SUM:
            return "sum"
        case AccumulationType.MEAN | AccumulationType.RUNNING_MEAN:
            return "mean"
        case AccumulationType.CONCAT:
            return "stack"
        case AccumulationType.MAX:
            return lambda x: jnp.max(kept(x, lowest), 0)
        case AccumulationType.MIN:
            return lambda x: jnp.min(kept(x, highest), 0)
        case AccumulationType.LAST:
            if weights is None:
                return lambda x: x[-1]
            last = jnp.max(jnp.where(weights != 0, jnp.arange(weights.shape[0]), 0))
            return lambda x: x[last]
    return lambda x: jax.tree.map(kind.aggregate, x)


def _kind_in_loop(weighted: bool, kind: Any) -> Any:
    """How microbatches combine: weighted means are sums that are divided at the end."""
    return SUM if weighted and kind in MEANS else kind


def _divided(kinds: Any, sums: Any, total: jax.Array, dtypes: list[Any]) -> Any:
    safe = jnp.where(total == 0, 1, total)

    def divide(kind: Any, part: Any) -> Any:
        if kind not in MEANS:
            return part
        return jax.tree.map(lambda x: x / safe.astype(jnp.real(x).dtype), part)

    leaves, treedef = jax.tree.flatten(jax.tree.map(divide, kinds, sums))
    if len(leaves) == len(dtypes):
        leaves = [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    return treedef.unflatten(leaves)


def _moved(out_axes: Any, out: Any) -> Any:
    """CONCAT's examples from axis 0 to where they were asked for."""
    if not any(axis != 0 for axis in jax.tree.leaves(out_axes)):
        return out
    move = lambda axis, part: jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), part)
    return jax.tree.map(move, out_axes, out)


def _axes_per_argument(spec: _Spec, count: int) -> tuple[Any, ...]:
    in_axes = spec.in_axes
    if not isinstance(in_axes, list | tuple):
        return (in_axes,) * count
    if len(in_axes) != count:
        raise BatchError(
            f"{spec.where}: in_axes={in_axes!r} has {len(in_axes)} entries for {count} positional arguments.\n"
            "Give one entry per positional argument, None for one that is not mapped."
        )
    return tuple(in_axes)


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any], in_axes: tuple[Any, ...]) -> int:
    """Examples in the arguments, of which the checks have seen that they agree."""
    sizes: list[int] = []

    def note(axis: Any, part: Any) -> None:
        if axis is not None:
            sizes.extend(leaf.shape[axis] for leaf in jax.tree.leaves(part))

    jax.tree.map(note, (in_axes, 0), (args, kwargs), is_leaf=lambda axis: axis is None)
    return sizes[0] if sizes else 0


def _named(path: Any, gradient: jax.Array) -> jax.Array:
    """`gradient` under the name that `explain` prints."""
    return checkpoint_name(gradient, f"gradient{jax.tree_util.keystr(path)}")


def _column(mask: jax.Array, like: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (like.ndim - 1))


def _with_no_aux(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (fun(*args, **kwargs), None)
