"""Sharded parameters in two processes: gradients stay sharded between microbatches, or are exchanged once, as you like.

Run: torchrun --nproc-per-node 2 examples/torch_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import microbatch.torch as mb


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    data = torch.randn(dist.get_world_size(), 16, 64)
    norms = {}
    for sync in ("every", "last"):
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            # "every" (the default) keeps one shard of the gradient, "last" a whole one until the end.
            loss = mb.backward(
                lambda x: model(x).square().mean(), data[rank], microbatch_size=4, sync=sync
            )
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
        norms[sync] = norm.item()
        if rank == 0:
            print(f'sync="{sync}": loss {loss:.6f}, gradient norm {norm:.6f}')
    assert abs(norms["every"] - norms["last"]) < 1e-6
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
