"""One call of `accumulate`: what is on the devices and in the host's memory while a stream goes by."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from microbatch._accumulation import (
    EXTREMES,
    MEANS,
    AccumulationType,
    Accumulator,
    Carry,
    as_accumulator,
    is_accumulator,
)
from microbatch._checkpoint import (
    Checkpoint,
    Progress,
    function_words,
    leaves_digest,
    leaves_words,
)
from microbatch._errors import AccumulatorError, BatchError, EmptyStream
from microbatch._outputs import check_can_weigh
from microbatch.jax._accumulators import CONCAT
from microbatch.jax._binding import is_array
from microbatch.jax._host_rows import HostRows, targets_of
from microbatch.jax._outputs import accumulators_of
from microbatch.jax._stream_leaves import (
    as_array,
    like_saved,
    on_device,
    refuse_tracers,
    single_device,
    to_host,
    with_paths,
)
from microbatch.jax._stream_program import Program, Settings, Structure, program_of, rows_of

_IN_FLIGHT = 2


class Folding:
    """One call: its arguments, and what is on the devices and in the host's memory."""

    def __init__(
        self, fun: Callable[..., Any], settings: Settings, args: tuple[Any, ...], out: Any
    ) -> None:
        self.where = settings.where
        self.position = 0
        self.rows_before = 0
        self._fun = fun
        self._settings = settings
        self._given = args
        self._out = out
        self._rows: int | None = None
        self._first_rows: int | None = None
        self._state: Any = None
        self._ran = 0
        self._landing: deque[tuple[Any, list[Any]]] = deque()
        self._programs: dict[Any, Program] = {}
        self._entries = accumulators_of(settings.where, settings.accumulator)
        self._bind(args)

    def read(self, element: Any) -> tuple[list[Any], Any]:
        """The arrays of the next microbatch, in memory of their own, and their structure."""
        arguments = tuple(element) if isinstance(element, tuple | list) else (element,)
        leaves, structure = jax.tree.flatten(arguments)
        arrays = [as_array(leaf) for leaf in leaves]
        if any(array is None for array in arrays):
            self._refuse_leaf(arguments)
        self._rows = rows_of(arrays)
        self._check_rows(arrays)
        return arrays, structure

    def add(self, rows: list[Any], structure: Any) -> None:
        """Evaluates the next microbatch and folds its output in, or skips it where it has no rows."""
        program = self._program(structure)
        if self._state is None:
            self._begin(program, rows)
        if self._rows == 0 and self._settings.weight_fn is None:
            self._leave_out(program, rows)
        else:
            while len(self._landing) >= _IN_FLIGHT:
                self._land()
            placed = [self._placed(x) for x in rows]
            self._state, marker, pieces = program.step(
                self._state, self._shared, placed, np.int32(self.position)
            )
            for piece in pieces:
                piece.copy_to_host_async()
            self._landing.append((marker, pieces))
            self._ran += 1
        self._advance()

    def pass_over(self) -> None:
        """Reads past a microbatch that the checkpoint holds already."""
        self._advance()

    def wait(self) -> None:
        """Until everything is computed, and the rows of CONCAT are here."""
        while self._landing:
            self._land()

    def result(self) -> Any:
        """What the folds make of the stream."""
        if self._state is None:
            raise EmptyStream(
                f"{self.where}: microbatches had no element, so not even the shapes of the result are known.\n"
                "Give at least one; an iterator can be read only once."
            )
        for entry in self._entries:
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
        """The state, as a checkpoint holds it."""
        arrays = {
            f"state.{i}": to_host(leaf) for i, leaf in enumerate(jax.tree.leaves(self._state))
        }
        arrays |= {f"rows.{i}": rows.saved() for i, rows in enumerate(self._host_rows)}
        numbers = {"rows_read": self.rows_before, "output": self._output_words(), "ran": self._ran}
        numbers["first_rows"] = self._first_rows
        return Progress(self.position, numbers, arrays)

    def resume(self, checkpoint: Checkpoint, rows: list[Any], structure: Any) -> Progress | None:
        """Takes the state of the file, if there is one."""
        saved = checkpoint.load()
        if saved is None:
            return None
        self._begin(self._program(structure), rows)
        checkpoint.check("output", saved.numbers["output"], self._output_words())
        self._ran = saved.numbers["ran"]
        leaves, treedef = jax.tree.flatten(self._state)
        arrays = [like_saved(saved.arrays[f"state.{i}"], leaf) for i, leaf in enumerate(leaves)]
        self._state = treedef.unflatten(arrays)
        for i, host_rows in enumerate(self._host_rows):
            host_rows.restore(saved.arrays[f"rows.{i}"])
        return saved

    def identity(self, rows: list[Any], structure: Any) -> dict[str, str]:
        """What a checkpoint of this call belongs to."""
        settings = self._settings
        microbatch = jax.tree.unflatten(structure, rows)
        weight_fn = settings.weight_fn
        return {
            "function": function_words(self._fun),
            "accumulator": ", ".join(
                f"output{path}: {_accumulator_words(entry)}"
                for path, entry in with_paths(settings.accumulator, is_leaf=is_accumulator)
            ),
            "weight_fn": "rows" if weight_fn is None else function_words(weight_fn),
            "accumulator_dtype": str(settings.accumulator_dtype),
            "set of arguments": leaves_digest(
                [(f"args{path}", to_host(leaf)) for path, leaf in with_paths(self._given)]
            ),
            "microbatch": leaves_words(
                [(f"microbatch{path}", leaf) for path, leaf in with_paths(microbatch)]
            ),
        }

    def _bind(self, args: tuple[Any, ...]) -> None:
        """Sorts the leaves of the arguments: shared by all microbatches, carried, or constants."""
        flat = [jax.tree.flatten(argument) for argument in args]
        carried = [entry.argnum for entry in self._entries if isinstance(entry, Carry)]
        _check_carried(self.where, carried, len(args))
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
                self._fun, self._settings, Structure(*arguments, structure)
            )
        self._last_program = self._programs[structure]
        return self._last_program

    def _begin(self, program: Program, rows: list[Any]) -> None:
        self._planned = program.planned(self._shared, self._initial, rows)
        plan, outputs = self._planned.plan, self._planned.outputs
        places = [i for p in plan.parts if p.accumulator is CONCAT for i in p.values]
        targets = targets_of(self.where, self._out, self._planned.types, places)
        self._host_rows = []
        for place, output in zip(places, _concatenated(outputs), strict=True):
            path = f"output{with_paths(self._planned.types)[place][0]}"
            _check_concat(self.where, path, output.type)
            rows_so_far = HostRows(self.where, path, output.type, targets.get(place))
            self._host_rows.append(rows_so_far)
        self._state = program.start(self._shared, self._initial, rows, self._device)
        self._first_rows = self._rows

    def _leave_out(self, program: Program, rows: list[Any]) -> None:
        self.wait()
        if self._host_rows:
            outputs = program.planned(self._shared, self._initial, rows).outputs
            for host_rows, output in zip(self._host_rows, _concatenated(outputs), strict=True):
                host_rows.append_zeros(output.type.shape[0] if output.type.shape else 1)

    def _land(self) -> None:
        marker, pieces = self._landing.popleft()
        marker.block_until_ready()
        for host_rows, piece in zip(self._host_rows, pieces, strict=True):
            host_rows.append(piece)

    def _output_words(self) -> str:
        pairs = with_paths(self._planned.types)
        return leaves_words([(f"output{path}", leaf) for path, leaf in pairs])

    def _placed(self, leaf: Any) -> jax.Array:
        return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf, self._device)

    def _advance(self) -> None:
        self.position += 1
        self.rows_before += self._rows or 0

    def _check_rows(self, arrays: list[Any]) -> None:
        counts = self._settings.weight_fn is None and any(e in MEANS for e in self._entries)
        if counts and self._rows is None:
            words = leaves_words([(f"[{i}]", x) for i, x in enumerate(arrays)])
            raise BatchError(
                f"{self.where}: microbatch {self.position} has no rows that could be counted ({words}).\n"
                "Give arrays with equally many rows on their first axis, or weight_fn=."
            )
        if self._state is not None and self._rows != self._first_rows:
            for entry in self._entries:
                if isinstance(entry, Accumulator):
                    check_can_weigh(self.where, entry, "output")

    def _refuse_leaf(self, arguments: tuple[Any, ...]) -> None:
        for path, leaf in with_paths(arguments):
            if as_array(leaf) is None:
                raise BatchError(
                    f"{self.where}: microbatch {self.position} holds {path} = {leaf!r:.60}, which is not an array.\n"
                    "Leave it out: microbatches=((batch['x'], batch['y']) for batch in loader)."
                )


def _accumulator_words(entry: Any) -> str:
    entry = as_accumulator(entry)
    if isinstance(entry, Accumulator):
        parts = (entry.init, entry.update, entry.finalize)
        return f"Accumulator({', '.join(map(function_words, parts))})"
    return entry.name if isinstance(entry, AccumulationType) else repr(entry)


def _check_carried(where: str, carried: Sequence[int], count: int) -> None:
    for argnum in carried:
        if not 0 <= argnum < count:
            raise AccumulatorError(
                f"{where}: Carry({argnum}) names no argument; the call has {count} before the microbatch's.\n"
                "Number the arguments given before microbatches= from 0."
            )
    if len(set(carried)) < len(carried):
        raise AccumulatorError(
            f"{where}: two outputs are carried to one argument.\nGive each Carry an argument of its own."
        )


def _concatenated(outputs: Sequence[Any]) -> list[Any]:
    return [output for output in outputs if output.kind is CONCAT]


def _check_concat(where: str, path: str, aval: Any) -> None:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        raise AccumulatorError(
            f"{where}: {path} has dtype {aval.dtype}, which the host's memory cannot hold.\n"
            "Return jax.random.key_data(key) for CONCAT."
        )
