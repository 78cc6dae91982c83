"""`micro_vmap` and `micro_grad`: a vmap that fits, and per-example gradients, against `jax.vmap` itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from microbatch import AccumulationType as Kind
from microbatch import AccumulatorError, BatchError
from microbatch.jax import Accumulator, Carry, micro_grad, micro_vmap, microbatch

pytestmark = pytest.mark.usefixtures("quick_compile")

X = jax.random.normal(jax.random.key(0), (12, 5))
Y = jax.random.normal(jax.random.key(1), (12, 3))
W = [
    jax.random.normal(jax.random.key(2), (5, 7)),
    jax.random.normal(jax.random.key(3), (7, 3)),
]
ENGINES = ("vmap", "auto", "factored")
STACKED = ["SUM", "MEAN", "CONCAT", "MAX", "MIN", "LAST", "RUNNING_MEAN"]


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - y) ** 2)


def assert_close(got, wanted, rtol=3e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, wanted)


def reduced(kind, stacked):
    match kind:
        case "SUM":
            return stacked.sum(0)
        case "MEAN" | "RUNNING_MEAN":
            return stacked.mean(0)
        case "MAX":
            return stacked.max(0)
        case "MIN":
            return stacked.min(0)
        case "LAST":
            return stacked[-1]
    return stacked


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [None, 1, 4, 5, 12])
def test_every_accumulator_combines_the_examples_of_a_vmap(size, engine):
    fun = lambda w, x: jnp.tanh(x @ w)
    stacked = jax.vmap(fun, (None, 0))(W[0], X)
    everything = lambda w, x: dict.fromkeys(STACKED, fun(w, x))
    mapped = micro_vmap(
        everything,
        (None, 0),
        microbatch_size=size,
        remainder="allow",
        accumulator={name: Kind[name] for name in STACKED},
        engine=engine,
    )
    got = jax.jit(mapped)(W[0], X)
    assert_close(got, {name: reduced(name, stacked) for name in STACKED})


def test_in_axes_and_out_axes_are_those_of_vmap():
    fun = lambda p, x, s: p["w"] * x + s
    p, x = {"w": jnp.arange(3.0), "b": jnp.arange(6.0)}, jnp.arange(18.0).reshape(3, 6)
    axes = ({"w": None, "b": 0}, 1, None)
    wanted = jax.vmap(fun, axes, 1)(p, x, 2.0)
    got = micro_vmap(fun, axes, 1, microbatch_size=2)(p, x, 2.0)
    assert_close(got, wanted)
    assert_close(
        micro_vmap(lambda x, y: x * y, microbatch_size=3)(jnp.arange(6), jnp.arange(6)),
        jnp.arange(6) ** 2,
    )


def test_keyword_arguments_are_mapped_over_axis_0():
    fun = lambda x, *, scale: x * scale
    got = micro_vmap(fun, microbatch_size=3)(X[:, 0], scale=jnp.arange(12.0))
    assert_close(got, X[:, 0] * jnp.arange(12.0))


def test_another_mapping_function_runs_as_given():
    calls = []

    def loop(fun, in_axes, out_axes):
        def mapped(*args):
            calls.append(len(args))
            return jax.vmap(fun, in_axes, out_axes)(*args)

        return mapped

    got = micro_vmap(lambda x: x**2, microbatch_size=3, vmap_fn=loop)(jnp.arange(6))
    assert got.tolist() == [0, 1, 4, 9, 16, 25]
    assert calls
    named = functools.partial(jax.vmap, axis_name="examples")
    got = micro_vmap(lambda x: x - jax.lax.pmean(x, "examples"), vmap_fn=named)(jnp.arange(4.0))
    assert_close(got, jnp.arange(4.0) - 1.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_example_that_can_be_checked_by_hand(engine):
    def half_square(params, features, targets):
        return 0.5 * jnp.mean((features @ params - targets) ** 2)

    gradients = micro_grad(
        half_square,
        batch_argnums=(1, 2),
        accumulator=Kind.MEAN,
        transform_fn=lambda g: (g, g**2),
        metrics_fn=jnp.linalg.norm,
        microbatch_size=2,
        engine=engine,
    )
    (mean, square), aux = gradients(jnp.zeros(1), jnp.ones((4, 1)), jnp.array([0.0, 2, 4, 6]))
    assert mean.tolist() == [-3.0] and square.tolist() == [14.0]
    assert aux.values.tolist() == [0, 2, 8, 18] and aux.metrics.tolist() == [0, 2, 4, 6]


def clipped(g):
    norm = optax.tree.norm(g)
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, 0.1 / norm), g)


@pytest.mark.parametrize("kind", ["SUM", "MEAN", "CONCAT"])
def test_micro_grad_is_the_established_one(kind):
    options = {"batch_argnums": (1, 2), "transform_fn": clipped, "metrics_fn": optax.tree.norm}
    there = optax.microbatching.micro_grad(
        loss, microbatch_size=4, accumulator=optax.microbatching.AccumulationType[kind], **options
    )
    here = micro_grad(loss, microbatch_size=4, accumulator=Kind[kind], **options)
    (wanted, wanted_aux), (got, aux) = jax.jit(there)(W, X, Y), jax.jit(here)(W, X, Y)
    assert_close((got, aux.values, aux.metrics), (wanted, wanted_aux.values, wanted_aux.metrics))


def test_auxiliary_outputs_argnums_and_no_batch_axis():
    def one(x, w, y):
        out = jnp.tanh(x @ w)
        return jnp.sum((out - y) ** 2), {"out": out}

    got, aux = micro_grad(
        one,
        has_aux=True,
        argnums=(1, 0),
        batch_argnums=(0, 2),
        keep_batch_dim=False,
        accumulator=(Kind.SUM, Kind.CONCAT),
        microbatch_size=3,
    )(X, W[0], X @ W[0])
    per_example = jax.vmap(jax.value_and_grad(one, (1, 0), has_aux=True), (0, None, 0))
    (values, wanted_aux), (of_w, of_x) = per_example(X, W[0], X @ W[0])
    assert_close(got, (of_w.sum(0), of_x), atol=1e-5)
    assert_close((aux.values, aux.aux), (values, wanted_aux))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [None, 5])
def test_rows_of_weight_zero_contribute_exactly_nothing_also_if_they_hold_nan(size, engine):
    bad = jnp.zeros(12, bool).at[jnp.array([1, 6, 7])].set(True)
    weights = jnp.where(bad, 0, 1.0 + jnp.arange(12) % 3)
    x = jnp.where(bad[:, None], jnp.nan, X)
    kinds = (Kind.SUM, Kind.MEAN, Kind.MAX)
    step = micro_grad(
        lambda w, x, y, weight: loss(w, x, y),
        batch_argnums=(1, 2, 3),
        microbatch_size=size,
        remainder="allow",
        accumulator=kinds,
        transform_fn=lambda g: (clipped(g), g, jax.tree.map(jnp.abs, g)),
        weight_fn=lambda w, x, y, weight: weight[0],
        engine=engine,
    )
    (total, mean, largest), aux = jax.jit(step)(W, x, Y, weights)
    kept = jnp.flatnonzero(~bad)
    each = jax.vmap(jax.grad(loss), (None, 0, 0))(W, X[kept, None], Y[kept, None])
    shares = weights[kept] / weights.sum()
    assert_close(total, jax.tree.map(lambda g: g.sum(0), jax.vmap(clipped)(each)))
    assert_close(mean, jax.tree.map(lambda g: jnp.tensordot(shares, g, 1), each))
    assert_close(largest, jax.tree.map(lambda g: jnp.abs(g).max(0), each))
    assert not aux.values[bad].any() and aux.values[~bad].all()
    nothing, _ = jax.jit(step)(W, x, Y, 0 * weights)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nothing[:2]))


def test_keys_do_not_depend_on_the_microbatch_size():
    noisy = lambda w, key, x: jnp.sum((x + jax.random.normal(key, x.shape)) @ w)
    key = jax.random.key(5)
    gradients = lambda size, order: micro_grad(
        noisy,
        batch_argnums=2,
        key_argnums=1,
        microbatch_size=size,
        order=order,
        accumulator=Kind.SUM,
    )(jnp.ones((5,)), key, X)[0]
    by_hand = sum(
        X[i] + jax.random.normal(jax.random.fold_in(key, i), (1, 5))[0] for i in range(12)
    )
    for size, order in ((12, "strided"), (4, "strided"), (3, "contiguous")):
        assert_close(gradients(size, order), by_hand, rtol=1e-4)


def test_a_mapped_function_is_differentiated_in_bounded_memory():
    total = lambda f: lambda w: jnp.sum(f(w, X) ** 3)
    fun = lambda w, x: jnp.tanh(x @ w).sum()
    small = micro_vmap(fun, (None, 0), microbatch_size=4)
    whole = jax.vmap(fun, (None, 0))
    gradients = jax.jit(jax.grad(total(small)))(W[0]), jax.grad(total(whole))(W[0])
    assert_close(*gradients, atol=3e-5)  # entries of 30 cancel to 0.02


def test_ones_own_accumulator_needs_an_aggregate():
    largest = Accumulator(
        lambda spec: jnp.zeros(spec.shape),
        lambda carry, value, index: jnp.maximum(carry, value),
        lambda carry: carry,
        lambda stacked: jnp.abs(stacked).max(0),
    )
    got = micro_vmap(lambda x: x, microbatch_size=4, accumulator=largest)(X)
    assert_close(got, jnp.abs(X).max(0))
    with pytest.raises(AccumulatorError, match="no aggregate"):
        micro_vmap(lambda x: x, accumulator=Accumulator(*[lambda *a: None] * 3))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [None, 2, 3, 6])
def test_ones_own_accumulator_has_zeros_for_examples_of_weight_0(size, engine):
    """Whatever they hold; and it begins and ends in the same way for every size."""
    seen = Accumulator(
        lambda spec: jnp.zeros(spec.shape),
        lambda carry, value, index: carry + value,
        lambda carry: 2 * carry,
        lambda values: values.sum(0),
    )
    x = jnp.array([-5.0, jnp.nan, jnp.inf, -3.0, jnp.nan, jnp.nan])
    w = jnp.arange(3.0)
    gradients, _ = micro_grad(
        lambda w, x: jnp.sum(w * x),
        accumulator=seen,
        microbatch_size=size,
        weight_fn=lambda w, x: jnp.isfinite(x[0]),
        engine=engine,
    )(w, x)
    assert gradients.tolist() == [-16.0] * 3


def test_ones_own_result_keeps_its_dtype_beside_weights():
    """Sums are widened and narrowed again; what an accumulator of one's own makes is left as it is."""
    positive = Accumulator(
        init=lambda spec: jnp.zeros(spec.shape, spec.dtype),
        update=lambda carry, value, index: carry + value,
        finalize=lambda carry: carry > 0,
        aggregate=lambda values: values.sum(0),
    )
    x = jnp.arange(4, dtype=jnp.bfloat16)
    mapped = micro_vmap(
        lambda x: (x, x, x),
        microbatch_size=2,
        accumulator=(positive, Kind.MEAN, Kind.CONCAT),
        weight_fn=lambda x: x < 2,
    )
    is_positive, mean, rows = mapped(x)
    assert is_positive.dtype == jnp.bool_ and is_positive
    assert (mean.dtype, float(mean)) == (jnp.bfloat16, 0.5)
    assert (rows.dtype, rows.tolist()) == (jnp.bfloat16, [0.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [None, 2])
def test_booleans_and_small_integers_are_counted_and_averaged(size, engine):
    """As `jnp.sum` and `jnp.mean` of the examples: an accuracy is a mean of booleans."""
    x = jnp.array([0, 40, 80, 120], jnp.int8)
    fun = lambda x: (x > 40, x)
    for kind, wanted in ((Kind.MEAN, (0.5, 60.0)), (Kind.SUM, (2, 240))):
        mapped = micro_vmap(fun, accumulator=kind, microbatch_size=size, engine=engine)
        assert tuple(x.item() for x in mapped(x)) == wanted
    weighted = micro_vmap(
        fun, accumulator=Kind.MEAN, microbatch_size=size, engine=engine, weight_fn=lambda x: x / 40
    )
    assert_close(weighted(x), (5 / 6, 560 / 6))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weight_fn", [None, lambda w, x: 2.0])
def test_low_precisions_are_rounded_once_and_not_in_every_microbatch(engine, weight_fn):
    """Microbatches whose sums nearly cancel: rounded to bfloat16 each, nothing would be left of the result."""
    x = jnp.concatenate([300 + jnp.arange(8.0), -300 - jnp.arange(8.0) / 2])[:, None]
    x = jnp.round(x).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64).sum(0)
    for kind, wanted in ((Kind.SUM, exact), (Kind.MEAN, exact / 16)):
        summed, _ = micro_grad(
            lambda w, x: jnp.sum(x @ w),
            accumulator=kind,
            microbatch_size=8,
            order="contiguous",
            engine=engine,
            weight_fn=weight_fn,
        )(jnp.ones((1, 1), jnp.bfloat16), x)
        assert summed.dtype == jnp.bfloat16
        np.testing.assert_array_equal(summed[0], jnp.asarray(wanted, jnp.bfloat16))


