"""One training step over microbatches: find, check, weigh, then the loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from microbatch._errors import DistributedError, GraphError
from microbatch._trees import leaves_with_paths
from microbatch.torch._aux import detach, join, unpack
from microbatch.torch._carried import CarriedArguments
from microbatch.torch._discovery import Found, discover
from microbatch.torch._distributed import (
    Wrappers,
    check_counts,
    finish,
    is_wrapper,
    mark_finished,
    needs_every_leaf,
    synchronising,
    syncs,
    wrappers_of,
)
from microbatch.torch._exchange import Totals, weigh
from microbatch.torch._gradients import Restorer, WideSums
from microbatch.torch._graph import connected_zero, reach_of
from microbatch.torch._guards import Guard, check_backward_fn
from microbatch.torch._internals import version_of
from microbatch.torch._losses import Losses
from microbatch.torch._out_of_memory import is_out_of_memory, out_of_memory
from microbatch.torch._reduction import Term, Terms, scale, terms_of
from microbatch.torch._sources import Options, Preparation, Source
from microbatch.torch._transfer import moved


@dataclass
class _Run:
    """What the loop has got so far."""

    losses: Losses
    index: int = 0
    auxes: list[Any] = field(default_factory=list)
    hidden: bool = False
    """Whether leaves are used that were not found before the call."""


def step(
    where: str,
    loss_fn: Callable[..., Any],
    given: Any,
    prepare: Preparation,
    options: Options,
    inputs: Sequence[torch.Tensor] | None = None,
) -> tuple[Any, Any]:
    """The loss of the batch (a mapping where `loss_fn` returns one) and the joined aux.

    Args:
      where: the words that open a message.
      loss_fn: called once per microbatch.
      given: the arguments of the call as they came, in which modules are looked for.
      prepare: checks and cuts the arguments; what it refuses is told to the other processes first.
      options: the shared keywords.
      inputs: the only leaves that get gradients; all where None.
    """
    terms = terms_of(where, options.reduction, options.weight_fn)
    found = discover(loss_fn, given)
    check_backward_fn(where, options.backward_fn)
    named = list(found.modules.values())
    wrappers = wrappers_of(where, named, options.sync_modules, options.process_group)
    for module in (*wrappers.ddp, *wrappers.fsdp):
        found.add_module(type(module).__name__, module)
    guard = Guard(
        where,
        found,
        allow_row_mixing=options.allow_row_mixing,
        allow_hooks=options.allow_hooks,
        is_wrapper=is_wrapper,
    )
    wide = (
        WideSums(where, options.accumulator_dtype, bool(wrappers))
        if options.accumulator_dtype is not None
        else None
    )
    source, totals = weigh(where, terms, prepare, guard, wrappers)
    check_counts(where, wrappers, source.count, totals.even)
    mode = syncs(where, wrappers, options.sync, totals.even)
    call = _Call(
        where=where,
        loss_fn=loss_fn,
        given=given,
        source=source,
        terms=terms,
        totals=totals,
        options=options,
        found=found,
        guard=guard,
        wrappers=wrappers,
        mode=mode,
        wide=wide,
        inputs=inputs,
    )
    return call.run()


@dataclass(frozen=True)
class _Call:
    """One step, with everything decided before its first forward."""

    where: str
    loss_fn: Callable[..., Any]
    given: Any
    source: Source
    terms: Terms
    totals: Totals
    options: Options
    found: Found
    guard: Guard
    wrappers: Wrappers
    mode: str
    wide: WideSums | None
    inputs: Sequence[torch.Tensor] | None

    def run(self) -> tuple[Any, Any]:
        """The loop, with gradients put back and memory errors made plain when it fails."""
        progress = _Run(Losses(self.where))
        restorer = Restorer(self.options.rollback)
        restorer.add(leaf for _, leaf in self.found.named_leaves())
        restorer.add(_leaves_behind(self.given))
        try:
            self._loop(progress, restorer)
            losses = progress.losses.total(self.wrappers.groups, self.wrappers.device)
            aux = join(self.where, progress.auxes) if progress.auxes else None
        except BaseException as error:
            if self.wide is not None:
                self.wide.abandon()
            restorer.restore()
            if not is_out_of_memory(error):
                raise
            words = str(error)
        else:
            return losses, aux
        finally:
            finish(self.wrappers)
        # Raised here, outside of the except block: otherwise the error would keep the attempt's tensors alive.
        raise self._out_of_memory(words, progress, restorer)

    def _loop(self, progress: _Run, restorer: Restorer) -> None:
        running = self._running()
        carried = CarriedArguments()
        device = None if self.options.device is None else torch.device(self.options.device)
        earlier = self._grads_of_wrapped(len(running))
        known = len(self.found.modules)

        def take(index: int) -> Any:
            return self.source.take(carried, index)

        microbatches = moved(take, running, device)
        for position, progress.index in enumerate(running):
            with ExitStack() as stack:
                is_last = position == len(running) - 1
                stack.enter_context(synchronising(self.wrappers, self.mode, is_last))
                args = next(microbatches)
                total = self._forward(args, progress, first=position == 0)
                if position == 0:
                    self._check_closures(total, len(running))
                    if len(self.found.modules) > known:
                        restorer.add(leaf for _, leaf in self.found.named_leaves())
                self._note_leaves(total, carried, restorer, progress, first=position == 0)
                if is_last and earlier:
                    self._check_missing(total, earlier)
                self._backward(total, carried)
                carried.collect()
                del args, total
        if self.wide is not None:
            self.wide.settle(carried.shared())
        carried.finish(self.inputs)
        if self.wide is not None:
            self.wide.finish()
        mark_finished(self.wrappers)

    def _running(self) -> list[int]:
        """Microbatches that run: those that count; all where each communicates; and the last where none counts."""
        everything = list(range(self.source.count))
        if self.wrappers.fsdp or (self.wrappers and self.mode == "every"):
            return everything
        return [i for i in everything if not self._is_void(i)] or everything[-1:]

    def _scale(self, term: Term, index: int) -> float:
        weights = self.totals.weights[term.column]
        weight = weights[index] if weights else 0.0
        return scale(term, weight, self.totals.totals[term.column])

    def _is_void(self, index: int) -> bool:
        return all(self._scale(term, index) == 0 for term in self.terms.terms.values())

    def _forward(self, args: Any, progress: _Run, first: bool) -> torch.Tensor:
        """The scaled loss of one microbatch; its values are added to the batch's."""
        index = progress.index
        void = self._is_void(index)
        outputs: list[torch.Tensor] = []
        with ExitStack() as stack:
            if first:
                stack.enter_context(self.guard.first_microbatch())
            for module in self.wrappers.fsdp if void else ():
                hook = module.register_forward_hook(
                    lambda _, __, out: outputs.extend(_with_graph(out))
                )
                stack.callback(hook.remove)
            output = self.loss_fn(*args)
        losses, aux = unpack(self.where, output, self.options.has_aux)
        keys = list(losses)
        progress.losses.check_keys(keys, index)
        total: torch.Tensor | None = None
        for key, term in self.terms.of(self.where, keys).items():
            loss, factor = losses[key], self._scale(term, index)
            progress.losses.add(key, loss, factor)
            if factor:
                factor *= self.wrappers.world
                scaled = loss if factor == 1 else loss * factor
                total = scaled if total is None else total + scaled
        if self.options.has_aux:
            progress.auxes.append(detach(aux))
        if total is None:
            return self._zero(losses, outputs)
        if not total.requires_grad:
            raise GraphError(
                f"{self.where}: the loss of microbatch {index} depends on no tensor that requires a gradient.\n"
                "Call it with gradients enabled, and without .item() or .detach() on the way to the loss."
            )
        return total

    def _zero(
        self, losses: Mapping[Any, torch.Tensor], outputs: list[torch.Tensor]
    ) -> torch.Tensor:
        """The loss of a microbatch that has to take part and counts for nothing."""
        if not outputs:
            graphs = [loss for loss in losses.values() if loss.requires_grad]
            outputs = list(reach_of(*graphs).leaves.values())
        return connected_zero(outputs) if outputs else torch.zeros(())

    def _backward(self, total: torch.Tensor, carried: CarriedArguments) -> None:
        if not total.requires_grad:  # Nothing counts and nothing is connected.
            return
        try:
            if self.options.backward_fn is not None:
                self.options.backward_fn(total)
            elif self.inputs is None:
                total.backward()
            else:
                total.backward(inputs=[*self.inputs, *carried.pieces(), *carried.shared()])
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise GraphError(_closure_words(self.where, "a tensor")) from error

    def _note_leaves(
        self,
        total: torch.Tensor,
        carried: CarriedArguments,
        restorer: Restorer,
        progress: _Run,
        first: bool,
    ) -> None:
        """Leaves that only the graph shows: for hooks, for what a failure puts back, and for side buffers."""
        if self.wide is None and not (first or progress.hidden):
            return
        leaves = reach_of(total).leaves
        for piece in carried.pieces():
            leaves.pop(id(piece), None)
        shared = {id(leaf) for leaf in carried.shared()}
        hidden = restorer.add(leaf for key, leaf in leaves.items() if key not in shared)
        if hidden and not self.wrappers:
            self.guard.check_leaves(hidden)
        progress.hidden |= bool(hidden)
        if self.wide is not None:
            self.wide.add(leaves.values())

    def _check_closures(self, total: torch.Tensor, count: int) -> None:
        suspects = self.found.graph_tensors() if count > 1 else []
        if not suspects:
            return
        nodes = reach_of(total).nodes
        for name, tensor in suspects:
            if tensor.grad_fn in nodes:
                raise GraphError(_closure_words(self.where, name))

    def _grads_of_wrapped(self, count: int) -> dict[str, tuple[torch.Tensor, Any]]:
        """Parameters of DDP modules that must all take part in the last backward, with their gradients' state."""
        if count < 2 or self.mode != "last":
            return {}
        return {
            name: (p, _state(p))
            for module in self.wrappers.ddp
            if needs_every_leaf(module)
            for name, p in module.module.named_parameters()
            if p.requires_grad
        }

    def _check_missing(
        self, total: torch.Tensor, earlier: Mapping[str, tuple[torch.Tensor, Any]]
    ) -> None:
        reach = reach_of(total)
        if reach.hides_leaves:
            return
        for name, (parameter, state) in earlier.items():
            if id(parameter) not in reach.leaves and _state(parameter) != state:
                raise DistributedError(
                    f"{self.where}: parameter {name} was used by an earlier microbatch and is not by the last, in "
                    "which gradients are exchanged; its gradient would not be averaged.\n"
                    "Wrap the model with DistributedDataParallel(model, find_unused_parameters=True)."
                )

    def _out_of_memory(self, words: str, progress: _Run, restorer: Restorer) -> Exception:
        leaf = next((leaf for _, leaf in self.found.named_leaves()), None)
        grads = "Gradients are as before the call."
        if restorer.incomplete and progress.index:
            grads = "Gradients that existed before the call hold a part of this batch (rollback=True keeps a copy)."
        return out_of_memory(
            self.where,
            words,
            microbatch_size=self.source.microbatch_size,
            batch_size=self.source.batch_size,
            index=progress.index,
            device=torch.device("cpu") if leaf is None else leaf.device,
            predicted=None if self.wrappers else self.source.predict(),
            grads=grads,
            distributed=bool(self.wrappers.groups),
        )


def _closure_words(where: str, name: str) -> str:
    return (
        f"{where}: {name} was computed before the call, and every microbatch would go through its graph again.\n"
        "Pass it as an argument (with None in in_dims if it is not a batch), or compute it inside the loss function."
    )


def _with_graph(output: Any) -> list[torch.Tensor]:
    leaves = [leaf for _, leaf in leaves_with_paths(output)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _leaves_behind(given: Any) -> Iterable[torch.Tensor]:
    """Leaves that get gradients through the arguments: they themselves, or those that they were computed from."""
    return reach_of(*_with_graph(given)).leaves.values()


def _state(parameter: torch.Tensor) -> Any:
    grad = parameter.grad
    return None if grad is None else (id(grad), version_of(grad))
