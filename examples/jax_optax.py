"""optax: a big batch on a small memory, and where schedules and averages of the parameters advance.

Two ways to the same training: `microbatch` inside one compiled step where the batch is an array, and
`weighted_multi_steps` where a loop must call the optimizer once per microbatch.

Run: python examples/jax_optax.py
"""

import jax
import jax.numpy as jnp
import optax

from microbatch.jax import AccumulationType, microbatch, weighted_multi_steps

ROWS, SIZE, STEPS = 48, 12, 20


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["in"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def make_optimizer():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 5, STEPS)
    return optax.adamw(schedule, weight_decay=0.01)


def train(update, params, opt_state, batches):
    """The loop of both ways; the average advances once per optimizer step."""
    average = params
    for step in range(STEPS):
        for batch in batches(step):
            params, opt_state = update(params, opt_state, *batch)
        average = optax.incremental_update(params, average, step_size=0.1)
    return average


def main():
    k1, k2, k3, k4 = jax.random.split(jax.random.key(0), 4)
    params = {"in": jax.random.normal(k1, (8, 16)), "out": jax.random.normal(k2, (16,))}
    x, y = jax.random.normal(k3, (ROWS, 8)), jax.random.normal(k4, (ROWS,))
    optimizer = make_optimizer()
    in_calls = weighted_multi_steps(optimizer, every=ROWS // SIZE)
    small_loss = microbatch(
        loss_fn, (1, 2), microbatch_size=SIZE, accumulator=AccumulationType.MEAN
    )

    def step_with(loss, optimizer):
        @jax.jit
        def step(params, opt_state, x, y):
            gradients = jax.grad(loss)(params, x, y)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return step

    whole = lambda step: [(x, y)]
    pieces = lambda step: [(x[i : i + SIZE], y[i : i + SIZE]) for i in range(0, ROWS, SIZE)]
    results = {
        "whole batch": train(step_with(loss_fn, optimizer), params, optimizer.init(params), whole),
        "microbatch": train(
            step_with(small_loss, optimizer), params, optimizer.init(params), whole
        ),
        "one call per microbatch": train(
            step_with(loss_fn, in_calls), params, in_calls.init(params), pieces
        ),
    }
    for name, average in results.items():
        print(f"{name:24} loss of the averaged parameters {loss_fn(average, x, y):.6f}")
    reference = results["whole batch"]["in"]
    gap = max(jnp.max(jnp.abs(average["in"] - reference)) for average in results.values())
    print(f"largest difference from the whole batch: {gap:.1e}")


if __name__ == "__main__":
    main()