def test_keys_are_selected_and_never_summed():
    key_of = lambda x: jax.random.key(7)
    kept = micro_vmap(key_of, weight_fn=lambda x: x > 0)(jnp.arange(2))
    assert kept[1] == jax.random.key(7) and kept[0] != jax.random.key(7)
    with pytest.raises(AccumulatorError, match="has no SUM"):
        micro_vmap(key_of, accumulator=Kind.SUM)(jnp.arange(2))


@pytest.mark.parametrize("size", [None, 2])
def test_N11_no_examples_have_a_mean_of_zero(size):
    mapped = micro_vmap(lambda x: (x, x), accumulator=(Kind.MEAN, Kind.SUM), microbatch_size=size)
    assert [float(x) for x in mapped(jnp.zeros(0))] == [0.0, 0.0]


@pytest.mark.parametrize("size", [None, 2])
def test_examples_that_do_not_agree_are_refused_by_name(size):
    add = lambda key, x, y: x + y
    mapped = micro_vmap(add, (None, 0, 0), microbatch_size=size, key_argnums=0)
    with pytest.raises(BatchError, match=r"(?s)micro_vmap\(<lambda>\): .*  x: 4 .*  y: 2 "):
        mapped(jax.random.key(0), jnp.zeros(4), jnp.zeros(2))
    with pytest.raises(BatchError, match="x is a scalar"):
        mapped(jax.random.key(0), 1.0, jnp.zeros(2))
    weighted = micro_vmap(add, microbatch_size=size, weight_fn=lambda key, x, y: jnp.ones(3))
    with pytest.raises(ValueError, match="Return one real number per example"):
        weighted(jnp.zeros(4), jnp.zeros(4), jnp.zeros(4))


