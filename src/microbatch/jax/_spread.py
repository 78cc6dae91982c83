"""The loop on many devices: each folds its own rows, and they combine once.

On a mesh with automatic axes the loop runs under `shard_map`. Its derivatives are loops, too, so theirs also combine
once, and no derivative is taken of a collective.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from microbatch._accumulation import EXTREMES, MEANS, AccumulationType
from microbatch.jax._accumulators import CONCAT, SUM, Moment, Output, highest, lowest
from microbatch.jax._derivatives import divided
from microbatch.jax._devices import Devices
from microbatch.jax._fold import Arrays, Loop, clamped, divisor, static_count_apart, which_run
from microbatch.jax._fold import fold as fold_here
from microbatch.jax._put_off import fold_once_reduced
from microbatch.jax._rows import Rows, explicit_spec, take


def fold(loop: Loop, arrays: Arrays, *, reversible: bool = False) -> tuple[list[Any], list[Any]]:
    """Runs the loop, see `_fold.fold`; where it has devices, each over its own rows.

    There the weights are ``[shards, num_microbatches]``, and there are no states.
    """
    devices = loop.devices
    if devices is None and reversible:
        return fold_here(loop, arrays, reversible=True)
    if devices is None:
        return fold_once_reduced(loop, arrays)
    known = _known_axes(devices, arrays.shared)
    scattered = tuple(_scatter_axis(devices, output, known) for output in loop.outputs)
    arrays, with_count = static_count_apart(arrays)

    def on_one(arrays: Arrays) -> list[Any]:
        arrays = with_count(arrays)
        if arrays.weights is not None:
            arrays = replace(arrays, weights=arrays.weights[0])
        return _Part(devices, loop, scattered).run(arrays, reversible)

    specs = replace(
        arrays,
        shared=[PartitionSpec()] * len(arrays.shared),
        rows=[devices.at_axis(rows.axis) for rows in loop.rows],
        weights=None if arrays.weights is None else devices.at_axis(0),
        count=None if arrays.count is None else PartitionSpec(),
    )
    out_specs = [
        devices.at_axis(output.axis if output.kind is CONCAT else axis)
        for output, axis in zip(loop.outputs, scattered, strict=True)
    ]
    return devices.over(on_one, (specs,), out_specs)(arrays), []


@dataclass(frozen=True)
class _Part:
    """One device's part of a loop.

    Attributes:
      devices: where the rows lie.
      loop: the loop over all rows.
      scattered: along which axis each output's sum is returned in shards.
    """

    devices: Devices
    loop: Loop
    scattered: tuple[int | None, ...]

    def run(self, arrays: Arrays, reversible: bool) -> list[Any]:
        """This device's loop, and what all devices make of it."""
        devices, loop, shards = self.devices, self.loop, self.devices.shards
        # A collective in the loop needs all devices in every iteration, so none may skip.
        skips = arrays.weights if devices.reduce == "each" else None
        step = functools.partial(self.step, skips)
        here = replace(
            loop,
            step=step,
            split=devices.local(loop.split),
            rows=tuple(replace(rows, size=rows.size // shards) for rows in loop.rows),
            devices=None,
        )
        of_loop = arrays if skips is None else replace(arrays, weights=None)
        here = replace(here, outputs=self.local_outputs(here, of_loop))
        results, _ = fold_here(here, of_loop, reversible=reversible)
        return self.combined(results, here, arrays)

    def step(self, skips: Any, at: Moment, shared: Any, states: Any, rows: Any) -> tuple[Any, Any]:
        """One microbatch on this device, its means' values weighted."""
        devices, loop = self.devices, self.loop
        weight = at.weight if skips is None else skips[at.index]
        piece = at.index + loop.split.full * lax.axis_index(devices.axes)
        moment = at._replace(index=piece, weight=weight)

        def evaluate() -> list[Any]:
            values = iter(loop.step(moment, shared, states, rows)[0])
            found = []
            for output in loop.outputs:
                mine = [next(values) for _ in output.types]
                if output.kind in (SUM, *MEANS):
                    mine[0] = mine[0].astype(output.dtype)
                if output.kind in MEANS and weight is not None:
                    mine[0] = mine[0] * weight.astype(output.dtype)
                found += mine
            return found

        if skips is None:
            values = evaluate()
        else:
            values = lax.cond(weight != 0, evaluate, lambda: self.nothing(evaluate))
        if devices.reduce == "each":
            values = [
                x
                if axis is None
                else lax.psum_scatter(x, devices.axes, scatter_dimension=axis, tiled=True)
                for x, axis in zip(values, self.of_values(self.scattered), strict=True)
            ]
        return values, states

    def nothing(self, evaluate: Callable[[], list[Any]]) -> list[Any]:
        """Values that change no accumulator."""
        neutral = {AccumulationType.MAX: lowest, AccumulationType.MIN: highest}
        kinds = self.of_values([output.kind for output in self.loop.outputs])
        return [
            jnp.full(t.shape, neutral[kind](t.dtype) if kind in neutral else 0, t.dtype)
            for kind, t in zip(kinds, jax.eval_shape(evaluate), strict=True)
        ]

    def of_values(self, entries: Sequence[Any]) -> list[Any]:
        """One entry per value, from one per output."""
        outputs = self.loop.outputs
        return [e for e, output in zip(entries, outputs, strict=True) for _ in output.types]

    def local_outputs(self, here: Loop, arrays: Arrays) -> tuple[Output, ...]:
        """The outputs with this device's shapes; means are sums of weighted values."""
        avals = iter(_types_of_step(here, arrays))
        outputs = []
        for output in self.loop.outputs:
            kind = SUM if output.kind in MEANS else output.kind
            types = tuple(next(avals) for _ in output.types)
            outputs.append(replace(output, kind=kind, types=types))
        return tuple(outputs)

    def combined(self, results: list[Any], here: Loop, arrays: Arrays) -> list[Any]:
        """The results of all devices: one reduction of each dtype, none of rows."""
        devices, outputs = self.devices, self.loop.outputs
        count = clamped(arrays.count, here.split.num_microbatches)
        runs = which_run(here.split, arrays.weights, count)
        totals = [divisor(here, output, arrays.weights, runs) for output in outputs]
        whole = {
            i: result
            for i, (result, output) in enumerate(zip(results, outputs, strict=True))
            if output.kind in (SUM, *MEANS) and self.scattered[i] is None
        }
        traced = {i: total for i, total in enumerate(totals) if isinstance(total, jax.Array)}
        whole, traced = lax.psum((whole, traced), devices.axes)
        found = []
        for i, (result, output) in enumerate(zip(results, outputs, strict=True)):
            if output.is_custom:
                found.append(self.winner(output, result))
            elif output.kind in EXTREMES:
                found.append(_extreme(output.kind, result, devices.axes))
            elif output.kind is CONCAT:
                found.append(result)
            else:
                if i not in whole and devices.reduce == "once":
                    axis = self.scattered[i]
                    result = lax.psum_scatter(
                        result, devices.axes, scatter_dimension=axis, tiled=True
                    )
                total = traced.get(i, totals[i] * devices.shards)
                total = total if output.kind in MEANS else 1
                found.append(
                    divided(whole.get(i, result), total).astype(self.loop.outputs[i].type.dtype)
                )
        return found

    def winner(self, output: Output, result: Any) -> Any:
        """The extreme over all devices, and the piece that attained it; the first one at a tie."""
        best, index = result
        piece = index + self.loop.split.full * lax.axis_index(self.devices.axes)
        everyone = _extreme(output.extreme, best, self.devices.axes)
        attained = (best == everyone) | ((best != best) & (everyone != everyone))
        never = jnp.iinfo(piece.dtype).max
        first = lax.pmin(jnp.where(attained & (index >= 0), piece, never), self.devices.axes)
        return everyone, first


def _extreme(kind: Any, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if value.dtype == jnp.bool_:
        return _extreme(kind, value.astype(jnp.int8), axes).astype(jnp.bool_)
    return (lax.pmax if kind is AccumulationType.MAX else lax.pmin)(value, axes)


def _known_axis(devices: Devices, leaf: Any) -> int | None:
    """Along which of its axes an array is known to lie over the devices; a traced array on automatic axes tells nothing."""
    spec = explicit_spec(leaf)
    if spec is None:
        sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
        spec = tuple(getattr(sharding, "spec", ()))
    for axis, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if names == devices.axes:
            return axis
    return None


def _known_axes(devices: Devices, leaves: Sequence[Any]) -> dict[tuple[int, ...], int]:
    """Shapes of arrays that are known to lie over the devices: what has the shape of a parameter lies like it."""
    # What a program closes over may be a number of Python.
    axes = {jnp.shape(leaf): _known_axis(devices, leaf) for leaf in leaves}
    return {shape: axis for shape, axis in axes.items() if axis is not None}


def _scatter_axis(
    devices: Devices, output: Output, known: dict[tuple[int, ...], int]
) -> int | None:
    if output.kind not in (SUM, *MEANS):
        return None
    shape, shards = output.type.shape, devices.shards
    if shape in known or devices.reduce == "once":
        return known.get(shape)
    return next((axis for axis, size in enumerate(shape) if size and size % shards == 0), None)


def weights_of_shards(
    devices: Devices,
    weights: Callable[[list[Any], Sequence[Rows]], jax.Array],
    rows: list[Any],
    cuts: Sequence[Rows],
) -> jax.Array:
    """One weight per device and microbatch: ``[shards, num_microbatches]``; `weights` gives those of some rows."""
    specs = [devices.at_axis(cut.axis) for cut in cuts]
    here = [replace(cut, size=cut.size // devices.shards) for cut in cuts]
    mapped = devices.over(lambda rows: weights(rows, here)[None], (specs,), devices.at_axis(0))
    return mapped(rows)


def _types_of_step(loop: Loop, arrays: Arrays) -> list[Any]:
    """The abstract values that one microbatch gives."""

    def values(arrays: Arrays) -> list[Any]:
        rows = [take(x, cut, 0) for x, cut in zip(arrays.rows, loop.rows, strict=True)]
        weight = None if arrays.weights is None else arrays.weights[0]
        return loop.step(Moment(jnp.int32(0), weight, 0), arrays.shared, arrays.states, rows)[0]

    return jax.make_jaxpr(values)(arrays).out_avals
