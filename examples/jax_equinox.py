"""equinox: a model whose leaves include functions goes in as it is.

Leaves that are no arrays (activations, numbers) are passed through, so `eqx.filter_value_and_grad` of the microbatched loss
works like that of the loss itself.

Run: python examples/jax_equinox.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from microbatch.jax import AccumulationType, microbatch

ROWS, SIZE, STEPS = 256, 32, 30


def loss_fn(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def trained(loss, model, x, y):
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, opt_state, x, y):
        value, gradients = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(STEPS):
        model, opt_state, value = step(model, opt_state, x, y)
    return model, value


def main():
    k_model, k_data = jax.random.split(jax.random.key(0))
    model = eqx.nn.MLP(4, "scalar", 32, 2, activation=jax.nn.gelu, key=k_model)
    functions = [leaf for leaf in jax.tree.leaves(model) if callable(leaf)]
    x = jax.random.normal(k_data, (ROWS, 4))
    y = jnp.sin(x).sum(1)

    small_loss = microbatch(loss_fn, (1, 2), SIZE, AccumulationType.MEAN)
    small, value = trained(small_loss, model, x, y)
    whole, expected = trained(loss_fn, model, x, y)
    predictions = jax.vmap(small)(x), jax.vmap(whole)(x)
    print(f"leaves that are functions: {len(functions)}")
    print(f"loss after {STEPS} steps {value:.6f}, with the whole batch {expected:.6f}")
    print(
        f"largest difference from the whole batch: {jnp.max(jnp.abs(jnp.subtract(*predictions))):.1e}"
    )


if __name__ == "__main__":
    main()
