"""Derivatives of the microbatched function are those of the whole batch, in every mode and under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from microbatch import AccumulationType as Kind
from microbatch import MicrobatchError
from microbatch.jax import Accumulator, Carry, microbatch

pytestmark = pytest.mark.usefixtures("quick_compile")

STRIDED = {"microbatch_size": 4, "order": "strided"}
TAIL = {"microbatch_size": 5, "order": "contiguous", "remainder": "allow"}
STRIDED_TAIL = {"microbatch_size": 5, "order": "strided", "remainder": "allow"}
X = jnp.linspace(-1.0, 2.0, 24).reshape(12, 2)
W = jnp.array([0.3, -0.7])


def loss(w, x):
    return jnp.mean(jnp.sin(x @ w) ** 2)


def features(w, x):
    return jnp.tanh(x * w)


def of_features(encode):
    return lambda w, x: jnp.sum(jnp.arange(24.0).reshape(12, 2) * encode(w, x) ** 3)


def assert_close(got, wanted, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, wanted)


def derivatives(f):
    """Every way of differentiating a scalar function of (w, x), as one compiled function."""

    def all_of_them(w, x):
        direction = (jnp.ones_like(w), x[::-1])
        return {
            "value_and_grad": jax.value_and_grad(f, (0, 1))(w, x),
            "jvp": jax.jvp(f, (w, x), direction),
            "vjp": jax.vjp(f, w, x)[1](2.0),
            "hessian": jax.hessian(f)(w, x),
            "reverse over reverse": jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x) ** 2))(w),
            "vmap of grad": jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), x),
            "grad of vmap": jax.grad(lambda w: jnp.sum(jax.vmap(f, (0, None))(w, x)))(
                jnp.stack([w, 2 * w])
            ),
            "checkpoint": jax.grad(jax.checkpoint(f))(w, x),
        }

    return jax.jit(all_of_them)


@pytest.mark.parametrize(
    ("mode", "split"),
    [
        ("auto", STRIDED),
        ("in_forward", TAIL),
        ("recompute", STRIDED_TAIL),
        ("recompute", TAIL),
        ("store", STRIDED),
    ],
)
def test_every_derivative_of_a_mean_is_the_whole_batchs(mode, split):
    small = microbatch(loss, 1, accumulator=Kind.MEAN, differentiate=mode, **split)
    assert_close(derivatives(small)(W, X), derivatives(loss)(W, X))


@pytest.mark.parametrize(
    ("mode", "split"),
    [("auto", STRIDED), ("auto", TAIL), ("recompute", STRIDED_TAIL), ("store", TAIL)],
)
def test_every_derivative_through_concatenated_rows_is_the_whole_batchs(mode, split):
    small = microbatch(features, 1, accumulator=Kind.CONCAT, differentiate=mode, **split)
    got = derivatives(of_features(small))(W, X)
    assert_close(got, derivatives(of_features(features))(W, X), rtol=1e-4, atol=1e-4)


def test_grad_without_jit():
    small = microbatch(loss, 1, 4, Kind.MEAN)
    assert_close(jax.grad(small, (0, 1))(W, X), jax.grad(loss, (0, 1))(W, X))


OUTPUTS = {
    "max": Kind.MAX,
    "min": Kind.MIN,
    "last": Kind.LAST,
    "running": Kind.RUNNING_MEAN,
    "rows": Kind.CONCAT,
    "count": Kind.SUM,
    "scalar rows": Kind.CONCAT,
}


def many_outputs(w, x):
    y = jnp.sin(x @ w + x[:, 0])
    return {
        "max": y.max(),
        "min": y.min() * jnp.array([1.0, 2.0]),
        "last": y.sum(),
        "running": y.mean(),
        "rows": y,
        "count": jnp.sum(x[:, 0] > 0),
        "scalar rows": y.sum(),
    }


def by_hand(w, x, count):
    parts = [many_outputs(w, x[i::3]) for i in range(3)]
    ran = parts[:count]
    rows = jnp.stack([p["rows"] if i < count else 0 * p["rows"] for i, p in enumerate(parts)], 1)
    sums = [p["scalar rows"] if i < count else 0.0 for i, p in enumerate(parts)]
    return {
        "max": jnp.stack([p["max"] for p in ran]).max(),
        "min": jnp.stack([p["min"] for p in ran]).min(0),
        "last": ran[-1]["last"],
        "running": sum(p["running"] for p in ran) / count,
        "rows": rows.reshape(-1),
        "count": sum(p["count"] for p in ran),
        "scalar rows": jnp.stack(sums),
    }


def one_number(out):
    factors = {name: 0.5 + i for i, name in enumerate(sorted(out))}
    return sum(factors[name] * jnp.sum(value**2) for name, value in out.items() if name != "count")


@pytest.mark.parametrize("count", [None, 2, "traced"])
@pytest.mark.parametrize("mode", ["auto", "recompute", "store"])
def test_every_accumulator_has_its_derivative_also_when_it_stops_early(mode, count):
    def small(w, x, k):
        transformed = microbatch(
            many_outputs, 1, 4, OUTPUTS, num_real_microbatches=k, differentiate=mode
        )
        return one_number(transformed(w, x))

    ran = 3 if count is None else 2
    wanted = jax.grad(lambda w, x: one_number(by_hand(w, x, ran)), (0, 1))(W, X)
    if count == "traced":
        got = jax.jit(jax.grad(small, (0, 1)))(W, X, jnp.int32(2))
    else:
        got = jax.jit(jax.grad(small, (0, 1)), static_argnums=2)(W, X, count)
    assert_close(got, wanted)


@pytest.mark.parametrize("mode", ["auto", "recompute", "store"])
@pytest.mark.parametrize("size", [4, 5])
def test_N1_masked_mean_loss(mode, size):
    def masked(w, x, mask):
        return jnp.sum(jnp.sin(x @ w) ** 2 * mask) / jnp.sum(mask)

    mask = jnp.array([1.0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1])
    small = microbatch(
        masked,
        (1, 2),
        size,
        Kind.MEAN,
        remainder="allow",
        differentiate=mode,
        weight_fn=lambda w, x, mask: mask.sum(),
    )
    got = jax.jit(jax.value_and_grad(small, (0, 1)))(W, X, mask)
    assert_close(got, jax.value_and_grad(masked, (0, 1))(W, X, mask))


@pytest.mark.parametrize("mode", ["auto", "recompute", "store"])
def test_N4_a_masked_microbatch_cannot_leak_nan_into_a_gradient(mode):
    def masked(w, x, mask):
        return jnp.sum(jnp.sin(x @ w) ** 2 * mask) / jnp.sum(mask)

    # Strided in three microbatches: rows 1, 4, 7, 10 are all masked, and hold NaN.
    mask = jnp.array([1.0, 0, 1] * 4)
    x = jnp.where(mask[:, None] == 0, jnp.nan, X)
    small = microbatch(
        masked,
        (1, 2),
        4,
        Kind.MEAN,
        differentiate=mode,
        weight_fn=lambda w, x, mask: mask.sum(),
    )
    kept = jnp.flatnonzero(mask)
    value, (of_w, of_x) = jax.jit(jax.value_and_grad(small, (0, 1)))(W, x, mask)
    wanted, (wanted_w, wanted_x) = jax.value_and_grad(masked, (0, 1))(W, X[kept], mask[kept])
    assert_close((value, of_w, of_x[kept]), (wanted, wanted_w, wanted_x))
    assert not of_x[mask == 0].any()
    nothing = jax.jit(jax.value_and_grad(small, (0, 1)))(W, x, 0 * mask)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(nothing))


def test_N13_a_nan_of_weight_other_than_zero_is_kept():
    value, gradient = jax.value_and_grad(microbatch(loss, 1, 4, Kind.MEAN))(W, X.at[3].set(jnp.nan))
    assert np.isnan(value) and np.isnan(gradient).all()


@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_complex_parameters_are_not_conjugated(mode):
    power = lambda c, x: jnp.sum(jnp.abs(x @ c) ** 2)
    c = jnp.array([1 + 2j, 3 - 1j])
    small = microbatch(power, 1, 4, Kind.SUM, differentiate=mode)
    assert_close(jax.grad(small)(c, X), jax.grad(power)(c, X))


@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_N19_bfloat16_gradients_accumulate_in_float32(mode):
    x = jnp.ones((1024, 1), jnp.bfloat16)
    w = jnp.ones((1,), jnp.bfloat16)
    total = lambda w, x: jnp.sum((x @ w).astype(jnp.float32))
    small = microbatch(total, 1, 1, Kind.SUM, differentiate=mode)
    gradient = jax.jit(jax.grad(small))(w, x)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0]) == 1024.0  # 256 where bfloat16 itself accumulates


def test_integer_and_key_leaves_among_the_batch_arguments():
    def picked(w, x, ids, keys):
        noise = jax.vmap(jax.random.normal)(keys)
        return jnp.mean(w[ids] * x[:, 0] * noise)

    w, ids = jnp.arange(3.0), jnp.arange(12) % 3
    keys = jax.random.split(jax.random.key(0), 12)
    small = microbatch(picked, (1, 2, 3), 4, Kind.MEAN)
    assert_close(jax.grad(small)(w, X, ids, keys), jax.grad(picked)(w, X, ids, keys))


def test_closures_over_traced_values_are_differentiated():
    def through_closure(f):
        def outer(w):
            v = jnp.sin(w)
            return f(lambda x: jnp.mean((x @ v) ** 2))

        return outer

    small = through_closure(lambda f: microbatch(f, 0, 4, Kind.MEAN)(X))
    whole = through_closure(lambda f: f(X))
    both = lambda f: jax.jit(lambda w: (jax.grad(f)(w), jax.hessian(f)(w)))(W)
    assert_close(both(small), both(whole))


def test_nested_in_itself_and_inside_a_scan():
    nested = microbatch(microbatch(loss, 1, 2, Kind.MEAN), 1, 6, Kind.MEAN)
    assert_close(jax.jit(jax.grad(nested))(W, X), jax.grad(loss)(W, X))

    def scanned(f):
        step = lambda total, x: (total + f(W * total, x), None)
        return lambda start: jax.lax.scan(step, start, X.reshape(2, 6, 2))[0]

    small = scanned(microbatch(loss, 1, 2, Kind.MEAN))
    assert_close(jax.jit(jax.grad(small))(1.0), jax.grad(scanned(loss))(1.0))


def two_of_each(w, v, x):
    """Outputs of `w` alone and of `v` alone, so that a map over `v` leaves some of them as they are."""
    of = lambda p: (jnp.tanh(x @ p), jnp.sum(jnp.sin(x @ p)), jnp.max(x @ p))
    return of(w) + of(v)


@pytest.mark.parametrize("traced", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("inside", [False, True])
def test_outputs_that_a_map_leaves_alone_have_their_own_derivatives(traced, inside):
    vs = jnp.stack([W, 2 * W, -W])
    mapped = lambda f: jax.vmap(traced(f), (None, 0, None))
    if not inside:
        mapped = lambda f: traced(jax.vmap(f, (None, 0, None)))

    def total(f):
        return lambda w, vs: sum(jnp.sum(jnp.cos(out)) for out in mapped(f)(w, vs, X))

    small = microbatch(two_of_each, 2, 4, (Kind.CONCAT, Kind.SUM, Kind.MAX) * 2)
    assert_close(jax.grad(total(small), (0, 1))(W, vs), jax.grad(total(two_of_each), (0, 1))(W, vs))


@pytest.mark.parametrize("traced", [jax.jit, jax.checkpoint])
def test_a_map_over_cotangents_inside_a_tangent(traced):
    def pullbacks(encode):
        total = traced(lambda w: jnp.sum(jnp.sin(encode(w, X))))
        return lambda w: jax.vmap(lambda ct: jax.vjp(total, w)[1](ct)[0])(jnp.arange(3.0))

    small = microbatch(features, 1, 4, Kind.CONCAT)
    assert_close(jax.jacfwd(pullbacks(small))(W), jax.jacfwd(pullbacks(features))(W))


@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("rows", [0, 3])
def test_rows_that_fill_no_microbatch_are_differentiated(rows, order):
    options = {"order": order, "remainder": "allow", "weight_fn": lambda w, x: x.shape[0]}
    small = microbatch(lambda w, x: jnp.sum(jnp.sin(x @ w)), 1, 4, Kind.MEAN, **options)
    wanted = jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)), (0, 1))(W, X[:rows])
    assert_close(jax.grad(small, (0, 1))(W, X[:rows]), wanted)
    by_rows = microbatch(lambda w, x: jnp.sin(x @ w), 1, 4, Kind.CONCAT, **options)
    wanted = jax.jacrev(lambda w, x: jnp.sin(x @ w), (0, 1))(W, X[:rows])
    assert_close(jax.jacrev(by_rows, (0, 1))(W, X[:rows]), wanted)


def test_a_large_weight_stays_in_the_range_of_narrow_rows():
    x = X.astype(jnp.float16)
    small = microbatch(loss, 1, 4, Kind.MEAN, weight_fn=lambda w, x: 1e7)
    assert_close(jax.grad(small, 1)(W, x), jax.grad(loss, 1)(W, x), rtol=4e-3, atol=1e-4)


def test_traced_programs_hold_on_to_no_array_of_the_call():
    fun = lambda w, x: (jnp.mean(x @ w), jnp.max(x @ w), x * w)
    small = microbatch(fun, 1, 5, (Kind.MEAN, Kind.MAX, Kind.CONCAT), remainder="allow")
    with jax.checking_leaks():
        jax.jit(jax.jacrev(small, (0, 1)))(W, X)


def evaluated(f, *args):
    """How many times the compiled program multiplies matrices: a count of what really runs."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return text.count(" dot(")


def test_forward_evaluation_computes_no_gradient_and_frozen_parameters_cost_nothing():
    w = {"a": jnp.eye(8), "b": jnp.eye(8)}
    x = jnp.ones((32, 8))
    net = lambda w, x: jnp.mean(jnp.sin(jnp.sin(x @ w["a"]) @ w["b"]))
    small = microbatch(net, 1, 8, Kind.MEAN)
    assert evaluated(small, w, x) == 2
    only_b = lambda b, w, x: small({"a": w["a"], "b": b}, x)
    assert evaluated(jax.grad(only_b), w["b"], w, x) == 3


def test_an_unused_scalar_costs_nothing():
    w, x = jnp.eye(8), jnp.ones((32, 8))

    def two(w, x):
        return jnp.mean(jnp.sin(x @ w)), jnp.mean(jnp.cos(x @ w))

    one = lambda w, x: microbatch(two, 1, 8, Kind.MEAN)(w, x)[0]
    alone = microbatch(lambda w, x: two(w, x)[0], 1, 8, Kind.MEAN)
    assert evaluated(jax.grad(one), w, x) == evaluated(jax.grad(alone), w, x)


def test_an_auxiliary_output_beside_the_scalar():
    def with_rows(w, x):
        y = jnp.sin(x @ w)
        return jnp.mean(y**2), {"rows": y, "hits": jnp.sum(y > 0)}

    small = microbatch(with_rows, 1, 4, (Kind.MEAN, {"rows": Kind.CONCAT, "hits": Kind.SUM}))
    got = jax.jit(jax.value_and_grad(small, has_aux=True))(W, X)
    assert_close(got, jax.value_and_grad(with_rows, has_aux=True)(W, X))


def test_in_forward_refuses_what_it_cannot_differentiate():
    small = microbatch(features, 1, 4, Kind.CONCAT, differentiate="in_forward")
    with pytest.raises(MicrobatchError, match='differentiate="auto" or "recompute"'):
        jax.grad(of_features(small))(W, X)


def test_in_forward_keeps_no_residuals_that_a_policy_could_choose():
    policy = jax.checkpoint_policies.everything_saveable
    with pytest.raises(MicrobatchError, match="checkpoint_policy"):
        microbatch(loss, 1, 4, Kind.MEAN, differentiate="in_forward", checkpoint_policy=policy)


def test_a_function_without_reverse_mode_is_told_the_way_out():
    def powers(w, x):
        grown = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * w[0]), (0, x))
        return jnp.mean(grown[1])

    with pytest.raises(MicrobatchError, match=r'microbatch\(powers\): [^\n]*\n.*"store"'):
        jax.grad(microbatch(powers, 1, 4, Kind.MEAN))(W, X)
    stored = microbatch(powers, 1, 4, Kind.MEAN, differentiate="store")
    along = (jnp.ones_like(W), jnp.ones_like(X))
    assert_close(jax.jvp(stored, (W, X), along), jax.jvp(powers, (W, X), along))


