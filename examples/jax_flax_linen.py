"""flax.linen: dropout with one key per microbatch, and batch statistics that are carried from one to the next.

`key_argnums` folds the microbatch's index into the dropout key; `Carry` hands the batch statistics on. Batch
normalization mixes the rows of a microbatch, so the reference is a loop over the same microbatches.

Run: python examples/jax_flax_linen.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from microbatch.jax import AccumulationType, Carry, microbatch

ROWS, SIZE = 64, 16
MEAN = AccumulationType.MEAN


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(32)(x)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(10)(x)


model = Classifier()


def training_loss(params, statistics, key, x, labels):
    logits, new = model.apply(
        {"params": params, "batch_stats": statistics}, x, True, rngs={"dropout": key}, mutable=["batch_stats"]
    )  # fmt: skip
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, new["batch_stats"]


def looped(params, statistics, key, x, labels):
    """The reference: the same microbatches, one after another, in plain Python."""
    total, n = 0.0, ROWS // SIZE
    for i in range(n):
        rows = (x[i * SIZE : (i + 1) * SIZE], labels[i * SIZE : (i + 1) * SIZE])
        loss, statistics = training_loss(params, statistics, jax.random.fold_in(key, i), *rows)
        total += loss / n
    return total, statistics


def main():
    k_init, k_data, k_labels, key = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(k_data, (ROWS, 20))
    labels = jax.random.randint(k_labels, (ROWS,), 0, 10)
    variables = model.init(k_init, x, False)
    params, statistics = variables["params"], variables["batch_stats"]

    small = microbatch(
        training_loss, (3, 4), SIZE, (MEAN, Carry(1)), key_argnums=2, order="contiguous"
    )
    step = jax.jit(jax.value_and_grad(small, has_aux=True))
    (loss, new), gradients = step(params, statistics, key, x, labels)
    (_, expected), reference = jax.jit(jax.value_and_grad(looped, has_aux=True))(
        params, statistics, key, x, labels
    )
    gap = lambda a, b: max(
        map(lambda p, q: jnp.max(jnp.abs(p - q)), jax.tree.leaves(a), jax.tree.leaves(b))
    )
    print(
        f"training loss {loss:.6f}, running mean of the first unit {new['BatchNorm_0']['mean'][0]:.6f}"
    )
    print(
        f"largest difference from the loop: {max(gap(gradients, reference), gap(new, expected)):.1e}"
    )


if __name__ == "__main__":
    main()
