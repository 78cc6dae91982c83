"""Microbatches that wait on the CPU and travel to the device one at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from microbatch._trees import map_leaves


def moved(
    take: Callable[[int], Any], indices: list[int], device: torch.device | None
) -> Iterator[Any]:
    """``take(i)`` for each index, on `device`; on a CUDA device the next one travels while this one computes."""
    if device is None:
        for index in indices:
            yield take(index)
    elif device.type != "cuda":
        for index in indices:
            yield _to(take(index), lambda t: t.to(device))
    else:
        yield from _overlapped(take, indices, device)


def _overlapped(
    take: Callable[[int], Any], indices: list[int], device: torch.device
) -> Iterator[Any]:
    stream = torch.cuda.Stream(device)
    compute = torch.cuda.current_stream(device)

    def send(index: int) -> Any:
        with torch.cuda.stream(stream):
            return _to(take(index), lambda t: _pinned(t).to(device, non_blocking=True))

    def arrived(microbatch: Any) -> Any:
        compute.wait_stream(stream)

        def claim(tensor: torch.Tensor) -> torch.Tensor:
            # Made on the other stream: the allocator must not reuse it before this one is done with it.
            if tensor.device.type == "cuda":
                tensor.record_stream(compute)
            return tensor

        return _to(microbatch, claim)

    following = send(indices[0])
    for position in range(len(indices)):
        current = arrived(following)
        following = send(indices[position + 1]) if position + 1 < len(indices) else None
        yield current
        del current


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor


def _to(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
