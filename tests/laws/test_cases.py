"""Inputs on which public projects went wrong, each named after its row in the table of cases."""

import numpy as np
import pytest

from microbatch import AccumulationType, AccumulatorError, EmptyStream
from tests.laws.cases import CONCAT, MAX, MEAN, MIN, ROWS, RUNNING_MEAN, SUM, values
from tests.laws.trees import assert_same_tree


def masked_mean(xp, w, x, mask):
    """A masked mean loss as it is written everywhere; 0/0 where all is masked."""
    return (((w * x) ** 2) * mask).sum() / mask.sum()


def count_tokens(w, x, mask):
    return mask.sum()


def value_and_grad_of(front, fun):
    """Value and gradient, or the value alone in a front without derivatives."""
    if front.value_and_grad is None:
        return lambda *args: (front.results(fun(*args)), None)
    return lambda *args: front.results(front.value_and_grad(fun)(*args))


def test_N1_masked_mean_loss(front):
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    mask = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    loss = front.microbatch(
        lambda w, x, mask: masked_mean(front.xp, w, x, mask),
        (1, 2),
        3,
        MEAN,
        weight_fn=count_tokens,
        order="contiguous",
    )
    value, grad = value_and_grad_of(front, loss)(*front.arrays((np.float64(0.5), x, mask)))
    squares = (x**2 * mask).sum() / mask.sum()
    assert_same_tree(value, np.array(0.25 * squares))
    if grad is not None:
        assert_same_tree(grad, np.array(2 * 0.5 * squares))


def test_N2_a_summed_loss_given_to_mean(front):
    x = np.array([1.0, 2.0, 3.0, 4.0])
    mean = front.microbatch(lambda x: x.sum(), 0, 2, MEAN, order="contiguous")
    assert float(mean(front.arrays(x))) == (3.0 + 7.0) / 2


def test_N3_a_ratio_is_folded_as_numerator_and_denominator(front):
    hits, tries = np.array([1.0, 0.0, 3.0, 4.0]), np.array([2.0, 0.0, 3.0, 5.0])
    args = front.arrays((hits, tries))
    both = front.microbatch(lambda h, t: (h.sum(), t.sum()), (0, 1), 2, SUM)
    numerator, denominator = front.results(both(*args))
    assert float(numerator / denominator) == pytest.approx(0.8)
    weighted = front.microbatch(
        lambda h, t: h.sum() / t.sum(), (0, 1), 2, MEAN, weight_fn=lambda h, t: t.sum()
    )
    assert float(weighted(*args)) == pytest.approx(0.8)


@pytest.mark.parametrize("masked", [slice(0, 3), slice(0, 6)])
def test_N4_masked_microbatches(front, masked):
    x, mask = np.arange(1.0, 7.0), np.ones(6)
    mask[masked] = 0
    x[masked] = np.nan
    loss = front.microbatch(
        lambda w, x, mask: masked_mean(front.xp, w, x, mask),
        (1, 2),
        3,
        MEAN,
        weight_fn=count_tokens,
        order="contiguous",
    )
    value, grad = value_and_grad_of(front, loss)(*front.arrays((np.float64(1.0), x, mask)))
    expected = (16.0 + 25.0 + 36.0) / 3 if mask.any() else 0.0
    assert_same_tree(value, np.array(expected))
    if grad is not None:
        assert_same_tree(grad, np.array(2 * expected))


@pytest.mark.parametrize("order", ["strided", "contiguous"])
def test_N5_concat_stopped_early_has_zeros(front, order):
    x = np.arange(1.0, 7.0)
    micro = front.microbatch(lambda x: x, 0, 2, CONCAT, num_real_microbatches=1, order=order)
    rows = [0, 3] if order == "strided" else [0, 1]
    expected = np.where(np.isin(np.arange(6), rows), x, 0)
    assert_same_tree(front.results(micro(front.arrays(x))), expected)


@pytest.mark.parametrize("case", ["N6", "N7"])
def test_N6_N7_bfloat16_sums_do_not_lose_count(front, case):
    value = {"N6": 1e-3, "N7": 1.0}[case]
    ones = front.arrays(np.full(4096, value))
    half = ones.to(front.bfloat16) if front.name == "torch" else ones.astype(front.bfloat16)
    total = front.results(front.microbatch(lambda x: x.sum(), 0, 1, SUM)(half))
    assert total.dtype.name == "bfloat16"
    # bfloat16 has 1e-3 to three digits, and the sum to its own last place.
    assert float(total) == pytest.approx(4096 * value, rel=2.0**-7)


