"""Calls and loops: the programs inside are run by the same rules."""

import dataclasses

import jax
from jax import extend, lax
from jax.extend.core import Jaxpr, JaxprEqn

from microbatch.jax._factored import _scan as scans
from microbatch.jax._factored._context import Context, ForcedDense, Recorder
from microbatch.jax._factored._registry import MAKERS
from microbatch.jax._factored._values import Value


def may_make(eqn: JaxprEqn) -> bool:
    """Whether some equation inside could make a factored value."""
    return any(_contains_maker(jaxpr) for jaxpr in extend.core.jaxprs_in_params(eqn.params))


def _contains_maker(jaxpr: Jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in MAKERS or may_make(eqn):
            return True
    return False


def call(run, ctx: Context, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """A nested `jit`."""
    closed = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return run(ctx, *_open(closed), values)


def checkpoint(run, ctx: Context, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """`jax.checkpoint`: what the forward pass computed must be computed again, not be found and kept."""
    barred = eqn.params["prevent_cse"]
    barred = [barred] * len(values) if isinstance(barred, bool) else barred
    if eqn.params["differentiated"] and any(barred):
        leaves, tree = jax.tree.flatten([v for v, bar in zip(values, barred, strict=True) if bar])
        again = iter(jax.tree.unflatten(tree, lax.optimization_barrier(leaves)))
        values = [next(again) if bar else v for v, bar in zip(values, barred, strict=True)]
    return run(ctx, *_open(eqn.params["jaxpr"]), values)


def custom(run, ctx: Context, eqn: JaxprEqn, values: list[Value]) -> list[Value] | None:
    """A function with its own derivative is opened only if its factored inputs stay factored throughout.

    Otherwise it is called on arrays and keeps its derivative.
    """
    silent = dataclasses.replace(ctx, strict=True, recorder=Recorder(), dry=True)
    try:
        jax.eval_shape(lambda v: run(silent, *_open(eqn.params["call_jaxpr"]), v), values)
    except ForcedDense as forced:
        if forced.slot is not None:
            raise
        return None
    return run(ctx, *_open(eqn.params["call_jaxpr"]), values)


def scan(run, ctx: Context, eqn: JaxprEqn, values: list[Value]) -> list[Value] | None:
    """A loop over stacked layers or over time, see `_scan`."""
    return scans.scan(run, ctx, eqn, values)


def _open(jaxpr: Jaxpr):
    return (
        (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, extend.core.ClosedJaxpr) else (jaxpr, ())
    )


CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})

CALLS = {
    "jit": call,
    "closed_call": call,
    "remat2": checkpoint,
    "custom_jvp_call": custom,
    "custom_vjp_call": custom,
    "scan": scan,
}
