"""How a call is run: without a derivative, with one that is made in the forward pass, or with one that recomputes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from microbatch._accumulation import AccumulationType, Accumulator, Carry
from microbatch._errors import MicrobatchError
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._accumulators import FoldOptions, make_fold
from microbatch.torch._arguments import Arguments
from microbatch.torch._autocast import Autocast
from microbatch.torch._call import Call
from microbatch.torch._discovery import Found
from microbatch.torch._gradient_sums import GradientSums
from microbatch.torch._guards import Guard
from microbatch.torch._in_forward import InForward, Made
from microbatch.torch._internals import transforms_active
from microbatch.torch._layout import Layout
from microbatch.torch._program import Microbatched, Program
from microbatch.torch._randomness import Randomness
from microbatch.torch._schedule import Schedule
from microbatch.torch._states import States
from microbatch.torch._tensors import type_words

Differentiate = Literal["auto", "in_forward", "recompute", "store"]
DIFFERENTIATE = ("auto", "in_forward", "recompute", "store")


@dataclass(frozen=True)
class Task:
    """One call with its settings."""

    where: str
    fun: Callable[..., Any]
    arguments: Arguments
    accumulator: Any
    schedule: Schedule
    options: FoldOptions
    differentiate: Differentiate
    rng: Any
    allow_row_mixing: bool
    subject: Callable[..., Any]
    """What is searched for modules: the user's function."""

    def call(self) -> Call:
        """The call's program, still to be collected."""
        return Call(
            self.where,
            self.fun,
            self.arguments,
            self.accumulator,
            self.schedule,
            Randomness(self.where, self.rng),
            self.options,
            self.subject,
        )


def evaluate(task: Task) -> Any:
    """The output of the call."""
    follows = torch.is_grad_enabled() or transforms_active()
    if task.differentiate == "store" or _has(task.accumulator, Accumulator):
        return _loop(task, follows)
    call = task.call()
    found = call.found()
    guard = _guard(task, found)
    guard.check_found()
    if not follows:
        call.collect(None)
        return call.result(call.program().run(call.tensors))
    call.collect(found)
    if transforms_active():
        if _has(task.accumulator, Carry):
            raise MicrobatchError(
                f"{task.where}: a Carry is not followed by transformations of torch.func.\n"
                "Call the microbatched function outside of them, or return the state as an ordinary output."
            )
        return _joined(call, call.program())
    if not task.schedule.steps:
        return _joined(call, call.program())
    return _Probed(task, call, found, guard).result()


def refuse_row_mixing(task: Task) -> None:
    """The checks that come before anything runs, for where the whole batch is one microbatch."""
    _guard(task, task.call().found()).check_found()


