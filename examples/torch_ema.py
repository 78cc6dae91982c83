"""A moving average of the weights: it advances once per optimizer step, however many microbatches the step has.

Run: python examples/torch_ema.py
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import microbatch.torch as mb


def train(microbatch_size, steps=10):
    torch.manual_seed(0)
    x = torch.randn(64, 8, dtype=torch.float64)
    y = x @ torch.randn(8, 1, dtype=torch.float64)
    model = nn.Linear(8, 1).double()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
    for _ in range(steps):
        optimizer.zero_grad()
        mb.backward(
            lambda x, y: ((model(x) - y) ** 2).mean(), x, y, microbatch_size=microbatch_size
        )
        optimizer.step()
        average.update_parameters(model)  # After the step, and not inside the loss function.
    return average


def main():
    averages = {size: train(size) for size in (64, 16, 1)}
    for size, average in averages.items():
        weight = average.module.weight.detach()
        print(
            f"microbatches of {size:2d}: {int(average.n_averaged)} updates, weights {weight[0, :3]}"
        )
    return averages


if __name__ == "__main__":
    main()
