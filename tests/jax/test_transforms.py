"""Clipping, moments and the noise scale, against NumPy on gradients made one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from microbatch.jax import AccumulationType, micro_grad
from microbatch.jax._transforms import (
    clip_by_global_norm,
    noise_scale,
    per_example_moments,
    squared_norm,
)


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params = {"w": draw(5, 7), "v": draw(7, 3)}
    batch = draw(8, 5), draw(8, 3)
    one = lambda i: jax.grad(loss)(params, *(a[i : i + 1] for a in batch))
    gradients = [jax.tree.map(np.asarray, one(i)) for i in range(8)]
    return params, batch, gradients


def norm_of(gradient):
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in gradient.values()))


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_clipped_sum_is_the_sum_of_clipped_gradients(problem, engine):
    params, batch, gradients = problem
    bound = float(np.median([norm_of(g) for g in gradients]))
    clipped, aux = micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=4,
        transform_fn=clip_by_global_norm(bound),
        metrics_fn=squared_norm,
        engine=engine,
    )(params, *batch)
    scales = [min(1, bound / norm_of(g)) for g in gradients]
    for name in params:
        want = sum(scale * g[name] for scale, g in zip(scales, gradients, strict=True))
        np.testing.assert_allclose(clipped[name], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.sqrt(aux.metrics), [norm_of(g) for g in gradients], rtol=1e-5)


@pytest.mark.parametrize("bound", [0.0, 1.0, float("inf")])
def test_zero_gradient_stays_zero(bound):
    zeros = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(2, jnp.bfloat16)}
    clipped = clip_by_global_norm(bound)(zeros)
    assert clipped["b"].dtype == jnp.bfloat16
    assert all(np.array_equal(leaf, np.zeros(leaf.shape)) for leaf in jax.tree.leaves(clipped))


def test_clipping_at_norm_zero_has_no_nan_derivative():
    clip = clip_by_global_norm(1.0)
    for entries in (jnp.full(3, 1e-3), jnp.zeros(3)):
        jacobian = jax.jacobian(lambda g: clip({"w": g})["w"])(entries)
        np.testing.assert_array_equal(jacobian, np.eye(3))


def test_the_norm_of_complex_gradients_is_real():
    gradient = {"w": jnp.array([3.0 + 4.0j, 0.0]), "b": jnp.array(12.0)}
    assert float(squared_norm(gradient)) == 169.0
    clipped = clip_by_global_norm(1.3)(gradient)
    np.testing.assert_allclose(clipped["w"], [0.3 + 0.4j, 0.0], rtol=1e-6)


def test_bounds_zero_and_infinity():
    gradient = {"w": jnp.array([3.0, 4.0])}
    assert clip_by_global_norm(0)(gradient)["w"].tolist() == [0.0, 0.0]
    assert clip_by_global_norm(float("inf"))(gradient)["w"].tolist() == [3.0, 4.0]


def test_negative_bound_is_refused_with_the_way_out():
    with pytest.raises(ValueError) as error:
        clip_by_global_norm(-1.0)
    assert str(error.value).splitlines() == [
        "clip_by_global_norm: max_norm=-1.0 is not a number that is at least 0.",
        "Use clip_by_global_norm(1.0).",
    ]


def test_moments_are_those_of_the_examples(problem):
    params, batch, gradients = problem
    (mean, square), _ = micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=4,
        accumulator=AccumulationType.MEAN,
        transform_fn=per_example_moments(),
    )(params, *batch)
    for name in params:
        stacked = np.stack([g[name] for g in gradients])
        np.testing.assert_allclose(mean[name], stacked.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(square[name], (stacked**2).mean(0), rtol=1e-5, atol=1e-6)


def test_noise_scale_is_sample_variance_over_squared_norm(problem):
    _, _, gradients = problem
    flat = np.stack([np.concatenate([leaf.ravel() for leaf in g.values()]) for g in gradients])
    estimate = noise_scale(flat.mean(0), jnp.asarray(np.sum(flat**2, 1)))
    variance = flat.var(0, ddof=1).sum()
    squared = np.sum(flat.mean(0) ** 2) - variance / len(flat)
    np.testing.assert_allclose(float(estimate.variance), variance, rtol=1e-4)
    np.testing.assert_allclose(float(estimate.value), variance / squared, rtol=1e-3)


def test_groups_of_examples_give_an_estimate_of_the_same_variance():
    rng = np.random.default_rng(1)
    examples = rng.normal(size=(4096, 3)) + 2
    groups = examples.reshape(256, 16, 3).mean(1)
    estimate = noise_scale(examples.mean(0), jnp.asarray(np.sum(groups**2, 1)), group_size=16)
    np.testing.assert_allclose(float(estimate.variance), 3.0, rtol=0.2)


def test_C15_noise_scale_of_one_microbatch_is_undefined():
    estimate = jax.jit(noise_scale)(jnp.array([2.0]), jnp.array([4.0]))
    assert not estimate.defined and np.isnan(estimate.value)
    assert str(estimate).startswith("undefined")


def test_noise_that_hides_the_gradient_is_infinite():
    estimate = noise_scale(jnp.zeros(1), jnp.array([1.0, 1.0]))
    assert np.isinf(estimate.value) and estimate.defined


def test_equal_gradients_have_no_noise():
    estimate = noise_scale(jnp.array([2.0]), jnp.array([4.0, 4.0]))
    assert float(estimate.value) == 0


@pytest.mark.parametrize("norms, size", [(jnp.ones((2, 2)), 1), (jnp.ones(0), 1), (jnp.ones(2), 0)])
def test_wrong_groups_are_refused(norms, size):
    with pytest.raises(ValueError, match="noise_scale: "):
        noise_scale(jnp.ones(1), norms, size)
