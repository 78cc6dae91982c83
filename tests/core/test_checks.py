"""Finding batch arguments in a call, however they are declared and passed."""

import functools
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch import BatchError, MicrobatchSizeError
from microbatch._checks import (
    Leaf,
    Slot,
    as_argnames,
    as_argnums,
    batch_size_of,
    check_declared,
    check_size,
    locate,
    name_of,
    per_argument,
    signature_words,
)

NAMES = ("a", "b", "c", "d")


def function(a, b, c, d):
    """Called in every way below."""


@given(
    positional=st.integers(0, 4),
    chosen=st.sets(st.sampled_from(NAMES), min_size=1),
    by_name=st.sets(st.sampled_from(NAMES)),
    negative=st.booleans(),
)
def test_the_same_arguments_are_found_however_declared_and_passed(
    positional, chosen, by_name, negative
):
    args = NAMES[:positional]
    kwargs = {name: name for name in NAMES[positional:]}
    numbers = [NAMES.index(n) - 4 * negative for n in NAMES if n in chosen - by_name]
    names = tuple(n for n in NAMES if n in chosen & by_name)
    slots = locate("f", inspect.signature(function), tuple(numbers), names, args, kwargs)
    assert {slot.name for slot in slots} == chosen
    for slot in slots:
        assert (args[slot.key] if isinstance(slot.key, int) else kwargs[slot.key]) == slot.name


def test_functions_without_a_signature_are_located_by_position():
    assert locate("f", None, (1,), (), (1, 2), {}) == (Slot(1, "args[1]"),)
    assert locate("f", None, (-1,), ("x",), (1, 2), {"x": 3}) == (
        Slot(1, "args[1]"),
        Slot("x", "x"),
    )


def test_open_ended_functions_take_any_number():
    def fun(*args, **kwargs):
        """Open at both ends."""

    check_declared("microbatch(fun)", inspect.signature(fun), (7, -3), ("anything",))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None, 1.5])
def test_C3_what_is_no_size(value):
    with pytest.raises(MicrobatchSizeError, match="microbatch_size="):
        check_size("f", "microbatch_size", value)


def test_C3_what_is_a_size():
    import numpy as np

    for value in (1, np.int64(3), np.uint8(7)):
        size = check_size("f", "microbatch_size", value)
        assert (size, type(size)) == (int(value), int)
    with pytest.raises(MicrobatchSizeError):
        check_size("f", "microbatch_size", np.bool_(True))


@pytest.mark.parametrize("value", [1.0, "0", (0, True), [None], ("a",)])
def test_numbers_that_are_none(value):
    with pytest.raises(BatchError, match="argnums="):
        as_argnums("f", value)


def test_names_that_are_none():
    assert as_argnames("f", "xy") == ("xy",)
    with pytest.raises(BatchError, match="holds 3"):
        as_argnames("f", ("x", 3))


def test_one_axis_stands_for_all():
    slots = (Slot(0, "a"), Slot(1, "b"))
    assert per_argument("f", "in_axes", 1, slots) == (1, 1)
    assert per_argument("f", "in_axes", (0, -1), slots) == (0, -1)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4))
def test_the_batch_size_is_the_common_number_of_rows(leaves):
    made = [Leaf(f"x[{i}]", (5, 2 + n), -2 if neg else 0) for i, (n, neg) in enumerate(leaves)]
    assert batch_size_of("f", made) == (5, "x[0] along axis " + str(made[0].axis))
    with pytest.raises(BatchError, match=r"y: 6 along axis 0 of shape \(6,\)"):
        batch_size_of("f", [*made, Leaf("y", (6,), 0)])


@pytest.mark.parametrize("axis", [True, 0.0, "0", None])
def test_an_axis_is_an_integer(axis):
    with pytest.raises(BatchError, match="for its axis of rows"):
        batch_size_of("f", [Leaf("x", (2, 2), axis)])


def test_a_function_is_called_by_its_own_name():
    class Model:
        def __call__(self, x):
            """A callable object."""

    wrapped = functools.partial(functools.partial(function, 1), 2)
    assert name_of(wrapped) == "function"
    assert name_of(Model()) == "Model"
    assert signature_words(inspect.signature(lambda a, *, b=3: 0)) == "(a, *, b=3)"
