"""Differentially private training (DP-SGD) with optax: clipped sums of Poisson samples, noise once on the sum.

Samples differ in size and nothing is compiled again: they are padded with rows of weight 0, and microbatches without a
real row do not run. Layers see one token per example, so norms are products of the factors' norms and lose no digits.

Run: python examples/jax_private_training.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from microbatch.jax import clip_by_global_norm, micro_grad

CLIP, NOISE, RATE, MOST, SIZE = 1.0, 0.8, 0.1, 256, 32


def loss_fn(params, x, y, real):
    hidden = jax.nn.relu(x @ params["w"] + params["b"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["v"], y).mean()


def clipped_sum(params, batch, **options):
    return micro_grad(
        loss_fn,
        batch_argnums=(1, 2, 3),
        weight_fn=lambda params, x, y, real: real[0],
        transform_fn=clip_by_global_norm(CLIP),
        **options,
    )(params, *batch)[0]


def step(optimizer, expected, params, state, key, batch, num_real):
    total = clipped_sum(
        params, batch, microbatch_size=SIZE, order="contiguous", num_real_microbatches=num_real
    )
    noise = optax.tree.random_like(key, total)
    noisy = jax.tree.map(lambda g, z: (g + CLIP * NOISE * z) / expected, total, noise)
    updates, state = optimizer.update(noisy, state, params)
    return optax.apply_updates(params, updates), state


def sample(rng, x, y):
    """Every example with probability RATE, padded to MOST rows, and how many microbatches hold real rows."""
    chosen = np.flatnonzero(rng.random(len(x)) < RATE)[:MOST]
    rows = np.zeros(MOST, int)
    rows[: len(chosen)] = chosen
    real = np.arange(MOST) < len(chosen)
    return (x[rows], y[rows], real.astype(np.float32)), -(-len(chosen) // SIZE)


def main(steps: int = 60):
    x, y = load_digits(return_X_y=True)
    x, y = np.float32(x / 16), np.int32(y)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
    params = {"w": draw(64, 64), "b": jnp.zeros(64), "v": draw(64, 10)}
    optimizer = optax.sgd(1.0, momentum=0.9)
    state = optimizer.init(params)
    update = jax.jit(lambda *args: step(optimizer, RATE * len(x), *args))
    for i in range(steps):
        batch, num_real = sample(rng, x, y)
        params, state = update(params, state, jax.random.key(i), batch, num_real)
    hidden = jax.nn.relu(x @ params["w"] + params["b"])
    accuracy = jnp.mean(jnp.argmax(hidden @ params["v"], 1) == y)
    print(f"accuracy {accuracy:.3f} after {steps} private steps")
    pieces = clipped_sum(params, batch, microbatch_size=SIZE)
    whole = clipped_sum(params, batch, engine="vmap")
    apart = max(float(jnp.max(jnp.abs(pieces[k] - whole[k]))) / len(x) for k in whole)
    print(f"largest difference from the whole batch, per example: {apart:.1e}")


if __name__ == "__main__":
    main()
