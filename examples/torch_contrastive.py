"""Contrastive training on a batch that does not fit, with a learned temperature.

Every row's loss depends on all rows, so the batch cannot be cut at the loss; it is cut at the encoders. In the backward
pass each microbatch is encoded again, with the same dropout masks.

Run: python examples/torch_contrastive.py
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

import microbatch.torch as mb


class Pairs(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)
        )
        self.texts = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode(self, image, text):
        return F.normalize(self.images(image), dim=-1), F.normalize(self.texts(text), dim=-1)


def contrastive_loss(images, texts, scale):
    logits = scale.exp() * images @ texts.T
    target = torch.arange(len(images))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def gradients(model, image, text, microbatch_size):
    model.zero_grad()
    torch.manual_seed(1)  # The same dropout masks, for the comparison.
    encode = mb.microbatch(model.encode, (0, 1), microbatch_size, mb.AccumulationType.CONCAT)
    loss = contrastive_loss(*encode(image, text), model.scale)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def main(steps=30):
    torch.manual_seed(0)
    shared = torch.randn(256, 8)
    image, text = shared @ torch.randn(8, 32), shared @ torch.randn(8, 24)
    model = Pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss, _ = gradients(model, image, text, microbatch_size=32)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, temperature {(-model.scale).exp():.4f}")

    model.eval()
    _, whole = gradients(model, image, text, None)
    _, pieces = gradients(model, image, text, 32)
    error = max((a - b).abs().max().item() for a, b in zip(whole, pieces))
    print(f"largest difference from the whole batch's gradient: {error:.1e}")
    return losses, error


if __name__ == "__main__":
    main()
