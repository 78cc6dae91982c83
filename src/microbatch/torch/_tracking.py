"""Peak bytes of live tensors, counted where they are made: one storage once, however many views it has."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # no public mode sees every kernel call
from torch.utils._pytree import tree_iter, tree_map_only

# The granularity of PyTorch's caching allocator on CUDA; a CPU's is not worth modelling.
CUDA_BLOCK_BYTES = 512


class TensorBytes(TorchDispatchMode):
    """Counts bytes of live tensor storages while it is entered, and remembers the most there were.

    Works on real tensors and on fake ones (where nothing is allocated), through views, in-place operations, backward
    passes and optimizers. A tensor made before counts from the first operation that reads it; `hold` counts it at once.
    What a kernel allocates and frees inside itself is not seen.

    Attributes:
      live_bytes: bytes of storages that are alive now.
      peak_bytes: the largest `live_bytes` so far, after any operation.

    >>> with TensorBytes() as tracked:
    ...     a = torch.zeros(1000)          # 4,000 bytes
    ...     b = a.view(10, 100)[3]         # a view: nothing
    ...     c = a + 1                      # 4,000 more, freed by the next line
    ...     del c
    ...     d = torch.zeros(10)
    >>> tracked.peak_bytes, tracked.live_bytes
    (8000, 4040)
    """

    def __init__(
        self,
        replace_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        """`replace_fn` gives the tensor to use in place of each input; `device` counts only tensors of its type."""
        super().__init__()
        self._device_type = None if device is None else torch.device(device).type
        self.live_bytes = 0
        self.peak_bytes = 0
        self._replace_fn = replace_fn
        self._known: dict[int, _Storage] = {}

    def hold(self, tensors: Iterable[Any]) -> None:
        """Counts tensors that were made before, for as long as they live; other values are ignored."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def restart_peak(self) -> None:
        """Makes what is alive now the peak."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._replace_fn is not None:
            replaced = [self._replace_fn(tensor) for tensor in inputs]
            if any(new is not old for new, old in zip(replaced, inputs, strict=True)):
                args, kwargs = tree_map_only(torch.Tensor, self._replace_fn, (args, kwargs))
            inputs = replaced
        self.hold(inputs)
        result = func(*args, **kwargs)
        self.hold([result] if isinstance(result, torch.Tensor) else tree_iter(result))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            # A DTensor also names its mesh.
            self.hold(getattr(tensor, name) for name in names)
            return
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        # The storage's own address: a Python wrapper may be made anew, the storage is the same.
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known.nbytes == storage.nbytes():
            return
        if self._device_type not in (None, tensor.device.type):
            return
        nbytes = storage.nbytes()
        counted = _rounded(nbytes, tensor.device)
        if known is None:
            ended = weakref.finalize(storage, self._forget, key)
            ended.atexit = False
            known = self._known[key] = _Storage()
        self.live_bytes += counted - known.counted
        known.nbytes, known.counted = nbytes, counted

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key).counted


class _Storage:
    __slots__ = ("counted", "nbytes")

    def __init__(self) -> None:
        self.nbytes = self.counted = 0


def tensor_bytes(tree: Any) -> int:
    """Bytes of the distinct storages in a tree.

    >>> a = torch.zeros(10)
    >>> tensor_bytes([a, a[2:5], "text"])
    40
    """
    found = {
        t.untyped_storage()._cdata: _rounded(t.untyped_storage().nbytes(), t.device)
        for t in tree_iter(tree)
        if isinstance(t, torch.Tensor)
    }
    return sum(found.values())


def _rounded(count: int, device: torch.device) -> int:
    if device.type != "cuda":
        return count
    return -(-count // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES
