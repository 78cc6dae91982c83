"""A few microbatches on fake tensors (or, when asked, on real ones), and the most bytes that were alive.

Gradients, accumulators and optimizer state are complete after the first microbatch, whatever its size. One more of each
size that is asked for is then as good as all, unless something of a microbatch stays behind.
"""

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Shape propagation has no public entry; these three names are all that is used of it (see the test that pins them).
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from microbatch._errors import PlanError
from microbatch.torch._batch import Batch
from microbatch.torch._discovery import Found, discover
from microbatch.torch._put_back import (
    clone_of,
    generators_kept,
    gradients_kept,
    parameters_kept,
    unwrapped,
)
from microbatch.torch._tensors import carry_dtype
from microbatch.torch._tracking import TensorBytes


@dataclass(frozen=True)
class Work:
    """What is planned: a function of a batch, and what runs around it.

    Attributes:
      where: the words that open a message.
      fun: called with the batch's arguments.
      batch: the arguments and how they are cut.
      concat: whether outputs are kept as rows (CONCAT); otherwise they are summed.
      backward: whether gradients are part of what must fit; None where `fun` decides by returning a loss.
      optimizer: whose state and step are part of it too, or None.
      accumulator_dtype: of side buffers that hold gradients between microbatches, or None.
      device: whose bytes count.
    """

    where: str
    fun: Callable[..., Any]
    batch: Batch
    concat: bool
    backward: bool | None
    optimizer: torch.optim.Optimizer | None
    accumulator_dtype: torch.dtype | None
    device: torch.device


def fake_peak(work: Work, size: int) -> int:
    """The peak bytes of `work` at microbatch size `size`, from shapes; nothing is allocated and nothing changes."""
    with fake_peaks(work) as peak_of:
        return peak_of(size)


@contextlib.contextmanager
def fake_peaks(work: Work) -> Iterator[Callable[[int], int]]:
    """The same for any number of sizes, which share what does not depend on the size."""
    with _faked(work) as loop:
        yield loop.peak_bytes


def real_peak(work: Work, size: int) -> int:
    """The same on the real tensors: it runs `fun`, and puts gradients, buffers and random state back."""
    with real_loop(work) as loop, loop.tracker:
        loop.tracker.hold(_resident(discover(work.fun, work.batch.args), work))
        loop.tracker.hold(tree_leaves(work.batch.args))
        return loop.peak_bytes(size)


@contextlib.contextmanager
def _faked(work: Work) -> "Iterator[Loop]":
    mode = FakeTensorMode()
    twins = _Twins(mode, work.device)
    tracker = _Tracker(work.device, twins)
    found = discover(work.fun, work.batch.args)
    try:
        with (
            gradients_kept(found, work.batch.args, work.optimizer) as leaves,
            unwrapped(found) as bucket_bytes,
            mode,
            tracker,
        ):
            tracker.live_bytes += bucket_bytes
            tracker.hold(twins(t) for t in _resident(found, work))
            args = tree_map_only(torch.Tensor, twins, work.batch.args)
            tracker.hold(tree_leaves(args))
            with torch.compiler.set_stance("force_eager"):
                # Steps act on twins, so the state that there is already may be used as it is.
                optimizer = clone_of(work.optimizer, lambda tensor: tensor)
                batch = Batch(args, work.batch.dims, work.batch.batch_size)
                yield Loop(work, batch, optimizer, tracker, leaves)
    except (DataDependentOutputException, DynamicOutputShapeException) as stop:
        raise PlanError(_stopped(work, str(stop.func), stop)) from None
    except RuntimeError as stop:
        if "supported for tensor subclasses" in str(stop):
            raise PlanError(_stopped(work, str(stop).split(" ")[0], stop)) from None
        raise


@contextlib.contextmanager
def real_loop(work: Work) -> "Iterator[Loop]":
    """The loop on the real tensors; gradients, buffers, parameters and random state are put back."""
    found = discover(work.fun, work.batch.args)
    tracker = _Tracker(work.device, None)
    devices = [work.device] if work.device.type == "cuda" else []
    with (
        gradients_kept(found, work.batch.args, work.optimizer) as leaves,
        parameters_kept(work.optimizer),
        unwrapped(found) as bucket_bytes,
        torch.random.fork_rng(devices),
        generators_kept(found),
    ):
        tracker.live_bytes += bucket_bytes
        yield Loop(work, work.batch, clone_of(work.optimizer, torch.clone), tracker, leaves)


