"""Comparing, and what a verification says."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch._errors import DifferentError
from microbatch._verification import (
    Cause,
    Leaf,
    Verification,
    agree,
    compare,
    explain,
    worst,
)


def value(array, path="", role="value"):
    return Leaf(path, role, np.asarray(array))


def one(whole, pieces, reference=None):
    (found,) = compare(
        [value(whole)], [value(pieces)], None if reference is None else [value(reference)]
    )
    return found


def verification(comparisons, causes=()):
    verdict = worst([c.verdict for c in comparisons])
    return Verification(
        "loss",
        "jax",
        8,
        8,
        2,
        verdict,
        tuple(comparisons),
        tuple(causes),
        explain(comparisons, verdict),
    )


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=50), st.integers(0, 2**32 - 1))
def test_sums_in_another_order_are_rounding(numbers, seed):
    wide = np.array(numbers, np.float64)
    forward, shuffled = np.float32(0), np.float32(0)
    for x in wide.astype(np.float32):
        forward += x
    for x in np.random.default_rng(seed).permutation(wide.astype(np.float32)):
        shuffled += x
    # Relative to what is summed, which is what a sum's rounding depends on.
    offset = np.abs(wide).sum() + 1
    found = one(np.float32(forward + offset), np.float32(shuffled + offset), wide.sum() + offset)
    assert found.verdict in ("exact", "rounding")


@given(st.floats(0.125, 1e3), st.floats(1e-3, 1))
def test_a_real_difference_is_never_rounding(size, relative):
    for reference in (None, np.float64(np.float32(size))):
        found = one(np.float32(size), np.float32(size * (1 + relative)), reference)
        assert found.verdict == "different"
        assert found.units > 1000


def test_bit_for_bit_is_exact():
    found = one(np.float32([1, np.nan, np.inf]), np.float32([1, np.nan, np.inf]))
    assert (found.verdict, found.difference, found.units) == ("exact", 0.0, 0.0)


def test_units_are_those_of_the_dtype_and_can_be_checked_by_hand():
    found = one(np.float32([1.0, 4.0]), np.float32([1.0, 4.0 + 2**-20]))
    assert found.units == 2**-20 / (2**-23 * 4) == 2.0
    assert found.verdict == "rounding"


@pytest.mark.parametrize(
    ("whole", "pieces"),
    [
        ([1.0, np.nan], [1.0, 2.0]),
        ([1.0, np.inf], [1.0, -np.inf]),
        ([1.0, 2.0], [1.0, np.nan]),
        ([1.0, 2.0], [1.0, 2.0, 3.0]),
    ],
)
def test_values_that_are_not_finite_or_shapes_that_differ_are_different(whole, pieces):
    assert one(np.float32(whole), np.float32(pieces)).verdict == "different"


def test_integers_do_not_round():
    assert one(np.int32([1, 2]), np.int32([1, 3])).verdict == "different"
    assert one(np.array([True]), np.array([True])).verdict == "exact"


def test_bfloat16_and_complex():
    narrow = lambda *numbers: np.array(numbers, ml_dtypes.bfloat16)
    assert one(narrow(1, 2), narrow(1, 2.015625)).verdict == "rounding"
    assert one(narrow(1, 2), narrow(1, 3)).verdict == "different"
    assert one(np.complex64([1 + 1j]), np.complex64([1 + 1.0000001j])).verdict == "rounding"
    assert one(np.complex64([1 + 1j]), np.complex64([1 - 1j])).verdict == "different"


def test_the_promise_is_twice_the_whole_batchs_error():
    exact = np.float64(1)
    assert one(np.float32(1 + 1e-4), np.float32(1 + 1.9e-4), exact).verdict == "rounding"
    assert one(np.float32(1 + 1e-4), np.float32(1 + 2.1e-4), exact).verdict == "different"


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_beside_the_others():
    big, zero, also = np.float32([1000.0]), np.float32([3e-6]), np.float32([-2e-6])
    leaves = lambda small: [value(big, "w", "gradient"), value(small, "b", "gradient")]
    found = compare(leaves(zero), leaves(also), None)
    assert [c.verdict for c in found] == ["exact", "rounding"]


def test_many_units_of_rounding_are_said_with_the_errors_that_allow_them():
    big, zero, also = np.float32([1000.0]), np.float32([3e-6]), np.float32([-2e-6])
    leaves = lambda small: [value(big, "w", "gradient"), value(small, "b", "gradient")]
    found = compare(leaves(zero), leaves(also), leaves(np.float32([0.0])))
    assert explain(found, "rounding").endswith(
        "in the gradient b; against float64 the whole batch is off by 3e-06, the microbatches by 2e-06."
    )
    few = compare([value(np.float32(1))], [value(np.float32(1 + 2e-7))], [value(1.0)])
    assert explain(few, "rounding").endswith("units of rounding of float32, in the value.")


def test_agree_can_say_no():
    assert agree([value(1.0)], [value(1.0 + 1e-15)]) == [True]
    assert agree([value(1.0)], [value(1.1)]) == [False]
    assert agree([value(1.0)], []) == [False]


def test_different_raises_and_has_an_exit_code():
    same = verification(compare([value(1.0)], [value(1.0)], None))
    assert same.raise_if_different() is same and same.exit_code == 0
    cause = Cause("sum_given_as_mean", "It is a sum.", "Use SUM.")
    other = verification(compare([value(4.0)], [value(1.0)], None), [cause])
    assert other.exit_code == 1
    with pytest.raises(DifferentError, match=r"It is a sum\.\nUse SUM\."):
        other.raise_if_different()


def test_it_prints_and_serialises():
    cause = Cause("sum_given_as_mean", "It is a <b>sum</b>.", "Use SUM.")
    found = verification(compare([value(4.0, "['a']")], [value(1.0)], [value(4.0)]), [cause])
    assert str(found) == (
        "verify(loss): 8 rows, 2 a microbatch\n"
        "\n"
        "               dtype   shape  difference     units  whole error  microbatched    verdict\n"
        "value ['a']  float64  scalar           3  3.38e+15            0             3  different\n"
        "\n"
        "Different: the value ['a'] is off by 3, 3.38e+15 units of rounding of float64; against float64 the whole "
        "batch is off by 0, the microbatches by 3.\n"
        "It is a <b>sum</b>.\n"
        "Use SUM."
    )
    assert json.loads(json.dumps(found.to_dict()))["causes"][0]["kind"] == "sum_given_as_mean"
    assert "<b>" not in found._repr_html_() and "&lt;b&gt;" in found._repr_html_()
