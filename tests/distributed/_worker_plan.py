"""What two processes check about planning; started by `test_plan_processes.py` as FRONT RANK PORT."""

import os
import sys

FRONT, RANK, PORT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ |= {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}

from microbatch import AccumulationType, BudgetError

MEAN = AccumulationType.MEAN
ROWS = 4096


def torch_problem():
    import torch
    import torch.distributed as dist

    import microbatch.torch as front

    address = f"tcp://localhost:{PORT}"
    dist.init_process_group("gloo", init_method=address, rank=RANK, world_size=2)
    weight = torch.ones(64, 64, requires_grad=True)
    loss = lambda x: (x @ weight).tanh().square().mean()
    return front, loss, torch.ones(ROWS, 64)


def jax_problem():
    import jax

    jax.distributed.initialize(f"localhost:{PORT}", num_processes=2, process_id=RANK)
    import jax.numpy as jnp

    import microbatch.jax as front

    first, second = jnp.ones((64, 256)), jnp.ones((256, 256))
    loss = lambda x: jnp.mean((jnp.tanh(x @ first) @ second) ** 2)
    return front, loss, jnp.ones((ROWS, 64))


def main():
    front, loss, batch = torch_problem() if FRONT == "torch" else jax_problem()
    plan = lambda budget: front.plan(loss, 0, MEAN, memory_budget=budget)(batch)
    agreed = plan(["64MiB", "3MiB"][RANK])
    assert ("Another process" in agreed.explanation) == (RANK == 0), agreed.explanation
    small = front.microbatch(loss, 0, "auto", MEAN, memory_budget=["64MiB", "3MiB"][RANK])
    assert abs(float(small(batch)) - float(loss(batch))) <= 1e-4 * abs(float(loss(batch)))
    # One that has nothing that fits does not leave the other waiting.
    nothing = front.microbatch(loss, 0, "auto", MEAN, memory_budget=["64MiB", "1KiB"][RANK])
    try:
        nothing(batch)
    except BudgetError:
        print(agreed.microbatch_size, flush=True)


if __name__ == "__main__":
    main()
