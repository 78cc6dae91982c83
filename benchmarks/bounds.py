"""How fast can it be: the operations and bytes that a gradient needs, at the rates that this machine has."""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import microbatch.torch as mb
from benchmarks._harness import Table, table_of, times_in_turn
from benchmarks.jax_gradient import mlp_loss
from benchmarks.torch_training import GPT, token_loss
from microbatch.jax import AccumulationType, microbatch

GIGA = 1e9


def workloads() -> list[Table]:
    """One table: two models in each framework."""
    torch.manual_seed(0)
    records = [_jax_mlp(256), _jax_mlp(32), _torch_mlp(256), _torch_gpt()]
    return [
        table_of(
            records,
            "bounds",
            "How fast can it be: what a gradient in microbatches needs, and what it takes",
            note="GFLOP: of the whole batch's forward and backward; in JAX all that its program has, in PyTorch its products. MB "
            "moved: the batch once; for every microbatch the parameters twice and the gradient read and written, as if no cache held "
            "them. Rates: the fastest of 7 runs, of a product of a microbatch's shape and of a pass over 256 MB, in turn with "
            "the gradient, whose median is taken. Bound: the longer of the two.",
        )
    ]


def _record(
    name: str,
    flop: float,
    moved_bytes: float,
    product: Callable[[], Any],
    product_flop: float,
    gradient: Callable[[], Any],
) -> dict[str, Any]:
    """A row; running `product` measures how many operations the machine does in a second."""
    many = torch.ones(2**26)
    # In place: memory that is new to the process would be measured, too.
    runs = {"product": product, "pass": lambda: many.add_(1), "gradient": gradient}
    times = times_in_turn(runs, rounds=7)
    flops = product_flop / min(times["product"])
    bandwidth = 2 * many.nbytes / min(times["pass"])
    taken = statistics.median(times["gradient"])
    bound = max(flop / flops, moved_bytes / bandwidth)
    return {
        "workload": name,
        "GFLOP": flop / GIGA,
        "MB moved": moved_bytes / 1e6,
        "GFLOP/s": flops / GIGA,
        "GB/s": bandwidth / GIGA,
        "bound, s": bound,
        "measured, s": taken,
        "of the bound, %": 100 * bound / taken,
    }


def _moved(batch_bytes: int, parameter_bytes: int, microbatches: int) -> float:
    return batch_bytes + microbatches * 4 * parameter_bytes


def _jax_mlp(size: int, rows: int = 4096, width: int = 512, layers: int = 4) -> dict[str, Any]:
    params = [jnp.eye(width) for _ in range(layers)]
    x = jnp.ones((rows, width))
    compiled = lambda fun, *args: jax.jit(fun).lower(*args).compile()
    whole = compiled(jax.value_and_grad(mlp_loss), params, x, x)
    mine = microbatch(jax.value_and_grad(mlp_loss), (1, 2), size, AccumulationType.MEAN)
    gradient = compiled(mine, params, x, x)
    product = compiled(
        lambda w, x: lax.fori_loop(0, 16, lambda _, x: x @ w, x), params[0], x[:size]
    )
    wait = jax.block_until_ready
    return _record(
        f"JAX, MLP of {layers} × {width}, {rows:,} rows, {size} a microbatch",
        whole.cost_analysis()["flops"],
        _moved(2 * x.nbytes, layers * width**2 * 4, rows // size),
        lambda: wait(product(params[0], x[:size])),
        16 * 2 * size * width**2,
        lambda: wait(gradient(params, x, x)),
    )


def _torch_mlp(size: int, rows: int = 4096, width: int = 512, layers: int = 4) -> dict[str, Any]:
    model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())])
    x = torch.randn(rows, width)
    name = f"PyTorch, MLP of {layers} × {width}, {rows:,} rows, {size} a microbatch"
    return _torch(
        name, model, lambda x: ((model(x) - x) ** 2).mean(), x, size, (size, width, width)
    )


def _torch_gpt(
    size: int = 4, rows: int = 64, tokens: int = 128, vocabulary: int = 8192, width: int = 256
) -> dict[str, Any]:
    model = GPT(width, 4, vocabulary)
    ids = torch.randint(0, vocabulary, (rows, tokens + 1))
    name = f"PyTorch, GPT of 4 × {width}, {rows} × {tokens} tokens, {size} rows a microbatch"
    shape = (size * tokens, width, vocabulary)
    return _torch(name, model, lambda ids: token_loss(model, ids, ids), ids, size, shape)


def _torch(
    name: str,
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    batch: torch.Tensor,
    size: int,
    product_shape: tuple[int, int, int],
) -> dict[str, Any]:
    with FlopCounterMode(display=False) as counter:
        loss(batch[:size]).backward()
    microbatches = len(batch) // size
    m, k, n = product_shape
    left, right, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)

    def gradient() -> None:
        model.zero_grad()
        mb.backward(loss, batch, microbatch_size=size)

    return _record(
        name,
        counter.get_total_flops() * microbatches,
        _moved(batch.nbytes, sum(p.nbytes for p in model.parameters()), microbatches),
        lambda: [torch.mm(left, right, out=out) for _ in range(16)],
        16 * 2 * m * k * n,
        gradient,
    )
