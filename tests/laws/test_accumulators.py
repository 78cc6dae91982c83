"""Weights, carried state and one's own accumulators mean the same in every front."""

import numpy as np
import pytest

from microbatch import Accumulator, Carry
from tests.laws.cases import CONCAT, LAST, MAX, MEAN, ROWS, RUNNING_MEAN, SUM, values
from tests.laws.trees import assert_same_tree


def masked_mean(xp, x, mask):
    """The mean over valid entries; 0/0 where there is none."""
    return (x * mask).sum() / mask.sum()


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("kind", [MEAN, RUNNING_MEAN])
def test_weights_make_a_mean_of_unequal_means_the_whole_mean(front, kind, size):
    rng = np.random.default_rng(0)
    x, mask = values(rng, ROWS), (rng.random(ROWS) < 0.6).astype(float)
    micro = front.microbatch(
        lambda x, mask: masked_mean(front.xp, x, mask),
        (0, 1),
        size,
        kind,
        weight_fn=lambda x, mask: mask.sum(),
        remainder="allow",
    )
    expected = np.array((x * mask).sum() / mask.sum())
    assert_same_tree(front.results(micro(*front.arrays((x, mask)))), expected, units_of_rounding=8)


def test_a_microbatch_of_weight_zero_reaches_nothing(front):
    x = np.array([1.0, 2.0, np.nan, np.inf, 5.0, 6.0])
    weight = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    fun = lambda x, w: {
        "mean": x.mean(),
        "sum": x.sum(),
        "max": front.xp.amax(x, 0),
        "rows": x,
        "last": x[0],
    }
    kinds = {"mean": MEAN, "sum": SUM, "max": MAX, "rows": CONCAT, "last": LAST}
    micro = front.microbatch(
        fun, (0, 1), 2, kinds, weight_fn=lambda x, w: w.sum(), order="contiguous"
    )
    expected = {
        "mean": np.array(3.5),
        "sum": np.array(14.0),
        "max": np.array(6.0),
        "rows": np.array([1.0, 2.0, 0.0, 0.0, 5.0, 6.0]),
        "last": np.array(5.0),
    }
    assert_same_tree(front.results(micro(*front.arrays((x, weight)))), expected)


def test_a_total_weight_of_zero_gives_zeros(front):
    x = np.array([np.nan, 2.0, 3.0, 4.0])
    fun = lambda x: (x.mean(), x.sum(), x)
    micro = front.microbatch(fun, 0, 2, (MEAN, SUM, CONCAT), weight_fn=lambda x: 0.0)
    expected = (np.array(0.0), np.array(0.0), np.zeros(4))
    assert_same_tree(front.results(micro(front.arrays(x))), expected)


def test_an_early_stop_with_weights_divides_by_those_that_ran(front):
    x, weight = np.array([1.0, 3.0, 100.0]), np.array([1.0, 3.0, 5.0])
    micro = front.microbatch(
        lambda x, w: x.mean(),
        (0, 1),
        1,
        MEAN,
        weight_fn=lambda x, w: w.sum(),
        num_real_microbatches=2,
        order="contiguous",
    )
    assert_same_tree(front.results(micro(*front.arrays((x, weight)))), np.array(2.5))


def test_a_state_is_carried_from_microbatch_to_microbatch(front):
    x = values(np.random.default_rng(0), ROWS)
    state = {"count": np.float64(0), "largest": np.float64(-100)}

    def fun(x, state):
        largest = front.xp.maximum(state["largest"], front.xp.amax(x, 0))
        return (x * state["count"]).sum(), {"count": state["count"] + 1, "largest": largest}

    micro = front.microbatch(fun, 0, 4, (SUM, Carry(1)), order="contiguous")
    total, after = front.results(micro(*front.arrays((x, state))))
    expected = sum((i * x[4 * i : 4 * i + 4]).sum() for i in range(3))
    assert_same_tree(total, np.array(expected))
    assert_same_tree(after, {"count": np.array(3.0), "largest": np.array(x.max())})


def test_a_carried_state_is_left_alone_by_a_skipped_microbatch(front):
    x, weight = np.arange(6.0), np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    fun = lambda x, w, state: (x.sum(), state + x.sum())
    micro = front.microbatch(
        fun, (0, 1), 2, (SUM, Carry(2)), weight_fn=lambda x, w, state: w.sum(), order="contiguous"
    )
    total, state = front.results(micro(*front.arrays((x, weight, np.float64(10.0)))))
    assert (float(total), float(state)) == (6.0, 16.0)


def test_ones_own_accumulator_folds_as_its_program_says(front):
    x = values(np.random.default_rng(0), ROWS, 2)
    xp = front.xp
    # The running largest exponential sum, as a stable log-sum-exp would hold it.
    logsumexp = Accumulator(
        init=lambda spec: front.arrays((np.float64(-1e30), np.float64(0))),
        update=lambda carry, value, index: (
            xp.maximum(carry[0], value[0]),
            carry[1] * xp.exp(carry[0] - xp.maximum(carry[0], value[0]))
            + value[1] * xp.exp(value[0] - xp.maximum(carry[0], value[0])),
        ),
        finalize=lambda carry: carry[0] + xp.log(carry[1]),
    )
    fun = lambda x: {
        "lse": (xp.amax(x.reshape(-1), 0), xp.exp(x - xp.amax(x.reshape(-1), 0)).sum())
    }
    micro = front.microbatch(fun, 0, 3, {"lse": logsumexp})
    result = front.results(micro(front.arrays(x)))
    assert_same_tree(result, {"lse": np.log(np.exp(x).sum())})


def test_ones_own_accumulator_is_told_the_weight_of_a_smaller_microbatch(front):
    x = values(np.random.default_rng(0), 7)
    mean = Accumulator(
        init=lambda spec: front.arrays(np.zeros(2)),
        update=lambda carry, value, index, weight: (
            carry + front.xp.stack([value * weight, value * 0 + weight])
        ),
        finalize=lambda carry: carry[0] / carry[1],
    )
    micro = front.microbatch(lambda x: x.mean(), 0, 3, mean, remainder="allow")
    assert_same_tree(front.results(micro(front.arrays(x))), np.array(x.mean()))


def test_objects_with_the_four_attributes_are_accumulators(front):
    class Largest:
        init = staticmethod(lambda spec: front.arrays(np.float64(-1e30)))
        update = staticmethod(lambda carry, value, index: front.xp.maximum(carry, value))
        finalize = staticmethod(lambda carry: carry)
        aggregate = staticmethod(lambda stacked: stacked)

    x = values(np.random.default_rng(0), ROWS)
    micro = front.microbatch(lambda x: front.xp.amax(x, 0), 0, 4, Largest())
    assert_same_tree(front.results(micro(front.arrays(x))), np.array(x.max()))


@pytest.mark.parametrize("order", ["strided", "contiguous"])
def test_concat_takes_scalars_and_any_number_of_rows(front, order):
    x = np.arange(6.0)
    fun = lambda x: (x.sum(), x.sum().reshape(1))
    micro = front.microbatch(fun, 0, 2, CONCAT, order=order)
    expected = np.array([3.0, 5.0, 7.0] if order == "strided" else [1.0, 5.0, 9.0])
    assert_same_tree(front.results(micro(front.arrays(x))), (expected, expected))