def test_refusals_name_the_way_out():
    with pytest.raises(AccumulatorError, match="out_axes=1"):
        micro_vmap(lambda x: x, out_axes=1, accumulator=Kind.SUM)
    with pytest.raises(AccumulatorError, match="Use microbatch"):
        micro_vmap(lambda x: x, accumulator=Carry(0))
    with pytest.raises(BatchError, match=r"micro_vmap\(loss\): in_axes=\(None, 0\) has 2 entries"):
        micro_vmap(loss, (None, 0))(W, X, Y)
    with pytest.raises(AccumulatorError, match="accumulator is 'sum', not an accumulator"):
        micro_vmap(lambda x: x, accumulator="sum")
    with pytest.raises(AccumulatorError, match="not a prefix of the output"):
        micro_vmap(lambda x: x, accumulator=(Kind.SUM, Kind.SUM))(X)
    with pytest.raises(BatchError, match="batch_argnums=-1"):
        micro_grad(loss, batch_argnums=-1)
    with pytest.raises(ValueError, match="'banana'"):
        micro_grad(loss, engine="banana")
    with pytest.raises(ValueError, match=r"micro_grad\(loss\): x has 12 rows"):
        micro_grad(loss, batch_argnums=(1, 2), microbatch_size=5)(W, X, Y)


