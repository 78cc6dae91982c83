"""L-BFGS from SciPy on the gradient of all data, streamed from a file.

Line searches need exact values: the mean over all rows, not over a random batch. `accumulate` reads the file microbatch by
microbatch in every evaluation and compiles once for all of them.

Run: python examples/jax_lbfgs.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from microbatch.jax import AccumulationType, accumulate

ROWS, WIDTH, SIZE = 10_000, 30, 1_024
traces = []


def loss_fn(weights, x, y):
    """Logistic regression."""
    traces.append(x.shape)
    return jnp.mean(jnp.logaddexp(0, -y * (x @ weights)))


gradient = accumulate(jax.value_and_grad(loss_fn), AccumulationType.MEAN)


def microbatches(x, y):
    for start in range(0, len(x), SIZE):
        yield x[start : start + SIZE], y[start : start + SIZE]


def write_data(path):
    rng = np.random.default_rng(0)
    x = np.lib.format.open_memmap(path, "w+", np.float32, (ROWS, WIDTH))
    x[:] = rng.normal(size=x.shape)
    return np.sign(x @ rng.normal(size=WIDTH) + rng.normal(size=ROWS)).astype(np.float32)


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        y = write_data(path)
        x = np.load(path, mmap_mode="r")

        def value_and_gradient(weights):
            value, slope = gradient(jnp.float32(weights), microbatches=microbatches(x, y))
            return float(value), np.asarray(slope, np.float64)

        found = minimize(value_and_gradient, np.zeros(WIDTH), jac=True, method="L-BFGS-B")
        margins = y * (np.float64(x) @ found.x)
        whole = np.mean(np.logaddexp(0, -margins))
        slope = -(y / (1 + np.exp(margins))) @ np.float64(x) / ROWS
    print(
        f"{found.nit} iterations, {found.nfev} passes over the file, traced for {len(set(traces))} shapes"
    )
    print(
        f"loss {found.fun:.6f}, accuracy {np.mean(margins > 0):.3f}, norm of the gradient {np.linalg.norm(slope):.1e}"
    )
    print(f"largest difference from the whole batch: {abs(found.fun - whole):.1e}")
    assert len(traces) == len(set(traces))


if __name__ == "__main__":
    main()
