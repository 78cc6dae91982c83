"""A causal language model of Hugging Face's transformers on texts of different lengths, weighted by their tokens.

The mean over the tokens of the whole batch, not the mean of the microbatches' means. Random weights: nothing is downloaded.

Run: python examples/torch_transformers.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import microbatch.torch as mb


def texts(rows, longest=24, vocabulary=50):
    """Counting modulo the vocabulary, padded at the end; the padding has no label."""
    lengths = torch.randint(3, longest + 1, (rows, 1))
    ids = (torch.randint(0, vocabulary, (rows, 1)) + torch.arange(longest)) % vocabulary
    mask = (torch.arange(longest) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def tokens(batch):
    """What the model's loss is a mean over: labels that are predicted, so not the first."""
    return (batch["labels"][:, 1:] != -100).sum()


def main(steps=15):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(batch):
        return model(**batch)  # An output with a .loss will do.

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mb.backward(loss_fn, texts(32), microbatch_size=4, weight_fn=tokens)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")

    # The same gradient as the whole batch at once.
    batch = texts(32)
    model.zero_grad()
    model(**batch).loss.backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    mb.backward(loss_fn, batch, microbatch_size=4, weight_fn=tokens)
    error = max((p.grad - g).abs().max().item() for p, g in zip(model.parameters(), whole))
    print(f"largest difference from the whole batch's gradient: {error:.1e}")
    return losses, error


if __name__ == "__main__":
    main()
