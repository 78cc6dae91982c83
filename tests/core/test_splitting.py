"""Where microbatches start and end, over all sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch import MicrobatchSizeError
from microbatch._splitting import Split, divisors, make_split

SIZES = st.integers(0, 60), st.integers(1, 70)
ORDERS = st.sampled_from(["strided", "contiguous"])


@given(*SIZES, ORDERS)
def test_microbatches_hold_every_row_once(batch_size, size, order):
    split = Split(batch_size, size, order)
    rows = list(range(batch_size))
    parts = [rows[split.rows(i)] for i in range(split.num_microbatches)]
    assert sorted(row for part in parts for row in part) == rows
    assert [len(part) for part in parts] == [split.size(i) for i in range(split.num_microbatches)]
    assert all(0 < len(part) <= size for part in parts)


@given(*SIZES, ORDERS)
def test_only_the_last_is_smaller_and_it_has_the_last_rows(batch_size, size, order):
    split = Split(batch_size, size, order)
    assert split.full * size + split.tail == batch_size
    if split.tail:
        last = list(range(batch_size))[split.rows(split.full)]
        assert last == list(range(batch_size - split.tail, batch_size))


@given(*SIZES)
def test_a_size_is_refused_exactly_where_it_leaves_a_tail(batch_size, size):
    if batch_size % size:
        with pytest.raises(MicrobatchSizeError, match="divisible"):
            make_split(batch_size, size)
        assert make_split(batch_size, size, remainder="allow").tail == batch_size % size
    else:
        assert make_split(batch_size, size).tail == 0


@given(st.integers(1, 60), st.integers(1, 70))
def test_a_count_is_an_upper_bound_and_its_size_the_smallest(batch_size, count):
    split = make_split(batch_size, None, count, remainder="allow")
    assert split.num_microbatches <= count
    if split.microbatch_size > 1:
        assert -(-batch_size // (split.microbatch_size - 1)) > count


@given(st.integers(1, 200), st.integers(1, 220))
def test_the_advice_divides_and_the_nearest_size_is_in_it(batch_size, size):
    if batch_size % size == 0:
        return
    with pytest.raises(MicrobatchSizeError) as caught:
        make_split(batch_size, size)
    words = str(caught.value).split("Use ")[1].split(", or remainder")[0]
    advised = [int(word) for word in words.replace(" or ", ", ").split(", ")]
    assert all(batch_size % d == 0 for d in advised)
    assert min(divisors(batch_size), key=lambda d: (abs(d - size), d)) in advised


@given(st.integers(1, 500))
def test_divisors_are_those_that_divide(number):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_neither_size_nor_count():
    with pytest.raises(MicrobatchSizeError, match="give microbatch_size or num_microbatches"):
        make_split(4, None)
