"""A per-example function over one microbatch, with the examples' outputs summed, stacked or handed on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from microbatch.jax._factored import _algebra as algebra
from microbatch.jax._factored import _cost as cost
from microbatch.jax._factored._context import Context, Recorder, working_dtype
from microbatch.jax._factored._interpreter import run
from microbatch.jax._factored._shapes import converted
from microbatch.jax._factored._values import Dense, Shared, Value

ENGINES = ("auto", "factored", "vmap")
NORMS = ("gram", "safe")


def evaluate(
    fun: Callable[..., Any],
    args: tuple,
    in_axes: Any = 0,
    *,
    aggregate: Any = "stack",
    weight: jax.Array | None = None,
    engine: str = "auto",
    norms: str = "gram",
    vmap_fn: Callable[..., Callable] = jax.vmap,
) -> Any:
    """Runs `fun` on every example of one microbatch and aggregates its outputs, without per-example gradients.

    Equivalent to, with ``m`` examples::

        outs = jax.vmap(fun, in_axes)(*args)                        # [m, ...]
        outs = where(weight != 0, outs, 0)                          # sums in float32 or wider
        return sum(outs) | sum(weight * outs) | outs | aggregate(outs)    # by leaf

    but products of two per-example values are kept as factors while the operations on them allow it.

    Args:
      fun: the function of one example.
      args: arguments of one microbatch; leaves that are not arrays are passed to `fun` as they are.
      in_axes: as `jax.vmap`'s, a tree prefix of `args`.
      aggregate: a tree prefix of the outputs of ``"sum"``, ``"mean"`` (the weighted sum, which the caller divides by
        the total weight of all microbatches), ``"stack"`` (``[m, ...]``) or a function of the stacked output.
      weight: ``[m]``. An example of weight 0 contributes exactly nothing, whatever it holds; stacked outputs are zero
        in its row.
      engine: ``"auto"`` (factors where they are cheaper), ``"factored"`` (wherever there is a rule) or ``"vmap"``.
      norms: ``"gram"``, or ``"safe"`` for norms of many tokens from entries, which lose no digits where
        tokens cancel.
      vmap_fn: `jax.vmap` or a partial of it with keywords.

    Returns:
      The aggregated outputs of `fun`; sums of narrow dtypes are float32 and not rounded yet.
    """
    _check(engine, norms)
    static, flat, axes, tree = _flatten(args, in_axes)
    batch_size = _batch_size(flat, axes)
    call = _Call(fun, static, tree)
    if engine == "vmap" or _only_vmap(flat, vmap_fn):
        outs = vmap_fn(call, in_axes=(axes,))(flat)
        leaves, out_tree = jax.tree.flatten(outs)
        ctx = Context(batch_size, vmap_fn, norms, Recorder())
        values = [Dense(leaf) for leaf in leaves]
    else:
        program = _trace(call, flat, axes)
        out_tree = program.out_tree
        finish = partial(_finish, out_tree, aggregate, weight)
        ctx = _chosen(program, batch_size, vmap_fn, norms, engine, finish)
        values = program.run(ctx)
    return _finish(out_tree, aggregate, weight, ctx, values)


def plan_run(fun, args, in_axes, aggregate, weight, engine, norms, vmap_fn):
    """The context that `evaluate` would run in, with its record, and the outputs' paths and values; nothing is run."""
    _check(engine, norms)
    static, flat, axes, tree = _flatten(args, in_axes)
    batch_size = _batch_size(flat, axes)
    seen = []

    def run_on(flat, weight):
        program = _trace(_Call(fun, static, tree), flat, axes)
        finish = partial(_finish, program.out_tree, aggregate, weight)
        ctx = _chosen(program, batch_size, vmap_fn, norms, engine, finish)
        values = program.run(ctx)
        finish(ctx, values)
        seen.append((ctx, program.out_tree, values))

    jax.eval_shape(run_on, flat, weight)
    ctx, out_tree, values = seen[0]
    places = jax.tree.unflatten(out_tree, list(range(len(values))))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(places)]
    return ctx, [path or "output" for path in paths], values


def _check(engine: str, norms: str) -> None:
    for name, value, allowed in (("engine", engine, ENGINES), ("norms", norms, NORMS)):
        if value not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise ValueError(f"{name}={value!r} is none of {listed}.")


def _only_vmap(flat, vmap_fn) -> bool:
    """Whether the examples must be traced together: they have a name to sum over, or a sharding in their types."""
    named = getattr(vmap_fn, "keywords", {}).get("axis_name") is not None
    specs = [getattr(jax.typeof(leaf).sharding, "spec", ()) for leaf in flat]
    return named or any(axis is not None for spec in specs for axis in spec)


class _Call:
    """`fun` as a function of its array leaves, the other leaves held fixed."""

    def __init__(self, fun, static, tree):
        self.fun, self.static, self.tree = fun, static, tree

    def __call__(self, arrays):
        arrays = iter(arrays)
        leaves = [next(arrays) if fixed is _ARRAY else fixed for fixed in self.static]
        return self.fun(*jax.tree.unflatten(self.tree, leaves))