class _Probed:
    """A call whose first microbatch has run under autograd: what it used and what it gave decide how to go on."""

    def __init__(self, task: Task, call: Call, found: Found, guard: Guard) -> None:
        self._task = task
        self._call = call
        self._found = found
        self._step = task.schedule.steps[0]
        program = call.program()
        tensors = call.tensors
        needed = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        self._sums = GradientSums(task.where, tensors, program.places, program.real, needed)
        carries = [entry for entry in _entries(task.accumulator) if isinstance(entry, Carry)]
        states = States(task.where, call, carries, task.arguments.args, self._step.index)
        with torch.enable_grad(), guard.first_microbatch():
            leaves = self._sums.leaves(program.leaves(tensors, self._step.index), self._step.index)
            self._values = program.evaluate(self._step.index, leaves)
        outputs = [value for value in self._values if value.requires_grad]
        self._sums.know(states.leaves)
        unknown = self._sums.check(outputs)
        states.check(outputs)
        self._values = states.without(self._values)
        if unknown:
            call.add_real(unknown)
            self._sums.add_leaves({len(tensors) + i: leaf for i, leaf in enumerate(unknown)})

    def result(self) -> Any:
        program = self._call.program()
        program.differentiable = tuple(value.requires_grad for value in self._values)
        obstacle = self._obstacle(program)
        wanted = self._task.differentiate
        if wanted == "in_forward" and obstacle is not None:
            raise MicrobatchError(
                f'{self._task.where}: differentiate="in_forward" needs scalar outputs with SUM or MEAN, but {obstacle}.\n'
                'Use differentiate="recompute".'
            )
        scalars = sum(program.differentiable)
        chosen = wanted == "in_forward" or (wanted == "auto" and scalars == 1)
        if scalars and chosen and obstacle is None:
            return self._call.result(self._in_forward(program))
        if scalars:
            self._call.refuse_change_in_place()
        values = self._values
        program.first.append([value.detach() for value in values])
        del values, self._values, self._sums
        if not scalars:
            return self._call.result(program.run(self._call.tensors))
        return _joined(self._call, program)

    def _obstacle(self, program: Program) -> str | None:
        """Why the gradients cannot be made in the forward pass; None if they can."""
        outputs = program.outputs()
        flags = program.differentiable or ()
        for output, value, flag in zip(outputs, self._values, flags, strict=True):
            if not flag:
                continue
            if output.kind not in (AccumulationType.SUM, AccumulationType.MEAN):
                return f"{output.path} has {output.kind.name}"
            if value.ndim or not value.dtype.is_floating_point:
                return f"{output.path} is {type_words(value)}"
        for name, module in self._found.modules.values():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                if module.find_unused_parameters:
                    return f"{name} is a DistributedDataParallel with find_unused_parameters=True"
                if module.static_graph:
                    return f"{name} is a DistributedDataParallel with static_graph=True"
        if self._task.differentiate == "auto" and self._in_half(flags):
            return "float16 gradients would be made before the loss scale arrives"
        return None

    def _in_half(self, flags: Sequence[bool]) -> bool:
        autocast = any(a.enabled and a.dtype is torch.float16 for a in Autocast.now())
        tensors = [t for t in self._call.tensors if t.requires_grad]
        tensors += [value for value, flag in zip(self._values, flags) if flag]
        return autocast or any(t.dtype is torch.float16 for t in tensors)

    def _in_forward(self, program: Program) -> list[torch.Tensor]:
        schedule = self._task.schedule
        tensors = self._call.tensors
        lanes = [j for j, flag in enumerate(program.differentiable or ()) if flag]
        self._sums.open_lanes(len(lanes))
        folds, carries = [], []
        values, self._values = self._values, []
        with self._sums.collecting():
            for step in schedule.steps:
                if not values:
                    with torch.enable_grad():
                        given = program.leaves(tensors, step.index)
                        leaves = self._sums.leaves(given, step.index)
                        values = program.evaluate(step.index, leaves)
                for lane, j in enumerate(lanes):
                    share = _share(program, j, step.weight)
                    self._sums.add(
                        [values[j]],
                        [torch.full_like(values[j], share)],
                        schedule.split,
                        step.index,
                        lane=lane,
                        keep_graph=lane + 1 < len(lanes),
                    )
                values = [value.detach() for value in values]
                with torch.no_grad():
                    folds = folds or program.folds(values, step.rows)
                    carries = carries or [fold.init() for fold in folds]
                    carries = [
                        fold.update(carry, value, step)
                        for fold, carry, value in zip(folds, carries, values, strict=True)
                    ]
                values = []
            with torch.no_grad():
                results = [
                    fold.finalize(carry, schedule.total)
                    for fold, carry in zip(folds, carries, strict=True)
                ]
        made = Made(self._task.where, results, lanes, self._sums)
        return list(InForward.apply(made, *tensors))


def _joined(call: Call, program: Program) -> Any:
    results = Microbatched.apply(program, *call.tensors)
    return call.result(results[: len(program.outputs())])


def _share(program: Program, j: int, weight: float | None) -> float:
    """What the value of a microbatch counts in output j."""
    if program.outputs()[j].kind is AccumulationType.SUM:
        return 1.0
    total = program.schedule.total
    return (1 if weight is None else weight) / total if total else 0.0