TOTAL = lambda w, x: jnp.sum((x * w) ** 2)
ROWS = jnp.ones((4, 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"argnums": 5}, "argnums names argument 5, and the call has 2 positional arguments"),
        ({"argnums": "w"}, "argnums='w' is not an integer"),
        ({"argnums": None}, "argnums=None is not an integer"),
        ({"argnums": 0.0}, "argnums=0.0 is not an integer"),
        ({"argnums": ()}, r"argnums=\(\) differentiates nothing"),
        ({"batch_argnums": "x"}, "batch_argnums='x' is not an integer"),
        ({"key_argnums": "k"}, "key_argnums='k' is not an integer"),
        ({"key_argnums": 7}, "key_argnums names argument 7"),
        ({"key_argnums": 0}, r"args\[0\], a float32\[3\], which is no random key"),
        ({"key_argnums": -1}, r"key_argnums names args\[1\], which is mapped"),
        ({"has_aux": True}, r"has_aux=True, and the function returned a float32\[\]"),
        ({"transform_fn": None}, "transform_fn=None is a NoneType, not a function"),
        ({"transform_fn": lambda g: "a"}, r"output\[0\] is a str, which cannot be accumulated"),
        ({"metrics_fn": "norm"}, "metrics_fn='norm' is a str, not a function"),
        (
            {"weight_fn": lambda w, x: None},
            "weight_fn returned a NoneType.\nReturn one real number",
        ),
        (
            {"fun": lambda w, x: (TOTAL(w, x), x)},
            "is a tuple, not one real number.\nReturn .*has_aux",
        ),
        ({"fun": lambda w, x: x * w}, r"is a float32\[1, 3\], not one real number.\nReduce it"),
        ({"fun": lambda w, x: None}, "is a NoneType, not one real number"),
        ({"fun": 3}, "fun=3 is a int, not a function"),
    ],
)
def test_wrong_words_to_micro_grad_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        micro_grad(**{"fun": TOTAL, "microbatch_size": 2, **options})(jnp.ones(3), ROWS)


