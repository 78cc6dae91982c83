"""One of two processes: the gradient of its half of the rows, and of the other's, on one mesh of both.

Run as ``_worker_jax.py PORT INDEX PROCESSES OUT``; writes what it sees as ``OUT.INDEX.npz``.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from microbatch.jax import AccumulationType, microbatch

ROWS, SIZE = 48, 16


def problem():
    """Parameters, and all rows; the last third has no weight, so that the processes' weights differ."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(6, 5)), "b": rng.normal(size=5)}
    rows = rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 5)), np.arange(ROWS) < 32
    as_float = lambda a: np.asarray(a, np.float32)
    return jax.tree.map(as_float, params), jax.tree.map(as_float, rows)


def loss(params, x, y, mask):
    errors = ((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2).mean(1)
    return jnp.sum(errors * mask) / jnp.maximum(jnp.sum(mask), 1)


def gradients(kind):
    """Value and gradient of the mean over all valid rows, by differentiating through the loop."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(kind,))
    params, rows = problem()

    def placed(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda where: array[where])

    options = {"mesh": mesh} if kind is AxisType.Auto else {}
    weight_fn = lambda params, x, y, mask: mask.sum()
    small = microbatch(loss, (1, 2, 3), SIZE, AccumulationType.MEAN, weight_fn=weight_fn, **options)
    with jax.set_mesh(mesh):
        args = (
            jax.tree.map(lambda a: placed(a, P()), params),
            *(placed(a, P("data")) for a in rows),
        )
        value, grads = jax.jit(jax.value_and_grad(small))(*args)
    return {"value": value, **grads}


def main(port, index, processes, out):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, index)
    found = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        for name, array in gradients(kind).items():
            # Replicated: this process's first piece is the whole.
            found[f"{kind.name}.{name}"] = np.asarray(array.addressable_shards[0].data)
    np.savez(f"{out}.{index}.npz", devices=jax.device_count(), **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
