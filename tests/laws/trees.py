"""Comparing trees of arrays with an oracle's."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def assert_same_tree(
    actual: Any, expected: Any, *, units_of_rounding: float = 4, path: str = "result"
) -> None:
    """Asserts the same structure, shapes and values.

    Values may differ by `units_of_rounding` roundings of the dtype of `actual`, relative to the largest magnitude in
    the expected leaf: what a sum in another order may do. Zero units ask for the same bits, dtypes included.
    """
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{path}: {type(actual).__name__} is no mapping"
        assert set(actual) == set(expected), f"{path}: {sorted(actual)} against {sorted(expected)}"
        pairs = [(f"{path}[{key!r}]", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, tuple | list):
        assert isinstance(actual, type(expected)), f"{path}: {type(actual).__name__}"
        assert len(actual) == len(expected), f"{path}: {len(actual)} against {len(expected)}"
        pairs = [
            (f"{path}[{i}]", *pair) for i, pair in enumerate(zip(actual, expected, strict=True))
        ]
    elif expected is None:
        assert actual is None, f"{path}: {actual!r} against None"
        pairs = []
    else:
        _assert_same_leaf(np.asarray(actual), np.asarray(expected), units_of_rounding, path)
        pairs = []
    for inner, a, b in pairs:
        assert_same_tree(a, b, units_of_rounding=units_of_rounding, path=inner)


def _assert_same_leaf(actual: np.ndarray, expected: np.ndarray, units: float, path: str) -> None:
    assert actual.shape == expected.shape, f"{path}: {actual.shape} against {expected.shape}"
    if units == 0:
        assert actual.dtype == expected.dtype, f"{path}: {actual.dtype} against {expected.dtype}"
        assert actual.tobytes() == expected.tobytes(), f"{path}: {actual} against {expected}"
        return
    exact = actual.dtype.kind in "iub"
    finite = np.abs(expected[np.isfinite(expected)]).astype(np.float64)
    tolerance = 0 if exact else units * rounding(actual.dtype) * finite.max(initial=0)
    np.testing.assert_allclose(
        actual.astype(expected.dtype), expected, rtol=0, atol=tolerance, err_msg=path
    )


def rounding(dtype: np.dtype) -> float:
    """The unit of rounding of a floating or complex dtype, bfloat16 included."""
    if dtype.name == "bfloat16":
        return 2.0**-8
    return float(np.finfo(dtype).eps)
