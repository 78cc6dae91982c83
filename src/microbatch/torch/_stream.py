"""`accumulate` in PyTorch: a fold over microbatches that arrive one after another."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from microbatch._accumulation import MEANS, AccumulationType, Accumulator, Carry
from microbatch._checkpoint import (
    Checkpoint,
    Progress,
    leaves_words,
)
from microbatch._checks import check_weight, name_of
from microbatch._errors import BatchError, MicrobatchError
from microbatch._outputs import canonical, check_can_weigh
from microbatch._splitting import Split
from microbatch._stream import Settings, fold_stream, identity_of
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._accumulators import Fold, FoldOptions, Step, make_fold
from microbatch.torch._host_rows import HostRows, targets_of
from microbatch.torch._internals import transforms_active
from microbatch.torch._layout import Layout
from microbatch.torch._microbatch import check_dtype
from microbatch.torch._randomness import sources
from microbatch.torch._tensors import dtype_name
from microbatch.torch._weights import as_weight


def accumulate(
    fun: Callable[..., Any],
    accumulator: Any = AccumulationType.SUM,
    *,
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Folds `fun` over a stream of microbatches, so that the batch never exists in memory.

    The function returned by ``accumulate(fun, accumulator)`` is equivalent to::

        def accumulated(*args, microbatches):
            carry = init(typeof(fun(*args, *first)))
            for i, microbatch in enumerate(microbatches):
                carry = update(carry, fun(*args, *microbatch).detach(), i)
            return finalize(carry)

    Args:
      fun: called as ``fun(*args, *microbatch)``; a microbatch's tensors are ``[m, ...]`` with m rows, which may differ
        between microbatches. It may compute gradients itself (`value_and_grad`); its outputs are detached.
      accumulator: how the outputs combine: one kind, or a tree of kinds that is a prefix of the output. A `Carry`
        names one of `args`.
      weight_fn: maps the arguments of `fun` to the microbatch's weight in MEAN and RUNNING_MEAN, in any unit (rows,
        valid tokens). Default: rows. A microbatch of weight 0 is skipped.
      accumulator_dtype: holds sums and means in this dtype. Default: float32 for float16 and bfloat16, the output's
        own dtype for others. The result has the output's dtype.

    Returns:
      A function of ``*args`` and the keywords

      - `microbatches`: an iterable that is consumed once; each element is a tuple or list of arguments, or a single
        argument that is neither. Progress is its business: ``microbatches=tqdm(loader)``.
      - `checkpoint`: a file in which the state and PyTorch's random state are saved as the stream goes by (at most a
        twentieth of the time is spent on it) and which is deleted at the end. A killed run that is started again with
        the same stream reads past what is in the file and continues, bit for bit. Needs safetensors.

      - `out`: a NumPy array (a memory map, for example) or a tensor to write CONCAT rows into, or a tree of them like the
        output with None elsewhere; with room for all rows. The result is the part of it that was written.

      Without it, CONCAT gives tensors in the host's memory: the memory of the device does not depend on the stream's length.

    Raises:
      EmptyStream: the iterable had no element, so that not even the shapes of the result are known.
      BatchError: rows are to be counted and a microbatch has none, or unequal ones.
      AccumulatorError: as for `microbatch`.
      CheckpointError: the file belongs to another function, other arguments, or another tree, dtype or size of
        microbatches.

    ================  ================================================================
    stream            result
    ================  ================================================================
    one element       ``fun(*args, *element)``, bit for bit
    total weight 0    zeros, never NaN; `fun` runs once for the shapes
    weight 0          skipped; its CONCAT rows are zeros
    a NaN output      NaN, as the whole batch would give
    a scalar, CONCAT  ``[number of microbatches]``
    ================  ================================================================

    >>> stream = [(torch.tensor([1.0, 2.0]),), (torch.tensor([6.0]),)]
    >>> mean = accumulate(lambda scale, x: scale * x.mean(), AccumulationType.MEAN)
    >>> mean(10.0, microbatches=stream).item()
    30.0
    """
    where = f"accumulate({name_of(fun)})"
    check_dtype(where, accumulator_dtype)
    settings = Settings(where, fun, canonical(where, accumulator), weight_fn, accumulator_dtype)

    def accumulated(
        *args: Any,
        microbatches: Iterable[Any],
        checkpoint: str | os.PathLike[str] | None = None,
        out: Any = None,
    ) -> Any:
        if transforms_active():
            raise MicrobatchError(
                f"{where}: a stream cannot be followed by transformations of torch.func.\n"
                "Transform the function that is given to accumulate, or use microbatch."
            )
        return fold_stream(_Stream(settings, args, out), microbatches, checkpoint)

    return accumulated