def test_parameters_without_a_gradient_are_refused_with_their_path():
    fun = lambda w, x: jnp.sum(x * w["n"])
    with pytest.raises(BatchError, match=r"args\[0\]\['n'\], a int32\[3\], which has no gradient"):
        micro_grad(fun)({"n": jnp.arange(3)}, ROWS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out_axes": None}, "out_axes holds None, not an integer.\nUse out_axes=0"),
        ({"out_axes": "0"}, "out_axes holds '0', not an integer"),
        ({"out_axes": 1.0}, "out_axes holds 1.0, not an integer"),
        ({"out_axes": 7}, "on axis 7, and the output with them has 2 axes.\nUse -2 to 1"),
        ({"out_axes": (0, 1)}, "is not a prefix of the output"),
        ({"vmap_fn": "vmap"}, "vmap_fn='vmap' is a str, not a function"),
        ({"weight_fn": "rows"}, "weight_fn='rows' is a str, not a function"),
        ({"fun": lambda x: {"a": "b"}}, r"output\['a'\] is a str, which cannot be accumulated"),
        ({"accumulator_dtype": "banana"}, "accumulator_dtype='banana' is not a floating-point"),
    ],
)
def test_wrong_words_to_micro_vmap_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        micro_vmap(**{"fun": lambda x: x, "microbatch_size": 2, **options})(ROWS)


def test_what_is_no_key_of_a_microbatch_is_refused():
    with pytest.raises(
        BatchError, match=r"key_argnums names args\[0\], a float32\[3\], which is no"
    ):
        microbatch(TOTAL, 1, 2, key_argnums=0)(jnp.ones(3), ROWS)
