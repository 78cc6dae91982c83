"""`accumulate` in NumPy: streams, what is saved of them, and what survives a kill."""

import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from microbatch import (
    AccumulationType,
    Accumulator,
    AccumulatorError,
    BatchError,
    Carry,
    EmptyStream,
)
from microbatch.numpy import accumulate

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType
WORKER = Path(__file__).with_name("_worker_stream.py")


def run_worker(folder, kill_after):
    return subprocess.run([sys.executable, WORKER, folder, str(kill_after)], check=False).returncode


def test_a_run_killed_again_and_again_continues_bit_for_bit(tmp_path):
    once, often = tmp_path / "once", tmp_path / "often"
    once.mkdir()
    often.mkdir()
    assert run_worker(once, -1) == 0
    for kill_after in (1, 2, 7, 13, 19):
        assert run_worker(often, kill_after) == -signal.SIGKILL
        assert (often / "state").exists()
    assert run_worker(often, -1) == 0
    assert not (often / "state").exists()
    assert (once / "result.npz").read_bytes() == (often / "result.npz").read_bytes()


def test_one_element_is_the_function_itself_bit_for_bit():
    # Among so many numbers are some for which x · 0.7 / 0.7 is not x.
    x = np.array([-0.0, *np.random.default_rng(0).random(100)])
    fun = lambda x: {
        "sum": x,
        "mean": x / 3,
        "ran": x,
        "rows": x,
        "top": x,
        "float": float(x[1]),
        "last": "text",
    }
    kinds = {
        "sum": SUM,
        "mean": MEAN,
        "ran": RUNNING_MEAN,
        "rows": CONCAT,
        "top": MAX,
        "float": SUM,
        "last": LAST,
    }
    result = accumulate(fun, kinds, weight_fn=lambda x: 0.7)(microbatches=[(x,)])
    for name, expected in fun(x).items():
        assert type(result[name]) is type(expected)
        assert np.asarray(result[name]).tobytes() == np.asarray(expected).tobytes(), name


def test_only_one_microbatch_is_alive_at_a_time():
    alive, most = set(), []

    class Rows(np.ndarray):
        pass

    def stream():
        for i in range(6):
            rows = np.ones((3, 2)).view(Rows)
            alive.add(i)
            weakref.finalize(rows, alive.discard, i)
            most.append(len(alive))
            yield (rows,)
            del rows

    assert accumulate(lambda x: float(x.sum()))(microbatches=stream()) == 36.0
    assert max(most) == 1


def test_a_buffer_that_the_stream_reuses_is_no_trap():
    buffer = np.empty(2)

    def stream():
        for i in range(3):
            buffer[:] = i
            yield (buffer,)

    rows, last = accumulate(lambda x: (x, x.sum()), (CONCAT, LAST))(microbatches=stream())
    assert rows.tolist() == [0, 0, 1, 1, 2, 2]
    assert float(last) == 4.0


def test_a_skipped_microbatch_leaves_zero_rows():
    stream = [(np.array([np.nan]),), (np.array([1.0, 2.0]),), (np.array([np.nan, np.nan, np.nan]),)]
    fold = accumulate(
        lambda x: (np.repeat(x, 2), x.sum()), (CONCAT, SUM), weight_fn=lambda x: x[0] == 1
    )
    rows, total = fold(microbatches=stream)
    assert rows.tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0]
    assert float(total) == 3.0


def test_a_microbatch_without_rows_has_no_weight():
    stream = [(np.zeros((0, 2)),), (np.ones((3, 2)),), (np.zeros((0, 2)),)]
    mean, rows = accumulate(lambda x: (x.mean(0), x), (MEAN, CONCAT))(microbatches=stream)
    assert mean.tolist() == [1.0, 1.0]
    assert rows.shape == (3, 2)


def test_ones_own_accumulator_is_told_the_weights():
    seen = []

    def update(carry, value, index, weight):
        seen.append((index, weight))
        return carry + value

    own = Accumulator(lambda spec: np.zeros_like(spec), update, lambda carry: carry)
    stream = [(np.ones(3),), (np.ones(3),), (np.ones(1),)]
    assert float(accumulate(lambda x: x.sum(), own)(microbatches=stream)) == 7.0
    assert seen == [(0, 3), (1, 3), (2, 1)]


def test_ones_own_accumulator_without_weights_needs_equal_rows():
    own = Accumulator(lambda spec: 0.0, lambda carry, x, i: carry + x, lambda carry: carry)
    with pytest.raises(AccumulatorError, match="fewer rows"):
        accumulate(lambda x: x.sum(), own)(microbatches=[(np.ones(3),), (np.ones(2),)])


def test_ones_own_state_is_saved_with_its_types(tmp_path, monkeypatch):
    monkeypatch.setattr("microbatch._checkpoint.time", SimpleNamespace(monotonic=lambda: 0.0))
    own = Accumulator(
        init=lambda spec: {"count": 0, "values": np.zeros(2), "name": "n"},
        update=lambda c, x, i: {
            "count": c["count"] + 1,
            "values": c["values"] + x,
            "name": f"n{i}",
        },
        finalize=lambda c: c,
    )

    def stream(stop):
        for i in range(4):
            if i == stop:
                raise InterruptedError
            yield (np.full(2, float(i)),)

    fold = accumulate(lambda state, x: (x, state + 1), (own, Carry(0)))
    with pytest.raises(InterruptedError):
        fold(5, microbatches=stream(3), checkpoint=tmp_path / "state")
    result, state = fold(5, microbatches=stream(9), checkpoint=tmp_path / "state")
    assert result["count"] == 4 and type(result["count"]) is int
    assert result["values"].tolist() == [6.0, 6.0]
    assert (result["name"], state) == ("n3", 9)


def test_a_shorter_stream_than_the_saved_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("microbatch._checkpoint.time", SimpleNamespace(monotonic=lambda: 0.0))

    def stream():
        yield (np.ones(2),)
        yield (np.ones(2),)
        raise InterruptedError

    fold = accumulate(lambda x: x.sum())
    with pytest.raises(InterruptedError):
        fold(microbatches=stream(), checkpoint=tmp_path / "state")
    with pytest.raises(ValueError, match=r"4 rows in 2 microbatches\n.*2 rows in 1 microbatches"):
        fold(microbatches=[(np.ones(2),)], checkpoint=tmp_path / "state")


def test_objects_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="Python objects"):
        accumulate(lambda x: object(), LAST)(
            microbatches=[(np.ones(2),)], checkpoint=tmp_path / "s"
        )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: accumulate(len, "sum"), AccumulatorError, "accumulate(len): accumulator is 'sum'"),
        (
            lambda: accumulate(lambda x: x, Carry(1))(2, microbatches=[]),
            AccumulatorError,
            "Carry(1) names no argument; the call has 1",
        ),
        (lambda: accumulate(len)(microbatches=iter(())), EmptyStream, "had no element"),
        (
            lambda: accumulate(lambda name: 1.0, MEAN)(microbatches=["a.npy"]),
            BatchError,
            "microbatch 0 has no rows that could be counted (microbatch[0]: str)",
        ),
        (
            lambda: accumulate(lambda x: x.sum(), MEAN, weight_fn=lambda x: -1)(
                microbatches=[(np.ones(2),)]
            ),
            ValueError,
            "weight_fn returned -1 for microbatch 0",
        ),
        (
            lambda: accumulate(lambda x: list(x))(microbatches=[(np.ones(2),), (np.ones(1),)]),
            AccumulatorError,
            "the output has output[0] in one microbatch and output[0], output[1] in the first",
        ),
    ],
)
def test_what_is_refused_and_why(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
