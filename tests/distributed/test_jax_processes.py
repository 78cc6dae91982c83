"""Two processes on one machine give one process's gradient."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

WORKER = Path(__file__).with_name("_worker_jax.py")
SECONDS = 180


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def run(processes, out):
    """What each process found."""
    port = free_port()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, WORKER, str(port), str(index), str(processes), str(out)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text
    return [dict(np.load(f"{out}.{index}.npz")) for index in range(processes)]


def reference():
    """Value and gradient over all valid rows at once, in float64 and by hand."""
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(6, 5)), rng.normal(size=5)
    x, y = rng.normal(size=(48, 6))[:32], rng.normal(size=(48, 5))[:32]
    out = np.tanh(x @ w + b)
    inner = 2 * (out - y) / out.size * (1 - out**2)
    return {"value": np.mean((out - y) ** 2), "w": x.T @ inner, "b": inner.sum(0)}


def test_two_processes_give_the_gradient_of_one(tmp_path):
    (alone,) = run(1, tmp_path / "alone")
    both = run(2, tmp_path / "both")
    assert alone["devices"] == 2 and [found["devices"] for found in both] == [4, 4]
    want = reference()
    for found in (alone, *both):
        for kind in ("Auto", "Explicit"):
            for name, value in want.items():
                np.testing.assert_allclose(found[f"{kind}.{name}"], value, 2e-6, 2e-6)
    for name in both[0]:
        np.testing.assert_array_equal(both[0][name], both[1][name])
