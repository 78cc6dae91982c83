"""The states that a `Carry` hands from one microbatch to the next, watched for a derivative that would be missing."""

from collections.abc import Sequence
from typing import Any

import torch

from microbatch._accumulation import Carry
from microbatch._errors import AccumulatorError
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._call import Call
from microbatch.torch._graph import reach_of


class States:
    """The initial states of a call, as leaves, so that it shows whether a derivative would go through.

    Args:
      where: the words that open a message.
      call: which begins with microbatch `index`.
      carries: which arguments are carried.
      args: the arguments that start them.
      index: the first microbatch.
    """

    def __init__(
        self, where: str, call: Call, carries: Sequence[Carry], args: Sequence[Any], index: int
    ) -> None:
        self._where = where
        self._depends = False
        self.leaves: list[torch.Tensor] = []
        if not carries:
            return
        self._call, self._index = call, index
        started: dict[int | str, Any] = {}
        for carry in carries:
            key = call.key(carry.argnum)
            started[key] = map_leaves(self._leaf, args[key])
        call.carries[index] = started
        call.watch_states = self._watch

    def owns(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf is one of the states."""
        return any(leaf is state for state in self.leaves)

    def without(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, cut from their graph where it leads to states alone."""
        if not self.leaves:
            return values
        return [
            value
            if value.requires_grad and not all(map(self.owns, reach_of(value).leaves.values()))
            else value.detach()
            for value in values
        ]

    def check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Refuses a derivative that would have to go through a state."""
        if not self.leaves:
            return
        self._call.watch_states = lambda states: None
        del self._call.carries[self._index]
        if self._depends and any(map(self.owns, reach_of(*outputs).leaves.values())):
            raise AccumulatorError(
                f"{self._where}: the output depends on a carried state, and the state on something that is differentiated; "
                "no derivative flows through a Carry, so it would be missing.\n"
                "Detach the state where it is used, or call the function under torch.no_grad()."
            )

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        self._depends = self._depends or leaf.requires_grad
        fresh = leaf.detach()
        if fresh.dtype.is_floating_point or fresh.dtype.is_complex:
            fresh.requires_grad_()
        self.leaves.append(fresh)
        return fresh

    def _watch(self, states: list[Any]) -> None:
        tensors = [t for _, t in leaves_with_paths(states) if isinstance(t, torch.Tensor)]
        reached = reach_of(*(t for t in tensors if t.requires_grad))
        self._depends = self._depends or any(
            not self.owns(leaf) for leaf in reached.leaves.values()
        )
