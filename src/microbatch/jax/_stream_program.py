"""The compiled half of `accumulate`: one program per function, structure and shapes, whatever the stream's length."""

import inspect
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from microbatch._accumulation import is_accumulator
from microbatch._identity import Recent
from microbatch._stream import Settings
from microbatch.jax._accumulators import CONCAT, Output, as_weight
from microbatch.jax._convolutions import canonical_convolutions, has_convolution
from microbatch.jax._outputs import OutputPlan, plan_outputs
from microbatch.jax._rows import explicit_spec
from microbatch.jax._stateful import evaluated
from microbatch.jax._stream_state import Folded, State, first_state, folded_in, results_of

_MOST_PROGRAMS = 32


@dataclass(frozen=True)
class Structure:
    """What a program is made for, besides shapes and dtypes, which `jax.jit` tells apart.

    Attributes:
      args: the structure of the arguments before the microbatch's.
      constants: the leaves of them that are not arrays, each with its place.
      states: which leaves are carried from microbatch to microbatch, in order.
      microbatch: the structure of the microbatch's arguments.
    """

    args: Any
    constants: tuple[tuple[int, Any], ...]
    states: tuple[int, ...]
    microbatch: Any

    @property
    def key(self) -> Hashable:
        """Equal for structures that share a program; constants that are objects are equal to themselves alone."""
        plain = (str, bytes, int, float, complex, bool, type)
        constants = tuple(
            (place, type(value), value if isinstance(value, plain) else id(value))
            for place, value in self.constants
        )
        return self.args, constants, self.states, self.microbatch

    def arguments(
        self, shared: Sequence[Any], states: Sequence[Any], rows: Sequence[Any]
    ) -> tuple[Any, ...]:
        """All arguments of the function."""
        placed = {**dict(self.constants), **dict(zip(self.states, states, strict=True))}
        remaining = iter(shared)
        leaves = [
            placed[i] if i in placed else next(remaining) for i in range(self.args.num_leaves)
        ]
        return (
            *self.args.unflatten(leaves),
            *self.microbatch.unflatten(rows),
        )


class Planned(NamedTuple):
    """The outputs for arguments of certain shapes.

    Attributes:
      types: the output's types, as a tree.
      plan: its parts.
      outputs: how they combine, but those that are carried.
      folded: those of them that are held on the devices.
    """

    types: Any
    plan: OutputPlan
    outputs: tuple[Output, ...]
    folded: Folded


