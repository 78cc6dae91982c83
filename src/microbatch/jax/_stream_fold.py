"""One call of `accumulate`: what is on the devices and in the host's memory while a stream goes by."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from microbatch._accumulation import EXTREMES, Carry
from microbatch._checkpoint import Progress, leaves_words
from microbatch._errors import AccumulatorError, BatchError, EmptyStream
from microbatch._stream import Settings, Stream, identity_of
from microbatch.jax._accumulators import CONCAT
from microbatch.jax._binding import is_array
from microbatch.jax._host_rows import HostRows, targets_of
from microbatch.jax._stream_leaves import (
    as_array,
    like_saved,
    on_device,
    refuse_tracers,
    single_device,
    to_host,
    with_paths,
)
from microbatch.jax._stream_program import Program, Structure, concatenated, program_of, rows_of

_IN_FLIGHT = 2


class Element(NamedTuple):
    """One microbatch: its arrays, in memory of their own, the structure of its arguments, and its rows."""

    leaves: list[Any]
    structure: Any
    rows: int | None


class Folding(Stream):
    """One call: its arguments, and what is on the devices and in the host's memory."""

    def __init__(
        self, fun: Callable[..., Any], settings: Settings, args: tuple[Any, ...], out: Any
    ) -> None:
        self.where = settings.where
        self.settings = settings
        self._fun = fun
        self._given = args
        self._out = out
        self._first_rows: int | None = None
        self._state: Any = None
        self._ran = 0
        self._landing: deque[tuple[Any, list[Any]]] = deque()
        self._programs: dict[Any, Program] = {}
        self._bind(args)

    @property
    def started(self) -> bool:
        return self._state is not None

    def read(self, element: Any) -> Element:
        arguments = tuple(element) if isinstance(element, tuple | list) else (element,)
        leaves, structure = jax.tree.flatten(arguments)
        arrays = [as_array(leaf) for leaf in leaves]
        if any(array is None for array in arrays):
            self._refuse_leaf(arguments)
        rows = rows_of(arrays)
        if rows is None and self.settings.counts_rows:
            raise self.settings.no_rows(self.position, with_paths(arrays))
        if self.started and rows != self._first_rows:
            self.settings.check_unequal_rows()
        return Element(arrays, structure, rows)

    def start(self, microbatch: Element) -> None:
        program = self._program(microbatch.structure)
        self._planned = program.planned(self._shared, self._initial, microbatch.leaves)
        plan, outputs = self._planned.plan, self._planned.outputs
        places = [i for p in plan.parts if p.accumulator is CONCAT for i in p.values]
        targets = targets_of(self.where, self._out, self._planned.types, places)
        types = [(f"output{path}", leaf) for path, leaf in with_paths(self._planned.types)]
        self._host_rows = []
        for place, output in zip(places, concatenated(outputs), strict=True):
            path = types[place][0]
            _check_concat(self.where, path, output.type)
            rows_so_far = HostRows(self.where, path, output.type, targets.get(place))
            self._host_rows.append(rows_so_far)
        self.output_words = leaves_words(types)
        self._state = program.start(self._shared, self._initial, microbatch.leaves, self._device)
        self._first_rows = microbatch.rows

    def add(self, microbatch: Element) -> None:
        if not self.started:
            self.start(microbatch)
        program = self._program(microbatch.structure)
        if microbatch.rows == 0 and self.settings.weight_fn is None:
            self._leave_out(program, microbatch.leaves)
        else:
            while len(self._landing) >= _IN_FLIGHT:
                self._land()
            placed = [self._placed(x) for x in microbatch.leaves]
            self._state, marker, pieces = program.step(
                self._state, self._shared, placed, np.int32(self.position)
            )
            for piece in pieces:
                piece.copy_to_host_async()
            self._landing.append((marker, pieces))
            self._ran += 1
        self.pass_over(microbatch)

    def pass_over(self, microbatch: Element) -> None:
        self.position += 1
        self.rows_read += microbatch.rows or 0

    def wait(self, result: Any = None) -> None:
        while self._landing:
            self._land()
        jax.block_until_ready(result)

    def result(self) -> Any:
        for _, entry in self.settings.entries:
            if entry in EXTREMES and not self._ran:
                raise EmptyStream(
                    f"{self.where}: {entry.name} of zero rows has no value.\nGive at least one row."
                )
        self.wait()
        state, self._state = self._state, None
        finished = iter(self._last_program.finish(self._planned, state))
        concatenated = iter(self._host_rows)
        results = [
            next(concatenated).result() if output.kind is CONCAT else next(finished)
            for output in self._planned.outputs
        ]
        return self._planned.plan.assemble(results, state.states)

    def progress(self) -> Progress:
        arrays = {
            f"state.{i}": to_host(leaf) for i, leaf in enumerate(jax.tree.leaves(self._state))
        }
        arrays |= {f"rows.{i}": rows.saved() for i, rows in enumerate(self._host_rows)}
        numbers = {"rows_read": self.rows_read, "output": self.output_words, "ran": self._ran}
        return Progress(self.position, numbers, arrays)

    def restore(self, saved: Progress) -> None:
        self._ran = saved.numbers["ran"]
        leaves, treedef = jax.tree.flatten(self._state)
        arrays = [like_saved(saved.arrays[f"state.{i}"], leaf) for i, leaf in enumerate(leaves)]
        self._state = treedef.unflatten(arrays)
        for i, host_rows in enumerate(self._host_rows):
            host_rows.restore(saved.arrays[f"rows.{i}"])

    def identity(self, microbatch: Element) -> dict[str, str]:
        args = [(f"args{path}", to_host(leaf)) for path, leaf in with_paths(self._given)]
        arguments = jax.tree.unflatten(microbatch.structure, microbatch.leaves)
        rows = [(f"microbatch{path}", leaf) for path, leaf in with_paths(arguments)]
        return identity_of(self.settings, self._fun, args, rows)

    def _bind(self, args: tuple[Any, ...]) -> None:
        """Sorts the leaves of the arguments: shared by all microbatches, carried, or constants."""
        flat = [jax.tree.flatten(argument) for argument in args]
        self.settings.check_carries(len(args))
        carried = [e.argnum for _, e in self.settings.entries if isinstance(e, Carry)]
        starts = np.cumsum([0, *(len(leaves) for leaves, _ in flat)])
        places = [i for k in carried for i in range(starts[k], starts[k + 1])]
        leaves = [leaf for leaves, _ in flat for leaf in leaves]
        refuse_tracers(self.where, leaves)
        arrays = {
            i: on_device(leaf) for i, leaf in enumerate(leaves) if is_array(leaf) or i in places
        }
        self._args_structure = jax.tree.structure(args)
        self._constants = tuple((i, x) for i, x in enumerate(leaves) if i not in arrays)
        self._state_places = tuple(places)
        self._shared = [x for i, x in arrays.items() if i not in places]
        self._initial = [arrays[i] for i in places]
        self._device = single_device([*self._shared, *self._initial])

    def _program(self, structure: Any) -> Program:
        if structure not in self._programs:
            arguments = self._args_structure, self._constants, self._state_places
            self._programs[structure] = program_of(
                self._fun, self.settings, Structure(*arguments, structure)
            )
        self._last_program = self._programs[structure]
        return self._last_program

    def _leave_out(self, program: Program, rows: list[Any]) -> None:
        self.wait()
        if self._host_rows:
            outputs = program.planned(self._shared, self._initial, rows).outputs
            for host_rows, output in zip(self._host_rows, concatenated(outputs), strict=True):
                host_rows.append_zeros(output.type.shape[0] if output.type.shape else 1)

    def _land(self) -> None:
        marker, pieces = self._landing.popleft()
        marker.block_until_ready()
        for host_rows, piece in zip(self._host_rows, pieces, strict=True):
            host_rows.append(piece)

    def _placed(self, leaf: Any) -> jax.Array:
        return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, self._device)

    def _refuse_leaf(self, arguments: tuple[Any, ...]) -> None:
        for path, leaf in with_paths(arguments):
            if as_array(leaf) is None:
                raise BatchError(
                    f"{self.where}: microbatch {self.position} holds {path} = {leaf!r:.60}, which is not an array.\n"
                    "Leave it out: microbatches=((batch['x'], batch['y']) for batch in loader)."
                )


def _check_concat(where: str, path: str, aval: Any) -> None:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        raise AccumulatorError(
            f"{where}: {path} has dtype {aval.dtype}, which the host's memory cannot hold.\n"
            "Return jax.random.key_data(key) for CONCAT."
        )
