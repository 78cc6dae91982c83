"""How examples are mapped and combined, a microbatch at a time: `micro_vmap` behind its arguments."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from microbatch._accumulation import (
    MEANS,
    AccumulationType,
    Accumulator,
    Carry,
    accumulates_wider,
    as_accumulator,
    is_accumulator,
)
from microbatch._checks import (
    as_positions,
    batch_size_of,
    check_choice,
    check_function,
    check_place,
    check_places,
    locate,
    signature_of,
)
from microbatch._errors import AccumulatorError, BatchError
from microbatch._splitting import make_split
from microbatch.jax._accumulators import CONCAT, SUM, as_weight, highest, lowest
from microbatch.jax._binding import batch_leaves, check_key
from microbatch.jax._factored import Explanation, evaluate, explain
from microbatch.jax._microbatch import run
from microbatch.jax._options import Options, checked
from microbatch.jax._outputs import accumulators_of, check_combines, matched
from microbatch.jax._stateful import evaluated

Engine = Literal["auto", "factored", "vmap"]
Norms = Literal["gram", "safe"]
ROW_INDEX = "index of the row in the batch"


@dataclass(frozen=True)
class Spec:
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

    @property
    def kinds(self) -> Any:
        """The accumulators in this library's types, a tree that is a prefix of the output."""
        return jax.tree.map(as_accumulator, self.accumulator, is_leaf=is_accumulator)


def check(spec: Spec) -> None:
    where = spec.where
    check_choice(where, "engine", spec.engine, ("auto", "factored", "vmap"))
    check_choice(where, "norms", spec.norms, ("gram", "safe"))
    if spec.weight_fn is not None:
        check_function(where, "weight_fn", spec.weight_fn)
    places = jax.tree.leaves(spec.out_axes, is_leaf=lambda axis: axis is None)
    check_places(where, "out_axes", places)
    moved = any(axis != 0 for axis in places)
    kinds = accumulators_of(where, spec.accumulator)
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