class Program:
    """A function, its accumulators and a structure, as three compiled functions."""

    def __init__(
        self, fun: Callable[[], Callable[..., Any]], settings: Settings, structure: Structure
    ) -> None:
        self._fun = fun
        self._settings = settings
        self._structure = structure
        self._starts: Recent[Any] = Recent(_MOST_PROGRAMS)
        self._plans: Recent[Planned] = Recent(_MOST_PROGRAMS)
        # Traced once, whether for types or inside the step.
        self._evaluate = jax.jit(self._evaluated, inline=True)
        self._start = jax.jit(self._started)
        self._step = jax.jit(self._stepped, donate_argnums=0)
        self._finish = jax.jit(results_of, static_argnums=0, donate_argnums=1)

    def planned(self, shared: list[Any], states: list[Any], rows: list[Any]) -> Planned:
        """What the outputs are and how they combine; the function is traced for it, never run."""
        shapes = tuple((x.shape, x.dtype) for x in (*shared, *states, *rows))
        wide = jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]
        return self._plans.get((wide, shapes), lambda: self._new_plan(shared, states, rows))

    def _new_plan(self, shared: list[Any], states: list[Any], rows: list[Any]) -> Planned:
        settings = self._settings
        types = jax.eval_shape(self._evaluate, shared, states, rows)
        plan = plan_outputs(settings.where, settings.accumulator, types, None)
        outputs = plan.outputs(settings.accumulator_dtype)
        folded = tuple(output for output in outputs if output.kind is not CONCAT)
        keeps = tuple(not o.is_custom and o.dtype == o.type.dtype for o in folded)
        return Planned(types, plan, outputs, Folded(folded, keeps))

    def start(self, shared: list[Any], states: list[Any], rows: list[Any], device: Any) -> State:
        """The first state, laid out as the step leaves it: as the parameters are, and never whole on one device."""
        if device is not None:
            return jax.device_put(self._start(shared, states, rows), device)
        places = tuple(getattr(x, "committed", False) and x.sharding for x in (*shared, *rows))
        if not any(places) or any(explicit_spec(x) is not None for x in shared):
            return self._start(shared, states, rows)
        start = self._starts.get(places, lambda: self._laid_out(shared, states, rows))
        return start(shared, states, rows)

    def _laid_out(self, shared: list[Any], states: list[Any], rows: list[Any]) -> Any:
        # Which layout the compiler gives the results is known only from a program that it has made.
        like = jax.eval_shape(self._started, shared, states, rows)
        step = self._step.lower(like, shared, rows, jnp.int32(0)).compile()
        return jax.jit(self._started, out_shardings=step.output_shardings[0])

    def step(
        self, state: State, shared: list[Any], rows: list[Any], index: Any
    ) -> tuple[State, Any, list[Any]]:
        """One microbatch: the next state (`state` is gone), a scalar to wait for, and the rows of CONCAT."""
        return self._step(state, shared, rows, index)

    def finish(self, planned: Planned, state: State) -> list[Any]:
        """The results of all outputs but CONCAT; `state` is gone."""
        # Only what keeps its dtype can be finished in its own memory.
        pairs = list(zip(state.accumulators, planned.folded.keeps_dtype, strict=True))
        in_place = [x for x, keeps in pairs if keeps]
        others = [x for x, keeps in pairs if not keeps]
        return self._finish(planned.folded, in_place, others, state.total, state.lost, state.ran)

    def _evaluated(self, shared: list[Any], states: list[Any], rows: list[Any]) -> Any:
        arguments = self._structure.arguments(shared, states, rows)
        return evaluated(self._settings.where, self._fun(), arguments, {})

    def _traced(
        self, shared: list[Any], states: list[Any], rows: list[Any]
    ) -> tuple[OutputPlan, Any]:
        """The plan with the types as a trace has them, sharding included, and the function's program."""
        closed, like = jax.make_jaxpr(self._evaluate, return_shape=True)(shared, states, rows)
        types = jax.tree.unflatten(jax.tree.structure(like), closed.out_avals)
        plan = plan_outputs(self._settings.where, self._settings.accumulator, types, None)
        return plan, closed.jaxpr

    def _started(self, shared: list[Any], states: list[Any], rows: list[Any]) -> State:
        plan, _ = self._traced(shared, states, rows)
        outputs = plan.outputs(self._settings.accumulator_dtype)
        return first_state(self._settings.where, outputs, states)

    def _stepped(
        self, state: State, shared: list[Any], rows: list[Any], index: Any
    ) -> tuple[State, Any, list[Any]]:
        settings = self._settings
        plan, program = self._traced(shared, state.states, rows)
        outputs = plan.outputs(settings.accumulator_dtype)
        evaluate = self._evaluate
        if settings.weight_fn is not None and has_convolution(program):
            # A branch is to XLA what a loop is: see `_convolutions`.
            evaluate = canonical_convolutions(evaluate)
        weight = self._weight(shared, state.states, rows)

        def run(state: State) -> tuple[State, list[Any]]:
            values = jax.tree.leaves(evaluate(shared, state.states, rows))
            return folded_in(settings.where, plan, outputs, state, values, weight, index)

        def skip(state: State) -> tuple[State, list[Any]]:
            return state, [
                jnp.zeros(o.type.shape or (1,), o.type.dtype) for o in concatenated(outputs)
            ]

        if settings.weight_fn is None:
            state, pieces = run(state)
        else:
            # A branch, not a product with zero: nothing in a skipped microbatch can reach the result.
            state, pieces = lax.cond(weight != 0, run, skip, state)
        return state, state.ran, pieces

    def _weight(self, shared: list[Any], states: list[Any], rows: list[Any]) -> jax.Array:
        weight_fn = self._settings.weight_fn
        if weight_fn is None:
            return jnp.asarray(rows_of(rows) or 1, jnp.result_type(float))
        value = weight_fn(*self._structure.arguments(shared, states, rows))
        return as_weight(self._settings.where, value)


def rows_of(leaves: Sequence[Any]) -> int | None:
    """The common length of the first axes, None where there is none or they differ."""
    rows = {leaf.shape[0] for leaf in leaves if leaf.shape}
    return rows.pop() if len(rows) == 1 else None


def program_of(fun: Callable[..., Any], settings: Settings, structure: Structure) -> Program:
    """The program of `fun`, kept as long as `fun` lives: calls in every optimizer step share it."""
    programs, reference = _programs_of(fun)
    # The leaves alone do not tell a dictionary from another type with the same keys.
    tree = jax.tree.structure(settings.accumulator, is_leaf=is_accumulator)
    options = (settings.entries, tree, settings.weight_fn, settings.accumulator_dtype)
    key = (options, structure.key)
    return programs.get(key, lambda: Program(reference, settings, structure))


_PROGRAMS: dict[Hashable, tuple[Recent[Program], Callable[[], Any], Any]] = {}


def _programs_of(fun: Callable[..., Any]) -> tuple[Recent[Program], Callable[[], Any]]:
    # A bound method is made anew whenever it is looked up, so its object is what lives.
    owner, method = (fun.__self__, fun.__func__) if inspect.ismethod(fun) else (fun, None)
    key = (id(owner), method)
    if key not in _PROGRAMS:
        try:
            alive = weakref.ref(owner, lambda _, programs=_PROGRAMS: programs.pop(key, None))
        except TypeError:
            # What cannot be referred to weakly (a builtin) stays.
            alive = lambda: owner
        if method is None:
            reference = alive
        else:
            reference = lambda: method.__get__(alive())
        _PROGRAMS[key] = (Recent(_MOST_PROGRAMS), reference, alive)
    programs, reference, _ = _PROGRAMS[key]
    return programs, reference


def concatenated(outputs: Sequence[Output]) -> list[Output]:
    """The outputs whose rows are kept side by side."""
    return [output for output in outputs if output.kind is CONCAT]
