"""``python -m benchmarks.plan``: what `plan` predicts beside what processes really take at their peak.

Each case runs in a process of its own: it plans with a budget, runs at the planned size, and reads the kernel's high-water
mark of resident memory over the run. What the process had before, arguments excepted, is subtracted.
"""

import json
import os
import subprocess
import sys
import time

MIB = 2**20


def resident(field):
    """VmRSS or VmHWM of this process, in bytes."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def restart_high_water():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def measured(run, held_bytes):
    """Bytes that `run` takes at its peak, its arguments included."""
    before = resident("VmRSS") - held_bytes
    restart_high_water()
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    return resident("VmHWM") - before, seconds


def jax_case(fun, args, budget):
    import jax

    from microbatch.jax import AccumulationType, microbatch, plan

    started = time.perf_counter()
    found = plan(fun, 1, AccumulationType.MEAN, memory_budget=budget)(*args)
    planning = time.perf_counter() - started
    step = jax.jit(microbatch(fun, 1, found.microbatch_size, AccumulationType.MEAN))
    compiled = step.lower(*args).compile()
    stats = compiled.memory_analysis()
    figure = (
        stats.temp_size_in_bytes
        + stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )
    few = jax.tree.map(lambda x: x, (args[0], args[1][:2]))
    jax.block_until_ready(jax.jit(fun)(*few))  # what libraries take once
    held = sum(x.nbytes for x in jax.tree.leaves(args))
    peak, seconds = measured(lambda: jax.block_until_ready(compiled(*args)), held)
    return found, {"tracked": figure, "peak": peak, "planning": planning, "seconds": seconds}


def jax_mlp():
    import jax
    import jax.numpy as jnp

    params = [jnp.full((1024, 1024), 1e-3) for _ in range(6)]

    def loss(params, x):
        for w in params:
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    return jax_case(jax.value_and_grad(loss), (params, jnp.ones((65_536, 1024))), "1GiB")


def jax_attention():
    import jax
    import jax.numpy as jnp

    params = [(jnp.full((256, 768), 1e-2), jnp.full((256, 256), 1e-2)) for _ in range(4)]

    def layer(x, weights):
        q, k, v = jnp.split(x @ weights[0], 3, -1)
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 16)
        return x + jnp.einsum("bts,bsd->btd", scores, v) @ weights[1]

    def loss(params, x):
        for weights in params:
            x = layer(x, weights)
        return jnp.mean(x**2)

    return jax_case(jax.value_and_grad(loss), (params, jnp.ones((512, 128, 256))), "768MiB")


def jax_convolutions():
    import jax
    import jax.numpy as jnp

    params = [jnp.full((3, 3, 3, 32), 0.1), *(jnp.full((3, 3, 32, 32), 0.05) for _ in range(3))]

    def loss(params, x):
        for w in params:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jnp.mean(x**2)

    return jax_case(jax.value_and_grad(loss), (params, jnp.ones((1024, 32, 32, 3))), "1GiB")


def torch_case(loss_fn, model, batch, budget, make_optimizer=None):
    import torch

    from microbatch.torch import plan
    from microbatch.torch._tracking import TensorBytes

    optimizer = make_optimizer(model.parameters()) if make_optimizer else None
    started = time.perf_counter()
    found = plan(loss_fn, memory_budget=budget, optimizer=optimizer)(batch)
    planning = time.perf_counter() - started

    def run(microbatches=2):
        for _ in range(1 if optimizer is None else 2):
            for rows in batch.split(found.microbatch_size)[:microbatches]:
                loss_fn(rows).backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()

    loss_fn(batch[:1]).backward()  # what libraries take once
    model.zero_grad()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), batch))
    peak, seconds = measured(run, held)
    model.zero_grad()
    if optimizer is not None:
        optimizer.state.clear()
    with TensorBytes() as tracked:
        tracked.hold([*model.parameters(), *model.buffers(), batch])
        run()
    del torch
    return found, {
        "tracked": tracked.peak_bytes,
        "peak": peak,
        "planning": planning,
        "seconds": seconds,
    }


def torch_mlp():
    import torch
    from torch import nn

    layers = [m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers)
    return torch_case(lambda x: model(x).square().mean(), model, torch.randn(65_536, 1024), "1GiB")


def torch_gpt2():
    import torch
    import transformers

    config = transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12, vocab_size=8192)
    model = transformers.GPT2LMHeadModel(config)
    loss_fn = lambda ids: model(input_ids=ids, labels=ids).loss
    ids = torch.randint(0, 8192, (64, 128))
    return torch_case(loss_fn, model, ids, "3GiB", torch.optim.AdamW)


def torch_convolutions():
    import torch
    from torch import nn

    layers = [m for _ in range(4) for m in (nn.LazyConv2d(32, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers)
    batch = torch.randn(1024, 3, 32, 32)
    model(batch[:1])
    return torch_case(lambda x: model(x).square().mean(), model, batch, "640MiB")


CASES = {
    case.__name__: case
    for case in (
        jax_mlp,
        jax_attention,
        jax_convolutions,
        torch_mlp,
        torch_gpt2,
        torch_convolutions,
    )
}


def main(names):
    """Prints one line a case."""
    if names[:1] == ["--inside"]:
        found, figures = CASES[names[1]]()
        print(
            json.dumps(
                figures
                | {
                    "size": found.microbatch_size,
                    "predicted": found.predicted_bytes,
                    "margin": found.margin_bytes,
                    "probes": found.probes,
                }
            )
        )
        return
    print(
        f"{'case':18} {'rows':>6} {'probes':>6} {'planning':>9} {'predicted':>10} {'margin':>10} {'tracked':>10} {'off by':>7} "
        f"{'peak RSS':>10} {'off by':>7}"
    )
    for name in names or CASES:
        command = [sys.executable, "-m", "benchmarks.plan", "--inside", name]
        environment = os.environ | {"OMP_NUM_THREADS": "2"}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
        f = json.loads(done.stdout.splitlines()[-1])
        off = lambda needed, real: f"{needed / real - 1:+7.1%}"
        mib = lambda key, f=f: f"{f[key] / MIB:6.0f} MiB"
        print(
            f"{name:18} {f['size']:>6} {f['probes']:>6} {f['planning']:>7.1f} s {mib('predicted')} {mib('margin')} {mib('tracked')} "
            f"{off(f['predicted'], f['tracked'])} {mib('peak')} {off(f['predicted'] + f['margin'], f['peak'])}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
