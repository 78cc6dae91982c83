"""A loop whose sums over devices are made once, after it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from microbatch._accumulation import MEANS
from microbatch.jax._accumulators import SUM, Moment
from microbatch.jax._convolutions import canonical_convolutions
from microbatch.jax._derivatives import divided, runs_of
from microbatch.jax._fold import Arrays, Loop, divisor, fold, moment, static_count_apart
from microbatch.jax._partial_sums import Program
from microbatch.jax._row_sums import RowAxes, names_of
from microbatch.jax._rows import Rows, explicit_spec, take, varying_axes

Result = tuple[list[Any], list[Any]]


def fold_once_reduced(loop: Loop, arrays: Arrays) -> Result:
    """`fold`, with as few reductions over devices as the program allows: one after the loop."""
    rows = _row_axes(loop, arrays)
    if rows is None or not loop.split.full:
        return fold(loop, arrays)
    given, with_count = static_count_apart(arrays)

    # A map over partial sums is beyond JAX's rules; such a loop reduces in every microbatch.
    @custom_vmap
    def run(arrays: Arrays) -> Result:
        arrays = with_count(arrays)
        put_off = _put_off(loop, arrays, rows)
        if put_off is None:
            return fold(loop, arrays)
        results, states = fold(put_off.loop, arrays)
        return _finished(loop, arrays, rows, put_off.types, results), states

    @run.def_vmap
    def mapped(size: int, axes: list[Arrays], arrays: Arrays) -> tuple[Result, Any]:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, axes[0])
        out = jax.vmap(lambda a: fold(loop, with_count(a)), (in_axes,), axis_size=size)(arrays)
        return out, jax.tree.map(lambda _: True, out)

    # One program: partial sums that leave one and enter another are not laid out alike in XLA (it aborts).
    return jax.jit(run)(given)


def _row_axes(loop: Loop, arrays: Arrays) -> RowAxes | None:
    """The mesh axes over which the rows lie; None where that is not in the types."""
    found = [_axes_of(x, cut) for x, cut in zip(arrays.rows, loop.rows, strict=True)]
    first = next((rows for rows in found if rows is not None), None)
    return None if first is None else replace(first, through_sharded=loop.reduce == "once")


def _axes_of(leaf: Any, cut: Rows) -> RowAxes | None:
    spec = explicit_spec(leaf)
    if spec is not None and names_of(spec[cut.axis]):
        axes, mesh = names_of(spec[cut.axis]), jax.typeof(leaf).sharding.mesh
        return RowAxes(axes, mesh) if math.prod(mesh.shape[name] for name in axes) > 1 else None
    varying = varying_axes(jax.typeof(leaf))
    return RowAxes(varying) if varying else None


def once_reduced(fun: Callable[..., Any], leaf: Any, cut: Rows) -> Callable[..., Any]:
    """`fun` with the sums in its loops put off until after them; `leaf` and `cut` tell over what the rows lie."""
    rows = _axes_of(leaf, cut)
    if rows is None:
        return fun

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        program = Program(closed, rows, lambda fun: fun)
        leaves = program.run(jax.tree.leaves(args), [False] * len(closed.out_avals))
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return run


@dataclass(frozen=True)
class _PutOff:
    """A loop that adds up partial sums.

    Attributes:
      loop: the loop.
      types: for each output, its type where it is a partial sum now; None where it is as before.
    """

    loop: Loop
    types: tuple[Any | None, ...]


def _put_off(loop: Loop, arrays: Arrays, rows: RowAxes) -> _PutOff | None:
    """The loop with partial sums in place of sums over devices; None where there are none."""
    examples = _examples(loop, arrays)
    wrap = canonical_convolutions if loop.convolves else lambda fun: fun
    trace = lambda args: Program(jax.make_jaxpr(loop.step)(*args), rows, wrap)
    program, firsts, start = trace(examples), [], 0
    for output in loop.outputs:
        firsts.append(start)
        start += len(output.types)
    is_put_off = [
        output.kind in (SUM, *MEANS) and program.partial[first]
        for output, first in zip(loop.outputs, firsts, strict=True)
    ]
    if not any(is_put_off):
        return None
    wanted = [False] * len(program.partial)
    for first, here in zip(firsts, is_put_off, strict=True):
        wanted[first] = here
    summed = [output for output, here in zip(loop.outputs, is_put_off, strict=True) if here]

    def widened(sums: list[Any], weights: list[Any]) -> list[Any]:
        sums = [x.astype(output.dtype) for x, output in zip(sums, summed, strict=True)]
        for weight in weights:
            sums = [
                x * weight.astype(x.dtype) if output.kind in MEANS else x
                for x, output in zip(sums, summed, strict=True)
            ]
        return sums

    def step(at: Moment, shared: Any, states: Any, rows: Any) -> Result:
        args = (at, shared, states, rows)
        weights = [] if at.weight is None else [jnp.asarray(at.weight)]
        out = trace(args).run(jax.tree.leaves(args), wanted, widened, weights)
        return out[:start], out[start:]

    avals = jax.make_jaxpr(step)(*examples).out_avals
    outputs = [
        replace(output, kind=SUM, types=(avals[first],)) if here else output
        for output, first, here in zip(loop.outputs, firsts, is_put_off, strict=True)
    ]
    types = tuple(
        output.type if here else None for output, here in zip(loop.outputs, is_put_off, strict=True)
    )
    return _PutOff(replace(loop, step=step, outputs=tuple(outputs), convolves=False), types)


def _finished(
    loop: Loop, arrays: Arrays, rows: RowAxes, types: Sequence[Any], results: Sequence[Any]
) -> list[Any]:
    """The results, each partial sum added up over the devices, and means divided."""
    found, runs = [], runs_of(loop, arrays)
    for result, output, aval in zip(results, loop.outputs, types, strict=True):
        if aval is not None:
            total = divisor(loop, output, arrays.weights, runs)
            result = divided(rows.added_up(result, aval), total).astype(aval.dtype)
        found.append(result)
    return found


def _examples(loop: Loop, arrays: Arrays) -> tuple[Any, ...]:
    """Arguments of one microbatch, for their types."""
    rows = [take(x, cut, 0) for x, cut in zip(arrays.rows, loop.rows, strict=True)]
    at = moment(loop.split, arrays.weights, arrays.weights, jnp.int32(0), False)
    return at, arrays.shared, arrays.states, rows
