"""Cross-entropy over a large vocabulary without all logits at once.

The logits of 2,048 tokens in a vocabulary of 8,192 are 64 MiB, and their gradient as much again; the hidden states are 1 MiB. The
head is microbatched along the tokens and the rest of the model is not: `jax.grad` goes through both.

Run: python examples/jax_cross_entropy_head.py
"""

import jax
import jax.numpy as jnp
import optax

from microbatch.jax import AccumulationType, microbatch

TOKENS, WIDTH, VOCABULARY, SIZE = 2048, 128, 8192, 128


def body(params, x):
    return x + jnp.tanh(x @ params["w"])


def head_loss(head, hidden, labels):
    """The sum over the tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels).sum()


def model_loss(head_loss):
    def loss(params, x, labels):
        return head_loss(params["head"], body(params, x), labels) / len(labels)

    return loss


def main():
    k1, k2, k3, k4 = jax.random.split(jax.random.key(0), 4)
    params = {
        "w": jax.random.normal(k1, (WIDTH, WIDTH)) * WIDTH**-0.5,
        "head": jax.random.normal(k2, (WIDTH, VOCABULARY)) * WIDTH**-0.5,
    }
    x = jax.random.normal(k3, (TOKENS, WIDTH))
    labels = jax.random.randint(k4, (TOKENS,), 0, VOCABULARY)

    small = microbatch(
        head_loss, argnums=(1, 2), microbatch_size=SIZE, accumulator=AccumulationType.SUM
    )
    results = {}
    for name, fun in [("whole batch", head_loss), ("microbatched", small)]:
        step = jax.jit(jax.value_and_grad(model_loss(fun))).lower(params, x, labels).compile()
        results[name] = step(params, x, labels)
        memory = step.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name:12} loss {results[name][0]:.6f}, temporaries {memory:.0f} MiB")
    gaps = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), *results.values())
    print(f"largest difference from the whole batch: {max(jax.tree.leaves(gaps)):.1e}")


if __name__ == "__main__":
    main()