def test_N9_a_running_maximum_is_over_all_microbatches(front):
    x = np.array([1.0, 9.0, 2.0, 3.0])
    amax = front.microbatch(lambda x: front.xp.amax(x, 0), 0, 2, MAX, order="contiguous")
    assert float(amax(front.arrays(x))) == 9.0


def test_N11_zero_rows(front):
    x = np.zeros((0, 4))
    fun = lambda x: {"sum": x.sum(0), "mean": x.sum(0), "rows": x * 2}
    kinds = {"sum": SUM, "mean": MEAN, "rows": CONCAT}
    result = front.results(front.microbatch(fun, 0, 2, kinds)(front.arrays(x)))
    assert_same_tree(result, {"sum": np.zeros(4), "mean": np.zeros(4), "rows": np.zeros((0, 4))})


@pytest.mark.parametrize("kind", [MAX, MIN])
def test_N11_zero_rows_have_no_largest(front, kind):
    with pytest.raises(EmptyStream, match=f"{kind.name} of zero rows"):
        front.microbatch(lambda x: x.sum(0), 0, 2, kind)(front.arrays(np.zeros((0, 4))))


@pytest.mark.parametrize("kind", [MEAN, RUNNING_MEAN])
@pytest.mark.parametrize("size", [2, 4])
def test_N12_the_mean_of_integers_is_refused(front, kind, size):
    x = np.array([1, 2, 3, 4], np.int32)
    with pytest.raises(
        AccumulatorError, match=r"output\['n'\] has dtype (torch\.)?int\d+.*" + kind.name
    ):
        front.microbatch(lambda x: {"n": x.sum(0)}, 0, size, kind)(front.arrays(x))


@pytest.mark.parametrize("kind", [SUM, MEAN, RUNNING_MEAN, MAX])
def test_N13_a_nan_stays_a_nan(front, kind):
    x = np.array([1.0, np.nan, 3.0, 4.0])
    micro = front.microbatch(lambda x: x.sum(), 0, 1, kind, weight_fn=lambda x: 2.0)
    assert np.isnan(float(micro(front.arrays(x))))


def test_C1_negative_axes_are_resolved_leaf_by_leaf(front):
    rng = np.random.default_rng(0)
    batch = {"a": values(rng, 6), "b": values(rng, 2, 6), "c": values(rng, 3, 2, 6)}
    fun = lambda b: {"sum": (b["a"] + b["b"]).sum(), "more": (b["c"] * b["a"]).sum(-1)}
    micro = front.microbatch(fun, 0, 2, SUM, in_axes=-1)
    assert_same_tree(front.results(micro(front.arrays(batch))), fun(batch))


def test_C2_what_is_not_an_array_is_passed_through(front):
    x = np.arange(4.0)
    config = {"fn": abs, "none": None, "name": "relu", "scale": 3, "flag": True}

    def fun(config, x):
        assert config == {"fn": abs, "none": None, "name": "relu", "scale": 3, "flag": True}
        return (config["scale"] * x).sum()

    assert float(front.microbatch(fun, 1, 2)(config, front.arrays(x))) == 18.0


def test_C8_named_or_numbered_and_passed_either_way(front):
    x, y = np.arange(4.0), np.arange(4.0, 8.0)
    a, b = front.arrays((x, y))
    fun = lambda a, b, c: (a * b).sum() + c
    expected = (x * y).sum() + 2
    by_number = front.microbatch(fun, (0, 1), 4)
    for micro in (
        front.microbatch(fun, (0, 1), 4),
        front.microbatch(fun, (-3, -2), 4),
        front.microbatch(fun, 0, 4, argnames="b"),
        front.microbatch(fun, (), 4, argnames=("b", "a")),
    ):
        assert float(micro(a, b, 2)) == expected
        assert float(micro(a, b, c=2)) == expected
        assert float(micro(a, b=b, c=2)) == expected
        assert float(micro(c=2, b=b, a=a)) == expected
    assert float(by_number(a=a, b=b, c=2)) == expected