class _Twins:
    """The fake twin of each real tensor, made once and kept alive."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
            return tensor
        if id(tensor) not in self.made:
            self.made[id(tensor)] = (tensor, self._twin(tensor))
        return self.made[id(tensor)][1]

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            # Arguments given as shapes alone stand for tensors on the device that is planned for.
            device = tensor.device if isinstance(tensor, FakeTensor) else self.device
            with self.mode:
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
        return self.mode.from_tensor(tensor)


class _Tracker(TensorBytes):
    """Counts, and lets an optimizer read its step counter, whose value changes no shape."""

    def __init__(self, device: torch.device, twins: _Twins | None) -> None:
        super().__init__(twins, device=device)
        self.invents_numbers = False
        self.is_real = twins is None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # Autograd asks for it more often than it computes.
            return args[0].fake_device
        if self.invents_numbers and func is torch.ops.aten._local_scalar_dense.default:
            # Neither 0 nor 1: what is divided by may be the number, or one less it.
            return 0.5
        return super().__torch_dispatch__(func, types, args, kwargs)


class Loop:
    """The loop over microbatches, with the gradients and the optimizer state that are there from its first one on."""

    def __init__(
        self,
        work: Work,
        batch: Batch,
        optimizer: torch.optim.Optimizer | None,
        tracker: _Tracker,
        leaves: list[torch.Tensor],
    ) -> None:
        given = [t for t in tree_leaves(batch.args) if _is_tensor(t)]
        self.work = work
        self.batch = batch
        self.optimizer = optimizer
        self.tracker = tracker
        self.leaves = [*leaves, *(t for t in given if t.is_leaf and t.requires_grad)]
        self.buffers: dict[int, torch.Tensor] = {}
        self.backward = work.backward
        self.has_state = optimizer is None
        self.has_gradients = False
        # What the optimizer's step takes beyond what is alive beside a microbatch.
        self.step_bytes = 0

    def peak_bytes(self, size: int) -> int:
        """The most bytes that are alive at once where microbatches have `size` rows."""
        pieces = self._pieces(size)
        # Beside all microbatches but the first there are gradients, so where two are of this size the second counts.
        accumulates = len(pieces) == 2 and pieces[1][1] - pieces[1][0] == size
        incomplete = not self.has_state or (accumulates and not self.has_gradients)
        if self.backward is not False and incomplete:
            self._run(pieces[:1])
            self.step()
        turn = pieces[:1] if accumulates else pieces
        if self.backward is not False and self._leaves_more(turn, clears=not accumulates):
            # Something of a microbatch stays, and the next one of its size finds it there.
            gc.collect()
            self._leaves_more(turn, clears=not accumulates)
            self._leaves_more(turn, clears=not accumulates)
        if self.backward is False:
            self.tracker.restart_peak()
            _run_forward(self.work, self.batch, pieces)
        return self.tracker.peak_bytes

    def run_two(self, size: int) -> None:
        """The first two microbatches."""
        pieces = self._pieces(size)
        if self.backward is not False:
            self._run(pieces)
        if self.backward is False:
            _run_forward(self.work, self.batch, pieces)

    def _pieces(self, size: int) -> list[tuple[int, int]]:
        rows = self.batch.batch_size
        return [(i, min(i + size, rows)) for i in range(0, rows, size)][:2]

    def _leaves_more(self, pieces: list[tuple[int, int]], clears: bool) -> bool:
        """Makes the peak that of `pieces`, and says whether other bytes are alive afterwards than were before."""
        if clears:
            self._clear()
        before = self.tracker.live_bytes
        self.tracker.restart_peak()
        self._run(pieces)
        peak = max(self.tracker.peak_bytes, self.tracker.live_bytes + self.step_bytes)
        self.tracker.peak_bytes = peak
        if clears:
            self._clear()
        return self.tracker.live_bytes != before

    def _run(self, pieces: list[tuple[int, int]]) -> None:
        """Forward, backward and accumulation; finds out whether `fun` is a loss, where that was not said."""
        for start, stop in pieces:
            output = self.work.fun(*self.batch.rows(start, stop))
            roots = losses(output)
            if not roots and self.backward is None:
                self.backward = False
                return
            cotangents = None
            if not roots:
                roots = [t for t in tree_leaves(output) if _is_tensor(t) and t.requires_grad]
                cotangents = [torch.ones_like(t) for t in roots]
            del output
            torch.autograd.backward(roots, cotangents)
            del roots, cotangents
            if self.work.accumulator_dtype is not None:
                _move_gradients(self.leaves, self.buffers, self.work.accumulator_dtype)
            self.has_gradients = True

    def step(self) -> None:
        """The optimizer's step, with the gradients that there are."""
        if self.optimizer is None or self.backward is False:
            return
        for leaf in self.leaves:
            if id(leaf) in self.buffers:
                leaf.grad = self.buffers.pop(id(leaf)).to(leaf.dtype)
        self.tracker.restart_peak()
        self.tracker.invents_numbers = not self.tracker.is_real
        self.optimizer.step()
        self.tracker.invents_numbers = False
        if self.work.accumulator_dtype is not None:
            _move_gradients(self.leaves, self.buffers, self.work.accumulator_dtype)
        self.step_bytes = self.tracker.peak_bytes - self.tracker.live_bytes
        self.has_state = True

    def _clear(self) -> None:
        self.has_gradients = False
        self.buffers.clear()
        for leaf in self.leaves:
            leaf.grad = None


