"""Two processes with unequal numbers of rows and tokens: the gradient is that of one process with all rows.

Run: torchrun --nproc-per-node 2 examples/torch_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import microbatch.torch as mb


def batch_of(rank):
    """Process 0 has 24 rows, process 1 has 40; labels are missing here and there."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(24 + 16 * rank, 6, 10, generator=generator)
    labels = torch.randint(0, 4, x.shape[:2], generator=generator)
    missing = torch.rand(labels.shape, generator=generator) < (0.7 if rank == 0 else 0.1)
    return x, labels.masked_fill(missing, -100)


def loss_of(model, x, labels):
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 4))
    model = DistributedDataParallel(alone)

    # One small message before the first forward, one gradient all-reduce after the last backward.
    loss = mb.backward(
        lambda x, labels: loss_of(model, x, labels),
        *batch_of(rank),
        microbatch_size=8,
        weight_fn=lambda x, labels: (labels != -100).sum(),
    )
    grads = [p.grad.clone() for p in alone.parameters()]

    alone.zero_grad()
    x, labels = (torch.cat(parts) for parts in zip(batch_of(0), batch_of(1)))
    whole = loss_of(alone, x, labels)
    wanted = torch.autograd.grad(whole, list(alone.parameters()))
    error = max((a - b).abs().max().item() for a, b in zip(grads, wanted))
    if rank == 0:
        print(
            f"loss {loss:.6f}, one process {whole:.6f}, largest difference in gradients {error:.1e}"
        )
    assert error < 1e-6
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
