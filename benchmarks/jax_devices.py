"""Messages between devices in JAX, counted in the compiled program: in its loop, and outside."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._harness import Bar, Table, table_of
from benchmarks.jax_gradient import mlp_loss
from microbatch.jax import AccumulationType, microbatch

DEVICES = (1, 2, 4, 8)
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def workloads() -> list[Table]:
    """One table: devices grow."""
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    return [_devices()]


def _devices(count: int = 8, rows: int = 256, width: int = 64) -> Table:
    records = []
    for devices in DEVICES:
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        place = lambda tree, spec, mesh=mesh: jax.device_put(tree, NamedSharding(mesh, spec))
        params = place([jnp.ones((width, width))] * 4, P())
        batch = place((jnp.ones((rows, width)), jnp.ones((rows, width))), P("data"))
        mine = microbatch(
            mlp_loss, (1, 2), rows // count, AccumulationType.MEAN, mesh=mesh, batch_spec=P("data")
        )
        ways = {
            "loop by hand": _loop_by_hand(count),
            "value_and_grad(microbatch)": jax.value_and_grad(mine),
        }
        record: dict[str, Any] = {"devices": devices}
        for name, way in ways.items():
            inside, outside = _collectives(way, params, *batch)
            record |= {f"{name}: in the loop": inside * count, f"{name}: outside": outside}
        records.append(record)
    total = lambda record, name: record[f"{name}: in the loop"] + record[f"{name}: outside"]
    most = max(total(record, "value_and_grad(microbatch)") for record in records)
    return table_of(
        records,
        "jax-growth-devices",
        f"JAX: more devices; messages of one gradient in {count} microbatches",
        bars=((Bar("value_and_grad(microbatch)", "messages", 1.0, "one a call"), float(most)),),
        note="Devices are forced on one CPU: messages are counted in the compiled program, not timed.",
    )


def _loop_by_hand(count: int) -> Any:
    """What one writes without thinking of devices: every microbatch's gradient is reduced."""

    def gradient(params: Any, x: jax.Array, y: jax.Array) -> Any:
        cut = [a.reshape(-1, count, *a.shape[1:]) for a in (x, y)]

        def step(i: Any, total: Any) -> Any:
            rows = [lax.dynamic_index_in_dim(a, i, 1, keepdims=False) for a in cut]
            return jax.tree.map(jnp.add, total, jax.value_and_grad(mlp_loss)(params, *rows))

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        return jax.tree.map(lambda a: a / count, lax.fori_loop(0, count, step, zero))

    return gradient


def _collectives(fun: Any, *args: Any) -> tuple[int, int]:
    text = jax.jit(fun).lower(*args).compile().as_text()
    inside = outside = 0
    for computation in re.split(r"\n(?=\S)", text):
        found = len(re.findall(rf" (?:{COLLECTIVES})(?:-start)?\(", computation))
        if computation.startswith("ENTRY"):
            outside += found
        else:
            inside += found
    return inside, outside
