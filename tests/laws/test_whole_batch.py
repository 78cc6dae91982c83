"""Any microbatch size gives the whole batch, in every front; the oracle is NumPy in float64."""

import numpy as np
import pytest

from tests.laws.cases import CASES, CONCAT, LAST, MEAN, ROWS, RUNNING_MEAN, SUM, values
from tests.laws.trees import assert_same_tree

SPLITS = [
    (1, "strided"),
    (3, "contiguous"),
    (3, "strided"),
    (5, "contiguous"),
    (5, "strided"),
    (20, "contiguous"),
]


def rows_of(index, size, order, batch_size=ROWS):
    """Which rows microbatch `index` holds, from the definition."""
    full = batch_size // size
    if index == full:
        return list(range(full * size, batch_size))
    if order == "strided":
        return list(range(index, full * size, full))
    return list(range(index * size, (index + 1) * size))


def microbatched(front, case, size, **options):
    """The result of the case in one front, as NumPy arrays."""
    options = {"in_axes": case.in_axes, "remainder": "allow", **options}
    args = case.args(np.random.default_rng(0))
    fun = lambda *args: case.fun(front.xp, *args)
    micro = front.microbatch(fun, case.argnums, size, case.accumulator, **options)
    return front.results(micro(*front.arrays(args)))


@pytest.mark.parametrize(("size", "order"), SPLITS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_size_gives_the_whole_batch(front, case, size, order):
    pieces = microbatched(front, case, size, order=order)
    assert_same_tree(pieces, case.whole(case.args(np.random.default_rng(0))), units_of_rounding=8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("size", [ROWS, 20])
def test_N10_one_microbatch_is_the_function_itself(front, case, size):
    args = front.arrays(case.args(np.random.default_rng(0)))
    whole = front.results(case.fun(front.xp, *args))
    assert_same_tree(microbatched(front, case, size), whole, units_of_rounding=0)


@pytest.mark.parametrize("count", [1, 3, 5, 12, 50])
def test_num_microbatches_is_an_upper_bound(front, count):
    x = values(np.random.default_rng(0), ROWS, 3)
    seen = []

    def fun(x):
        seen.append(x.shape[0])
        return x * 2

    micro = front.microbatch(
        fun, 0, None, CONCAT, num_microbatches=count, remainder="allow", order="contiguous"
    )
    assert_same_tree(front.results(micro(front.arrays(x))), (2 * x), units_of_rounding=1)
    assert max(seen) == -(-ROWS // count)


@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("size", [4, 5])
def test_a_microbatch_holds_the_rows_that_its_order_says(front, size, order):
    x = np.arange(float(ROWS))
    sums = lambda x: x.sum()
    micro = front.microbatch(sums, 0, size, CONCAT, order=order, remainder="allow")
    count = -(-ROWS // size)
    expected = np.array([x[rows_of(i, size, order)].sum() for i in range(count)])
    assert_same_tree(front.results(micro(front.arrays(x))), expected, units_of_rounding=0.0001)


def test_the_default_order_is_the_fronts_own(front):
    x = np.arange(6.0)
    sums = front.results(front.microbatch(lambda x: x.sum(), 0, 2, CONCAT)(front.arrays(x)))
    expected = [3.0, 5.0, 7.0] if front.name == "jax" else [1.0, 5.0, 9.0]
    assert sums.tolist() == expected


@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("k", [-1, 0, 1, 2, 3, 7])
def test_an_early_stop_is_the_rows_that_ran(front, k, order):
    size, count = 4, 3
    x = values(np.random.default_rng(1), ROWS, 2)
    ran = min(max(k, 0), count)
    parts = [x[rows_of(i, size, order)] for i in range(ran)]
    fun = lambda x: {
        "sum": x.sum(0),
        "mean": x.mean(0),
        "ran": x.mean(0),
        "rows": x,
        "last": x.sum(0),
    }
    kinds = {"sum": SUM, "mean": MEAN, "ran": RUNNING_MEAN, "rows": CONCAT, "last": LAST}
    micro = front.microbatch(fun, 0, size, kinds, num_real_microbatches=k, order=order)
    rows = np.zeros_like(x)
    for i, part in enumerate(parts):
        rows[rows_of(i, size, order)] = part
    zeros = np.zeros(2)
    expected = {
        "sum": sum((p.sum(0) for p in parts), zeros),
        "mean": sum((p.mean(0) for p in parts), zeros) / count,
        "ran": sum((p.mean(0) for p in parts), zeros) / max(ran, 1),
        "rows": rows,
        "last": parts[-1].sum(0) if parts else zeros,
    }
    assert_same_tree(front.results(micro(front.arrays(x))), expected)


def test_nesting_changes_nothing(front):
    x = values(np.random.default_rng(2), ROWS, 3)
    fun = lambda x: {"sum": x.sum(0), "rows": x * x}
    kinds = {"sum": SUM, "rows": CONCAT}
    inner = front.microbatch(fun, 0, 2, kinds)
    outer = front.microbatch(inner, 0, 6, kinds)
    assert_same_tree(front.results(outer(front.arrays(x))), fun(x))


def test_reshape_batch_axis_is_the_strided_order(front):
    x = values(np.random.default_rng(3), 2, 6, 3)
    pieces = front.results(front.module.reshape_batch_axis(front.arrays({"x": x}), 2, -2))["x"]
    expected = np.stack([x[:, [i, i + 3]] for i in range(3)], axis=1)
    assert_same_tree(pieces, expected, units_of_rounding=0.0001)
