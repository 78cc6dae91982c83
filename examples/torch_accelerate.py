"""With Hugging Face Accelerate: it places the model and calls backward; nobody divides twice.

Run: python examples/torch_accelerate.py, or with accelerate launch
"""

import torch
from accelerate import Accelerator
from torch import nn

import microbatch.torch as mb


def main(epochs=3):
    torch.manual_seed(0)
    # The windows are made here, so Accelerate must not accumulate as well (it would be refused).
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    x = torch.randn(240, 8)
    data = torch.utils.data.TensorDataset(x, x @ torch.randn(8, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loss_fn(x, y):
        return ((model(x) - y) ** 2).mean()

    losses = []
    for _ in range(epochs):
        for window in mb.windows(loader, 4):  # 15 batches: 4, 4, 4 and 3.
            optimizer.zero_grad()
            loss = mb.backward_window(loss_fn, window, backward_fn=accelerator.backward)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps")
    return losses


if __name__ == "__main__":
    main()