def _loop(task: Task, follows: bool) -> Any:
    """A plain loop, for accumulators of one's own and for keeping everything.

    Autograd follows the accumulation. Unless everything is to be kept, each microbatch is a node that recomputes.
    """
    call = task.call()
    _guard(task, call.found()).check_found()
    recomputes = follows and task.differentiate != "store"
    options = task.options._replace(tracked=follows)
    layout: Layout | None = None
    folds, carries = [], []
    states: dict[int, Any] = {}
    for step in task.schedule.steps:
        args, kwargs = task.arguments.cut(task.schedule.split.rows(step.index))
        args = tuple(states.get(i, value) for i, value in enumerate(args))
        if recomputes:
            output = evaluate(_one_microbatch(task, args, kwargs, step))
        else:
            output = task.fun(*args, **kwargs)
        if layout is None:
            layout = Layout.of(task.where, task.accumulator, output)
            folds = [make_fold(part, options, step.rows) for part in layout.parts]
            carries = [fold.init() for fold in folds]
        values = layout.flatten(output)
        for j, part in enumerate(layout.parts):
            if isinstance(part.accumulator, Carry):
                values[j] = map_leaves(_detached, values[j])
                states[call.key(part.accumulator.argnum)] = values[j]
        carries = [
            fold.update(carry, value, step)
            for fold, carry, value in zip(folds, carries, values, strict=True)
        ]
        del output, values
    if layout is None:
        call.collect(None)
        call.abstract(call.tensors)
        layout = call.layout
        assert layout is not None
        rows = task.schedule.split.microbatch_size
        folds = [make_fold(part, options, rows) for part in layout.parts]
        carries = [fold.init() for fold in folds]
        for j, part in enumerate(layout.parts):
            if isinstance(part.accumulator, Carry):
                carries[j] = task.arguments.args[call.key(part.accumulator.argnum)]
    return layout.assemble(
        [fold.finalize(carry, task.schedule.total) for fold, carry in zip(folds, carries)]
    )


def _one_microbatch(task: Task, args: tuple[Any, ...], kwargs: dict[str, Any], step: Any) -> Task:
    """A task that is one microbatch of `task`, its output as it is."""
    rows = step.rows
    split = task.schedule.split
    single = type(split)(rows, max(rows, 1), split.order)
    whole = Schedule(single, (step._replace(index=0, weight=None, total=0, first=True),), 1)
    return Task(
        task.where,
        task.fun,
        Arguments(args, kwargs, task.arguments.rows, rows, task.arguments.subject),
        AccumulationType.LAST,
        whole,
        task.options._replace(split=single, weighted=False, complete=True),
        "recompute",
        task.rng,
        True,
        task.subject,
    )


def alone(task: Task, output: Any) -> Any:
    """The result where the only microbatch is the whole batch."""
    layout = Layout.of(task.where, task.accumulator, output)
    rows = task.schedule.split.batch_size
    follows = torch.is_grad_enabled() or transforms_active()
    options = task.options._replace(tracked=follows)
    step = task.schedule.steps[0]
    results = []
    for part, value in zip(layout.parts, layout.flatten(output), strict=True):
        results.append(make_fold(part, options, rows).alone(value, step))
    if all(
        isinstance(part.accumulator, AccumulationType)
        and part.accumulator is not AccumulationType.CONCAT
        for part in layout.parts
    ):
        return output
    return layout.assemble(results)


def _guard(task: Task, found: Found) -> Guard:
    return Guard(
        task.where,
        found,
        allow_row_mixing=task.allow_row_mixing,
        allow_hooks=True,
        is_wrapper=lambda module: False,
    )


def _entries(accumulator: Any) -> list[Any]:
    return [entry for _, entry in leaves_with_paths(accumulator)]


def _has(accumulator: Any, kind: type) -> bool:
    return any(isinstance(entry, kind) for entry in _entries(accumulator))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
