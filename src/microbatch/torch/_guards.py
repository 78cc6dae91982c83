"""What is refused because microbatches would change the answer: modules that mix rows, state, hooks."""

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# No public class has every BatchNorm, and nothing else, below it.
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from microbatch._errors import DistributedError, HookError, MicrobatchError, RowMixingError
from microbatch.torch._discovery import Found, discover
from microbatch.torch._internals import acts_after_gradient, acts_on_gradient, version_of

_SMALL_BYTES = 1 << 20
_seen_unchanged: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


class Guard:
    """The checks of one call: of what was found before it, and of what the first microbatch turns out to run.

    Args:
      where: the words that open a message.
      found: what discovery found; modules that run without having been found are added to it.
      allow_row_mixing: lets BatchNorm and changing buffers pass.
      allow_hooks: lets hooks on leaves pass.
      is_wrapper: whether a module synchronises gradients; one that is found late is refused.
    """

    def __init__(
        self,
        where: str,
        found: Found,
        *,
        allow_row_mixing: bool,
        allow_hooks: bool,
        is_wrapper: Callable[[nn.Module], bool],
    ) -> None:
        self._where = where
        self._found = found
        self._allow_row_mixing = allow_row_mixing
        self._allow_hooks = allow_hooks
        self._is_wrapper = is_wrapper
        self._buffers: list[_Buffer] = []
        self._thread = threading.get_ident()

    def check_found(self) -> None:
        """Refuses what discovery already shows."""
        for name, module in self._found.modules.values():
            self._check_module(name, module)
        if not self._allow_hooks:
            for name, leaf in self._found.named_leaves():
                _check_leaf(self._where, name, leaf)

    def check_leaves(self, leaves: Iterable[torch.Tensor]) -> None:
        """Refuses hooks on leaves that only the graph of a loss shows."""
        if not self._allow_hooks:
            for leaf in leaves:
                _check_leaf(self._where, f"a leaf of shape {tuple(leaf.shape)}", leaf)

    @contextmanager
    def first_microbatch(self) -> Generator[None]:
        """Watches the modules that run; buffers that change are restored where small, and refused."""
        for name, module in self._found.modules.values():
            self._watch(name, module)
        # What is compiled while a global hook is there would be compiled once more without it.
        compiled = self._found.compiled
        handle = None if compiled else register_module_forward_pre_hook(self._before_module)
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
        self._check_buffers()

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if id(module) in self._found.modules:
            return
        name = type(module).__name__
        if self._is_wrapper(module):
            self._restore_buffers()
            raise DistributedError(
                f"{self._where}: the loss function runs a {name} that could not be found from it before the call, "
                "so its synchronisation cannot be placed.\n"
                "Name it: sync_modules=[model]."
            )
        self._found.add_module(name, module)
        try:
            for path, child in module.named_modules():
                self._check_module(f"{name}.{path}" if path else name, child)
                self._watch(path or name, child)
            if not self._allow_hooks:
                for path, leaf in module.named_parameters():
                    _check_leaf(self._where, f"{name}.{path}", leaf)
        except Exception:
            self._restore_buffers()
            raise

    def _check_module(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, _BatchNorm):
            return
        mixes = module.training or module.running_mean is None
        if isinstance(module, nn.SyncBatchNorm) and mixes:
            raise RowMixingError(
                f"{self._where}: {name} is a SyncBatchNorm in training mode; its statistics are those of one "
                "microbatch on all processes, and it communicates once per microbatch.\n"
                f"Call {name}.eval(), or replace it by GroupNorm."
            )
        if mixes and not self._allow_row_mixing:
            why = "is in training mode" if module.training else "has no running statistics"
            raise RowMixingError(
                f"{self._where}: {name} is a {type(module).__name__} that {why}; it would normalise each microbatch "
                "by itself, and the gradient would not be the whole batch's.\n"
                f"Call {name}.eval(), replace it by GroupNorm or LayerNorm, or accept the difference with "
                "allow_row_mixing=True."
            )

    def _watch(self, name: str, module: nn.Module) -> None:
        if self._allow_row_mixing:
            return
        for path, buffer in module._buffers.items():
            if buffer is not None:
                self._buffers.append(_Buffer(f"{name}.{path}", module, path, buffer))

    def _check_buffers(self) -> None:
        changed = next((b for b in self._buffers if b.changed()), None)
        if changed is None:
            for buffer in self._buffers:
                _seen_unchanged[buffer.module] = buffer.module.training
            return
        restored = self._restore_buffers()
        aftermath = (
            "It was restored." if restored else "It is large and was not restored; load it again."
        )
        raise RowMixingError(
            f"{self._where}: the buffer {changed.name} of a {type(changed.module).__name__} changed during the first "
            f"microbatch; it would change once per microbatch. {aftermath}\n"
            "Call .eval() on that module, or accept one change per microbatch with allow_row_mixing=True."
        )

    def _restore_buffers(self) -> bool:
        outcomes = [buffer.restore() for buffer in self._buffers if buffer.changed()]
        return all(outcomes)


class _Buffer:
    """A buffer as it was; its value is kept only where it is small and its module was never seen to leave it alone."""

    def __init__(self, name: str, module: nn.Module, key: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.module = module
        self._key = key
        self._tensor = tensor
        self._version = version_of(tensor)
        trusted = _seen_unchanged.get(module) == module.training
        small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
        self._value = tensor.detach().clone() if small and not trusted else None

    def changed(self) -> bool:
        now = getattr(self.module, self._key, None)
        return now is not self._tensor or version_of(self._tensor) != self._version

    def restore(self) -> bool:
        if self._value is not None:
            with torch.no_grad():
                self._tensor.copy_(self._value)
        setattr(self.module, self._key, self._tensor)
        intact = self._value is not None or version_of(self._tensor) == self._version
        self._version = version_of(self._tensor)
        return intact


def check_backward_fn(where: str, backward_fn: Callable[..., Any] | None) -> None:
    """Refuses a `backward_fn` that divides the loss again."""
    if backward_fn is None:
        return
    found = discover(backward_fn)
    for name, item in [*found.objects, *found.modules.values()]:
        if not callable(getattr(type(item), "backward", None)):
            continue
        steps = getattr(item, "gradient_accumulation_steps", 1)
        steps = steps() if callable(steps) else steps
        if isinstance(steps, int) and steps > 1:
            raise MicrobatchError(
                f"{where}: backward_fn uses {name}, a {type(item).__name__} that divides the loss by its "
                f"gradient_accumulation_steps={steps} once more.\n"
                "Set its gradient_accumulation_steps to 1: the weights here already divide by the whole batch."
            )


def _check_leaf(where: str, name: str, leaf: torch.Tensor) -> None:
    if acts_after_gradient(leaf):
        raise HookError(
            f"{where}: {name} has a hook after its gradient is accumulated (an optimizer stepped in backward?); it "
            "would run once per microbatch, on part of the gradient.\n"
            "Remove it and step after the call, or accept that with allow_hooks=True."
        )
    if acts_on_gradient(leaf):
        raise HookError(
            f"{where}: {name} has a gradient hook; it would act on each microbatch's share, not on the gradient.\n"
            "Remove it and change .grad after the call, or accept that with allow_hooks=True (right for hooks that "
            "are linear)."
        )
