"""flax.nnx: split the module outside, merge it inside, carry its state.

A module that changes inside the microbatched function (batch statistics, the counters of its random numbers) would lose
that change, and is refused. The recipe: parameters and state become arguments, the new state an output, and `Carry` hands it
to the next microbatch. Its counters advance with it, so every microbatch draws its own dropout mask.

Run: python examples/jax_flax_nnx.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from microbatch import MicrobatchError
from microbatch.jax import AccumulationType, Carry, microbatch

ROWS, SIZE = 64, 16


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(20, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def mean_loss(model, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


def main():
    model = Classifier(nnx.Rngs(0))
    k_data, k_labels = jax.random.split(jax.random.key(1))
    x, labels = jax.random.normal(k_data, (ROWS, 20)), jax.random.randint(k_labels, (ROWS,), 0, 10)
    options = {"microbatch_size": SIZE, "order": "contiguous"}

    try:
        microbatch(mean_loss, (1, 2), accumulator=AccumulationType.MEAN, **options)(
            model, x, labels
        )
    except MicrobatchError as error:
        print(f"the direct way: {str(error).splitlines()[0]}")

    graphdef, params, state = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, state, x, labels):
        model = nnx.merge(graphdef, params, state)
        return mean_loss(model, x, labels), nnx.state(model, nnx.Not(nnx.Param))

    small = microbatch(loss_fn, (2, 3), accumulator=(AccumulationType.MEAN, Carry(1)), **options)
    step = jax.jit(jax.value_and_grad(small, has_aux=True))
    (loss, new_state), gradients = step(params, state, x, labels)

    # The reference: the module itself, called on the same microbatches one after another; it changes as it goes.
    losses, of_pieces = zip(
        *(
            nnx.value_and_grad(mean_loss)(model, x[i : i + SIZE], labels[i : i + SIZE])
            for i in range(0, ROWS, SIZE)
        ),
        strict=True,
    )
    reference = jax.tree.map(lambda *g: sum(g) / len(g), *of_pieces)
    changed = jax.tree.map(jnp.subtract, gradients, reference)
    gap = max(jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(changed))
    drift = jnp.max(jnp.abs(new_state["norm"]["mean"][...] - model.norm.mean[...]))
    print(f"loss {loss:.6f}, by the loop {sum(losses) / len(losses):.6f}")
    print(f"dropout masks drawn {new_state['dropout']['rngs']['count'][...]}")
    print(f"largest difference from the loop: {max(gap, drift):.1e}")
    nnx.update(model, new_state)


if __name__ == "__main__":
    main()
