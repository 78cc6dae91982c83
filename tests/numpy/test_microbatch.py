"""`microbatch` in NumPy: properties over all sizes, axes and kinds, and arrays that do not fit."""

import fractions
import tracemalloc
import warnings
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch import AccumulationType, Accumulator, AccumulatorError, BatchError, Carry
from microbatch.numpy import microbatch, reshape_batch_axis
from tests.laws.trees import assert_same_tree

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType
ORDERS = st.sampled_from(["strided", "contiguous"])


@st.composite
def splits(draw):
    """(rows, size): also sizes that do not divide, and sizes beyond the batch."""
    return draw(st.integers(1, 40)), draw(st.integers(1, 45))


def fractions_of(rows, seed=0):
    """Exact numbers: sums and means of them have no rounding, so a law about them is an equality."""
    rng = np.random.default_rng(seed)
    values = [fractions.Fraction(int(a), int(b)) for a, b in rng.integers(1, 50, (rows, 2))]
    return np.array(values, object)


@given(split=splits(), order=ORDERS)
def test_sums_and_rows_are_the_whole_batchs_exactly(split, order):
    rows, size = split
    x = fractions_of(rows)
    fun = lambda x: {"sum": x.sum(), "rows": x * x, "top": x.max(), "low": x.min()}
    kinds = {"sum": SUM, "rows": CONCAT, "top": MAX, "low": MIN}
    result = microbatch(fun, 0, size, kinds, order=order, remainder="allow")(x)
    whole = fun(x)
    assert result["sum"] == whole["sum"]
    assert (result["top"], result["low"]) == (whole["top"], whole["low"])
    assert result["rows"].tolist() == whole["rows"].tolist()


@given(split=splits(), order=ORDERS, seed=st.integers(0, 5))
def test_a_weighted_mean_is_the_whole_batchs_exactly(split, order, seed):
    rows, size = split
    x, weight = fractions_of(rows, seed), np.random.default_rng(seed).integers(0, 3, rows)
    mean = lambda x, w: (x * w).sum() / fractions.Fraction(int(w.sum()))
    micro = microbatch(
        mean, (0, 1), size, MEAN, weight_fn=lambda x, w: w.sum(), order=order, remainder="allow"
    )
    if weight.sum():
        assert micro(x, weight) == mean(x, weight)


@given(split=splits(), order=ORDERS, stop=st.integers(-1, 45))
def test_an_early_stop_sums_a_prefix_of_the_microbatches(split, order, stop):
    rows, size = split
    x = np.arange(1.0, rows + 1)
    parts = microbatch(lambda x: x.sum(), 0, size, CONCAT, order=order, remainder="allow")(x)
    parts = np.atleast_1d(parts)
    total = microbatch(
        lambda x: x.sum(), 0, size, order=order, remainder="allow", num_real_microbatches=stop
    )(x)
    assert total == parts[: max(stop, 0)].sum()


@given(
    split=splits(),
    axis=st.integers(-3, 2),
    order=ORDERS,
    dtype=st.sampled_from(["float64", "float32", "float16", "int16", "complex64", "bool"]),
)
def test_any_axis_and_dtype(split, axis, order, dtype):
    rows, size = split
    x = np.moveaxis(np.random.default_rng(0).integers(0, 4, (rows, 2, 3)), 0, axis).astype(dtype)
    fun = lambda x: np.moveaxis(x, axis, 0)
    micro = microbatch(fun, 0, size, CONCAT, in_axes=axis, order=order, remainder="allow")
    assert_same_tree(micro(x), fun(x), units_of_rounding=0)


@given(rows=st.integers(1, 12), size=st.integers(1, 12), axis=st.integers(-2, 1))
def test_reshape_batch_axis_holds_the_strided_microbatches(rows, size, axis):
    x = np.moveaxis(np.arange(rows * size * 2).reshape(rows * size, 2), 0, axis)
    pieces = reshape_batch_axis(x, size, axis)
    seen = []
    microbatch(lambda x: seen.append(x), 0, size, order="strided", in_axes=axis)(x)
    for i, piece in enumerate(seen):
        assert_same_tree(np.take(pieces, i, axis % 2), piece, units_of_rounding=0)


