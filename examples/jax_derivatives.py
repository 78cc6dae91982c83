"""Jacobians, Hessians and Gauss-Newton products, a block at a time and without an identity matrix in memory.

`jax.jacfwd` maps over the rows of an identity matrix of n × n, all at once. Here `micro_vmap` maps over n numbers: each makes
its own unit vector, a few at a time.

Run: python examples/jax_derivatives.py
"""

import jax
import jax.numpy as jnp

from microbatch.jax import AccumulationType, micro_vmap, microbatch

N, SIZE, ROWS = 600, 50, 4096


def jacobian(fun, x, microbatch_size):
    """All of ``[outputs, n]``, as many columns at a time as a microbatch has."""
    column = lambda i: jax.jvp(fun, (x,), (jax.nn.one_hot(i, x.size, dtype=x.dtype),))[1]
    return micro_vmap(column, out_axes=-1, microbatch_size=microbatch_size)(jnp.arange(x.size))


def hessian(fun, x, microbatch_size):
    """All of ``[n, n]``: the Jacobian of the gradient."""
    return jacobian(jax.grad(fun), x, microbatch_size)


def hessian_diagonal(fun, x, microbatch_size):
    """Only ``[n]``, in the memory of one microbatch of unit vectors."""

    def entry(i):
        unit = jax.nn.one_hot(i, x.size, dtype=x.dtype)
        return jax.jvp(jax.grad(fun), (x,), (unit,))[1] @ unit

    return micro_vmap(entry, microbatch_size=microbatch_size)(jnp.arange(x.size))


def gauss_newton_product(predict, params, v, x, microbatch_size):
    """JᵀJ v of the squared error's mean over all rows, a microbatch of rows at a time."""

    def of_rows(params, v, x):
        outputs, pullback = jax.vjp(lambda p: predict(p, x), params)
        _, moved = jax.jvp(lambda p: predict(p, x), (params,), (v,))
        return pullback(moved / outputs.size)[0]

    mean = microbatch(of_rows, 2, microbatch_size, accumulator=AccumulationType.MEAN)
    return jax.jit(mean)(params, v, x)


def main():
    w, x = jax.random.normal(jax.random.key(0), (N, N)) * N**-0.5, jnp.linspace(-1, 1, N)
    vector = lambda x: jnp.tanh(w @ x)
    scalar = lambda x: jnp.sum(vector(x) ** 2)
    peak = lambda fun: jax.jit(fun).lower(x).compile().memory_analysis().temp_size_in_bytes / 2**20
    whole, small = (
        lambda x: jnp.diag(jax.hessian(scalar)(x)),
        lambda x: hessian_diagonal(scalar, x, SIZE),
    )
    print(
        f"diagonal of the Hessian: {peak(whole):.1f} MiB of temporaries, {peak(small):.1f} MiB so"
    )
    predict = lambda p, x: jnp.tanh(x @ p)
    params, rows = w[0, :20], jax.random.normal(jax.random.key(1), (ROWS, 20))
    of_all = jax.jacobian(lambda p: predict(p, rows))(params)
    checks = {
        "Jacobian": (jacobian(vector, x, SIZE), jax.jacobian(vector)(x)),
        "Hessian": (hessian(scalar, x, SIZE), jax.hessian(scalar)(x)),
        "its diagonal": (hessian_diagonal(scalar, x, SIZE), jnp.diag(jax.hessian(scalar)(x))),
        "Gauss-Newton": (
            gauss_newton_product(predict, params, params, rows, 256),
            of_all.T @ (of_all @ params) / ROWS,
        ),
    }
    gaps = {k: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for k, (a, b) in checks.items()}
    print(f"largest difference from the whole batch: {max(gaps.values()):.1e}")


if __name__ == "__main__":
    main()
