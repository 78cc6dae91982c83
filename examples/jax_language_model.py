"""A language model's loss is a mean over tokens, and microbatches have unequal numbers of them.

The mean of the microbatches' means would weigh a token in a short microbatch more than one in a long one. `weight_fn` tells
how many tokens count; then the loss and its gradient are the whole batch's.

Run: python examples/jax_language_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from microbatch.jax import AccumulationType, microbatch

ROWS, SIZE, LENGTH, VOCABULARY, WIDTH = 16, 2, 24, 50, 32
MEAN = AccumulationType.MEAN


def init(key):
    shapes = {"embed": (VOCABULARY, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, VOCABULARY)}
    keys = jax.random.split(key, len(shapes))
    return {
        k: jax.random.normal(r, s) * s[0] ** -0.5
        for (k, s), r in zip(shapes.items(), keys, strict=True)
    }


def logits_fn(params, tokens):
    """One layer of causal attention."""
    x = params["embed"][tokens]
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    attended = jax.nn.dot_product_attention(*(a[:, :, None] for a in (q, k, v)), is_causal=True)
    return (x + attended[:, :, 0]) @ params["out"]


def loss_fn(params, tokens, mask):
    """The mean over the tokens that count."""
    logits, targets, counts = logits_fn(params, tokens[:, :-1]), tokens[:, 1:], mask[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * counts) / jnp.sum(counts)


def count_tokens(params, tokens, mask):
    return mask[:, 1:].sum()


def main():
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.integers(2, LENGTH + 1, ROWS))
    tokens = jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, LENGTH)))
    mask = jnp.arange(LENGTH) < jnp.asarray(lengths)[:, None]
    params = init(jax.random.key(0))

    options = {"microbatch_size": SIZE, "accumulator": MEAN, "order": "contiguous"}
    right = microbatch(loss_fn, (1, 2), weight_fn=count_tokens, **options)
    naive = microbatch(loss_fn, (1, 2), **options)
    gradient_of = lambda loss: jax.jit(jax.value_and_grad(loss))(params, tokens, mask)
    (whole, expected), (value, gradients), (wrong, _) = map(gradient_of, (loss_fn, right, naive))
    counts = mask[:, 1:].sum(1).reshape(-1, SIZE).sum(1)
    print(f"tokens in the microbatches: {counts.tolist()}")
    print(f"whole batch {whole:.6f}, weighted by tokens {value:.6f}, mean of the means {wrong:.6f}")
    gaps = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), gradients, expected)
    print(f"largest difference from the whole batch: {max(jax.tree.leaves(gaps)):.1e}")


if __name__ == "__main__":
    main()
