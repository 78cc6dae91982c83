"""`accumulate` in PyTorch: a fold over microbatches that arrive one after another."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from microbatch._accumulation import AccumulationType, Accumulator, Carry, Step
from microbatch._checkpoint import Progress
from microbatch._checks import check_function, check_weight, name_of
from microbatch._eager_stream import EagerStream
from microbatch._errors import MicrobatchError
from microbatch._outputs import canonical
from microbatch._splitting import Split
from microbatch._stream import Settings, fold_stream, identity_of
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._accumulators import Fold, FoldOptions, make_fold
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
    check_function(where, "fun", fun)
    if weight_fn is not None:
        check_function(where, "weight_fn", weight_fn)
    check_dtype(where, accumulator_dtype)
    kinds = canonical(where, accumulator)
    entries = tuple(leaves_with_paths(kinds, "output"))
    settings = Settings(where, kinds, entries, weight_fn, accumulator_dtype)

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
        return fold_stream(_Stream(settings, fun, args, out), microbatches, checkpoint)

    return accumulated


class _Stream(EagerStream):
    """One call on tensors."""

    def __init__(
        self, settings: Settings, fun: Callable[..., Any], args: tuple[Any, ...], out: Any
    ) -> None:
        super().__init__(settings, fun, args)
        self._out = out
        self._layout: Layout | None = None
        self._folds: list[Fold] = []
        self._carries: list[Any] = []
        self._skipped: list[Step] = []

    @property
    def started(self) -> bool:
        return self._layout is not None

    def identity(self, microbatch: tuple[Any, ...]) -> dict[str, str]:
        state = lambda x: dict(x.state_dict()) if isinstance(x, nn.Module) else x
        held = map_leaves(state, tuple(self.args))
        hosted = map_leaves(lambda x: _as_array(x)[1] if isinstance(x, torch.Tensor) else x, held)
        leaves = leaves_with_paths(hosted, "args")
        rows = leaves_with_paths(microbatch, "microbatch")
        return identity_of(self.settings, self.fun, leaves, rows)

    def rows_of(self, leaf: Any) -> int | None:
        return leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None

    def as_weight(self, value: Any) -> float:
        where = self.settings.where
        weight = as_weight(where, value)
        number = weight.item() if isinstance(weight, torch.Tensor) else weight
        return check_weight(where, number, self.position)

    def evaluated(self, microbatch: tuple[Any, ...]) -> Any:
        return map_leaves(
            lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf,
            self.fun(*self.args, *microbatch),
        )

    def evaluated_aside(self, microbatch: tuple[Any, ...]) -> Any:
        # What it draws is not missing later.
        before = [(source, source.get_state()) for source in sources()]
        try:
            return self.evaluated(microbatch)
        finally:
            for source, state in before:
                source.set_state(state)

    def make_folds(self, output: Any, rows: int) -> None:
        settings = self.settings
        self._layout = layout = Layout.of(settings.where, settings.accumulator, output)
        split = Split(1, 1)
        options = FoldOptions(settings.where, split, settings.accumulator_dtype, weighted=True)
        targets = targets_of(settings.where, self._out, layout.template, layout.parts)
        for part in layout.parts:
            fold = make_fold(part, options, rows)
            self._folds.append(fold)
            if isinstance(part.accumulator, Carry):
                carry = self.args[part.accumulator.argnum]
            elif part.accumulator is AccumulationType.CONCAT:
                carry = HostRows(settings.where, part, rows, targets.get(part.path))
            else:
                carry = fold.init()
            self._carries.append(carry)
        for step in self._skipped:
            self.skip(step)

    def fold(self, output: Any, step: Step) -> dict[Carry, Any]:
        assert self._layout is not None
        parts, values = self._layout.parts, self._layout.flatten(output)
        told = step._replace(weight=step.own_weight)
        with torch.no_grad():
            for i, (part, fold, value) in enumerate(zip(parts, self._folds, values, strict=True)):
                carry = self._carries[i]
                if isinstance(carry, HostRows):
                    carry.add(value, step.index)
                else:
                    mine = told if isinstance(part.accumulator, Accumulator) else step
                    self._carries[i] = fold.update(carry, value, mine)
        return self._carried()

    def skip(self, step: Step) -> None:
        if not self.started:
            self._skipped.append(step)
        for carry in self._carries:
            if isinstance(carry, HostRows):
                carry.skip(step.rows)

    def folded(self) -> Any:
        assert self._layout is not None
        with torch.no_grad():
            results = [
                carry.result() if isinstance(carry, HostRows) else fold.finalize(carry, self.total)
                for fold, carry in zip(self._folds, self._carries, strict=True)
            ]
        return self._layout.assemble(results)

    def progress(self) -> Progress:
        arrays: dict[str, np.ndarray] = {}
        types: dict[str, str] = {}
        for i, carry in enumerate(self._carries):
            carry = carry.state() if isinstance(carry, HostRows) else carry
            for j, (_, leaf) in enumerate(leaves_with_paths(carry)):
                types[f"{i}.{j}"], arrays[f"{i}.{j}"] = _as_array(leaf)
        for i, source in enumerate(sources()):
            arrays[f"random.{i}"] = source.get_state().numpy()
        return Progress(self.position, {**self.numbers(), "types": types}, arrays)

    def restore(self, saved: Progress) -> None:
        self.restore_numbers(saved)
        types = saved.numbers["types"]
        for i, carry in enumerate(self._carries):
            names = [name for name in types if name.startswith(f"{i}.")]
            leaves = [_as_leaf(types[name], saved.arrays[name]) for name in names]
            if isinstance(carry, HostRows):
                carry.restore(leaves)
                continue
            like = [leaf for _, leaf in leaves_with_paths(carry)]
            placed = iter([_beside(leaf, old) for leaf, old in zip(leaves, like, strict=True)])
            self._carries[i] = map_leaves(lambda _: next(placed), carry)
        for carry, value in self._carried().items():
            self.args[carry.argnum] = value

    def go_on(self, saved: Progress) -> None:
        for i, source in enumerate(sources()):
            if f"random.{i}" in saved.arrays:
                source.set_state(torch.from_numpy(saved.arrays[f"random.{i}"].copy()))

    def _carried(self) -> dict[Carry, Any]:
        assert self._layout is not None
        pairs = zip(self._layout.parts, self._carries, strict=True)
        return {
            part.accumulator: carry for part, carry in pairs if isinstance(part.accumulator, Carry)
        }


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