def run_examples(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call: examples to microbatches' outputs (`reduced`), those to the batch's (`run`)."""
    in_axes = _axes_per_argument(spec, len(args))
    weighted = spec.weight_fn is not None
    kinds = spec.kinds
    in_loop = jax.tree.map(functools.partial(_kind_in_loop, weighted), kinds)
    dtypes: list[Any] = []

    def weights_of(args: Any, kwargs: Any) -> jax.Array:
        kwargs = {name: value for name, value in kwargs.items() if name != ROW_INDEX}
        weight_fn = spec.weight_fn
        assert weight_fn is not None
        of_one = lambda a, k: as_weight(spec.where, weight_fn(*a, **k), per="example")
        return jax.lax.stop_gradient(jax.vmap(of_one, (in_axes, 0))(args, kwargs))

    def reduced(*args: Any, **kwargs: Any) -> Any:
        rows = kwargs.pop(ROW_INDEX, None)
        weights = weights_of(args, kwargs) if weighted else None
        out = _on_examples(spec, rows, args, kwargs, in_axes, weights, kinds, dtypes)
        return out if weights is None else (out, jnp.sum(weights))

    def any_weight(*args: Any, **kwargs: Any) -> jax.Array:
        return jnp.count_nonzero(weights_of(args, kwargs))

    size = _batch_size(spec, args, kwargs, in_axes)
    if spec.key_argnums:
        kwargs = {**kwargs, ROW_INDEX: jnp.arange(size)}
    whole = spec.options["microbatch_size"] is None and spec.options["num_microbatches"] is None
    single: dict[str, Any] = {"num_microbatches": 1} if whole else {}
    # A custom accumulator has its init and finalize, also around a single microbatch.
    custom = any(isinstance(kind, Accumulator) for kind in jax.tree.leaves(kinds))
    if whole and not custom:
        out = reduced(*args, **kwargs)
    else:
        argnums, axes = _batch_arguments(in_axes, kwargs)
        options = Options(
            where=spec.where,
            signature=signature_of(spec.fun),
            argnums=argnums,
            argnames=tuple(kwargs),
            in_axes=axes,
            accumulator=(in_loop, SUM) if weighted else in_loop,
            weight_fn=any_weight if weighted else None,
            key_argnums=(),
            checkpoint_policy=None,
            **(spec.options | single),
        )
        out = run(reduced, checked(options, declared=False), args, kwargs)
    if weighted:
        out = _divided(kinds, *out)
    return _moved(spec, jax.tree.map(_narrowed, kinds, out, *dtypes))


def _on_examples(
    spec: Spec,
    rows: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: tuple[Any, ...],
    weights: Any,
    kinds: Any,
    dtypes: list[Any],
) -> Any:
    """One microbatch: `fun` on each example, the examples' outputs combined; sums in float32 or wider."""
    mapped = _mapped(spec, rows, args, kwargs, in_axes, dtypes)
    out = evaluate(*mapped, **_how(spec, weights, kinds))
    if weights is not None:
        return out
    size = max(_batch_size(spec, args, kwargs, in_axes), 1)
    mean = lambda kind, part: jax.tree.map(lambda x: x / size, part) if kind in MEANS else part
    return jax.tree.map(mean, kinds, out)


def explain_examples(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """How one microbatch's statistics are computed; from shapes alone."""
    in_axes, kinds = _axes_per_argument(spec, len(args)), spec.kinds
    batch_size = _batch_size(spec, args, kwargs, in_axes)
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
    mapped = _mapped(spec, rows, args, kwargs, in_axes, [])
    return explain(*mapped, **_how(spec, weights, kinds))


def _mapped(
    spec: Spec,
    rows: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: tuple[Any, ...],
    dtypes: list[Any],
) -> tuple[Any, ...]:
    """The function of one example, its arguments and their axes, as the engine takes them.

    Its trace notes the tree of its outputs' dtypes as the single item of `dtypes`.
    """

    kinds = accumulators_of(spec.where, spec.accumulator)
    keys = _keys(spec, args, in_axes)

    def example(row: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        folded = lambda key: jax.random.fold_in(key, row)
        args = tuple(jax.tree.map(folded, a) if i in keys else a for i, a in enumerate(args))
        out = evaluated(spec.where, spec.fun, args, kwargs)
        dtypes[:] = [jax.tree.map(lambda x: jnp.asarray(x).dtype, out)]
        for kind, part in zip(kinds, matched(spec.where, spec.accumulator, *dtypes), strict=True):
            for dtype in jax.tree.leaves(part):
                check_combines(spec.where, kind, "an output", dtype)
        return out

    return example, (rows, args, kwargs), (None if rows is None else 0, in_axes, 0)


def _how(spec: Spec, weights: Any, kinds: Any) -> dict[str, Any]:
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


def _divided(kinds: Any, sums: Any, total: jax.Array) -> Any:
    """Means from weighted sums."""
    safe = jnp.where(total == 0, 1, total)

    def divide(kind: Any, part: Any) -> Any:
        if kind not in MEANS:
            return part
        return jax.tree.map(lambda x: x / safe.astype(jnp.real(x).dtype), part)

    return jax.tree.map(divide, kinds, sums)


def _narrowed(kind: Any, part: Any, dtypes: Any) -> Any:
    """Sums in the examples' own dtype, rounded once."""
    if kind not in (SUM, *MEANS):
        return part
    own = lambda x, dtype: x.astype(dtype) if accumulates_wider(dtype.name) else x
    return jax.tree.map(own, part, dtypes)


def _moved(spec: Spec, out: Any) -> Any:
    """CONCAT's examples from axis 0 to where they were asked for."""
    axes, treedef = jax.tree.flatten(spec.out_axes)
    if not any(axes):
        return out
    try:
        parts = treedef.flatten_up_to(out)
    except ValueError as error:
        raise BatchError(
            f"{spec.where}: out_axes={spec.out_axes!r} is not a prefix of the output, a tree {jax.tree.structure(out)}.\n"
            "Give one axis for the whole output, or one per part of it."
        ) from error

    def move(axis: int, x: jax.Array) -> jax.Array:
        check_place(spec.where, "out_axes", axis, x.ndim)
        return jnp.moveaxis(x, 0, axis)

    return treedef.unflatten(
        jax.tree.map(functools.partial(move, axis), part)
        for axis, part in zip(axes, parts, strict=True)
    )


def _keys(spec: Spec, args: tuple[Any, ...], in_axes: tuple[Any, ...]) -> tuple[int, ...]:
    """Which positional arguments are keys, each one for all examples."""
    keys = as_positions(spec.where, "key_argnums", spec.key_argnums, len(args))
    for i in keys:
        if jax.tree.leaves(in_axes[i]):
            raise BatchError(
                f"{spec.where}: key_argnums names args[{i}], which is mapped over examples.\n"
                "Give it None for its axis, or take it out of key_argnums: keys that are mapped need no folding."
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i]):
            check_key(spec.where, f"[{i}]{jax.tree_util.keystr(path)}", leaf)
    return keys


def _axes_per_argument(spec: Spec, count: int) -> tuple[Any, ...]:
    in_axes = spec.in_axes
    if not isinstance(in_axes, list | tuple):
        return (in_axes,) * count
    if len(in_axes) != count:
        raise BatchError(
            f"{spec.where}: in_axes={in_axes!r} has {len(in_axes)} entries for {count} positional arguments.\n"
            "Give one entry per positional argument, None for one that is not mapped."
        )
    return tuple(in_axes)


def _batch_arguments(
    in_axes: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Which positional arguments are mapped, and the axes of those and of all keywords."""
    mapped = tuple(i for i, axes in enumerate(in_axes) if jax.tree.leaves(axes))
    return mapped, (*(in_axes[i] for i in mapped), *(0 for _ in kwargs))


def _batch_size(
    spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any], in_axes: tuple[Any, ...]
) -> int:
    """How many examples the arguments hold; unequal numbers are refused."""
    where, (mapped, axes) = spec.where, _batch_arguments(in_axes, kwargs)
    slots = locate(where, signature_of(spec.fun), mapped, tuple(kwargs), args, kwargs)
    return batch_size_of(where, batch_leaves(where, slots, axes, args, kwargs))[0]


def _column(mask: jax.Array, like: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (like.ndim - 1))
