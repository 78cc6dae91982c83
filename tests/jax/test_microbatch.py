"""What only the JAX front has: keys, states, static leaves, traced counts; and how it refuses."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from microbatch import AccumulationType as Kind
from microbatch import AccumulatorError, BatchError, MicrobatchSizeError
from microbatch.jax import Carry, microbatch, reshape_batch_axis

pytestmark = pytest.mark.usefixtures("quick_compile")

X = jnp.arange(24.0).reshape(12, 2)


def rows_of(w, x):
    return x * w


@pytest.mark.parametrize("kind", list(Kind))
def test_N10_one_microbatch_is_the_function_itself(kind):
    calls = []

    def counted(w, x):
        calls.append(x.shape)
        return x * w

    out = microbatch(counted, 1, 12, kind)(2.0, X)
    assert calls == [(12, 2)]
    assert (out == X * 2.0).all()


def test_M7_the_function_never_sees_more_rows_than_a_microbatch():
    seen = set()

    def counted(w, x):
        seen.add(x.shape[0])
        return x * w

    microbatch(counted, 1, 5, Kind.CONCAT, remainder="allow")(2.0, X)
    assert seen == {5, 2}


def test_C2_leaves_that_are_not_arrays_are_passed_on_untouched():
    def fun(settings, x):
        assert settings["depth"] == 2 and isinstance(settings["depth"], int)
        assert settings["name"] == "net" and settings["nothing"] is None
        assert settings["labels"][1] == "dog"
        return settings["activation"](x * settings["scale"])

    settings = {
        "depth": 2,
        "name": "net",
        "nothing": None,
        "labels": np.array(["cat", "dog"]),
        "activation": jnp.tanh,
        "scale": jnp.float32(0.5),
    }
    small = microbatch(fun, 1, 4, Kind.CONCAT)
    np.testing.assert_allclose(small(settings, X), jnp.tanh(X * 0.5), rtol=1e-6)
    with pytest.raises(BatchError, match="labels is not an array"):
        microbatch(lambda labels: labels, 0, 1, Kind.CONCAT)(np.array(["cat", "dog"]))
    differentiated = jax.grad(lambda scale: small(settings | {"scale": scale}, X).sum())(
        jnp.float32(0.5)
    )
    whole = jax.grad(lambda scale: jnp.tanh(X * scale).sum())(0.5)
    np.testing.assert_allclose(differentiated, whole, rtol=1e-4)


def test_C1_a_negative_axis_is_resolved_leaf_by_leaf():
    batch = {"matrix": X.T, "tensor": jnp.stack([X.T, 2 * X.T]), "vector": jnp.arange(12.0)}
    fun = lambda b: (b["matrix"].sum(0) + b["tensor"].sum((0, 1)) + b["vector"]).sum()
    small = microbatch(fun, 0, 4, in_axes=-1)
    np.testing.assert_allclose(small(batch), fun(batch), rtol=1e-6)


def test_in_axes_may_be_a_tree_with_none_for_what_is_not_split():
    fun = lambda b: b["x"].T @ jnp.ones((12 if b["x"].shape[0] == 12 else 4,)) + b["bias"]
    batch = {"x": X, "bias": jnp.ones(2)}
    small = microbatch(lambda b: b["x"].sum(0) * b["bias"], 0, 4, in_axes=({"x": 0, "bias": None},))
    np.testing.assert_allclose(small(batch), X.sum(0), rtol=1e-6)
    assert fun(batch).shape == (2,)


def test_keys_are_shared_unless_they_are_named():
    draw = lambda key, x: jax.random.normal(key, (1,)) + 0 * x[:1, 0]
    key = jax.random.key(0)
    shared = microbatch(draw, 1, 4, Kind.CONCAT)(key, X)
    assert (shared == shared[0]).all()
    for same_key in (key, jax.random.PRNGKey(0)):
        folded = microbatch(draw, 1, 4, Kind.CONCAT, key_argnums=0)(same_key, X)
        by_hand = [draw(jax.random.fold_in(same_key, i), X)[0] for i in range(3)]
        np.testing.assert_array_equal(folded, by_hand)


def test_a_chain_of_keys_is_carried():
    def draw(key, x):
        key, now = jax.random.split(key)
        return jax.random.uniform(now, (4,)) * x[:, 0], key

    key = jax.random.key(7)
    rows, last = microbatch(draw, 1, 4, (Kind.CONCAT, Carry(0)), order="contiguous")(key, X)
    by_hand = []
    for i in range(3):
        part, key = draw(key, X[4 * i : 4 * i + 4])
        by_hand.append(part)
    np.testing.assert_allclose(rows, jnp.concatenate(by_hand), rtol=1e-6)
    assert (jax.random.key_data(last) == jax.random.key_data(key)).all()


def test_batch_statistics_of_a_real_model_are_carried():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.BatchNorm(use_running_average=False, momentum=0.5)(x))

    net = Net()
    variables = net.init(jax.random.key(0), X)

    def loss(params, stats, x):
        out, updated = net.apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return jnp.mean(out**2), updated["batch_stats"]

    step = microbatch(
        jax.value_and_grad(loss, has_aux=True), 2, 4, ((Kind.MEAN, Carry(1)), Kind.MEAN)
    )
    (_, stats), gradients = step(variables["params"], variables["batch_stats"], X)
    by_hand, total = variables["batch_stats"], None
    for i in range(3):
        grads, by_hand = jax.grad(loss, has_aux=True)(variables["params"], by_hand, X[i::3])
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, stats, by_hand)
    jax.tree.map(close, gradients, jax.tree.map(lambda g: g / 3, total))


def test_a_carried_state_of_another_shape_is_refused():
    grows = lambda state, x: (x.sum(), jnp.concatenate([state, state]))
    with pytest.raises(AccumulatorError, match=r"output\[1\] is carried to argument 0"):
        microbatch(grows, 1, 4, (Kind.SUM, Carry(0)))(jnp.zeros(1), X)


def test_a_batch_argument_cannot_be_carried():
    with pytest.raises(BatchError, match="x is a batch argument"):
        microbatch(lambda x: (x.sum(), x), 0, 4, (Kind.SUM, Carry(0)))(X)


@pytest.mark.parametrize("count", [-2, 0, 2, 3, 9])
def test_a_traced_count_stops_as_a_static_one_does(count):
    kinds = {"sum": Kind.SUM, "mean": Kind.MEAN, "running": Kind.RUNNING_MEAN, "rows": Kind.CONCAT}
    fun = lambda x: {"sum": x.sum(), "mean": x.mean(), "running": x.mean(), "rows": x}
    stopped = lambda x, k: microbatch(fun, 0, 4, kinds, num_real_microbatches=k)(x)
    traced, static = jax.jit(stopped)(X, count), stopped(X, count)
    ran = min(max(count, 0), 3)
    means = [X[i::3].mean() for i in range(ran)]
    wanted = {
        "sum": sum(X[i::3].sum() for i in range(ran)),
        "mean": sum(means) / 3,
        "running": sum(means) / max(ran, 1),
        "rows": jnp.where((jnp.arange(12) % 3 < ran)[:, None], X, 0),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(traced[name], value, rtol=1e-6)
        np.testing.assert_allclose(static[name], value, rtol=1e-6)


def test_vmap_over_the_count_and_the_weights():
    stopped = lambda k, m: microbatch(
        lambda x, m: (x * m[:, None]).sum() / m.sum(),
        (0, 1),
        4,
        Kind.MEAN,
        num_real_microbatches=k,
        weight_fn=lambda x, m: m.sum(),
    )(X, m)
    masks = jnp.stack([jnp.ones(12), jnp.arange(12) % 2.0])
    got = jax.vmap(stopped)(jnp.array([3, 1]), masks)
    np.testing.assert_allclose(got, [X.sum() / 12, X[3::6].sum() / 2], rtol=1e-6)


def test_outputs_that_are_python_numbers():
    small = microbatch(lambda x: (x.shape[0], 1.5), 0, 4)
    rows, total = small(X)
    assert (int(rows), float(total)) == (12, 4.5)


@pytest.mark.parametrize("value", [1.5, True, np.bool_(True), "2", jnp.float32(2)])
def test_a_count_that_is_no_integer_is_refused(value):
    with pytest.raises(MicrobatchSizeError, match="num_real_microbatches"):
        microbatch(rows_of, 1, 4, num_real_microbatches=value)(2.0, X)


def test_a_count_past_int32_is_all():
    small = lambda count: microbatch(jnp.sum, 0, 4, num_real_microbatches=count)(X)
    assert small(jnp.uint32(3_000_000_000)) == X.sum()
    with jax.enable_x64(True):
        assert small(jnp.int64(2**40)) == X.sum()
        assert small(jnp.int64(-(2**40))) == 0


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16])
def test_extremes_of_dtypes_with_and_without_infinity(dtype):
    x = jnp.array([-3.0, -1.0, -2.0, -4.0]).astype(dtype)
    most, least = microbatch(lambda x: (x[0], x[0]), 0, 1, (Kind.MAX, Kind.MIN))(x)
    assert (float(most), float(least)) == (-1.0, -4.0)


def test_a_weight_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"weight_fn returned shape \(4,\)"):
        microbatch(rows_of, 1, 4, Kind.MEAN, weight_fn=lambda w, x: x[:, 0])(2.0, X)
    with pytest.raises(ValueError, match=r"weight_fn returned shape .* complex64"):
        microbatch(rows_of, 1, 4, Kind.MEAN, weight_fn=lambda w, x: x.sum() + 1j)(2.0, X)


def test_a_weight_may_be_a_boolean():
    x = jnp.arange(4.0)
    small = microbatch(
        jnp.mean, 0, 2, Kind.MEAN, weight_fn=lambda x: jnp.any(x > 2), order="contiguous"
    )
    assert float(small(x)) == 2.5


def test_booleans_are_summed_as_numpy_adds_them():
    some = microbatch(lambda x: jnp.any(x > 2), 0, 2, Kind.SUM)
    assert some(jnp.arange(4.0)).item() is True
    assert some(jnp.zeros(4)).item() is False


@pytest.mark.parametrize(
    "kind, output, words",
    [
        (
            Kind.MAX,
            lambda x: x.sum() + 1j,
            "output has dtype complex64, which has no order for MAX",
        ),
        (Kind.MIN, lambda x: jax.random.key(0), "output has dtype key<fry>, which has no order"),
        (Kind.SUM, lambda x: jax.random.key(0), "output has dtype key<fry>, which has no SUM"),
    ],
)
def test_what_cannot_be_compared_or_summed_is_refused(kind, output, words):
    with pytest.raises(AccumulatorError, match=words):
        microbatch(output, 0, 2, kind)(jnp.arange(4.0))


def test_an_axis_that_is_no_integer_is_refused():
    with pytest.raises(BatchError, match=r"tree has 0\.5 for its axis of rows"):
        reshape_batch_axis(jnp.arange(4.0), 2, axis=0.5)


def test_N11_zero_rows_are_traced_once_and_never_run():
    traced = []

    def fun(x):
        traced.append(x.shape)
        return {"sum": x.sum(), "mean": x.mean(), "rows": x, "last": x[0]}

    kinds = {"sum": Kind.SUM, "mean": Kind.MEAN, "rows": Kind.CONCAT, "last": Kind.LAST}
    out = microbatch(fun, 0, 3, kinds)(jnp.zeros((0, 4)))
    assert traced == [(3, 4)]
    assert out["sum"] == 0 and out["mean"] == 0
    assert out["rows"].shape == (0, 4) and not out["last"].any()
    with pytest.raises(ValueError, match="MAX of zero rows"):
        microbatch(lambda x: x.max(), 0, 3, Kind.MAX)(jnp.zeros((0, 4)))


def test_C21_a_keyword_of_the_functions_own_is_never_swallowed():
    def fun(x, *, order, weight_fn):
        return x.sum() * order + weight_fn

    bound = functools.partial(fun, order=2.0, weight_fn=1.0)
    assert float(microbatch(bound, 0, 4)(X)) == float(X.sum() * 2 + 3)
    assert float(microbatch(fun, 0, 4)(X, order=2.0, weight_fn=1.0)) == float(X.sum() * 2 + 3)


def test_C18_a_module_that_is_mutated_inside_is_split_and_merged():
    from flax import nnx

    class Counter(nnx.Module):
        def __init__(self):
            self.seen = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.seen[...] += x.shape[0]
            return x.sum()

    graph, state = nnx.split(Counter())

    def fun(state, x):
        module = nnx.merge(graph, state)
        return module(x), nnx.state(module)

    total, state = microbatch(fun, 1, 4, (Kind.SUM, Carry(0)))(state, X)
    assert float(total) == float(X.sum())
    assert float(nnx.merge(graph, state).seen[...]) == 12