class _Stream:
    """One call: where it is in the stream, and what it holds."""

    def __init__(self, settings: Settings, args: tuple[Any, ...], out: Any) -> None:
        settings.check_carries(len(args))
        self.settings = settings
        self.position = 0
        self.rows_read = 0
        self._out = out
        self._args = list(args)
        self._first_rows: int | None = None
        self._first_weight: Any = None
        self._total: float = 0
        self._layout: Layout | None = None
        self._folds: list[Fold] = []
        self._carries: list[Any] = []
        self._skipped: list[int] = []
        self._output_words = ""
        self._unrun: tuple[Any, ...] | None = None

    def identity(self, microbatch: tuple[Any, ...]) -> dict[str, str]:
        """What a checkpoint of this stream belongs to, told by its first microbatch."""
        state = lambda x: dict(x.state_dict()) if isinstance(x, nn.Module) else x
        held = map_leaves(state, tuple(self._args))
        hosted = map_leaves(lambda x: _as_array(x)[1] if isinstance(x, torch.Tensor) else x, held)
        return identity_of(self.settings, hosted, microbatch)

    @property
    def started(self) -> bool:
        """Whether an output is in the folds."""
        return self._layout is not None

    def add(self, microbatch: tuple[Any, ...]) -> None:
        """Evaluates the next microbatch and folds its output in, or skips it where its weight is 0."""
        rows = self._read(microbatch)
        own_weight = self._weight(microbatch, rows)
        if own_weight == 0:
            self._skip(rows or 0)
            # One is kept: if none has a weight, it is run for the shapes of the result.
            self._unrun = self._unrun or microbatch
        else:
            self._fold_in(_detached(self.settings.fun(*self._args, *microbatch)), rows, own_weight)
        self.position += 1

    def pass_over(self, microbatch: tuple[Any, ...]) -> None:
        """Reads past a microbatch that the checkpoint holds already."""
        self._read(microbatch)
        self.position += 1

    def go_on(self, saved: Progress) -> None:
        """Takes the random numbers up where the checkpoint left them."""
        for i, source in enumerate(sources()):
            if f"random.{i}" in saved.arrays:
                source.set_state(torch.from_numpy(saved.arrays[f"random.{i}"].copy()))

    def result(self) -> Any:
        """What the folds make of the stream."""
        if self._layout is None:
            assert self._unrun is not None
            self._start(self._run_aside(self._unrun), self._first_rows)
        assert self._layout is not None
        with torch.no_grad():
            results = [
                carry.result() if isinstance(carry, HostRows) else fold.finalize(carry, self._total)
                for fold, carry in zip(self._folds, self._carries, strict=True)
            ]
        return self._layout.assemble(results)

    def progress(self) -> Progress:
        """The state, as a checkpoint holds it."""
        arrays: dict[str, np.ndarray] = {}
        types: dict[str, str] = {}
        for i, carry in enumerate(self._carries):
            carry = carry.state() if isinstance(carry, HostRows) else carry
            for j, (_, leaf) in enumerate(leaves_with_paths(carry)):
                types[f"{i}.{j}"], arrays[f"{i}.{j}"] = _as_array(leaf)
        for i, source in enumerate(sources()):
            arrays[f"random.{i}"] = source.get_state().numpy()
        numbers = {
            "rows_read": self.rows_read,
            "total": self._total,
            "first_weight": self._first_weight,
            "output": self._output_words,
            "types": types,
        }
        return Progress(self.position, numbers, arrays)

    def resume(self, checkpoint: Checkpoint, microbatch: tuple[Any, ...]) -> Progress | None:
        """Takes the state of the file, if there is one.

        The structure of the state is that of an output, so `fun` runs once and its output is thrown away.
        """
        saved = checkpoint.load()
        if saved is None:
            return None
        self._start(self._run_aside(microbatch), _rows_of(microbatch))
        numbers, types = saved.numbers, saved.numbers["types"]
        checkpoint.check("output", numbers["output"], self._output_words)
        self._total, self._first_weight = numbers["total"], numbers["first_weight"]
        assert self._layout is not None
        for i, (part, carry) in enumerate(zip(self._layout.parts, self._carries, strict=True)):
            names = [name for name in types if name.startswith(f"{i}.")]
            leaves = [_as_leaf(types[name], saved.arrays[name]) for name in names]
            if isinstance(carry, HostRows):
                carry.restore(leaves)
                continue
            like = [leaf for _, leaf in leaves_with_paths(carry)]
            placed = iter([_beside(leaf, old) for leaf, old in zip(leaves, like, strict=True)])
            self._carries[i] = map_leaves(lambda _: next(placed), carry)
            if isinstance(part.accumulator, Carry):
                self._args[part.accumulator.argnum] = self._carries[i]
        return saved

    def _start(self, output: Any, rows: int | None) -> None:
        settings = self.settings
        self._output_words = leaves_words(leaves_with_paths(output, "output"))
        self._layout = Layout.of(settings.where, settings.accumulator, output)
        split = Split(1, 1)
        options = FoldOptions(settings.where, split, settings.accumulator_dtype, weighted=True)
        targets = targets_of(settings.where, self._out, self._layout.template, self._layout.parts)
        for part in self._layout.parts:
            fold = make_fold(part, options, rows or 0)
            carry = None
            if isinstance(part.accumulator, Carry):
                carry = self._args[part.accumulator.argnum]
            elif part.accumulator is AccumulationType.CONCAT:
                carry = HostRows(settings.where, part, rows or 0, targets.get(part.path))
                for skipped in self._skipped:
                    carry.skip(skipped)
            self._folds.append(fold)
            self._carries.append(fold.init() if carry is None else carry)
        self._unrun = None

    def _skip(self, rows: int) -> None:
        if self._layout is None:
            self._skipped.append(rows)
            return
        for carry in self._carries:
            if isinstance(carry, HostRows):
                carry.skip(rows)

    def _fold_in(self, output: Any, rows: int | None, own_weight: Any) -> None:
        if self._layout is None:
            self._start(output, rows)
        assert self._layout is not None
        if self._first_weight is None:
            self._first_weight = own_weight
        # Relative to the first weight, so that a stream of one element is that element's output.
        same = own_weight == self._first_weight
        weight = None if same else own_weight / self._first_weight
        values = self._layout.flatten(output)
        with torch.no_grad():
            for i, (part, fold) in enumerate(zip(self._layout.parts, self._folds, strict=True)):
                if isinstance(self._carries[i], HostRows):
                    self._carries[i].add(values[i], self.position)
                    continue
                # An accumulator of one's own is given the weight itself.
                given = own_weight if isinstance(part.accumulator, Accumulator) else weight
                step = Step(self.position, rows or 0, given, self._total, first=self._total == 0)
                self._carries[i] = fold.update(self._carries[i], values[i], step)
                if isinstance(part.accumulator, Carry):
                    self._args[part.accumulator.argnum] = self._carries[i]
        self._total += 1 if weight is None else weight

    def _read(self, microbatch: tuple[Any, ...]) -> int | None:
        """The rows of the next microbatch."""
        rows = _rows_of(microbatch)
        if self.position == 0:
            self._first_rows = rows
        elif rows != self._first_rows:
            for entry in self.settings.entries():
                if isinstance(entry, Accumulator):
                    check_can_weigh(self.settings.where, entry, "output")
        self.rows_read += rows or 0
        return rows

    def _weight(self, microbatch: tuple[Any, ...], rows: int | None) -> Any:
        settings = self.settings
        if settings.weight_fn is not None:
            weight = as_weight(settings.where, settings.weight_fn(*self._args, *microbatch))
            weight = weight.item() if isinstance(weight, torch.Tensor) else weight
            return check_weight(settings.where, weight, self.position)
        if rows is not None:
            return rows
        if any(entry in MEANS for entry in settings.entries()):
            raise BatchError(
                f"{settings.where}: microbatch {self.position} has no rows that could be counted "
                f"({leaves_words(leaves_with_paths(microbatch, 'microbatch'))}).\n"
                "Give tensors with equally many rows on their first dimension, or weight_fn=."
            )
        return 1

    def _run_aside(self, microbatch: tuple[Any, ...]) -> Any:
        """An output of which only the types matter; nothing that it draws is missing later."""
        before = [(source, source.get_state()) for source in sources()]
        try:
            return _detached(self.settings.fun(*self._args, *microbatch))
        finally:
            for source, state in before:
                source.set_state(state)


