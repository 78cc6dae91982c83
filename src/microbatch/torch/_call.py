"""One call of a microbatched function: its arguments as flat tensors, and one microbatch as a function of them."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from microbatch._accumulation import AccumulationType, Carry
from microbatch._errors import AccumulatorError, MicrobatchError
from microbatch._outputs import refuse_extremes
from microbatch._trees import leaves_with_paths, map_leaves, map_numbered_leaves
from microbatch.torch._accumulators import FoldOptions
from microbatch.torch._arguments import Arguments
from microbatch.torch._autocast import Autocast, fresh_casts, restored
from microbatch.torch._captured import (
    Member,
    captured_tensors,
    in_modes,
    installed,
    matters,
    members_of,
    rebind,
)
from microbatch.torch._discovery import Found, discover
from microbatch.torch._internals import (
    is_transformed,
    shapes_alone,
    transforms_active,
    version_of,
)
from microbatch.torch._layout import Layout
from microbatch.torch._program import Output, Program, output_of
from microbatch.torch._randomness import Randomness
from microbatch.torch._rows import Place
from microbatch.torch._schedule import Schedule


class Input(NamedTuple):
    """Where one flat input comes from, and goes to."""

    tensor: torch.Tensor
    axis: int | None = None
    argument: tuple[int | str, int] | None = None
    member: Member | None = None
    real: bool = False


class Call:
    """The program of one call.

    Args:
      where: the words that open a message.
      fun: the function.
      arguments: its arguments.
      accumulator: the canonical accumulator tree.
      randomness: what was drawn, to be drawn again.
      options: of the folds.
      subject: what is searched for modules.
    """

    def __init__(
        self,
        where: str,
        fun: Callable[..., Any],
        arguments: Arguments,
        accumulator: Any,
        schedule: Schedule,
        randomness: Randomness,
        options: FoldOptions,
        subject: Callable[..., Any],
    ) -> None:
        self.where = where
        self.layout: Layout | None = None
        self.carries: dict[int, dict[int | str, Any]] = {}
        """By microbatch, the arguments that the one before it carried over."""
        self.carried: list[Any] = []
        """The states after the last microbatch that ran, in the order of the parts."""
        self._fun = fun
        self._subject = subject
        self._arguments = arguments
        self._accumulator = accumulator
        self._schedule = schedule
        self._randomness = randomness
        self._options = options
        self._autocast = Autocast.now()
        self._casts = any(setting.enabled for setting in self._autocast)
        self._first_rows = schedule.split.microbatch_size
        self.watch_states: Callable[[list[Any]], None] = lambda states: None
        """Called with the states of a microbatch, before they are cut from their graph."""
        self._evaluated: set[int] = set()
        self._changed: str | None = None
        self._modes: list[tuple[nn.Module, bool]] = []

    def found(self) -> Found:
        """The modules that the function and its arguments hold."""
        modules = [
            leaf
            for _, leaf in leaves_with_paths((self._arguments.args, self._arguments.kwargs))
            if isinstance(leaf, nn.Module)
        ]
        found = Found()
        if isinstance(self._subject, nn.Module):
            found.add_module(type(self._subject).__name__, self._subject)
        return discover(self._subject, modules, found)

    def collect(self, found: Found | None) -> None:
        """Finds the flat inputs: rows, arguments and captured tensors that matter, parameters of modules."""
        axes = {(rows.key, rows.leaf): rows.axis for rows in self._arguments.rows}
        named = [*enumerate(self._arguments.args), *self._arguments.kwargs.items()]
        inputs: list[Input] = []
        for key, value in named:
            for number, (_, leaf) in enumerate(leaves_with_paths(value)):
                axis = axes.get((key, number))
                if isinstance(leaf, torch.Tensor) and (axis is not None or matters(leaf)):
                    inputs.append(Input(leaf, axis, (key, number)))
        if found is not None:
            self._randomness.add(self._generators(found))
            self._modes = [(module, module.training) for _, module in found.modules.values()]
            inputs += [Input(tensor) for tensor in captured_tensors(self._fun)]
            functional = transforms_active()
            reals: set[int] = set()
            if not self._schedule.steps:  # What nothing runs for cannot be found by running.
                reals = {id(leaf) for _, leaf in found.named_leaves() if not functional}
                inputs += [
                    Input(leaf, real=True) for _, leaf in found.named_leaves() if not functional
                ]
            for member in members_of([module for _, module in found.modules.values()]):
                plain = member.tensor.is_leaf and not is_transformed(member.tensor)
                if functional or not plain:
                    inputs.append(Input(member.tensor, member=member))
                elif id(member.tensor) not in reals:
                    reals.add(id(member.tensor))
                    inputs.append(Input(member.tensor, real=True))
        self._inputs = inputs
        self._captured = [i for i, a in enumerate(inputs) if _is_captured(a)]
        self._members = [i for i, a in enumerate(inputs) if a.member is not None]

    def add_real(self, leaves: Sequence[torch.Tensor]) -> None:
        """Adds leaves that turned out to be used."""
        self._inputs = [*self._inputs, *(Input(leaf, real=True) for leaf in leaves)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The flat inputs."""
        return [entry.tensor for entry in self._inputs]

    def program(self) -> Program:
        """The call as a program over `tensors`."""
        split = self._schedule.split
        places = [
            None if entry.axis is None else Place(entry.axis, split.microbatch_size, split.tail)
            for entry in self._inputs
        ]
        return Program(
            schedule=self._schedule,
            evaluate=self.evaluate,
            places=tuple(places),
            real=tuple(entry.real for entry in self._inputs),
            outputs=self.outputs,
            options=self._options,
            abstract=self.abstract,
            where=self.where,
            replaying=self._replaying,
        )

    def outputs(self) -> list[Output]:
        """What the program accumulates; the states that are carried are not part of it."""
        assert self.layout is not None
        return [
            output_of(
                part.accumulator, part.path, part.value, self._schedule.split, self._first_rows
            )
            for part in self.layout.parts
            if isinstance(part.accumulator, AccumulationType)
        ]

    def evaluate(self, index: int, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One microbatch: the function on its leaves. A second time, what it drew is drawn again."""
        if index in self._evaluated:
            self.refuse_change_in_place()
        self._evaluated.add(index)
        watched = self._watched(leaves)
        before = [version_of(tensor) for _, tensor in watched]
        output = self.run_function(index, leaves)
        for (path, tensor), version in zip(watched, before, strict=True):
            if version_of(tensor) != version:
                self._changed = path
        if self.layout is None:
            self.layout = Layout.of(self.where, self._accumulator, output)
            self._first_rows = self._schedule.split.size(index)
        values = self.layout.flatten(output)
        for value in values:
            if (
                isinstance(value, torch.Tensor)
                and is_transformed(value)
                and not transforms_active()
            ):
                raise MicrobatchError(
                    f"{self.where}: the function uses a tensor of an outer torch.func transformation that cannot be "
                    "found from it.\nPass the tensor as an argument."
                )
        return self._carry(index, values)

    def _watched(self, leaves: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """The tensors among the arguments that the function gets, with what to call them."""
        found: list[tuple[str, torch.Tensor]] = [
            (_argument_words(entry.argument[0]), leaf)
            for entry, leaf in zip(self._inputs, leaves, strict=False)
            if entry.argument is not None
        ]
        for key, value in [*enumerate(self._arguments.args), *self._arguments.kwargs.items()]:
            for path, leaf in leaves_with_paths(value, _argument_words(key)):
                if isinstance(leaf, torch.Tensor):
                    found.append((path, leaf))
        return [(path, tensor) for path, tensor in found if not tensor.is_inference()]

    def refuse_change_in_place(self) -> None:
        """Refuses to evaluate again what would now see other arguments."""
        if self._changed is not None:
            raise MicrobatchError(
                f"{self.where}: the function changes {self._changed} in place, and its derivative evaluates it again, on "
                "what it has changed.\n"
                "Change a copy, or return the new state (see Carry)."
            )

    def _generators(self, found: Found) -> list[torch.Generator]:
        """Generators of random numbers that the function, its arguments and its modules hold."""
        held = [item for _, item in found.objects]
        held += [
            leaf for _, leaf in leaves_with_paths((self._arguments.args, self._arguments.kwargs))
        ]
        held += [value for _, module in found.modules.values() for value in vars(module).values()]
        return [item for item in held if isinstance(item, torch.Generator)]

    def run_function(self, index: int, leaves: Sequence[torch.Tensor]) -> Any:
        """The function's own output for a microbatch, from its leaves."""
        args, kwargs = self._rebuild(leaves, self.carries.get(index, {}))
        fun = self._fun
        if self._captured:
            given = {id(self._inputs[i].tensor): leaves[i] for i in self._captured}
            fun = rebind(fun, lambda tensor: given.get(id(tensor), tensor))
        members = [
            member._replace(tensor=leaves[i])
            for i in self._members
            if (member := self._inputs[i].member) is not None
        ]
        drawing = nullcontext() if index < 0 else self._randomness.microbatch(index)
        casting = fresh_casts() if self._casts else nullcontext()
        with installed(members), drawing, casting:
            return fun(*args, **kwargs)

    def abstract(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of a full microbatch by shapes alone; nothing is run and nothing is drawn."""
        rows = self._schedule.split.microbatch_size
        with shapes_alone() as mode:
            leaves = []
            for entry, tensor in zip(self._inputs, tensors, strict=True):
                fake = mode.from_tensor(tensor)
                if entry.axis is not None:
                    shape = list(fake.shape)
                    shape[entry.axis] = rows
                    fake = fake.new_empty(shape)
                leaves.append(fake)
            output = self.run_function(-1, leaves)
        self.layout = Layout.of(self.where, self._accumulator, output)
        if self._schedule.split.batch_size == 0:
            refuse_extremes(self.where, self.layout.parts)
        parts = self.layout.parts
        return [part.value for part in parts if isinstance(part.accumulator, AccumulationType)]

    def result(self, values: Sequence[torch.Tensor]) -> Any:
        """The whole output from the accumulated values and the carried states."""
        assert self.layout is not None
        simple, carried = iter(values), iter(self.carried or self._initial_states())
        return self.layout.assemble(
            [
                next(carried) if isinstance(part.accumulator, Carry) else next(simple)
                for part in self.layout.parts
            ]
        )

    def _carry(self, index: int, values: list[Any]) -> list[torch.Tensor]:
        """Hands the carried states to the next microbatch; returns the other values."""
        assert self.layout is not None
        parts = self.layout.parts
        if not any(isinstance(part.accumulator, Carry) for part in parts):
            return values
        states = [
            map_leaves(_detached, value)
            for part, value in zip(parts, values)
            if isinstance(part.accumulator, Carry)
        ]
        indices = [step.index for step in self._schedule.steps]
        after = indices.index(index) + 1
        if after == len(indices):
            self.carried = self.carried or states
        elif indices[after] not in self.carries:
            keys = [
                part.accumulator.argnum for part in parts if isinstance(part.accumulator, Carry)
            ]
            self.carries[indices[after]] = {self.key(n): s for n, s in zip(keys, states)}
        self.watch_states([v for p, v in zip(parts, values) if isinstance(p.accumulator, Carry)])
        return [
            value for part, value in zip(parts, values) if not isinstance(part.accumulator, Carry)
        ]

    def _initial_states(self) -> list[Any]:
        assert self.layout is not None
        args = self._arguments.args
        return [
            args[part.accumulator.argnum]
            for part in self.layout.parts
            if isinstance(part.accumulator, Carry)
        ]

    def key(self, argnum: int) -> int:
        count = len(self._arguments.args)
        key = argnum + count if argnum < 0 else argnum
        if not 0 <= key < count or any(rows.key == key for rows in self._arguments.rows):
            raise AccumulatorError(
                f"{self.where}: Carry({argnum}) names no argument that is passed by position and is not a batch "
                f"argument; the call has {count}.\n"
                "Give the position of the argument that starts the state."
            )
        return key

    @contextmanager
    def _replaying(self) -> Any:
        with self._randomness.replaying(), restored(self._autocast), in_modes(self._modes):
            yield

    def _rebuild(
        self, leaves: Sequence[torch.Tensor], carried: dict[int | str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `leaves` in the places where the inputs came from."""
        new: dict[int | str, dict[int, torch.Tensor]] = {}
        for entry, leaf in zip(self._inputs, leaves, strict=False):
            if entry.argument is not None and leaf is not entry.tensor:
                key, number = entry.argument
                new.setdefault(key, {})[number] = leaf

        def argument(key: int | str, value: Any) -> Any:
            if key in carried:
                return carried[key]
            if key not in new:
                return value
            if isinstance(value, torch.Tensor):
                return new[key][0]
            return map_numbered_leaves(new[key].get, value)

        args = tuple(argument(i, value) for i, value in enumerate(self._arguments.args))
        kwargs = {name: argument(name, value) for name, value in self._arguments.kwargs.items()}
        return args, kwargs


def _argument_words(key: int | str) -> str:
    return f"args[{key}]" if isinstance(key, int) else key


def _is_captured(entry: Input) -> bool:
    return entry.argument is None and entry.member is None and not entry.real


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
