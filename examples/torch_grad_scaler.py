"""Mixed precision with a loss scale, gradient clipping and a schedule: each once per optimizer step, after the window.

Run: python examples/torch_grad_scaler.py
"""

import torch
from torch import nn

import microbatch.torch as mb


def main(epochs=2):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(320, 16, device=device)
    data = torch.utils.data.TensorDataset(x, x[:, :1].sin())
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    windows = mb.windows(loader, 4)  # Ten batches: windows of 4, 4 and 2.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, epochs * len(windows))
    scaler = torch.amp.GradScaler(device)
    counts = {"unscale": 0, "clip": 0, "step": 0}

    def loss_fn(x, y):
        with torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else torch.float16):
            return ((model(x) - y).float() ** 2).mean()

    losses = []
    for _ in range(epochs):
        for window in windows:
            optimizer.zero_grad()
            loss = mb.backward_window(
                loss_fn, window, backward_fn=lambda scaled: scaler.scale(scaled).backward()
            )
            scaler.unscale_(optimizer)
            counts["unscale"] += 1
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            counts["clip"] += 1
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            counts["step"] += 1
            losses.append(loss.item())
    print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {counts}; rate {schedule.get_last_lr()[0]:.3f}"
    )
    return losses, counts, schedule.last_epoch


if __name__ == "__main__":
    main()