@given(st.lists(st.floats(-1e3, 1e3, width=16), min_size=1, max_size=64))
def test_half_precision_is_at_most_twice_as_wrong_as_the_whole_batch(numbers):
    x = np.array(numbers, np.float16)
    exact = x.astype(np.float64).sum()
    wrong = abs(float(microbatch(lambda x: x.sum(), 0, 1)(x)) - exact)
    whole = abs(float(x.sum(dtype=np.float32).astype(np.float16)) - exact)
    assert wrong <= 2 * whole + 2.0**-11 * abs(exact)


class Recorded:
    """An array that says which rows were asked for; not an `ndarray`, as data sets on disk are not."""

    def __init__(self, array):
        self.array, self.shape, self.asked = array, array.shape, []

    def __getitem__(self, index):
        self.asked.append(index[-1])
        return self.array[index]


def test_only_the_rows_of_one_microbatch_are_asked_for():
    data = Recorded(np.arange(10.0))
    assert microbatch(lambda x: x.sum(), 0, 4, remainder="allow")(data) == 45.0
    assert data.asked == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_a_batch_larger_than_memory():
    # 8 TiB of rows, all of them the same memory; a copy of the batch would fail.
    data = np.broadcast_to(np.arange(64.0), (2**34, 64))
    for order in ("strided", "contiguous"):
        micro = microbatch(lambda x: x.sum(), 0, 2**8, num_real_microbatches=3, order=order)
        assert float(micro(data)) == 3 * 2**8 * 2016.0


