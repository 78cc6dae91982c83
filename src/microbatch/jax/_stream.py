"""`accumulate` in JAX: a fold over microbatches that arrive one after another."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from microbatch._accumulation import (
    EXTREMES,
    MEANS,
    AccumulationType,
    Accumulator,
    Carry,
    as_accumulator,
)
from microbatch._checkpoint import (
    Checkpoint,
    Progress,
    function_words,
    leaves_digest,
    leaves_words,
)
from microbatch._checks import name_of
from microbatch._errors import AccumulatorError, BatchError, EmptyStream, MicrobatchError
from microbatch._outputs import check_can_weigh
from microbatch.jax._accumulators import CONCAT
from microbatch.jax._binding import is_array
from microbatch.jax._host_rows import HostRows, targets_of
from microbatch.jax._stream_program import Settings, Structure, program_of, rows_of

_IN_FLIGHT = 2


def accumulate(
    fun: Callable[..., Any],
    accumulator: Any = AccumulationType.SUM,
    *,
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: Any = None,
) -> Callable[..., Any]:
    """Folds `fun` over a stream of microbatches, so that the batch never exists in memory.

    The function returned by ``accumulate(fun, accumulator)`` is equivalent to::

        def accumulated(*args, microbatches):
            carry = init(typeof(fun(*args, *first)))
            for i, microbatch in enumerate(microbatches):
                carry = update(carry, fun(*args, *microbatch), i)
            return finalize(carry)

    `fun` is compiled together with the update, once for all calls with the same shapes, as `jax.jit` compiles; the
    program is kept as long as `fun` is, so define `fun` once, outside the training loop. The accumulator's memory is
    used again for the next one, and a microbatch travels to the device while the one before it is computed; at most
    two are there.

    Args:
      fun: called as ``fun(*args, *microbatch)``; a microbatch's arrays are ``[m, ...]`` with m rows, which may differ
        between microbatches (a number of rows that is new compiles anew).
      accumulator: how the outputs combine: one kind, or a tree of kinds that is a prefix of the output. A `Carry`
        names one of `args`.
      weight_fn: maps the arguments of `fun` to the microbatch's weight in MEAN and RUNNING_MEAN, in any unit (rows,
        valid tokens). Default: rows. A microbatch of weight 0 is skipped.
      accumulator_dtype: holds sums and means in this dtype. Default: float32 for float16 and bfloat16, the output's
        own dtype for others. The result has the output's dtype.

    Returns:
      A function of ``*args``, arrays as they are for `jax.jit`, and other leaves (functions, strings, Python's
      numbers) as constants of the program: a new value compiles anew, so a number that changes is given as an array.
      Its keywords are

      - `microbatches`: an iterable that is consumed once, one element ahead; each element is a tuple or list of
        arguments, or a single argument that is neither. Arrays of any library that NumPy can read (a PyTorch
        DataLoader's tensors) are copied before the next element is asked for. Progress is the iterable's business:
        ``microbatches=tqdm(loader)``.
      - `checkpoint`: a file in which the state is saved as the stream goes by (at most a twentieth of the time is
        spent on it) and which is deleted at the end. A killed run that is started again with the same stream reads
        past what is in the file and continues, bit for bit. Needs safetensors.
      - `out`: an array, or a tree like the output with None elsewhere, to write CONCAT rows into, with room for all
        rows. The result is the part of it that was written. CONCAT gives NumPy arrays in the host's memory: the
        memory of the device does not depend on the stream's length.

    Raises:
      EmptyStream: the iterable had no element, so that not even the shapes of the result are known; or MAX and MIN of
        zero rows.
      BatchError: rows are to be counted and a microbatch has none, or unequal ones; or it holds what is no array.
      AccumulatorError: as for `microbatch`.
      CheckpointError: the file belongs to another function, other arguments, or another tree, dtype or size of
        microbatches.
      MicrobatchError: it is called inside `jax.jit`, `jax.grad` or another transformation.

    ================  ================================================================
    stream            result
    ================  ================================================================
    one element       ``jax.jit(fun)(*args, *element)``, bit for bit
    total weight 0    zeros for SUM and MEAN, never NaN
    weight 0          skipped; its CONCAT rows are zeros
    zero rows         skipped; `fun` is traced for shapes, not run
    a NaN output      NaN, as the whole batch would give
    a scalar, CONCAT  ``[number of microbatches]``
    ================  ================================================================

    >>> stream = [(jnp.array([1.0, 2.0]),), (jnp.array([6.0]),)]
    >>> mean = accumulate(lambda scale, x: scale * x.mean(), AccumulationType.MEAN)
    >>> float(mean(10.0, microbatches=stream))
    30.0

    A full-batch gradient, three optimizer steps, one compilation:

    >>> gradient = accumulate(jax.grad(lambda w, x: jnp.mean((w - x) ** 2)), AccumulationType.MEAN)
    >>> w = jnp.array(0.0)
    >>> for _ in range(3):
    ...     w = w - 0.5 * gradient(w, microbatches=stream)
    >>> float(w)
    3.0
    """
    where = f"accumulate({name_of(fun)})"
    settings = Settings(
        where,
        accumulator,
        _accumulator_key(where, accumulator),
        weight_fn,
        _checked_dtype(where, accumulator_dtype),
    )

    def accumulated(
        *args: Any,
        microbatches: Iterable[Any],
        checkpoint: str | os.PathLike[str] | None = None,
        out: Any = None,
    ) -> Any:
        return _run(_Folding(fun, settings, args, out), microbatches, checkpoint)

    return accumulated


def _run(
    folding: "_Folding", microbatches: Iterable[Any], path: str | os.PathLike[str] | None
) -> Any:
    checkpoint: Checkpoint | None = None
    saved: Progress | None = None
    for element in microbatches:
        leaves, structure = folding.read(element)
        del element
        if path is not None and checkpoint is None:
            checkpoint = Checkpoint(path, folding.where, folding.identity(leaves, structure))
            saved = folding.resume(checkpoint, leaves, structure)
        if saved is not None and folding.position < saved.position:
            folding.pass_over()
            continue
        if saved is not None and folding.position == saved.position:
            _check_same_stream(checkpoint, saved, folding)
        folding.add(leaves, structure)
        # Released before the iterable makes the next one.
        del leaves
        if checkpoint is not None and checkpoint.due:
            # Waited for first, so that the time of computing is not taken for that of saving.
            folding.wait()
            checkpoint.save(folding.progress)
    if saved is not None and folding.position <= saved.position:
        _check_same_stream(checkpoint, saved, folding)
    result = folding.result()
    if checkpoint is not None:
        jax.block_until_ready(result)
        checkpoint.remove()
    return result


def _check_same_stream(checkpoint: Checkpoint, saved: Progress, folding: "_Folding") -> None:
    was = (saved.position, saved.numbers["rows_read"])
    now = (folding.position, folding.rows_before)
    checkpoint.check(
        "stream", *(f"{rows} rows in {count} microbatches" for count, rows in (was, now))
    )


class _Folding:
    """One call: the arguments, and what is on the devices and in the host's memory."""

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
        self._entries = _entries(settings.accumulator)
        self._bind(args)

    def read(self, element: Any) -> tuple[list[Any], Any]:
        """The arrays of the next microbatch, in memory of their own, and their structure."""
        arguments = tuple(element) if isinstance(element, tuple | list) else (element,)
        leaves, structure = jax.tree.flatten(arguments)
        arrays = [_as_array(leaf) for leaf in leaves]
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
            self._learn(self._state)
            self._learn = lambda state: None
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
            f"state.{i}": _to_host(leaf) for i, leaf in enumerate(jax.tree.leaves(self._state))
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
        arrays = [_like(saved.arrays[f"state.{i}"], leaf) for i, leaf in enumerate(leaves)]
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
                for path, entry in _with_paths(settings.accumulator, is_leaf=_is_accumulator)
            ),
            "weight_fn": "rows" if weight_fn is None else function_words(weight_fn),
            "accumulator_dtype": str(settings.accumulator_dtype),
            "set of arguments": leaves_digest(
                [(f"args{path}", _to_host(leaf)) for path, leaf in _with_paths(self._given)]
            ),
            "microbatch": leaves_words(
                [(f"microbatch{path}", leaf) for path, leaf in _with_paths(microbatch)]
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
        _refuse_tracers(self.where, leaves)
        arrays = {
            i: _on_device(leaf) for i, leaf in enumerate(leaves) if is_array(leaf) or i in places
        }
        self._args_structure = jax.tree.structure(args)
        self._constants = tuple((i, x) for i, x in enumerate(leaves) if i not in arrays)
        self._state_places = tuple(places)
        self._shared = [x for i, x in arrays.items() if i not in places]
        self._initial = [arrays[i] for i in places]
        self._device = _single_device([*self._shared, *self._initial])

    def _program(self, structure: Any) -> Any:
        self._last_program = program_of(
            self._fun,
            self._settings,
            Structure(self._args_structure, self._constants, self._state_places, structure),
        )
        return self._last_program

    def _begin(self, program: Any, rows: list[Any]) -> None:
        self._planned = program.planned(self._shared, self._initial, rows)
        plan, outputs = self._planned.plan, self._planned.outputs
        places = [i for p in plan.parts if p.accumulator is CONCAT for i in p.values]
        targets = targets_of(self.where, self._out, self._planned.types, places)
        self._host_rows = []
        for place, output in zip(places, _concatenated(outputs), strict=True):
            path = f"output{_with_paths(self._planned.types)[place][0]}"
            _check_concat(self.where, path, output.type)
            rows_so_far = HostRows(self.where, path, output.type, targets.get(place))
            self._host_rows.append(rows_so_far)
        self._state, self._learn = program.start(self._shared, self._initial, rows, self._device)
        self._first_rows = self._rows

    def _leave_out(self, program: Any, rows: list[Any]) -> None:
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
        pairs = _with_paths(self._planned.types)
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
        for path, leaf in _with_paths(arguments):
            if _as_array(leaf) is None:
                raise BatchError(
                    f"{self.where}: microbatch {self.position} holds {path} = {leaf!r:.60}, which is not an array.\n"
                    "Leave it out: microbatches=((batch['x'], batch['y']) for batch in loader)."
                )


def _accumulator_key(where: str, accumulator: Any) -> Any:
    leaves, treedef = jax.tree.flatten(accumulator, is_leaf=_is_accumulator)
    for leaf in leaves:
        if as_accumulator(leaf) is None:
            raise AccumulatorError(
                f"{where}: accumulator holds {leaf!r}, not an accumulator.\n"
                f"Use one of {', '.join(AccumulationType.__members__)}, an Accumulator or a Carry."
            )
    return tuple(map(as_accumulator, leaves)), treedef


def _entries(accumulator: Any) -> list[Any]:
    leaves = jax.tree.leaves(accumulator, is_leaf=_is_accumulator)
    return [as_accumulator(leaf) for leaf in leaves]


def _is_accumulator(value: Any) -> bool:
    return as_accumulator(value) is not None


def _accumulator_words(entry: Any) -> str:
    entry = as_accumulator(entry)
    if isinstance(entry, Accumulator):
        parts = (entry.init, entry.update, entry.finalize)
        return f"Accumulator({', '.join(map(function_words, parts))})"
    return entry.name if isinstance(entry, AccumulationType) else repr(entry)


def _checked_dtype(where: str, dtype: Any) -> Any:
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return None if dtype is None else jnp.dtype(dtype)
    raise AccumulatorError(
        f"{where}: accumulator_dtype={dtype!r} is not a floating-point dtype.\n"
        "Use for example accumulator_dtype=jnp.float32."
    )


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


def _refuse_tracers(where: str, leaves: Sequence[Any]) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise MicrobatchError(
            f"{where}: called inside a transformation (jit, grad, vmap, scan), where a stream cannot be read.\n"
            "Transform the function instead, accumulate(jax.value_and_grad(fun), ...), or use microbatch on arrays."
        )


def _as_array(leaf: Any) -> Any:
    """A leaf of a microbatch as an array that nobody else writes into; None where it is no array."""
    if isinstance(leaf, jax.core.Tracer):
        _refuse_tracers("accumulate", [leaf])
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        return jnp.asarray(leaf)
    if not hasattr(leaf, "__array__") and not hasattr(leaf, "__dlpack__"):
        return None
    try:
        # A copy: the iterable may fill the same array again, and on a CPU the device would see that.
        array = np.array(np.asarray(leaf))
    except (TypeError, RuntimeError):
        # What NumPy has no dtype for, or cannot reach on its device.
        return jnp.array(jax.dlpack.from_dlpack(leaf))
    return None if array.dtype.kind in "OSUMm" else array


def _on_device(leaf: Any) -> jax.Array:
    return leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)


def _single_device(arrays: Sequence[jax.Array]) -> Any:
    """The device that the arrays are committed to, if it is one; None where they may be moved, or lie on several."""
    devices = {x.sharding for x in arrays if x.committed}
    if len(devices) != 1:
        return None
    (sharding,) = devices
    return sharding if len(sharding.device_set) == 1 else None


def _to_host(leaf: Any) -> Any:
    """A leaf as NumPy has it; a random key as its numbers."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _like(saved: np.ndarray, leaf: jax.Array) -> jax.Array:
    """What `_to_host` gave, where `leaf` is."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        saved = jax.random.wrap_key_data(saved, impl=jax.random.key_impl(leaf))
    return jax.device_put(jnp.array(saved), leaf.sharding if leaf.committed else None)


def _with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]
