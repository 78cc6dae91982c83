"""The comparison that every law relies on can fail, in each way."""

import numpy as np
import pytest

from tests.laws.trees import assert_same_tree

EXPECTED = {"a": np.array([1.0, 2.0]), "b": (np.array(3.0), None, [np.array([1, 2])])}


def changed(**parts):
    return {**EXPECTED, **parts}


def test_a_tree_is_the_same_as_itself():
    assert_same_tree(EXPECTED, EXPECTED)
    assert_same_tree(EXPECTED, EXPECTED, units_of_rounding=0)


def test_rounding_is_allowed_only_where_it_is_asked_for():
    nearly = changed(a=np.array([1.0, np.nextafter(2.0, 3.0)]))
    assert_same_tree(nearly, EXPECTED)
    with pytest.raises(AssertionError):
        assert_same_tree(nearly, EXPECTED, units_of_rounding=0)


@pytest.mark.parametrize(
    "other",
    [
        changed(a=np.array([1.0, 2.00001])),
        changed(a=np.array([1.0, np.nan])),
        changed(a=np.array([1.0, np.inf])),
        changed(a=np.array([1.0])),
        changed(a=np.array([[1.0, 2.0]])),
        changed(b=(np.array(3.0), None, [np.array([1, 3])])),
        changed(b=(np.array(3.0), 0.0, [np.array([1, 2])])),
        changed(b=[np.array(3.0), None, [np.array([1, 2])]]),
        changed(b=(np.array(3.0), None, [])),
        changed(c=np.array(0.0)),
        {"a": EXPECTED["a"]},
        (EXPECTED["a"], EXPECTED["b"]),
    ],
)
def test_any_difference_is_found(other):
    with pytest.raises(AssertionError):
        assert_same_tree(other, EXPECTED)


@pytest.mark.parametrize("other", [np.array([1.0, 2.0], np.float32), np.array([1.0, -0.0])])
def test_zero_units_of_rounding_are_bits_and_dtypes(other):
    with pytest.raises(AssertionError):
        assert_same_tree(other, np.array([1.0, abs(other[1])]), units_of_rounding=0)
