"""What explanations of a difference look at: modules whose rows influence each other, and weights that may be meant."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from microbatch.torch._discovery import Found

_Calls = list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]


def influential_module(
    found: Found,
    plain: Callable[[], Any],
    other: Callable[[], Any],
    others: torch.Tensor,
    size: int,
) -> str | None:
    """The first module whose output changes in rows in which its input did not.

    Args:
      found: the modules.
      plain: runs the function on the batch.
      other: runs it on the batch with other values in some rows.
      others: the rows that are the same in both.
      size: how many rows there are.
    """
    before, after = _watched(found, plain, others, size), _watched(found, other, others, size)
    for (name, inputs, outputs), (_, inputs_too, outputs_too) in zip(before, after):
        if _close(inputs, inputs_too) and not _close(outputs, outputs_too):
            return name
    return None


def _watched(found: Found, run: Callable[[], Any], others: torch.Tensor, size: int) -> _Calls:
    """What goes in and out of every module without submodules, in the rows `others`."""
    calls: _Calls = []

    def of(values: Any) -> list[torch.Tensor]:
        rows = [
            t
            for t in tree_leaves(values)
            if isinstance(t, torch.Tensor) and t.ndim and len(t) == size
        ]
        return [t.detach()[others.to(t.device)].clone() for t in rows]

    handles = [
        module.register_forward_hook(
            lambda module, args, out, name=name: calls.append(
                (f"{name} ({type(module).__name__})", of(args), of(out))
            )
        )
        for name, module in found.modules.values()
        if not any(True for _ in module.children())
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
        for a, b in zip(left, right)
    )


def possible_weights(leaf: torch.Tensor) -> list[tuple[str, Callable[[torch.Tensor], Any]]]:
    """Weights that a tensor may hold, each with its text."""
    if leaf.dtype == torch.bool:
        return [("{x}.sum()", torch.sum)]
    if not leaf.is_floating_point() and not leaf.is_complex():
        return [
            ("({x} != -100).sum()", lambda x: (x != -100).sum()),
            ("{x}.sum()", torch.sum),
            ("({x} != 0).sum()", lambda x: (x != 0).sum()),
            ("({x} != -1).sum()", lambda x: (x != -1).sum()),
            ("({x} >= 0).sum()", lambda x: (x >= 0).sum()),
        ]
    is_mask = not leaf.is_complex() and bool((leaf.isfinite() & (leaf >= 0)).all())
    return [("{x}.sum()", torch.sum)] if is_mask else []