@torch.no_grad()
def _run_forward(work: Work, batch: Batch, pieces: list[tuple[int, int]]) -> None:
    accumulates = pieces[0][1] < batch.batch_size
    held: list[Any] = []
    for start, stop in pieces:
        outputs = [t for t in tree_leaves(work.fun(*batch.rows(start, stop))) if _is_tensor(t)]
        if not accumulates:
            held = outputs
            continue
        if not held:
            held = [_accumulator(t, work, batch.batch_size, stop - start) for t in outputs]
        for carry, value in zip(held, outputs, strict=True):
            if work.concat and carry.ndim:
                carry[: stop - start].copy_(value)
            else:
                carry.add_(value)
        del outputs


def _accumulator(value: torch.Tensor, work: Work, batch_size: int, rows: int) -> torch.Tensor:
    if work.concat and value.ndim:
        return value.new_zeros((batch_size * value.shape[0] // rows, *value.shape[1:]))
    return torch.zeros_like(value, dtype=carry_dtype(value.dtype, work.accumulator_dtype))


def losses(output: Any) -> list[torch.Tensor]:
    """The scalars with a graph in what a loss function returns; empty where it is not a loss.

    >>> losses((torch.ones(3, requires_grad=True).sum(), "aux"))
    [tensor(3., grad_fn=<SumBackward0>)]
    """
    if hasattr(output, "loss"):
        output = output.loss
    if isinstance(output, dict):
        output = tuple(output.values())
    first = output[:1] if isinstance(output, tuple) and not losses_only(output) else output
    found = [t for t in tree_leaves(first) if _is_tensor(t)]
    return found if found and all(t.ndim == 0 and t.requires_grad for t in found) else []


def losses_only(output: tuple[Any, ...]) -> bool:
    """Whether every value is a scalar tensor."""
    return all(_is_tensor(t) and t.ndim == 0 for t in output)


def _move_gradients(
    leaves: list[torch.Tensor], buffers: dict[int, torch.Tensor], dtype: torch.dtype
) -> None:
    for leaf in leaves:
        if leaf.grad is None:
            continue
        if id(leaf) in buffers:
            buffers[id(leaf)].add_(leaf.grad)
        else:
            buffers[id(leaf)] = leaf.grad.to(dtype)
        leaf.grad = None


def _resident(found: Found, work: Work) -> list[torch.Tensor]:
    """What lies in memory whatever the size: parameters, buffers, other tensors that `fun` holds."""
    modules = [module for _, module in found.modules.values()]
    held = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
    held += [t for _, t in found.tensors]
    if work.optimizer is not None:
        held += [p for group in work.optimizer.param_groups for p in group["params"]]
    for tensor in held:
        if tensor is not None and is_lazy(tensor):
            raise PlanError(
                f"{work.where}: {work.fun} uses a lazy module whose parameters have no shape yet.\n"
                "Call the module once, on a few rows, before planning."
            )
        if (
            type(tensor).__name__ == "DTensor"
            or type(getattr(tensor, "data", None)).__name__ == "DTensor"
        ):
            raise PlanError(
                f"{work.where}: {work.fun} uses sharded parameters (DTensor), whose memory shapes do not tell.\n"
                "Give microbatch_size a number."
            )
    return [t for t in held if t is not None]


def _stopped(work: Work, operation: str, stop: BaseException) -> str:
    """Says which operation needs values, and where in the user's program it is."""
    inside = torch.__file__.rpartition("/")[0]
    frames = [
        f
        for f in traceback.extract_tb(stop.__traceback__)
        if not f.filename.startswith((inside, _HERE))
    ]
    place = f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return (
        f"{work.where}: {_WORDS.get(operation, operation)} needs values, and planning has only shapes{place}.\n"
        "Pass probe=True to measure two small real runs, or give microbatch_size a number."
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_HERE = __file__.rpartition("/")[0]
_WORDS = {
    "aten._local_scalar_dense.default": ".item() (or int(), float(), bool(), .tolist())",
    "aten.nonzero.default": "indexing with a boolean mask (or .nonzero())",
    "aten._unique2.default": "torch.unique",
    "aten.masked_select.default": "torch.masked_select",
}