def test_a_custom_accumulator_is_differentiated():
    squares = Accumulator(
        init=lambda spec: jnp.zeros(spec.shape, spec.dtype),
        update=lambda carry, value, index: carry + value**2,
        finalize=lambda carry: {"root": jnp.sqrt(carry)},
    )
    small = lambda w, x: microbatch(loss, 1, 4, squares)(w, x)["root"]
    whole = lambda w, x: jnp.sqrt(sum(loss(w, x[i::3]) ** 2 for i in range(3)))
    assert_close(jax.grad(small, (0, 1))(W, X), jax.grad(whole, (0, 1))(W, X))


def test_no_derivative_flows_through_a_carry():
    def with_state(w, state, x):
        mean = jax.lax.stop_gradient(jnp.mean(x @ w))
        return loss(w, x), 0.9 * state + 0.1 * mean

    small = microbatch(with_state, 2, 4, (Kind.MEAN, Carry(1)))
    start = jnp.float32(0)
    (value, state), gradient = jax.value_and_grad(small, has_aux=True)(W, start, X)
    by_loop = start
    for i in range(3):
        by_loop = with_state(W, by_loop, X[i::3])[1]
    assert_close((value, state, gradient), (loss(W, X), by_loop, jax.grad(loss)(W, X)))


def test_a_derivative_through_a_carry_that_matters_is_refused():
    matters = lambda w, state, x: (loss(w, x) + state, 0.9 * state + w[0])
    with pytest.raises(MicrobatchError, match="through a Carry"):
        jax.grad(microbatch(matters, 2, 4, (Kind.MEAN, Carry(1))), has_aux=True)(
            W, jnp.float32(0), X
        )
    beside = lambda w, state, x: (loss(w, x), 0.9 * state + w[0])
    small = microbatch(beside, 2, 4, (Kind.MEAN, Carry(1)))
    assert_close(jax.grad(small, has_aux=True)(W, jnp.float32(0), X)[0], jax.grad(loss)(W, X))
    with pytest.raises(MicrobatchError, match="through a Carry"):
        jax.grad(lambda w: small(w, jnp.float32(0), X)[1])(W)
    with pytest.raises(MicrobatchError, match="through a Carry"):
        jax.grad(lambda state: small(W, state, X)[0])(jnp.float32(0))


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_a_checkpoint_policy_changes_memory_and_not_the_gradient(policy):
    small = microbatch(
        loss, 1, 4, Kind.MEAN, checkpoint_policy=getattr(jax.checkpoint_policies, policy)
    )
    assert_close(jax.jit(jax.grad(small))(W, X), jax.grad(loss)(W, X))
