"""The loss of a batch, added up from its microbatches' shares."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from microbatch._errors import MicrobatchError
from microbatch.torch._exchange import sum_over


class Losses:
    """One sum for each key of the mapping that `loss_fn` returns; the key of a single loss is None."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._sums: dict[str | None, torch.Tensor] = {}
        self._dtypes: dict[str | None, torch.dtype] = {}

    def check_keys(self, keys: Collection[str | None], index: int) -> None:
        """Refuses losses that microbatch `index` has and earlier ones had not, or the other way round."""
        if self._sums and set(keys) != set(self._sums):
            raise MicrobatchError(
                f"{self._where}: the loss of microbatch {index} has the keys {list(keys)}, and those of earlier ones "
                f"{list(self._sums)}.\n"
                "Return the same losses from every microbatch, for example zeros that depend on the parameters."
            )

    def add(self, key: str | None, loss: torch.Tensor, factor: float) -> None:
        """Adds a share of the batch's loss, held in float32 or wider; no share of weight 0, be it NaN."""
        self._dtypes[key] = loss.dtype
        loss = loss.detach().reshape(())
        if key in self._sums:
            if factor:
                self._sums[key].add_(loss, alpha=factor)
            return
        wide = torch.promote_types(loss.dtype, torch.float32)
        if not factor:
            self._sums[key] = torch.zeros((), dtype=wide, device=loss.device)
        else:
            self._sums[key] = loss.to(wide) * factor if factor != 1 else loss.to(wide, copy=True)

    def total(self, groups: Sequence[Any], device: torch.device | None) -> Any:
        """The batch's loss over all processes of `groups`, or the mapping of losses, each in its own dtype."""
        keys = list(self._sums)
        summed = sum_over(list(self._sums.values()), groups, device)
        losses = {key: loss.to(self._dtypes[key]) for key, loss in zip(keys, summed)}
        return losses[None] if keys == [None] else losses
