"""The Trainer of Hugging Face's transformers, a few rows at a time: one line beside the class.

Random weights: nothing is downloaded.

Run: python examples/torch_trainer.py
"""

import tempfile

import torch
import transformers

import microbatch.torch as mb


class Trainer(mb.TrainerMixin, transformers.Trainer):
    microbatch_size = 4


def texts(count, longest=24, vocabulary=50):
    """Counting modulo the vocabulary, of different lengths; the padding has no label."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, longest + 1, (), generator=generator))
        first = torch.randint(0, vocabulary, (1,), generator=generator)
        ids = (first + torch.arange(longest)) % vocabulary
        mask = (torch.arange(longest) < length).long()
        labels = ids.masked_fill(mask == 0, -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def train(trainer, rows, batch, steps, accumulate=1):
    """Losses of every optimizer step, and the model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate,
            max_steps=steps, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", seed=0,
        )  # fmt: skip
        run = trainer(model=model, args=arguments, train_dataset=rows)
        run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry], model


def main(steps=8):
    rows = texts(256)
    losses, _ = train(Trainer, rows, batch=32, steps=steps)
    whole, _ = train(transformers.Trainer, rows, batch=32, steps=steps)
    print(
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}; whole batches {whole[0]:.4f} to {whole[-1]:.4f}"
    )
    return losses, whole


if __name__ == "__main__":
    main()
