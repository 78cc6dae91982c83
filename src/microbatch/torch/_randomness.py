"""Random numbers that are drawn again: the state of every generator before each microbatch, kept where it was drawn from."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from microbatch._errors import MicrobatchError


class Randomness:
    """What one call drew, microbatch by microbatch.

    Args:
      where: the words that open a message.
      rng: ``"replay"``, None for functions that draw nothing, or further generators that the function draws from.
    """

    def __init__(self, where: str, rng: Any) -> None:
        self._records = rng is not None
        named = () if rng is None or isinstance(rng, str) else rng
        self._generators = tuple(named) if isinstance(named, tuple | list) else (named,)
        known = rng is None or rng == "replay" or not isinstance(rng, str)
        if not known or not all(isinstance(g, torch.Generator) for g in self._generators):
            raise MicrobatchError(
                f"{where}: rng={rng!r} is not understood.\n"
                'Use "replay", None where nothing random is drawn, or the torch.Generator objects that are drawn from.'
            )
        self._states: dict[int, list[tuple[Any, torch.Tensor]]] = {}

    def add(self, generators: Iterable[torch.Generator]) -> None:
        """Further generators that the function may draw from."""
        known = (*self._generators, torch.default_generator)
        self._generators += tuple(g for g in generators if all(g is not k for k in known))

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """The first time, remembers the states of the generators that are drawn from; later, draws the same again."""
        if not self._records:
            yield
            return
        if index in self._states:
            for source, state in self._states[index]:
                source.set_state(state)
            yield
            return
        before = [(source, source.get_state()) for source in (*sources(), *self._generators)]
        yield
        # A device that this microbatch was the first to use has no state from before it; its seed is not known here.
        self._states[index] = [
            (source, state)
            for source, state in before
            if not torch.equal(source.get_state(), state)
        ]

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Leaves every generator as it was, whatever is drawn again inside."""
        drawn = {source for states in self._states.values() for source, _ in states}
        before = [(source, source.get_state()) for source in drawn]
        try:
            yield
        finally:
            for source, state in before:
                source.set_state(state)


def sources() -> Sequence[Any]:
    """The default generators of the host and of the accelerator's devices."""
    return (torch.default_generator, *_accelerator_generators())


def _accelerator_generators() -> Sequence["_DeviceGenerator"]:
    """The default generators of the accelerator's devices; nothing is initialised by asking."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ()
    module = torch.get_device_module(accelerator.type)
    if not getattr(module, "is_initialized", lambda: True)():
        return ()
    return [_DeviceGenerator(accelerator.type, i) for i in range(torch.accelerator.device_count())]


class _DeviceGenerator:
    """The default generator of one device, by its module's public functions."""

    def __init__(self, device_type: str, index: int) -> None:
        self._device = torch.device(device_type, index)
        self._module = torch.get_device_module(device_type)

    def __hash__(self) -> int:
        return hash(self._device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceGenerator) and self._device == other._device

    def get_state(self) -> torch.Tensor:
        """The state, on the host."""
        return self._module.get_rng_state(self._device)

    def set_state(self, state: torch.Tensor) -> None:
        """Goes back to a state."""
        self._module.set_rng_state(state, self._device)
