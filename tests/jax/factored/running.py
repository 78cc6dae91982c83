"""Running one per-example function with several engines, quickly compiled."""

import jax
import jax.numpy as jnp
import numpy as np

from microbatch.jax._factored import evaluate

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def per_example(model, transform, metrics=lambda g: ()):
    """Value, transformed gradient and metrics of one example."""

    def one(params, *example):
        value, grad = jax.value_and_grad(model.loss)(params, *(x[None] for x in example))
        return transform(grad), (value, metrics(grad))

    return one


def run(engine, model, one, aggregate=("sum", "stack"), **options):
    """`evaluate` on the model's batch, compiled without optimisation."""
    in_axes = (None,) + (0,) * len(model.batch)
    call = lambda p, batch, options: evaluate(
        one, (p, *batch), in_axes, aggregate=aggregate, engine=engine, **static, **options
    )
    static = {k: v for k, v in options.items() if not isinstance(v, jax.Array)}
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.Array)}
    return jax.jit(call, compiler_options=FAST)(model.params, model.batch, arrays)


def as_double(model):
    """The model with float64 parameters and batch."""
    widen = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return model._replace(
        params=jax.tree.map(widen, model.params), batch=jax.tree.map(widen, model.batch)
    )


def assert_same_tree(actual, desired, rtol):
    """Equal up to `rtol` of the largest entry of each leaf."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True)
    for got, want in pairs:
        assert got.shape == want.shape and got.dtype == want.dtype
        scale = float(np.max(np.abs(want), initial=0)) or 1.0
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=rtol * scale)


def squared_norm(grad):
    """The sum of squares of all entries."""
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(grad))


def clip(grad, bound=0.1):
    """The gradient scaled to a norm of at most `bound`."""
    scale = jnp.minimum(1.0, bound / jnp.sqrt(squared_norm(grad)))
    return jax.tree.map(lambda leaf: leaf * scale, grad)
