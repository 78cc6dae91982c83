"""What is written is what is read, in one step, for the fold that it belongs to."""

import functools
import json
import os
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch import CheckpointError
from microbatch._checkpoint import (
    Checkpoint,
    Progress,
    function_words,
    leaves_digest,
    leaves_words,
)

IDENTITY = {"function": "f", "microbatch": "x: float32[4]"}
DTYPES = [
    "float64",
    "float32",
    "float16",
    "int8",
    "uint16",
    "bool",
    "complex64",
    "complex128",
    ">f4",
    "<U3",
    "M8[s]",
]


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_any_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    array = np.ones(shape, np.int8).astype(dtype)
    checkpoint = Checkpoint(tmp_path / "state", "f", IDENTITY)
    checkpoint.save(lambda: Progress(3, {"total": 0.1}, {"0.0": array}))
    position, numbers, arrays = checkpoint.load()
    assert (position, numbers) == (3, {"total": 0.1})
    assert arrays["0.0"].dtype == array.dtype.newbyteorder("=")
    assert arrays["0.0"].shape == shape
    assert (arrays["0.0"] == array).all()


@given(st.floats(allow_nan=False), st.integers())
def test_numbers_come_back_exactly(number, count):
    assert json.loads(json.dumps({"n": number, "c": count})) == {"n": number, "c": count}


def test_a_view_that_is_not_contiguous_comes_back(tmp_path):
    array = np.arange(12.0).reshape(3, 4).T[::2]
    checkpoint = Checkpoint(tmp_path / "state", "f", IDENTITY)
    checkpoint.save(lambda: Progress(1, {}, {"a": array}))
    assert (checkpoint.load().arrays["a"] == array).all()


def test_no_file_is_no_progress(tmp_path):
    checkpoint = Checkpoint(tmp_path / "state", "f", IDENTITY)
    assert checkpoint.load() is None
    checkpoint.remove()


def test_a_file_of_another_fold_is_refused_with_both(tmp_path):
    Checkpoint(tmp_path / "state", "f", IDENTITY).save(lambda: Progress(1, {}, {}))
    other = Checkpoint(tmp_path / "state", "accumulate(g)", {**IDENTITY, "function": "g"})
    with pytest.raises(CheckpointError) as caught:
        other.load()
    assert str(caught.value) == (
        f"accumulate(g): {tmp_path / 'state'} is a checkpoint of another function.\n"
        "  saved: f\n  now:   g\n"
        "Go on with what it was made with, or delete the file to start anew."
    )


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, step):
    checkpoint = Checkpoint(tmp_path / "state", "f", IDENTITY, time_share=float("inf"))
    checkpoint.save(lambda: Progress(1, {}, {}))

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(lambda: Progress(2, {}, {}))
    assert checkpoint.load().position == 1
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_saving_takes_a_share_of_the_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("microbatch._checkpoint.time", SimpleNamespace(monotonic=lambda: now[0]))

    def progress():
        now[0] += 1.0
        return Progress(1, {}, {})

    checkpoint = Checkpoint(tmp_path / "state", "f", IDENTITY, time_share=0.05)
    saved = []
    for moment in (0.0, 5.0, 20.9, 21.1, 22.0):
        now[0] = moment
        saved.append(checkpoint.due)
        if checkpoint.due:
            checkpoint.save(progress)
    # The first took one second, so the next is due after twenty more.
    assert saved == [True, False, False, True, False]


def test_words_change_with_the_program():
    make = lambda text: eval(text)
    one, same, other = make("lambda x: x + 1"), make("lambda x: x + 1"), make("lambda x: x + 2")
    assert function_words(one) == function_words(same)
    assert function_words(one) != function_words(other)
    nested = lambda inner: eval(f"lambda x: (lambda y: y + {inner})(x)")
    assert function_words(nested(1)) != function_words(nested(2))

    closed = lambda held: lambda x: x + held
    kept = lambda held: functools.partial(lambda scale, x: scale * x, held)
    given = lambda held: lambda x, scale=held: scale * x
    through = lambda held: closed(closed(held))
    for holding in (closed, kept, given, through):
        for left, right in ((1, 2), ("a", "b"), (np.ones(2), np.zeros(2)), ((1, 2.0), (1, 3.0))):
            assert function_words(holding(left)) == function_words(holding(left))
            assert function_words(holding(left)) != function_words(holding(right))
        assert function_words(holding([1])) == function_words(holding([2]))  # a log, perhaps

    def itself(x):
        return itself(x - 1) if x else x

    assert function_words(itself) == function_words(itself)

    class Callable:
        def __call__(self, x):
            return x

    assert function_words(Callable()) == function_words(Callable())
    assert function_words(len).endswith("len")


def test_digests_change_with_the_values():
    leaves = lambda *values: [(f"a[{i}]", value) for i, value in enumerate(values)]
    x = np.arange(3.0)
    same = leaves_digest(leaves(x, 2, "s"))
    assert same == leaves_digest(leaves(x.copy(), 2, "s"))
    for other in (
        leaves(x + 1, 2, "s"),
        leaves(x, 3, "s"),
        leaves(x, 2, "t"),
        leaves(x[:2], 2, "s"),
    ):
        assert leaves_digest(other) != same
    assert leaves_words(leaves(x, 2)) == "a[0]: float64[3], a[1]: int"


def test_safetensors_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'microbatch\[checkpoint\]'"):
        Checkpoint(tmp_path / "state", "f", IDENTITY).save(lambda: Progress(1, {}, {}))