class _Program:
    """One example's traced program and the microbatch's values of its inputs."""

    def __init__(self, closed, out_tree, inputs: list[Value]):
        self.closed, self.out_tree, self.inputs = closed, out_tree, inputs

    def run(self, ctx: Context) -> list[Value]:
        return run(ctx, self.closed.jaxpr, self.closed.consts, self.inputs)


_ARRAY = object()


def _flatten(args, in_axes):
    leaves, tree = jax.tree.flatten(tuple(args))
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    entries, prefix = jax.tree.flatten(in_axes, is_leaf=lambda x: x is None)
    if prefix == jax.tree.structure(0):
        entries, subtrees = entries * len(args), args
    else:
        subtrees = prefix.flatten_up_to(tuple(args))
    axes = [a for a, s in zip(entries, subtrees, strict=True) for _ in jax.tree.leaves(s)]
    dynamic = [hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in leaves]
    static = [_ARRAY if d else leaf for d, leaf in zip(dynamic, leaves, strict=True)]
    flat = [leaf for d, leaf in zip(dynamic, leaves, strict=True) if d]
    return static, flat, [a for d, a in zip(dynamic, axes, strict=True) if d], tree


def _batch_size(flat, axes) -> int:
    sizes = {leaf.shape[axis] for leaf, axis in zip(flat, axes, strict=True) if axis is not None}
    if len(sizes) != 1:
        raise ValueError(
            f"evaluate needs one number of examples among its mapped arguments, got {sorted(sizes)}. "
            "Give every mapped leaf the same size along its axis in in_axes."
        )
    return sizes.pop()


def _trace(call: _Call, flat, axes) -> _Program:
    def one(leaf, axis):
        if axis is None:
            return leaf
        axis = axis % leaf.ndim
        return jax.ShapeDtypeStruct(leaf.shape[:axis] + leaf.shape[axis + 1 :], leaf.dtype)

    closed, shape = jax.make_jaxpr(call, return_shape=True)(
        [one(leaf, axis) for leaf, axis in zip(flat, axes, strict=True)]
    )
    inputs = [
        Shared(leaf) if axis is None else Dense(jnp.moveaxis(leaf, axis, 0))
        for leaf, axis in zip(flat, axes, strict=True)
    ]
    return _Program(closed, jax.tree.structure(shape), inputs)


def _chosen(program: _Program, batch_size, vmap_fn, norms, engine, finish) -> Context:
    """The context of the real run: which values are made as arrays, from a run on shapes alone."""
    dry = Context(batch_size, vmap_fn, norms, Recorder(), dry=True)
    jax.eval_shape(lambda: finish(dry, program.run(dry)))
    events = dry.recorder.events
    as_arrays = cost.cheaper_as_arrays(events) if engine == "auto" else frozenset()
    return Context(batch_size, vmap_fn, norms, Recorder(), cost.unused_factors(events), as_arrays)


def _finish(out_tree, aggregate, weight, ctx: Context, values: list[Value]):
    places = jax.tree.unflatten(out_tree, list(range(len(values))))
    rules = jax.tree.leaves(jax.tree.broadcast(aggregate, places))
    outs = [_aggregated(ctx, v, how, weight) for v, how in zip(values, rules, strict=True)]
    return jax.tree.unflatten(out_tree, outs)


def _aggregated(ctx: Context, value: Value, how, weight):
    inexact = jnp.issubdtype(value.dtype, jnp.inexact)
    if how == "mean" and not inexact:
        value = _in_dtype(ctx, value, jnp.result_type(float))
    if how in ("sum", "mean") and inexact:
        value = _in_dtype(ctx, value, working_dtype(value.dtype))
    if weight is not None:
        value = _weighted(ctx, value, weight, how == "mean")
    if how == "sum" and not inexact:
        # Booleans are counted, and small integers do not overflow, as `jnp.sum` has it.
        return jnp.sum(algebra.entries(ctx, value), 0)
    if how in ("sum", "mean"):
        return algebra.sum_examples(ctx, value)
    stacked = algebra.entries(ctx, value)
    return stacked if how == "stack" else how(stacked)


def _in_dtype(ctx: Context, value: Value, dtype) -> Value:
    if value.dtype == dtype:
        return value
    kept = converted(value, dtype)
    return Dense(algebra.entries(ctx, value).astype(dtype)) if kept is None else kept


def _weighted(ctx: Context, value: Value, weight, scaled: bool) -> Value:
    if isinstance(value, Shared) or not algebra.linear(value):
        value = Dense(algebra.entries(ctx, value))
    keep = weight != 0
    if scaled:
        value = algebra.with_scale(algebra.with_keep(value, keep), weight)
    return algebra.with_keep(value, keep)
