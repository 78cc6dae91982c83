"""A plain PyTorch loop whose batch does not have to fit: one line where ``loss.backward()`` was.

Run: python examples/torch_plain_loop.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import microbatch.torch as mb


def main(steps=60):
    torch.manual_seed(0)
    features, labels = torch.randn(1024, 20), torch.randint(0, 4, (1024,))
    features[torch.arange(1024), labels] += 2.0
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(x, y):
        return F.cross_entropy(model(x), y)

    losses = []
    for step in range(steps):
        batch = torch.randperm(1024)[:500]
        optimizer.zero_grad()
        # Eight rows at a time; the gradient is that of all 500.
        loss = mb.backward(loss_fn, features[batch], labels[batch], microbatch_size=8)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
