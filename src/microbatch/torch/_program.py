"""One call as a pure function of flat tensors, its derivative as another such function, and the node that joins them.

A program runs outside of every transformation of `torch.func` (its node hands it plain tensors), one microbatch after
another and without autograd. Its derivative is a program too, so second derivatives and transformations need nothing
of their own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from microbatch._accumulation import AccumulationType
from microbatch._errors import MicrobatchError
from microbatch._outputs import Part
from microbatch._splitting import Split
from microbatch.torch._accumulators import Fold, FoldOptions, make_fold
from microbatch.torch._gradient_sums import GradientSums
from microbatch.torch._internals import own_hooks_only, transforms_active
from microbatch.torch._rows import Place, row_counts
from microbatch.torch._schedule import Schedule
from microbatch.torch._tensors import spec_of


class Output(NamedTuple):
    """One output of a program: its kind, its place where it has rows, and whether CONCAT stacks a scalar."""

    kind: AccumulationType
    path: str
    place: Place | None
    scalar: bool


@dataclass
class Program:
    """``evaluate(index, leaves)`` over the microbatches of a schedule.

    Attributes:
      schedule: which microbatches run, with their weights.
      evaluate: one microbatch: its leaves to its outputs, tensors both.
      places: per input, where a microbatch's rows are; None for what all microbatches share.
      real: per input, whether `evaluate` uses the tensor itself, wherever it is (a module's parameter), and not what it
        is given.
      outputs: the outputs, known once `evaluate` has run.
      options: of the folds.
      abstract: the outputs of a full microbatch as fake tensors, for where nothing runs.
      where: opens the messages.
      around: entered around all microbatches.
      differentiable: per output, whether a derivative goes through it, where that is known.
      first: the outputs of the first microbatch, where they are known already; taken by `run`.
      replaying: entered around the pullback's microbatches: what was drawn is drawn again, under the same autocast.
    """

    schedule: Schedule
    evaluate: Callable[[int, Sequence[torch.Tensor]], list[torch.Tensor]]
    places: tuple[Place | None, ...]
    real: tuple[bool, ...]
    outputs: Callable[[], list[Output]]
    options: FoldOptions
    abstract: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    where: str = ""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    differentiable: tuple[bool, ...] | None = None
    first: list[list[torch.Tensor]] = field(default_factory=list)
    replaying: Callable[[], AbstractContextManager[Any]] = nullcontext

    def leaves(self, tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        """The inputs of one microbatch: rows of what has rows, views."""
        split = self.schedule.split
        return [
            tensor if place is None else place.take(tensor, split, index)
            for tensor, place in zip(tensors, self.places, strict=True)
        ]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The accumulated outputs, then the winners of MAX and MIN."""
        folds: list[Fold] = []
        carries: list[Any] = []
        with torch.no_grad(), self.around():
            for step in self.schedule.steps:
                if self.first:
                    values = self.first.pop()
                else:
                    values = self.evaluate(step.index, self.leaves(tensors, step.index))
                if not folds:
                    folds = self.folds(values, step.rows)
                    carries = [fold.init() for fold in folds]
                carries = [
                    fold.update(carry, value, step)
                    for fold, carry, value in zip(folds, carries, values, strict=True)
                ]
                del values
            if not folds:
                folds = self.folds(self.abstract(tensors), self.schedule.split.microbatch_size)
                carries = [fold.init() for fold in folds]
            results = [
                fold.finalize(carry, self.schedule.total) for fold, carry in zip(folds, carries)
            ]
            winners = [t for fold, carry in zip(folds, carries) for t in fold.winners(carry)]
            return [*results, *winners]

    def folds(self, values: Sequence[torch.Tensor], rows: int) -> list[Fold]:
        """The folds of the outputs, from the values of a microbatch of `rows` rows."""
        return [
            make_fold(
                Part(output.kind, output.path, spec_of(value)),
                self.options._replace(row_axis=output.place.axis if output.place else 0),
                rows,
            )
            for output, value in zip(self.outputs(), values, strict=True)
        ]

    def batched(self, in_dims: Sequence[int | None], randomness: str) -> "Program":
        """The program over a further leading axis of the inputs that have one (0 in `in_dims`), and of all outputs."""

        def evaluate(index: int, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            one = lambda *inner: tuple(self.evaluate(index, inner))
            mapped = torch.vmap(one, in_dims=tuple(in_dims), randomness=randomness)
            return list(mapped(*leaves))

        def shifted(place: Place | None, moves: bool) -> Place | None:
            return place._replace(axis=place.axis + 1) if place is not None and moves else place

        changes: dict[str, Any] = {
            "evaluate": evaluate,
            "places": tuple(
                shifted(place, dim is not None)
                for place, dim in zip(self.places, in_dims, strict=True)
            ),
            "outputs": lambda: [o._replace(place=shifted(o.place, True)) for o in self.outputs()],
        }
        return Program(**{f.name: getattr(self, f.name) for f in fields(Program)} | changes)

    def pullback(self, needed: Sequence[int], with_cotangent: Sequence[int]) -> "Pullback":
        """The derivative for the inputs at `needed` where the outputs at `with_cotangent` have a cotangent."""
        return Pullback(self, needed, with_cotangent)


class Pullback(Program):
    """The derivative of a program: its inputs and cotangents to the cotangents of the inputs at `needed`.

    Each microbatch is evaluated again, differentiated and released. Gradients of what microbatches share are sums, held
    in float32 or wider; those of rows are written where the rows are.
    """

    def __init__(self, base: Program, needed: Sequence[int], with_cotangent: Sequence[int]) -> None:
        outputs = base.outputs()
        self.base = base
        self.needed = tuple(needed)
        self.selected = tuple(with_cotangent)
        self.cotangents = [outputs[j] for j in self.selected]
        won = [o for o in self.cotangents if o.kind in _EXTREMES]
        super().__init__(
            schedule=base.schedule,
            evaluate=self._evaluate,
            places=(*base.places, *(o.place for o in self.cotangents), *(None for _ in won)),
            real=(*base.real, *(False for _ in (*self.cotangents, *won))),
            outputs=self._outputs,
            options=base.options._replace(accumulator_dtype=None, weighted=False),
            abstract=lambda tensors: [tensors[i] for i in self.needed],
            where=base.where,
            around=base.replaying,
            replaying=base.replaying,
        )
        self._steps = {step.index: step for step in base.schedule.steps}

    def _outputs(self) -> list[Output]:
        places = [self.base.places[i] for i in self.needed]
        return [
            Output(
                AccumulationType.SUM if place is None else AccumulationType.CONCAT,
                "gradient",
                place,
                False,
            )
            for place in places
        ]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The gradients, None where there is none; each is added to its sum as soon as autograd has it, so no second one waits beside it."""
        count = len(self.base.places)
        sums = GradientSums(
            self.where, tensors[:count], self.base.places, self.base.real, self.needed
        )
        with torch.no_grad(), self.around(), sums.collecting():
            for step in self.schedule.steps:
                index = step.index
                given = self.leaves(tensors, index)
                cotangents = self._cotangents(index, given[count:])
                if any(cotangent is not None for cotangent in cotangents):
                    with torch.enable_grad():
                        leaves = sums.leaves(given[:count], index)
                        values = self.base.evaluate(index, leaves)
                        outputs = [values[j] for j in self.selected]
                        del values
                    sums.add(outputs, cotangents, self.schedule.split, index)
                    del outputs, leaves
                del given, cotangents
        if not self.schedule.steps:
            return [torch.zeros_like(tensors[i]) for i in self.needed]
        return sums.results()

    def _evaluate(self, index: int, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One microbatch's gradients, where autograd or a transformation follows them."""
        count = len(self.base.places)
        inputs = list(leaves[:count])
        cotangents = self._cotangents(index, leaves[count:])
        live = [j for j, c in zip(self.selected, cotangents) if c is not None]
        cotangents = [c for c in cotangents if c is not None]
        if not live:
            return [torch.zeros_like(inputs[i]) for i in self.needed]
        if transforms_active():
            return self._by_transformation(index, inputs, live, cotangents)
        follows = torch.is_grad_enabled()
        with torch.enable_grad():
            for i in self.needed:
                if not self.base.real[i] and not inputs[i].requires_grad:
                    inputs[i] = inputs[i].detach().requires_grad_()
            values = self.base.evaluate(index, inputs)
            differentiable = [
                (values[j], c) for j, c in zip(live, cotangents) if values[j].requires_grad
            ]
            wanted = [inputs[i] for i in self.needed]
            if not differentiable:
                return [torch.zeros_like(tensor) for tensor in wanted]
            outputs, given = zip(*differentiable)
            with own_hooks_only(wanted):
                found = torch.autograd.grad(
                    outputs, wanted, given, create_graph=follows, allow_unused=True
                )
        return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]

    def _by_transformation(
        self,
        index: int,
        inputs: list[torch.Tensor],
        live: list[int],
        cotangents: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        def of_needed(*needed: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(inputs)
            for i, tensor in zip(self.needed, needed, strict=True):
                full[i] = tensor
            values = self.base.evaluate(index, full)
            return tuple(values[j] for j in live)

        pull = torch.func.vjp(of_needed, *(inputs[i] for i in self.needed))[1]
        return list(pull(tuple(cotangents)))

    def _cotangents(self, index: int, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """What each selected output of microbatch `index` receives; None where nothing of it is in the result."""
        winners = iter(given[len(self.cotangents) :])
        weight = self._steps[index].weight
        weight = 1 if weight is None else weight
        found: list[torch.Tensor | None] = []
        for output, cotangent in zip(self.cotangents, given, strict=False):
            if output.kind is AccumulationType.CONCAT:
                # Its rows were taken already, like those of a batch argument.
                found.append(cotangent.squeeze(-1) if output.scalar else cotangent)
            elif output.kind is AccumulationType.MEAN:
                share = weight / self.schedule.total if self.schedule.total else 0
                found.append(cotangent if share == 1 else cotangent * share)
            elif output.kind is AccumulationType.RUNNING_MEAN:
                found.append(cotangent * (weight / self.schedule.ran))
            elif output.kind is AccumulationType.LAST:
                found.append(cotangent if index == self.schedule.steps[-1].index else None)
            elif output.kind in _EXTREMES:
                found.append(torch.where(next(winners) == index, cotangent, 0))
            else:
                found.append(cotangent)
        return found


_EXTREMES = (AccumulationType.MAX, AccumulationType.MIN)


def output_of(
    kind: AccumulationType, path: str, spec: torch.Tensor, split: Split, rows: int
) -> Output:
    """What the program has to know about an output, from a microbatch of `rows` rows."""
    place = None
    if kind is AccumulationType.CONCAT:
        place = Place(0, *row_counts(spec, 0, split, rows))
    return Output(kind, path, place, spec.ndim == 0)


class Microbatched(torch.autograd.Function):
    """The node: forward runs the program, backward its pullback; under transformations, both run beneath them."""

    @staticmethod
    def forward(program: Program, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The program's results and winners."""
        results = program.run(tensors)
        if isinstance(program, Pullback):
            return tuple(
                torch.zeros_like(tensors[i]) if t is None else t
                for i, t in zip(program.needed, results, strict=True)
            )
        for j, output in enumerate(program.outputs()):
            if output.kind is AccumulationType.LAST:  # It may be an input, or a view of one.
                results[j] = results[j].clone()
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keeps the inputs and the winners, and nothing that was computed from them."""
        program, *tensors = inputs
        count = len(program.outputs())
        flags = program.differentiable or (True,) * count
        ctx.program = program
        ctx.count = len(tensors)
        constant = [t for t, flag in zip(output, flags) if not flag or not _is_inexact(t)]
        ctx.mark_non_differentiable(*constant, *output[count:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[count:])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients, by the pullback's run, or by its node where something follows."""
        program = ctx.program
        tensors, winners = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        outputs = program.outputs()
        selected = [j for j in range(len(outputs)) if cotangents[j] is not None]
        needed = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        gradients: list[torch.Tensor | None] = [None] * ctx.count
        if selected and needed:
            extremes = [j for j, output in enumerate(outputs) if output.kind in _EXTREMES]
            won = [winners[extremes.index(j)] for j in selected if j in extremes]
            pullback = program.pullback(needed, selected)
            inputs = (*tensors, *(cotangents[j] for j in selected), *won)
            follows = torch.is_grad_enabled() or transforms_active()
            found = Microbatched.apply(pullback, *inputs) if follows else pullback.run(inputs)
            for i, gradient in zip(needed, found, strict=True):
                gradients[i] = gradient
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward mode would need the whole batch's tangents while the values are made; it is refused."""
        raise MicrobatchError(
            f"{ctx.program.where}: forward-mode derivatives (torch.func.jvp, jacfwd, hessian) do not go through it.\n"
            "Use reverse mode: torch.func.vjp, jacrev, or jacrev(jacrev(fun)) for a Hessian."
        )

    @staticmethod
    def vmap(  # pyrefly: ignore[bad-override]
        info: Any, in_dims: tuple[Any, ...], program: Program, *tensors: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        """The program over the mapped axis, microbatch by microbatch."""
        dims = in_dims[1:]
        moved = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims)]
        batched = program.batched([None if dim is None else 0 for dim in dims], info.randomness)
        results = Microbatched.apply(batched, *moved)
        return results, (0,) * len(results)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
