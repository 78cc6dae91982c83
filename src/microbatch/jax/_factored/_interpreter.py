"""Runs one example's program over a microbatch: a `vmap` whose values may stay factored.

Equations whose inputs are arrays wait in a stretch that runs under one `vmap`; only an equation that may make or that
meets a factored value is looked at alone.
"""

from typing import Any

from jax import extend
from jax.extend.core import Jaxpr, JaxprEqn

from microbatch.jax._factored import _algebra as algebra
from microbatch.jax._factored import _arithmetic, _control, _makers, _nonfinite, _shapes  # noqa: F401 (they register their rules)
from microbatch.jax._factored._context import Context
from microbatch.jax._factored._registry import MAKERS, RULES
from microbatch.jax._factored._values import (
    Dense,
    Fill,
    Shared,
    Value,
    is_factored,
    is_per_example,
    is_zero,
)

_PENDING = object()


def run(ctx: Context, jaxpr: Jaxpr, consts, args: list[Value]) -> list[Value]:
    """The values of the outputs of `jaxpr`, one example's program, for all examples of the microbatch."""
    frame = _Frame(ctx, jaxpr)
    frame.env.update(zip(jaxpr.constvars, map(Shared, consts), strict=True))
    frame.env.update(zip(jaxpr.invars, args, strict=True))
    for index, eqn in enumerate(jaxpr.eqns):
        frame.step(index, eqn)
    frame.flush(len(jaxpr.eqns))
    return [frame.read(v) for v in jaxpr.outvars]


class _Frame:
    """The variables of one (sub)program and the equations that wait to be run."""

    def __init__(self, ctx: Context, jaxpr: Jaxpr):
        self.ctx, self.jaxpr = ctx, jaxpr
        self.env: dict[Any, Any] = {}
        self.arrays: dict[Any, Dense] = {}
        self.waiting: list[int] = []
        self.last_use = {v: i for i, e in enumerate(jaxpr.eqns) for v in _variables(e.invars)}
        self.last_use.update({v: len(jaxpr.eqns) for v in _variables(jaxpr.outvars)})

    def step(self, index: int, eqn: JaxprEqn) -> None:
        ctx = self.ctx.at(index, primitive=eqn.primitive.name)
        known = [self.read(v) for v in eqn.invars]
        if _has_rule(eqn, known):
            outs = _by_rule(ctx, eqn, self._values(index, eqn))
            if outs is not None:
                self.env.update(zip(eqn.outvars, outs, strict=True))
                return
        for var, value in zip(eqn.invars, known, strict=True):
            if value is not _PENDING and is_factored(value) and var not in self.arrays:
                self.arrays[var] = Dense(algebra.entries(ctx, value))
        if _has_maker(eqn, known):
            for var, value in zip(eqn.invars, known, strict=True):
                if isinstance(value, Fill) and value.per_example:
                    entries = algebra.fill_entries(value, self.ctx.batch_size)
                    self.arrays[var] = Dense(entries)
            out = MAKERS[eqn.primitive.name](ctx, eqn, *self._values(index, eqn, arrays=True))
            if out is not None:
                self.env[eqn.outvars[0]] = out
                return
        if any(value is _PENDING or is_per_example(value) for value in known):
            self.waiting.append(index)
            self.env.update(dict.fromkeys(eqn.outvars, _PENDING))
        else:
            inputs = list(dict.fromkeys(_variables(eqn.invars)))
            function = _function(self.jaxpr, [eqn], inputs, eqn.outvars)
            outs = function([self._array(v) for v in inputs])
            self.env.update(zip(eqn.outvars, map(Shared, outs), strict=True))

    def read(self, var) -> Any:
        if isinstance(var, extend.core.Literal):
            zero = var.aval.shape == () and var.aval.dtype.kind in "fiu" and var.val == 0
            return Fill(None, (), var.aval.dtype, False) if zero else Shared(var.val)
        return self.env[var]

    def flush(self, index: int) -> None:
        """Runs the waiting equations under one vmap and keeps what is used from `index` on."""
        if not self.waiting:
            return
        eqns = [self.jaxpr.eqns[i] for i in self.waiting]
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        needed = dict.fromkeys(v for e in eqns for v in _variables(e.invars) if v not in made)
        kept = [v for v in made if self.last_use.get(v, -1) >= index]
        inputs = list(needed)
        mapped = [0 if self._per_example(v) else None for v in inputs]
        function = _function(self.jaxpr, eqns, inputs, kept)
        if kept or _effects(eqns):
            outs = self.ctx.vmap_fn(function, in_axes=(mapped,))([self._array(v) for v in inputs])
            self.env.update(zip(kept, map(Dense, outs), strict=True))
        self.waiting = []

    def _values(self, index: int, eqn: JaxprEqn, arrays: bool = False) -> list[Value]:
        """The inputs' values, with the arrays of factored ones if `arrays`; runs what waits if they need it."""
        if any(self.read(v) is _PENDING for v in eqn.invars):
            self.flush(index)
        return [(arrays and self._made_array(v)) or self.read(v) for v in eqn.invars]

    def _made_array(self, var) -> Dense | None:
        return None if isinstance(var, extend.core.Literal) else self.arrays.get(var)

    def _per_example(self, var) -> bool:
        return var in self.arrays or is_per_example(self.env[var])

    def _array(self, var):
        value = self.arrays[var] if var in self.arrays else self.read(var)
        if isinstance(value, Fill):
            return algebra.fill_entries(value, self.ctx.batch_size if value.per_example else None)
        return value.array


def _has_rule(eqn: JaxprEqn, known: list) -> bool:
    """Whether the equation is to be looked at before its inputs become arrays; some may still wait."""
    name = eqn.primitive.name
    factored = any(value is not _PENDING and is_factored(value) for value in known)
    if name in _control.CALLS:
        return factored or (name not in _control.CUSTOM and _control.may_make(eqn))
    if name == "broadcast_in_dim" and eqn.invars[0].aval.size == 1:
        return True
    zero = any(value is not _PENDING and is_zero(value) for value in known)
    return name in RULES and (factored or (zero and _PENDING not in known))


def _has_maker(eqn: JaxprEqn, known: list) -> bool:
    if eqn.primitive.name not in MAKERS:
        return False
    per_example = [value is _PENDING or is_per_example(value) for value in known]
    return _makers.could_make(eqn, per_example, [v is not _PENDING and is_zero(v) for v in known])


def _by_rule(ctx: Context, eqn: JaxprEqn, values: list[Value]) -> list[Value] | None:
    """The outputs by a rule, or None if the equation needs arrays."""
    name = eqn.primitive.name
    if name in _control.CALLS:
        return _control.CALLS[name](run, ctx, eqn, values)
    out = RULES[name](ctx, eqn, *values)
    if out is None:
        return None
    return list(out) if eqn.primitive.multiple_results else [out]


def _function(jaxpr: Jaxpr, eqns, inputs, outputs):
    """A stretch of equations as a function of a list of arrays."""
    part = jaxpr.replace(
        constvars=[], invars=inputs, outvars=list(outputs), eqns=list(eqns), effects=_effects(eqns)
    )
    call = extend.core.jaxpr_as_fun(extend.core.ClosedJaxpr(part, ()))
    return lambda arrays: call(*arrays)


def _effects(eqns):
    return frozenset().union(*(eqn.effects for eqn in eqns))


def _variables(atoms):
    return [v for v in atoms if not isinstance(v, extend.core.Literal)]
