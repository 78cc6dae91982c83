"""What `plan` predicts, beside what processes take: the bytes of what runs, and the kernel's high-water mark.

Each case has a process of its own, which plans with a budget, runs at the planned size, and reads the high-water mark of
resident memory over the run. What the process had before, arguments excepted, is subtracted.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._harness import Bar, Table

MIB = 2**20
GPT2 = "PyTorch: GPT-2, 12 × 768, AdamW"


def workloads() -> list[Table]:
    """Every case, one after another."""
    if not Path("/proc/self/clear_refs").exists():
        return []
    found = {name: _in_a_process(name) for name in CASES}
    return [
        Table(
            name="planning",
            title="plan: predicted memory beside real memory, each case in a process of its own",
            columns=(
                "",
                "rows a microbatch",
                "probes",
                "planning s",
                "predicted MiB",
                "counted MiB",
                "off %",
                "with margin MiB",
                "peak RSS MiB",
                "off %",
            ),
            rows=tuple(_row(name, f) for name, f in found.items()),
            bars=tuple(_bars(found)),
            note="Counted: in JAX the compiler's figure of the loop that runs, in PyTorch tensors while they live. Peak "
            "RSS: the kernel's high-water mark of resident memory, arguments included, with an allocator that gives freed "
            "blocks back. Planning is each process's first.",
        )
    ]


def _row(name: str, figures: dict[str, Any]) -> tuple[Any, ...]:
    with_margin = figures["predicted"] + figures["margin"]
    return (
        name,
        figures["size"],
        figures["probes"],
        round(figures["planning"], 2),
        round(figures["predicted"] / MIB),
        round(figures["counted"] / MIB),
        f"{100 * (figures['predicted'] / figures['counted'] - 1):+.1f}",
        round(with_margin / MIB),
        round(figures["peak"] / MIB),
        f"{100 * (with_margin / figures['peak'] - 1):+.1f}",
    )


def _bars(found: dict[str, dict[str, Any]]) -> list[tuple[Bar, float]]:
    """The worst case in each direction, by name."""
    predicted = lambda f: f["predicted"]
    with_margin = lambda f: f["predicted"] + f["margin"]
    counted, peak = lambda f: f["counted"], lambda f: f["peak"]

    def worst(
        figure: str, of: Callable[..., int], limit: float, against: str, other: Callable[..., int]
    ) -> tuple[Bar, float]:
        reached, name = max((of(f) / other(f), name) for name, f in found.items())
        return Bar(f"“{name}”", figure, limit, against), reached

    return [
        worst("predicted memory", predicted, 1.05, "the count", counted),
        worst("counted memory", counted, 1.05, "the plan", predicted),
        worst("memory with margin", with_margin, 1.1, "peak RSS", peak),
        worst("peak RSS", peak, 1.1, "the plan with margin", with_margin),
        (Bar(f"“{GPT2}”", "planning time", 2.0, "one second"), found[GPT2]["planning"]),
    ]


def _in_a_process(name: str) -> dict[str, Any]:
    """The figures of one case."""
    command = [sys.executable, "-m", "benchmarks.planning", name]
    # Blocks of 1 MiB and more go back to the kernel when they are freed, so that resident memory is memory in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def _resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _peak_bytes(run: Callable[[], Any], held_bytes: int) -> int:
    """What `run` takes at its peak, its arguments included."""
    before = _resident("VmRSS") - held_bytes
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    run()
    return _resident("VmHWM") - before


def _figures(planned: Any, planning: float, counted: int, peak: int) -> dict[str, Any]:
    return {
        "size": planned.microbatch_size,
        "probes": planned.probes,
        "predicted": planned.predicted_bytes,
        "margin": planned.margin_bytes,
        "planning": planning,
        "counted": counted,
        "peak": peak,
    }


def _jax_case(fun: Callable[..., Any], args: tuple[Any, ...], budget: str) -> dict[str, Any]:
    import jax

    from microbatch.jax import AccumulationType, microbatch, plan

    started = time.perf_counter()
    planned = plan(fun, 1, AccumulationType.MEAN, memory_budget=budget)(*args)
    planning = time.perf_counter() - started
    step = jax.jit(microbatch(fun, 1, planned.microbatch_size, AccumulationType.MEAN))
    compiled = step.lower(*args).compile()
    stats = compiled.memory_analysis()
    counted = (
        stats.temp_size_in_bytes
        + stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    jax.block_until_ready(jax.jit(fun)(args[0], args[1][:2]))  # what libraries take once
    held = sum(x.nbytes for x in jax.tree.leaves(args))
    peak = _peak_bytes(lambda: jax.block_until_ready(compiled(*args)), held)
    return _figures(planned, planning, counted, peak)


def _jax_mlp() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    params = [jnp.full((1024, 1024), 1e-3) for _ in range(6)]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    return _jax_case(jax.value_and_grad(loss), (params, jnp.ones((16_384, 1024))), "512MiB")


def _jax_attention() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    params = [(jnp.full((256, 768), 1e-2), jnp.full((256, 256), 1e-2)) for _ in range(4)]

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        q, k, v = jnp.split(x @ weights[0], 3, -1)
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 16)
        return x + jnp.einsum("bts,bsd->btd", scores, v) @ weights[1]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for weights in params:
            x = layer(x, weights)
        return jnp.mean(x**2)

    return _jax_case(jax.value_and_grad(loss), (params, jnp.ones((512, 128, 256))), "768MiB")


def _jax_convolutions() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    params = [jnp.full((3, 3, 3, 32), 0.1), *(jnp.full((3, 3, 32, 32), 0.05) for _ in range(3))]
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
            x = jax.nn.relu(x)
        return jnp.mean(x**2)

    return _jax_case(jax.value_and_grad(loss), (params, jnp.ones((1024, 32, 32, 3))), "1GiB")


def _torch_case(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    budget: str,
    make_optimizer: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    from microbatch.torch import plan
    from microbatch.torch._tracking import TensorBytes

    optimizer = make_optimizer(model.parameters()) if make_optimizer else None
    started = time.perf_counter()
    planned = plan(loss_fn, memory_budget=budget, optimizer=optimizer)(batch)
    planning = time.perf_counter() - started
    pieces = batch.split(planned.microbatch_size)

    def run() -> None:
        # The optimizer's state is there after its first step, and all gradients after one microbatch.
        for rows in pieces[:1] if optimizer else ():
            loss_fn(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        for rows in pieces[:2]:
            loss_fn(rows).backward()

    loss_fn(batch[:1]).backward()  # what libraries take once
    model.zero_grad()
    tensors = [*model.parameters(), *model.buffers(), batch]
    with TensorBytes() as tracked:
        tracked.hold(tensors)
        peak = _peak_bytes(run, sum(t.nbytes for t in tensors))
    return _figures(planned, planning, tracked.peak_bytes, peak)


def _torch_mlp() -> dict[str, Any]:
    import torch
    from torch import nn

    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.GELU())])
    batch = torch.randn(16_384, 1024)
    return _torch_case(lambda x: model(x).square().mean(), model, batch, "384MiB")


def _torch_gpt2() -> dict[str, Any]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12, vocab_size=8192)
    model = transformers.GPT2LMHeadModel(config)
    loss_fn = lambda ids: model(input_ids=ids, labels=ids).loss
    ids = torch.randint(0, 8192, (64, 32))
    return _torch_case(loss_fn, model, ids, "1800MiB", torch.optim.AdamW)


def _torch_convolutions() -> dict[str, Any]:
    import torch
    from torch import nn

    layers = [m for _ in range(4) for m in (nn.LazyConv2d(32, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers)
    batch = torch.randn(1024, 3, 32, 32)
    model(batch[:1])
    return _torch_case(lambda x: model(x).square().mean(), model, batch, "384MiB")


CASES = {
    "JAX: MLP, 6 × 1024": _jax_mlp,
    "JAX: attention, 4 × 256": _jax_attention,
    "JAX: convolutions, 4 × 32": _jax_convolutions,
    "PyTorch: MLP, 6 × 1024": _torch_mlp,
    GPT2: _torch_gpt2,
    "PyTorch: convolutions, 4 × 32": _torch_convolutions,
}


if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]]()))
