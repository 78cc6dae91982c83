"""`weighted_multi_steps`: an optimizer that is called per microbatch and steps as for the whole batch."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from microbatch import MicrobatchError, MicrobatchSizeError
from microbatch.jax import weighted_multi_steps


def problem(rows=12):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 5)), rng.normal(size=rows)
    params = {"w": rng.normal(size=5), "b": np.zeros(())}
    return [jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), t) for t in (params, x, y)]


def loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def test_N8_four_rows_three_times_are_twelve_rows_with_adam_and_weight_decay():
    params, x, y = problem()
    optimizer = optax.adamw(0.05, weight_decay=0.1)
    split = weighted_multi_steps(optimizer, every=3)
    whole, apart = params, params
    whole_state, state = optimizer.init(params), split.init(params)

    @jax.jit
    def micro_step(params, state, x, y):
        updates, state = split.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        updates, whole_state = optimizer.update(jax.grad(loss)(whole, x, y), whole_state, whole)
        whole = optax.apply_updates(whole, updates)
        for i in range(3):
            apart, state = micro_step(apart, state, x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])
    for k in params:
        np.testing.assert_allclose(apart[k], whole[k], rtol=2e-5, atol=2e-6)
    assert int(state.inner_state[0].count) == 20 == int(state.gradient_step)
    assert int(state.mini_step) == 0


@pytest.mark.parametrize("sizes", [(1, 11), (5, 4, 3), (2, 0, 10)])
def test_N15_unequal_weights_give_the_gradient_of_all_rows(sizes):
    params, x, y = problem()
    split = weighted_multi_steps(optax.sgd(1.0), every=len(sizes))
    state = split.init(params)
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        start += size
        gradient = jax.grad(loss)(params, x[rows], y[rows])  # NaN for no rows
        updates, state = split.update(gradient, state, params, weight=size)
    expected = jax.grad(loss)(params, x, y)
    for k in params:
        np.testing.assert_allclose(updates[k], -expected[k], rtol=1e-5)


def test_C12_schedules_and_averages_advance_once_per_optimizer_step():
    seen = []

    def schedule(count):
        jax.debug.callback(lambda c: seen.append(int(c)), count)
        return 0.1

    params = jnp.ones(2)
    split = weighted_multi_steps(optax.sgd(schedule), every=3)
    state = split.init(params)
    average, averaged = params, 0
    for _ in range(9):
        updates, state = jax.jit(split.update)(jnp.ones(2), state, params)
        params = optax.apply_updates(params, updates)
        if state.mini_step == 0:
            average, averaged = 0.5 * average + 0.5 * params, averaged + 1
    jax.effects_barrier()
    assert seen == [0, 1, 2]
    assert averaged == 3
    np.testing.assert_allclose(params, 0.7, rtol=1e-6)


def test_it_scans_and_a_weight_may_be_traced():
    split = weighted_multi_steps(optax.adam(0.1), every=2)
    params = {"a": jnp.zeros(3)}
    gradients, weights = jnp.arange(12.0).reshape(4, 3), jnp.array([1.0, 3.0, 0.0, 2.0])

    def body(carry, step):
        params, state = carry
        gradient, weight = step
        updates, state = split.update({"a": gradient}, state, params, weight=weight)
        return (optax.apply_updates(params, updates), state), None

    (scanned, state), _ = jax.lax.scan(body, (params, split.init(params)), (gradients, weights))
    inner, plain = optax.adam(0.1).init(params), params
    for mean in ((gradients[0] + 3 * gradients[1]) / 4, gradients[3]):
        updates, inner = optax.adam(0.1).update({"a": mean}, inner, plain)
        plain = optax.apply_updates(plain, updates)
    np.testing.assert_allclose(scanned["a"], plain["a"], rtol=1e-6)
    assert int(state.inner_state[0].count) == 2


def test_one_call_per_step_is_the_optimizer_bit_for_bit():
    gradient = jnp.array([-0.0, 1e-37, 0.1, jnp.inf])
    split = weighted_multi_steps(optax.identity(), every=1)
    updates, _ = split.update(gradient, split.init(gradient), gradient, weight=7)
    np.testing.assert_array_equal(updates, gradient)
    np.testing.assert_array_equal(np.signbit(updates), np.signbit(gradient))


def test_N13_a_weighted_nan_reaches_the_optimizer_and_N4_an_unweighted_one_does_not():
    split = weighted_multi_steps(optax.identity(), every=2)
    bad, good = jnp.array([jnp.nan]), jnp.array([2.0])
    for order in ([(bad, 0), (good, 3)], [(good, 3), (bad, 0)]):
        state = split.init(good)
        for gradient, weight in order:
            updates, state = split.update(gradient, state, good, weight=weight)
        assert updates.tolist() == [2.0]
    state = split.init(good)
    for weight in (1, 1):
        updates, state = split.update(bad, state, good, weight=weight)
    assert np.isnan(updates).all()
    state = split.init(good)
    for _ in range(2):
        updates, state = split.update(bad, state, good, weight=0)
    assert updates.tolist() == [0]


def test_N19_bfloat16_gradients_are_held_in_float32():
    params = jnp.zeros((), jnp.bfloat16)
    split = weighted_multi_steps(optax.identity(), every=512)
    state = split.init(params)
    assert state.gradients.dtype == jnp.float32

    def body(state, _):
        updates, state = split.update(jnp.bfloat16(1e-3), state, params)
        return state, updates

    _, updates = jax.lax.scan(body, state, None, length=512)
    assert updates.dtype == jnp.bfloat16
    assert updates[-1] == jnp.bfloat16(1e-3) and not updates[:-1].any()


def test_other_keywords_are_passed_on():
    def update(updates, state, params=None, *, value, fn):
        return jax.tree.map(lambda g: g * value + fn(0.0), updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    split = weighted_multi_steps(inner, every=2)
    state = split.init(jnp.zeros(1))
    for value in (3.0, 10.0):
        updates, state = split.update(jnp.ones(1), state, value=value, fn=jnp.cos)
    assert updates.tolist() == [11]


def test_empty_subtrees_and_masked_leaves():
    params = {"a": jnp.zeros(2), "none": None}
    split = weighted_multi_steps(optax.masked(optax.sgd(1.0), {"a": True, "none": None}), every=2)
    state = split.init(params)
    for _ in range(2):
        updates, state = split.update({"a": jnp.ones(2), "none": None}, state, params)
    assert updates["a"].tolist() == [-1, -1] and updates["none"] is None


def test_it_runs_inside_a_chain():
    params = jnp.zeros(1)
    chain = optax.chain(weighted_multi_steps(optax.sgd(1.0), every=2), optax.scale(2.0))
    state = chain.init(params)
    for gradient, weight in ((1.0, 1), (5.0, 3)):
        updates, state = chain.update(jnp.array([gradient]), state, params, weight=weight)
    assert updates.tolist() == [-8]


@pytest.mark.parametrize("every", [0, -5, 2.0, True, "8"])
def test_C3_a_number_of_calls_that_is_none_is_refused(every):
    with pytest.raises(MicrobatchSizeError, match=r"weighted_multi_steps: every="):
        weighted_multi_steps(optax.sgd(1.0), every)


def test_weights_and_gradients_that_cannot_be_averaged_are_refused():
    split = weighted_multi_steps(optax.sgd(1.0), every=2)
    state = split.init({"a": jnp.zeros(2)})
    with pytest.raises(MicrobatchError, match=r"weight has shape \(2,\)"):
        split.update({"a": jnp.zeros(2)}, state, weight=jnp.ones(2))
    with pytest.raises(MicrobatchError, match=r"gradients\['a'\] has dtype int32"):
        split.update({"a": jnp.zeros(2, int)}, state)


def test_without_optax_the_way_out_is_named():
    program = """
import sys
import microbatch.jax
assert "optax" not in sys.modules
sys.modules["optax"] = None
try:
    microbatch.jax.weighted_multi_steps(None, 2)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install optax" in done.stdout, done.stderr
