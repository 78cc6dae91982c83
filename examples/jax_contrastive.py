"""Gradient caching: a contrastive loss over a batch that does not fit, temperature learned.

Every pair is a negative of every other, so the loss cannot be cut; the encoders can. Their outputs are small and are
concatenated; differentiating evaluates each microbatch again. What elsewhere takes a library is one composition here, and
the temperature, which is outside, gets its gradient once.

Run: python examples/jax_contrastive.py
"""

import jax
import jax.numpy as jnp
import optax

from microbatch.jax import AccumulationType, microbatch

PAIRS, SIZE, WIDTH = 1024, 64, 256


def encode(params, x):
    for w in params:
        x = jax.nn.gelu(x @ w)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def contrastive_loss(left, right, log_scale):
    """InfoNCE, both ways."""
    similarity = jnp.exp(log_scale) * left @ right.T
    pairs = jnp.arange(len(left))
    of_rows = optax.softmax_cross_entropy_with_integer_labels(similarity, pairs)
    of_columns = optax.softmax_cross_entropy_with_integer_labels(similarity.T, pairs)
    return (of_rows.mean() + of_columns.mean()) / 2


def loss_with(encode):
    def loss(params, images, texts):
        left, right = encode(params["image"], images), encode(params["text"], texts)
        return contrastive_loss(left, right, params["log_scale"])

    return loss


def main():
    keys = jax.random.split(jax.random.key(0), 14)
    layers = lambda keys: [jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5 for k in keys]
    params = {"image": layers(keys[:6]), "text": layers(keys[6:12]), "log_scale": jnp.log(10.0)}
    images, texts = (jax.random.normal(k, (PAIRS, WIDTH)) for k in keys[12:])

    small = microbatch(encode, 1, microbatch_size=SIZE, accumulator=AccumulationType.CONCAT)
    steps = {
        name: jax.jit(jax.value_and_grad(loss_with(fun))).lower(params, images, texts).compile()
        for name, fun in [("whole batch", encode), ("microbatched", small)]
    }
    results = {name: step(params, images, texts) for name, step in steps.items()}
    for name, (value, gradients) in results.items():
        memory = steps[name].memory_analysis().temp_size_in_bytes / 2**20
        print(
            f"{name:12} loss {value:.6f}, d loss / d log_scale {gradients['log_scale']:+.6f}, {memory:.1f} MiB"
        )
    pairs = zip(*(jax.tree.leaves(gradients) for _, gradients in results.values()), strict=True)
    print(
        f"largest difference from the whole batch: {max(jnp.max(jnp.abs(a - b)) for a, b in pairs):.1e}"
    )


if __name__ == "__main__":
    main()
