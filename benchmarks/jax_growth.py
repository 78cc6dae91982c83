"""How cost grows in JAX: with the rows, the number of microbatches, the leaves of the parameters, a stream's length."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._harness import Bar, Table, growth_table, seconds_in_turn, table_of, time_columns
from benchmarks._jax import compiled_in_turn
from benchmarks.jax_gradient import mlp_loss, scan_by_hand
from microbatch.jax import AccumulationType, accumulate, microbatch

MEAN = AccumulationType.MEAN
WHOLE, HAND = "whole batch", "scan by hand"
HAND_STREAM, FOLD = "loop by hand", "accumulate(grad)"
INSIDE, AROUND = "microbatch(value_and_grad)", "value_and_grad(microbatch)"
# What varies, the functions to compare there, and their arguments.
Case = tuple[int, Mapping[str, Callable[..., Any]], tuple[Any, ...]]


def workloads() -> list[Table]:
    """One table for each thing that may grow."""
    return [_rows(), _microbatches(), _leaves(), _stream()]


def _rows(size: int = 256) -> Table:
    cases = [(rows, _ways(size), _arguments(rows)) for rows in (2**k for k in range(8, 17))]
    title = f"JAX: rows grow; the gradient of an MLP of 4 × 128, {size} rows a microbatch"
    return _grown("jax-growth-rows", title, "rows", cases)


def _microbatches(rows: int = 2**14) -> Table:
    args = _arguments(rows)
    cases = [(count, _ways(rows // count), args) for count in (2**k for k in range(9))]
    title = f"JAX: more and smaller microbatches; the gradient of an MLP of 4 × 128, {rows:,} rows"
    return _grown("jax-growth-microbatches", title, "microbatches", cases)


def _arguments(rows: int, width: int = 128, layers: int = 4) -> tuple[Any, ...]:
    params, x, y = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, shape: jax.random.normal(key, shape)
    weights = [normal(k, (width, width)) / width**0.5 for k in jax.random.split(params, layers)]
    return weights, normal(x, (rows, width)), normal(y, (rows, width))


def _ways(size: int) -> dict[str, Callable[..., Any]]:
    return {
        WHOLE: jax.value_and_grad(mlp_loss),
        HAND: scan_by_hand(mlp_loss, size),
        AROUND: jax.value_and_grad(microbatch(mlp_loss, (1, 2), size, MEAN)),
    }


def _grown(name: str, title: str, growing: str, cases: Iterable[Case]) -> Table:
    """Time, temporary memory and compilation of each way, case by case."""
    records = []
    for value, ways, args in cases:
        made = compiled_in_turn(ways, args, rounds=3)
        run = lambda program, args=args: jax.block_until_ready(program(*args))
        runs = {way: lambda p=p, run=run: run(p) for way, (p, _) in made.items()}
        mib = lambda program: program.memory_analysis().temp_size_in_bytes / 2**20
        records.append(
            {growing: value}
            | time_columns(runs, AROUND, HAND)
            | {f"{way}, MiB": mib(program) for way, (program, _) in made.items()}
            | {f"{way}, compile s": s for way, (_, s) in made.items()}
        )
    return growth_table(
        records,
        name,
        title,
        "MiB: temporary memory, beside arguments and results.",
        mine=AROUND,
        against=HAND,
        limits={"s": 1.05, "MiB": 1.05, "compile s": 1.2},
    )


def _leaves(rows: int = 8, size: int = 2) -> Table:
    loss = lambda params, x: sum(jnp.sin(leaf) for leaf in params) * jnp.mean(x)
    ways = {
        WHOLE: jax.value_and_grad(loss),
        HAND: scan_by_hand(loss, size),
        INSIDE: microbatch(jax.value_and_grad(loss), 1, size, MEAN),
        AROUND: jax.value_and_grad(microbatch(loss, 1, size, MEAN)),
    }
    records = []
    for leaves in (10, 50, 200, 1000, 5000):
        args = [jnp.ones(())] * leaves, jnp.ones(rows)
        # A fresh function each time: JAX remembers those that it has traced.
        trace = lambda way, args=args: jax.make_jaxpr(lambda *a: way(*a))(*args)
        runs = {name: lambda way=way: trace(way) for name, way in ways.items()}
        taken = seconds_in_turn(runs, rounds=3)
        records.append(
            {"leaves": leaves}
            | {f"{name}, s": s for name, s in taken.items()}
            | {f"{name}, lines": str(trace(way)).count("\n") for name, way in ways.items()}
        )
    return table_of(
        records,
        "jax-growth-leaves",
        "JAX: parameters in more leaves; time to trace a gradient, and lines of the traced program",
        x="leaves",
        panels=tuple(tuple(f"{way}, {figure}" for way in ways) for figure in ("s", "lines")),
    )


class _Watched:
    """A stream of the same rows again and again that looks at the device before each."""

    def __init__(self, length: int, rows: np.ndarray) -> None:
        self.length, self.rows, self.most_bytes = length, rows, 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(self.length):
            self.most_bytes = max(self.most_bytes, sum(a.nbytes for a in jax.live_arrays()))
            yield self.rows, self.rows


def _stream(width: int = 128, size: int = 256) -> Table:
    params, *_ = _arguments(size, width)
    rows = np.random.default_rng(0).normal(size=(size, width)).astype(np.float32)
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: (
            event.endswith("backend_compile_duration") and compilations.append(event)
        )
    )
    fold, step = accumulate(jax.grad(mlp_loss), MEAN), jax.jit(_add_gradient, donate_argnums=0)

    def by_hand(length: int) -> Any:
        total = jax.tree.map(jnp.zeros_like, params)
        for _ in range(length):
            total = step(total, params, rows, rows)
        return jax.block_until_ready(jax.tree.map(lambda a: a / length, total))

    records = []
    for length in (10, 30, 100, 300, 1000):
        watched = _Watched(length, rows)
        compilations.clear()
        jax.block_until_ready(fold(params, microbatches=watched))
        counted = len(compilations)
        runs = {
            HAND_STREAM: lambda length=length: by_hand(length),
            FOLD: lambda length=length: jax.block_until_ready(
                fold(params, microbatches=itertools.repeat((rows, rows), length))
            ),
        }
        records.append(
            {"microbatches": length}
            | time_columns(runs, FOLD, HAND_STREAM, rounds=5)
            | {f"{FOLD}, MiB": watched.most_bytes / 2**20, "compilations": counted}
        )
    most = records[-1]
    return table_of(
        records,
        "jax-growth-stream",
        f"JAX: a longer stream; the gradient of an MLP of 4 × {width}, {size} rows a microbatch",
        x="microbatches",
        panels=((f"{HAND_STREAM}, s", f"{FOLD}, s"), (f"{FOLD}, MiB",)),
        bars=(
            (Bar(f"{FOLD}, 1,000", "time", 1.05, HAND_STREAM), most[f"{FOLD} / {HAND_STREAM}"]),
            (
                Bar(f"{FOLD}, 1,000", "device memory", 1.0, f"{FOLD}, 10"),
                most[f"{FOLD}, MiB"] / records[0][f"{FOLD}, MiB"],
            ),
        ),
        note="MiB: arrays on the device when the next microbatch is asked for.",
    )


def _add_gradient(total: Any, params: Any, x: jax.Array, y: jax.Array) -> Any:
    return jax.tree.map(jnp.add, total, jax.grad(mlp_loss)(params, x, y))
