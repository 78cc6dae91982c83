"""Automatic mixed precision as it was when a function was called, for when it runs again in backward."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch


class Autocast(NamedTuple):
    """One device type's setting."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls) -> "tuple[Autocast, ...]":
        """The settings of the CPU and of the accelerator."""
        accelerator = torch.accelerator.current_accelerator()
        types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return tuple(
            cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
        )


@contextmanager
def restored(settings: tuple[Autocast, ...]) -> Iterator[None]:
    """Runs under these settings."""
    with ExitStack() as stack:
        for setting, now in zip(settings, Autocast.now(), strict=True):
            if setting != now:
                stack.enter_context(
                    torch.autocast(setting.device_type, setting.dtype, setting.enabled)
                )
        yield


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Casts of parameters are cached inside, and neither taken from outside nor left there.

    A cast that was cached without a graph, or in the graph of another microbatch, is of no use to this one.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
