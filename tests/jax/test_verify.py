"""Every reason for a difference, made on purpose, is found; and what is the same is not accused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from microbatch._accumulation import AccumulationType
from microbatch._errors import BatchError, DifferentError, MicrobatchSizeError
from microbatch.jax._verification import verify

MEAN, SUM, CONCAT = AccumulationType.MEAN, AccumulationType.SUM, AccumulationType.CONCAT
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


PARAMS = {"w": normal(8, 4), "b": normal(4)}
X, Y = normal(24, 8), normal(24, 4)


def predict(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def mean_loss(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def kinds(found):
    return [cause.kind for cause in found.causes]


def test_a_mean_loss_and_its_gradient_are_the_same_up_to_rounding():
    found = verify(mean_loss, (1, 2), MEAN, microbatch_size=4)(PARAMS, X, Y)
    assert found.verdict in ("exact", "rounding")
    assert [(c.role, c.path) for c in found.comparisons] == [
        ("value", ""),
        ("gradient", "params['b']"),
        ("gradient", "params['w']"),
    ]
    assert found.causes == () and found.exit_code == 0
    inexact = [c for c in found.comparisons if c.verdict == "rounding"]
    assert all(c.whole_error is not None for c in inexact)


def test_a_gradient_function_is_compared_as_it_is():
    found = verify(jax.value_and_grad(mean_loss), (1, 2), MEAN, microbatch_size=8)(PARAMS, X, Y)
    assert found.verdict in ("exact", "rounding")
    assert [c.role for c in found.comparisons] == ["value"] * 3


def test_rows_are_exact():
    found = verify(lambda x: x * 2, 0, CONCAT, microbatch_size=6)(X)
    assert found.verdict == "exact"
    assert "bit for bit" in found.explanation


def test_N1_unequal_means_and_the_weight_function_that_repairs_them():
    mask = jnp.asarray(RNG.random((24, 5)) < np.linspace(0.1, 1, 24)[:, None], jnp.float32)
    tokens = normal(24, 5)

    def loss(w, batch):
        return jnp.sum((w * batch["x"]) ** 2 * batch["mask"]) / jnp.sum(batch["mask"])

    found = verify(loss, 1, MEAN, microbatch_size=4, order="contiguous")(
        normal(), {"x": tokens, "mask": mask}
    )
    assert found.verdict == "different"
    assert kinds(found) == ["unequal_means"]
    assert "lambda w, batch: batch['mask'].sum()" in found.causes[0].remedy
    weigh = eval(found.causes[0].remedy.split("weight_fn=")[1].split(" (tried")[0])
    repaired = verify(loss, 1, MEAN, microbatch_size=4, weight_fn=weigh)(
        normal(), {"x": tokens, "mask": mask}
    )
    assert repaired.verdict in ("exact", "rounding")


def test_N1_labels_with_an_index_to_ignore():
    labels = jnp.asarray(np.where(RNG.random((24, 6)) < np.linspace(0, 0.9, 24)[:, None], -100, 3))

    def loss(w, x, labels):
        each = (w * x[:, None]) ** 2
        return jnp.sum(jnp.where(labels != -100, each, 0)) / jnp.sum(labels != -100)

    found = verify(loss, (1, 2), MEAN, microbatch_size=4, order="contiguous")(
        normal(), normal(24), labels
    )
    assert kinds(found) == ["unequal_means"]
    assert "(labels != -100).sum()" in found.causes[0].remedy


def test_N2_a_sum_given_as_mean_and_a_mean_given_as_sum():
    total = lambda p, x, y: jnp.sum((predict(p, x) - y) ** 2)
    found = verify(total, (1, 2), MEAN, microbatch_size=4)(PARAMS, X, Y)
    assert kinds(found) == ["sum_given_as_mean"]
    assert "6 times smaller" in found.causes[0].sentence and "SUM" in found.causes[0].remedy
    found = verify(mean_loss, (1, 2), SUM, microbatch_size=4)(PARAMS, X, Y)
    assert kinds(found) == ["mean_given_as_sum"]
    with pytest.raises(DifferentError, match="AccumulationType"):
        found.raise_if_different()


def test_an_extremum():
    found = verify(lambda x: jnp.max(x, 0), 0, SUM, microbatch_size=4)(X)
    assert kinds(found) == ["extremum"]
    assert "MAX" in found.causes[0].remedy


def test_rows_that_influence_each_other():
    normalise = lambda x: (x - x.mean(0)) / x.std(0)
    found = verify(normalise, 0, CONCAT, microbatch_size=4)(X)
    assert kinds(found) == ["rows_influence_each_other"]
    assert "row 0" in found.causes[0].sentence


def test_a_contrastive_loss_is_not_a_sum():
    def loss(p, x, y):
        a, b = predict(p, x), predict(p, y)
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T)))

    found = verify(loss, (1, 2), MEAN, microbatch_size=4)(PARAMS, X, normal(24, 8))
    assert kinds(found) == ["not_a_sum"]
    assert "CONCAT" in found.causes[0].remedy


def test_a_root_of_a_mean_is_not_a_sum():
    found = verify(lambda x: jnp.sqrt(jnp.mean(x**2)), 0, MEAN, microbatch_size=4)(X)
    assert kinds(found) == ["not_a_sum"]


def dropout_loss(p, key, x, y):
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return mean_loss(p, x * kept, y)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_numbers_of_several_keys(make):
    noisy = lambda keys, x: jnp.mean(x * jax.random.normal(keys[1], x.shape))
    found = verify(noisy, 1, MEAN, microbatch_size=8)(jax.random.split(make(0), 3), X)
    assert kinds(found) == ["random_numbers"]


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_numbers_and_how_to_make_them_equal(make):
    found = verify(dropout_loss, (2, 3), MEAN, microbatch_size=4)(PARAMS, make(0), X, Y)
    assert kinds(found) == ["random_numbers"]
    assert "key" in found.causes[0].sentence and "jax.random.split" in found.causes[0].remedy
    # The way out that it names, taken.
    rows = jax.vmap(dropout_loss, (None, 0, 0, 0))
    repaired = verify(lambda *a: jnp.mean(rows(*a)), (1, 2, 3), MEAN, microbatch_size=4)(
        PARAMS, jax.random.split(make(0), 24), X, Y
    )
    assert repaired.verdict in ("exact", "rounding")


def test_low_precision_accumulation():
    ones = jnp.ones((4096, 2), jnp.bfloat16)
    fun = lambda x: jnp.sum(x, 0)
    good = verify(fun, 0, SUM, microbatch_size=1)(ones)
    assert good.verdict in ("exact", "rounding")
    poor = verify(fun, 0, SUM, microbatch_size=1, accumulator_dtype=jnp.bfloat16)(ones)
    assert poor.verdict == "different"
    assert kinds(poor) == ["low_precision"]
    assert "accumulator_dtype" in poor.causes[0].remedy


def test_a_gradient_that_differs_alone_is_not_called_lost_precision():
    def masked(w, x, mask):
        return jnp.sum((x * w - 1) ** 2 * mask) / jnp.sum(mask)

    x, mask = jnp.array([1.0, 5.0, 3.0, 9.0]), jnp.array([1.0, 1.0, 1.0, 0.0])
    # At w = 0 every row's loss is 1, so any weights give the same value.
    found = verify(masked, (1, 2), MEAN, microbatch_size=2)(jnp.array(0.0), x, mask)
    assert found.verdict == "different" and kinds(found) == ["gradient_alone"]
    assert kinds(verify(masked, (1, 2), MEAN, microbatch_size=2)(jnp.array(0.5), x, mask)) == [
        "unequal_means"
    ]
    # Without parameters the batch is differentiated, and here it makes the weights.
    count = lambda w, x, mask: mask.sum()
    found = verify(masked, (1, 2), MEAN, microbatch_size=2, weight_fn=count)(0.5, x, mask)
    assert kinds(found) == ["gradient_alone"] and "weight_fn" in found.causes[0].sentence
    ties = jnp.ones(4)
    assert kinds(verify(jnp.max, 0, AccumulationType.MAX, microbatch_size=2)(ties)) == [
        "gradient_alone"
    ]


def test_N13_values_that_are_not_finite_are_placed():
    x = X.at[9].set(jnp.nan)
    found = verify(mean_loss, (1, 2), MEAN, microbatch_size=4, order="contiguous")(PARAMS, x, Y)
    assert kinds(found) == ["not_finite"]
    assert (
        "microbatch 2 " in found.causes[0].sentence and "rows 8 to 11" in found.causes[0].sentence
    )
    assert found.verdict == "exact"  # NaN as the whole batch's
    strided = verify(mean_loss, (1, 2), MEAN, microbatch_size=4)(PARAMS, x, Y)
    assert (
        "microbatch 3 " in strided.causes[0].sentence
        and "in steps of 6" in strided.causes[0].sentence
    )


def test_a_prefix_where_the_whole_does_not_fit():
    wide = lambda x: jnp.mean(jnp.exp(x[:, :, None] * x[:, None, :]).sum((1, 2)))
    found = verify(wide, 0, MEAN, microbatch_size=8, memory_budget="40KiB")(normal(256, 64))
    assert found.batch_size == 256
    assert 16 <= found.rows < 256 and found.rows % 8 == 0
    assert "the first" in str(found)


def test_a_function_that_casts_has_no_float64_and_is_still_judged():
    loss = lambda p, x, y: mean_loss(p, x, y).astype(jnp.float32)
    found = verify(loss, (1, 2), MEAN, microbatch_size=4)(PARAMS, X, Y)
    assert found.verdict in ("exact", "rounding")
    assert all(c.whole_error is None for c in found.comparisons)


def test_batches_by_name_and_a_tail():
    loss = lambda params, *, x, y: mean_loss(params, x, y)
    found = verify(loss, (), MEAN, microbatch_size=7, argnames=("x", "y"), remainder="allow")(
        PARAMS, x=X, y=Y
    )
    assert found.verdict in ("exact", "rounding")
    assert found.microbatch_size == 7


def test_bad_input_is_refused():
    with pytest.raises(MicrobatchSizeError, match="not positive"):
        verify(mean_loss, (1, 2), MEAN, microbatch_size=0)
    with pytest.raises(MicrobatchSizeError, match="one microbatch"):
        verify(mean_loss, (1, 2), MEAN, microbatch_size=24)(PARAMS, X, Y)
    with pytest.raises(MicrobatchSizeError, match="divisible"):
        verify(mean_loss, (1, 2), MEAN, microbatch_size=5)(PARAMS, X, Y)
    with pytest.raises(BatchError):
        verify(mean_loss, 9, MEAN, microbatch_size=5)
    with pytest.raises(TypeError, match="unknown"):
        verify(mean_loss, 1, MEAN, microbatch_size=5, unknown=1)


def test_x64_is_left_as_it_was():
    before = jax.config.jax_enable_x64
    verify(mean_loss, (1, 2), MEAN, microbatch_size=4)(PARAMS, X, Y)
    assert jax.config.jax_enable_x64 == before
    assert jnp.ones(1).dtype == jnp.float32