@pytest.mark.parametrize("order", ["strided", "contiguous"])
def test_memory_is_that_of_one_microbatch(tmp_path, order):
    rows, width, size = 4096, 128, 64
    data = np.memmap(tmp_path / "batch", np.float64, "w+", shape=(rows, width))
    out = np.memmap(tmp_path / "result", np.float64, "w+", shape=(rows, width))
    microbatch_bytes = size * width * 8
    micro = microbatch(
        lambda x: (x + 1, x.sum(0)), 0, size, (CONCAT, SUM), out=(out, None), order=order
    )
    tracemalloc.start()
    result, total = micro(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result is out
    assert (out == 1).all() and (total == 0).all()
    # One output and the buffers of its making, against 64 outputs in the batch.
    assert peak < 3 * microbatch_bytes


def test_the_accumulator_reuses_its_memory():
    size = 2**16
    micro = microbatch(lambda x: np.full(size, x[0]), 0, 1, MEAN, weight_fn=lambda x: 2)
    tracemalloc.start()
    micro(np.arange(10.0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The accumulator, one output, and the output times its weight.
    assert peak < 3.2 * size * 8


def test_out_takes_the_rows_of_any_number_of_outputs():
    x = np.arange(6.0).reshape(3, 2)
    fun = lambda x: {"a": x * 2, "b": (x.sum(), x[:, 0])}
    out = {"a": np.zeros((3, 2), np.float64), "b": (None, np.zeros(3, np.float32))}
    kinds = {"a": CONCAT, "b": (SUM, CONCAT)}
    for size in (1, 2, 3):
        result = microbatch(fun, 0, size, kinds, remainder="allow", out=out)(x)
        assert result["a"] is out["a"] and result["b"][1] is out["b"][1]
        assert out["a"].tolist() == (2 * x).tolist()
        assert out["b"][1].tolist() == [0.0, 2.0, 4.0]


def test_out_has_zeros_in_the_rows_that_did_not_run():
    out = np.full(6, np.nan)
    x = np.arange(1.0, 7.0)
    weight = lambda x: x[0] != 3
    microbatch(lambda x: x, 0, 2, CONCAT, out=out, weight_fn=weight, num_real_microbatches=2)(x)
    assert out.tolist() == [1, 2, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.zeros(5), "out for output is float64[5], and the result is float64[6]."),
        (np.zeros(6, int), "out for output is int64[6], and the result is float64[6]."),
        ({"a": np.zeros(6)}, "out does not fit the output"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out, words):
    with pytest.raises(AccumulatorError) as caught:
        microbatch(lambda x: x, 0, 2, CONCAT, out=out)(np.ones(6))
    assert words in str(caught.value)
    with pytest.raises(AccumulatorError, match="is not one CONCAT output"):
        microbatch(lambda x: x, 0, 2, SUM, out=np.zeros(2))(np.ones(6))


def test_an_out_that_later_microbatches_read_is_refused():
    double = lambda x, y=0: 2 * x
    x = np.arange(12.0).reshape(4, 3)
    for out, args, axis in [
        (x[1:], (x[:-1],), 0),
        (x, (x[:, :3].T[:, :4],), 1),
        (x, (x.copy(), x), 0),
    ]:
        with pytest.raises(AccumulatorError, match="out shares memory with an argument"):
            microbatch(double, 0, 1, CONCAT, out=out, in_axes=axis)(*args)
    columns = np.zeros((4, 6))
    microbatch(double, 0, 2, CONCAT, out=columns[:, 3:])(columns[:, :3])
    assert np.array_equal(
        microbatch(double, 0, 2, CONCAT, out=x)(x), 2 * np.arange(12.0).reshape(4, 3)
    )
    x.setflags(write=False)
    with pytest.raises(AccumulatorError, match="out for output is read-only"):
        microbatch(double, 0, 2, CONCAT, out=x)(np.zeros((4, 3)))


def test_a_mask_is_not_lost():
    x = np.ma.array(np.arange(4.0), mask=[0, 1, 0, 0])
    with pytest.raises(
        AccumulatorError, match="output is a masked array, whose mask would be lost"
    ):
        microbatch(lambda x: x, 0, 2, CONCAT)(x)
    split = lambda x: (x.filled(0), np.ma.getmaskarray(x))
    values, mask = microbatch(split, 0, 2, CONCAT)(x)
    assert np.array_equal(values, x.filled(0)) and np.array_equal(mask, x.mask)


@pytest.mark.parametrize("dtype", ["M8[D]", "m8[s]"])
def test_dates_and_durations(dtype):
    x = np.array([3, -5, 9, 1]).astype(dtype)
    assert (
        microbatch(np.max, 0, 2, MAX)(x) == x.max() and microbatch(np.min, 0, 2, MIN)(x) == x.min()
    )
    x[2] = "NaT"
    assert np.isnat(microbatch(np.max, 0, 2, MAX)(x))
    with pytest.raises(AccumulatorError, match="MEAN"):
        microbatch(np.max, 0, 2, MEAN)(x)


def test_outputs_that_are_pythons_own_numbers_stay_such():
    fun = lambda x: (float(x.sum()), int(x.sum()), complex(x.sum()), x.sum())
    for size in (2, 4):
        result = microbatch(fun, 0, size)(np.arange(4.0))
        assert [type(value) for value in result] == [float, int, complex, np.float64]
        assert result == (6.0, 6, 6 + 0j, 6.0)


def test_a_mean_of_floats_and_a_last_of_anything():
    fun = lambda x: {"mean": float(x.mean()), "name": f"rows from {x[0]:g}"}
    result = microbatch(fun, 0, 2, {"mean": MEAN, "name": LAST})(np.arange(4.0))
    assert result == {"mean": 1.5, "name": "rows from 2"}


def test_named_tuples_and_axes_by_leaf():
    Batch = namedtuple("Batch", ["x", "y"])
    batch = Batch(np.arange(8.0).reshape(2, 4), np.arange(4.0))
    fun = lambda b: Batch((b.x * b.y).sum(), b.y * 2)
    micro = microbatch(fun, 0, 2, Batch(SUM, CONCAT), in_axes=(Batch(1, 0),))
    result = micro(batch)
    assert isinstance(result, Batch)
    assert (result.x, result.y.tolist()) == ((batch.x * batch.y).sum(), [0, 2, 4, 6])


def test_an_axis_tree_that_does_not_fit():
    with pytest.raises(BatchError, match="in_axes does not fit x"):
        microbatch(lambda x: x, 0, 2, in_axes=({"a": 0},))((np.ones(4), np.ones(4)))


def test_bfloat16_is_held_in_float32():
    import ml_dtypes

    x = np.full(1024, 1.0, ml_dtypes.bfloat16)
    for kind, expected in ((SUM, 1024.0), (MEAN, 1.0), (RUNNING_MEAN, 1.0), (MAX, 1.0)):
        result = microbatch(lambda x: x.sum(), 0, 1, kind)(x)
        assert result.dtype == ml_dtypes.bfloat16
        assert float(result) == expected


def test_zero_rows_run_the_function_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = microbatch(lambda x: (x.mean(0), x / 0), 0, 2, (MEAN, CONCAT))(np.zeros((0, 3)))
    assert_same_tree(result, (np.zeros(3), np.zeros((0, 3))))


def test_the_rows_of_a_tail_may_be_other_than_its_share():
    fun = lambda x: np.repeat(x.sum(), 3)
    result = microbatch(fun, 0, 4, CONCAT, remainder="allow")(np.ones(10))
    assert result.tolist() == [4, 4, 4, 4, 4, 4, 2, 2, 2]


def test_an_infinite_mean_is_not_turned_into_nan():
    x = np.array([np.inf, 1.0, 2.0])
    for kind in (MEAN, RUNNING_MEAN):
        assert microbatch(lambda x: x.sum(), 0, 1, kind)(x) == np.inf


def test_extremes_of_complex_and_boolean_numbers():
    z = np.array([1 + 1j, 1 - 1j, 0 + 5j])
    assert microbatch(lambda z: z.max(), 0, 1, MAX)(z) == 1 + 1j
    assert microbatch(lambda z: z.min(), 0, 1, MIN)(z) == 5j
    flags = np.array([False, True, False])
    assert microbatch(lambda b: b.any(), 0, 1, MAX)(flags) == np.True_
    assert microbatch(lambda b: b.all(), 0, 1, MIN)(flags) == np.False_


def test_nan_survives_the_extremes():
    x = np.array([1.0, np.nan, 3.0])
    for kind in (MAX, MIN):
        assert np.isnan(microbatch(lambda x: x[0], 0, 1, kind)(x))


def test_two_states_and_a_sum():
    fun = lambda low, x, high: (min(low, x.min()), x.sum(), max(high, x.max()))
    micro = microbatch(fun, 1, 2, (Carry(0), SUM, Carry(-1)))
    assert micro(9.0, np.array([3.0, 4.0, 1.0, 8.0]), -9.0) == (1.0, 16.0, 8.0)
    assert micro(low=9.0, x=np.array([3.0, 4.0, 1.0, 8.0]), high=-9.0) == (1.0, 16.0, 8.0)


def test_a_structure_that_changes_is_refused():
    fun = lambda x: {"a": x.sum()} if x[0] == 0 else {"b": x.sum()}
    with pytest.raises(AccumulatorError, match=r"has output\['b'\] in one microbatch"):
        microbatch(fun, 0, 1)(np.arange(2.0))


def test_a_dtype_that_changes_is_refused():
    fun = lambda x: 1 if x[0] == 0 else 1.5
    with pytest.raises(AccumulatorError, match=r"float64\[\] in microbatch 1 and int64\[\] before"):
        microbatch(fun, 0, 1)(np.arange(2.0))


def test_the_type_that_an_accumulator_starts_from_has_no_values():
    specs = []

    def init(spec):
        specs.append(spec)
        return np.zeros_like(spec)

    own = Accumulator(init, lambda carry, x, i: carry + x, lambda carry: carry)
    result = microbatch(lambda x: x + 7, 0, 2, own)(np.ones(4, np.float32))
    assert result.tolist() == [16.0, 16.0]
    assert (specs[0].shape, specs[0].dtype, specs[0].any()) == ((2,), np.float32, np.False_)


def test_the_function_keeps_its_name_and_signature():
    def loss(params, batch):
        """Documented."""

    micro = microbatch(loss, 1, 2)
    assert (micro.__name__, micro.__doc__) == ("loss", "Documented.")
    assert microbatch(loss, 1, None) is loss
