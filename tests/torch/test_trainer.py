"""The mixin for the Trainer of transformers: the loss of the whole optimizer step, whatever is in each microbatch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import microbatch
import microbatch.torch as mb

transformers = pytest.importorskip("transformers")


class Tagger(nn.Module):
    """Returns the mean over its labels, and knows nothing of the Trainer's count of items."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def rows(count=16, width=6):
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        labels = torch.randint(0, 3, (width,), generator=generator)
        labels[1 + 5 * index % width :] = -100
        made.append({"x": torch.randn(width, 5, generator=generator), "labels": labels})
    return made


class WithMixin(mb.TrainerMixin, transformers.Trainer):
    microbatch_size = 2


def train(kind, folder, data, batch, accumulate=1, **kwargs):
    model = Tagger()
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate,
        max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0.0, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant",
        **kwargs,
    )  # fmt: skip
    before = copy.deepcopy(model.state_dict())
    trainer = kind(
        model=model, args=arguments, train_dataset=torch.utils.data.Subset(data, range(len(data)))
    )
    trainer.train()
    [loss] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return loss, {name: before[name] - value for name, value in model.state_dict().items()}


def whole_batch(data):
    model = Tagger()
    loss = model(*(torch.stack([row[key] for row in data]) for key in ("x", "labels")))["loss"]
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("batch, accumulate", [(16, 1), (8, 2), (5, 4)])
def test_the_step_is_that_of_all_its_labels(tmp_path, batch, accumulate):
    data = rows()
    loss, step = train(WithMixin, tmp_path, data, batch, accumulate)
    wanted_loss, grads = whole_batch(data)
    assert loss == pytest.approx(wanted_loss, rel=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(step[name], grad, rtol=1e-4, atol=1e-6)


def test_the_trainer_alone_gives_the_mean_of_means(tmp_path):
    data = rows()
    loss, _ = train(transformers.Trainer, tmp_path, data, 4, 4)
    assert abs(loss - whole_batch(data)[0]) > 1e-3


def test_the_model_sees_few_rows_and_evaluation_is_as_it_was(tmp_path):
    seen = []

    class Watching(WithMixin):
        def compute_loss(self, model, inputs, *args, **kwargs):
            hook = model.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(len(kwargs["x"])), with_kwargs=True
            )
            try:
                return super().compute_loss(model, inputs, *args, **kwargs)
            finally:
                hook.remove()

    train(Watching, tmp_path, rows(), 16)
    assert set(seen) == {2}
    seen.clear()
    train(Watching, tmp_path, rows(), 16, eval_strategy="no")
    trainer = Watching(
        model=Tagger(),
        args=transformers.TrainingArguments(
            str(tmp_path),
            per_device_eval_batch_size=8,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
    )
    seen.clear()
    data = rows()
    metrics = trainer.evaluate(torch.utils.data.Subset(data, range(len(data))))
    assert set(seen) == {8} and metrics["eval_loss"] > 0


def test_a_size_that_is_none_is_refused(tmp_path):
    class Wrong(mb.TrainerMixin, transformers.Trainer):
        microbatch_size = 0

    with pytest.raises(microbatch.MicrobatchSizeError, match="Wrong: microbatch_size=0"):
        train(Wrong, tmp_path, rows(), 16)
