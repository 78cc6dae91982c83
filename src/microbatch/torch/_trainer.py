"""For the Trainer of Hugging Face's transformers, which is not imported here."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from microbatch._accumulation import AccumulationType
from microbatch._checks import check_size
from microbatch.torch._microbatch import microbatch

_IGNORED = -100


class TrainerMixin:
    """Bounded memory for a transformers `Trainer`, with the loss of the whole optimizer step.

    One line beside the class, for any `per_device_train_batch_size`::

        class Trainer(mb.TrainerMixin, transformers.Trainer):
            microbatch_size = 4

    The model sees `microbatch_size` rows at a time. The loss is the mean over all labels of the optimizer step, whatever
    the number of labels in each microbatch, gradient accumulation step and process, also for models whose forward does
    not take `num_items_in_batch` (the Trainer by itself then gives the mean of means). Put the mixin first.

    Attributes:
      microbatch_size: rows in a microbatch, or "auto"; the last one may have fewer.
    """

    microbatch_size: int | str = 1
    # Told to the Trainer: what compute_loss returns is already divided by the labels of the whole step.
    loss_is_scaled_for_ga = True
    _step_labels: Any = None

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of one optimizer step and their number of labels, which is kept for `compute_loss`."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        counts = [self._count_labels(batch) for batch in batches]
        known = [count for count in counts if count is not None]
        self._step_labels = None
        if counts and len(known) == len(counts):
            total = torch.stack(known).sum().to(device)
            if self.args.world_size > 1:  # type: ignore[attr-defined]
                total = self.accelerator.gather(total).sum()  # type: ignore[attr-defined]
            self._step_labels = total
        return batches, num_items

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The Trainer's own loss, a microbatch at a time; as it is where outputs are asked for, in evaluation."""
        whole: Callable[..., Any] = super().compute_loss  # type: ignore[misc]
        if return_outputs or not torch.is_grad_enabled():
            return whole(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if self.microbatch_size != "auto":
            check_size(type(self).__name__, "microbatch_size", self.microbatch_size)

        def loss_of(rows: Mapping[str, Any]) -> torch.Tensor:
            # The Trainer takes labels out of the mapping that it is given.
            return whole(model, dict(rows), num_items_in_batch=num_items_in_batch)

        normalised = num_items_in_batch is not None and (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None  # type: ignore[attr-defined]
        )
        if normalised:  # Each loss is a sum, divided by the labels of the whole step.
            summed = microbatch(
                loss_of, 0, self.microbatch_size, AccumulationType.SUM, remainder="allow"
            )
            return summed(dict(inputs))
        labels = self._count_labels(inputs)
        weight_fn = None if labels is None else self._count_labels
        mean = microbatch(
            loss_of, 0, self.microbatch_size, AccumulationType.MEAN, remainder="allow",
            weight_fn=weight_fn,
        )  # fmt: skip
        loss = mean(dict(inputs))
        if labels is None or self._step_labels is None:
            return loss / getattr(self, "current_gradient_accumulation_steps", 1)
        processes = self.args.world_size  # type: ignore[attr-defined]
        return loss * (labels.to(loss.device) / self._step_labels * processes)

    def _count_labels(self, batch: Any) -> torch.Tensor | None:
        """Labels that the loss of a batch is a mean over; None where it has none."""
        if not isinstance(batch, Mapping):
            return None
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, torch.Tensor):
            return None
        shifts = "shift_labels" not in batch and getattr(self, "_loss_shifts_labels", False)
        return (labels[..., 1:] if shifts else labels).ne(_IGNORED).sum()