def test_C8_axes_follow_the_order_of_the_names(front):
    x, y = np.arange(8.0).reshape(4, 2), np.arange(8.0).reshape(2, 4) + 1
    a, b = front.arrays((x, y))
    fun = lambda a, b: front.xp.einsum("bi,ib->i", a, b)
    expected = np.einsum("bi,ib->i", x, y)
    for micro in (
        front.microbatch(fun, (0, 1), 2, in_axes=(0, 1)),
        front.microbatch(fun, (1, 0), 2, in_axes=(1, 0)),
        front.microbatch(fun, 0, 2, argnames="b", in_axes=(0, 1)),
        front.microbatch(fun, (), 2, argnames=("b", "a"), in_axes=(1, 0)),
    ):
        assert_same_tree(front.results(micro(a, b=b)), expected)


def test_C9_many_leaves(front):
    params = {f"p{i}": np.float64(i % 5) for i in range(300)}
    calls = []

    def fun(params, x):
        calls.append(len(params))
        return {name: value * x.sum() for name, value in params.items()}

    x = np.arange(4.0)
    result = front.results(front.microbatch(fun, 1, 2)(front.arrays(params), front.arrays(x)))
    assert float(result["p3"]) == 18.0
    # Evaluated or traced once per microbatch at most.
    assert len(calls) <= 2


@pytest.mark.parametrize(("size", "order"), [(1, "strided"), (5, "contiguous"), (5, "strided")])
def test_M7_the_function_never_sees_more_rows_than_a_microbatch(front, size, order):
    seen = []

    def fun(x):
        seen.append(x.shape[0])
        return x.sum(), x

    micro = front.microbatch(fun, 0, size, (SUM, CONCAT), order=order, remainder="allow")
    micro(front.arrays(np.arange(float(ROWS))))
    assert max(seen) == size


@pytest.mark.parametrize("kind", [SUM, MEAN])
def test_half_precision_results_have_their_own_dtype(front, kind):
    x = np.full(64, 0.125, np.float16)
    total = front.results(front.microbatch(lambda x: x.sum(), 0, 2, kind)(front.arrays(x)))
    assert total.dtype == np.float16
    assert float(total) == (8.0 if kind is SUM else 0.25)


def test_accumulator_dtype_decides_how_sums_are_held(front):
    x = np.array([1.0] + [2.0**-12] * 7, np.float16)
    of = lambda dtype: float(
        front.microbatch(lambda x: x.sum(), 0, 1, accumulator_dtype=dtype)(front.arrays(x))
    )
    half = front.xp.float16
    assert of(None) == float(np.float16(1 + 7 * 2.0**-12))
    assert of(half) == 1.0


def test_complex_means_are_fine(front):
    x = np.array([1 + 2j, 3 - 1j, 1j, 2.0], np.complex64)
    mean = front.microbatch(lambda x: x.mean(), 0, 2, MEAN)
    assert_same_tree(front.results(mean(front.arrays(x))), np.array(x.mean()))


def test_kinds_of_another_library_are_known_by_their_names(front):
    import enum

    class Kind(enum.Enum):
        MEAN = "average"
        CONCAT = "rows"

    x = np.arange(4.0)
    micro = front.microbatch(lambda x: (x.mean(), x), 0, 2, (Kind.MEAN, Kind.CONCAT))
    assert_same_tree(front.results(micro(front.arrays(x))), (np.array(1.5), x))


def test_without_a_size_it_is_the_function(front):
    fun = lambda x: x
    assert front.microbatch(fun, 0, None) is fun


def test_integers_keep_their_dtype_in_sums(front):
    x = np.array([100, 27, 1, 2], np.int8)
    total = front.microbatch(lambda x: x[0] + x[1], 0, 2, SUM)(front.arrays(x))
    assert front.results(total).dtype == np.int8


def test_all_kinds_are_numbered_as_promised():
    assert [(kind.name, kind.value) for kind in AccumulationType] == [
        ("MEAN", 1),
        ("SUM", 2),
        ("RUNNING_MEAN", 3),
        ("CONCAT", 4),
        ("MAX", 5),
        ("MIN", 6),
        ("LAST", 7),
    ]