def _rows_of(microbatch: tuple[Any, ...]) -> int | None:
    """The common length of the first dimensions, None where there is none or they differ."""
    leaves = [leaf for _, leaf in leaves_with_paths(microbatch)]
    rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
    return rows.pop() if len(rows) == 1 else None


def _detached(output: Any) -> Any:
    return map_leaves(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output
    )


def _as_array(leaf: Any) -> tuple[str, np.ndarray]:
    """A leaf of the state for the file; dtypes that NumPy lacks as their bytes."""
    if not isinstance(leaf, torch.Tensor):
        return "python", np.asarray(leaf)
    host = leaf.detach().cpu().contiguous()
    try:
        return "tensor", host.numpy()
    except TypeError:
        shape = ",".join(map(str, host.shape))
        return f"{dtype_name(host.dtype)} {shape}", host.reshape(-1).view(torch.uint8).numpy()


def _as_leaf(kind: str, array: np.ndarray) -> Any:
    if kind == "python":
        return array.item()
    tensor = torch.from_numpy(np.array(array))
    if kind == "tensor":
        return tensor
    dtype, _, shape = kind.partition(" ")
    return tensor.view(getattr(torch, dtype)).reshape([int(n) for n in shape.split(",") if n])


def _beside(leaf: Any, old: Any) -> Any:
    """`leaf` on the device of the one in whose place it comes."""
    both = isinstance(leaf, torch.Tensor) and isinstance(old, torch.Tensor)
    return leaf.to(old.device) if both else leaf
