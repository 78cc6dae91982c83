"""Folds a stream again and again in processes that are killed; prints what is left.

A process forks before JAX has started, so that each of them begins at once. Usage: FOLDER KILLS
"""

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from microbatch.jax import AccumulationType, Carry, accumulate

MEAN, SUM, CONCAT = AccumulationType.MEAN, AccumulationType.SUM, AccumulationType.CONCAT
LENGTH, WAIT_SECONDS = 60, 0.006


def fun(params, key, x):
    key, use = jax.random.split(key)
    rows = jnp.tanh(x @ params) + jax.random.uniform(use)
    return {"mean": rows.mean(), "sum": rows.sum(0), "rows": rows.astype(jnp.bfloat16)}, key


KINDS = {"mean": MEAN, "sum": SUM, "rows": CONCAT}, Carry(1)


def stream(wait_seconds):
    rng = np.random.default_rng(0)
    for i in range(LENGTH):
        time.sleep(wait_seconds)
        yield rng.normal(size=(1 + i % 2, 4)).astype(np.float32)


def folded(path, wait_seconds=WAIT_SECONDS):
    params = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    weight_fn = lambda params, key, x: x[0, 0] > -1
    fold = accumulate(fun, KINDS, weight_fn=weight_fn)
    out, key = fold(params, jax.random.key(0), microbatches=stream(wait_seconds), checkpoint=path)
    flat = [np.asarray(x).astype(np.float32).tobytes() for x in jax.tree.leaves(out)]
    return b"".join([*flat, np.asarray(jax.random.key_data(key)).tobytes()]).hex()


def in_a_process(path, result):
    """Folds in a fork that writes its result; returns its process id."""
    child = os.fork()
    if child == 0:
        words = folded(path)
        Path(f"{result}.part").write_text(words)
        os.replace(f"{result}.part", result)
        os._exit(0)
    return child


def main(folder, kills):
    warnings.simplefilter("ignore")  # JAX warns of every fork; none of these follows its start.
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    path, result = folder / "state.safetensors", folder / "result"
    chance = random.Random(0)
    killed, resumed = 0, 0
    while killed < kills:
        child = in_a_process(path, result)
        # Until the fold is under way, then a random moment of it.
        before = path.stat().st_mtime_ns if path.exists() else 0
        resumed += before > 0
        while not result.exists() and (path.stat().st_mtime_ns if path.exists() else 0) == before:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        if result.exists():
            # It had finished: what it gave is compared, and the next one starts anew.
            print("result", result.read_text())
            result.unlink()
    os.waitpid(in_a_process(path, result), 0)
    print("result", result.read_text())
    print("left", *[p.name for p in folder.iterdir() if p.name not in ("result", "programs")])
    print("killed", killed, "resumed", resumed)
    print("whole", folded(None, 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
