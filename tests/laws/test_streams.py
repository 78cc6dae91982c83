"""A stream of microbatches gives what the batch would have given, in every front that folds one."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from microbatch import AccumulatorError, BatchError, Carry, CheckpointError, EmptyStream
from tests.laws.cases import CONCAT, LAST, MAX, MEAN, MIN, ROWS, RUNNING_MEAN, SUM, values
from tests.laws.trees import assert_same_tree

KINDS = {"sum": SUM, "mean": MEAN, "ran": RUNNING_MEAN, "rows": CONCAT, "top": MAX, "low": MIN}


def statistics(front):
    def fun(scale, x):
        return {
            "sum": (scale * x).sum(0),
            "mean": x.mean(0),
            "ran": x.mean(0),
            "rows": scale * x,
            "top": front.xp.amax(x, 0),
            "low": front.xp.amin(x, 0),
        }

    return fun


def expected(scale, x):
    return {
        "sum": (scale * x).sum(0),
        "mean": x.mean(0),
        "ran": x.mean(0),
        "rows": scale * x,
        "top": x.max(0),
        "low": x.min(0),
    }


def stream_of(front, *arrays, size):
    for start in range(0, len(arrays[0]), size):
        yield front.arrays(tuple(array[start : start + size] for array in arrays))


@pytest.mark.parametrize("size", [1, 4, 5, 12])
def test_a_stream_gives_the_whole_batch(front, size):
    x = values(np.random.default_rng(0), ROWS, 3)
    fold = front.module.accumulate(statistics(front), KINDS)
    result = fold(front.arrays(np.float64(0.5)), microbatches=stream_of(front, x, size=size))
    assert_same_tree(front.results(result), expected(0.5, x), units_of_rounding=8)


def test_N1_weights_of_a_stream(front):
    x, mask = np.arange(1.0, 8.0), np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    x[2] = np.nan
    fold = front.module.accumulate(
        lambda x, mask: (x * mask).sum() / mask.sum(), MEAN, weight_fn=lambda x, mask: mask.sum()
    )
    result = front.results(fold(microbatches=stream_of(front, x, mask, size=2)))
    assert_same_tree(result, np.array((1.0 + 5.0 + 6.0 + 7.0) / 4))


def test_N4_a_stream_without_weight_gives_zeros(front):
    x = np.full(4, np.nan)
    fold = front.module.accumulate(lambda x: (x.mean(), x), (MEAN, CONCAT), weight_fn=lambda x: 0)
    result = front.results(fold(microbatches=stream_of(front, x, size=2)))
    assert_same_tree(result, (np.array(0.0), np.zeros(4)))


def test_N6_a_long_stream_of_bfloat16_does_not_lose_count(front):
    one = front.arrays(np.ones(1))
    half = one.to(front.bfloat16) if front.name == "torch" else one.astype(front.bfloat16)
    fold = front.module.accumulate(lambda x: x.sum(), SUM)
    assert float(fold(microbatches=((half,) for _ in range(600)))) == 600.0


def test_a_state_is_carried_through_a_stream(front):
    x = np.arange(6.0)
    fold = front.module.accumulate(lambda state, x: (state + x.sum(), x.sum()), (Carry(0), LAST))
    state, last = front.results(
        fold(front.arrays(np.float64(10.0)), microbatches=stream_of(front, x, size=2))
    )
    assert (float(state), float(last)) == (25.0, 9.0)


def test_rows_go_into_a_given_array(front):
    x = values(np.random.default_rng(0), 7, 2)
    out = np.full((7, 2), np.nan, np.float32)
    fold = front.module.accumulate(lambda x: x * 2, CONCAT)
    result = fold(microbatches=stream_of(front, x, size=3), out=out)
    assert result is out
    assert_same_tree(out, 2 * x)
    with pytest.raises(AccumulatorError, match="out"):
        fold(microbatches=stream_of(front, x, size=3), out=out[:5])


def test_an_element_that_is_no_tuple_is_one_argument(front):
    fold = front.module.accumulate(lambda batch: batch["x"].sum())
    assert float(fold(microbatches=[front.arrays({"x": np.arange(3.0)})])) == 3.0


def test_a_stream_without_elements_is_refused(front):
    with pytest.raises(EmptyStream, match="had no element"):
        front.module.accumulate(lambda x: x.sum())(microbatches=[])


def test_a_stream_without_rows_needs_weights(front):
    with pytest.raises(BatchError, match=r"weight_fn="):
        front.module.accumulate(lambda a, b: a.sum() / b.sum(), MEAN)(
            microbatches=[front.arrays((np.ones(2), np.ones(3)))]
        )


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((Carry(0), Carry(0)), "two outputs are carried to one argument"),
        ((Carry(1), LAST), r"Carry\(1\) names no argument; the call has 1"),
    ],
)
def test_what_cannot_be_carried_is_refused(front, kinds, said):
    fold = front.module.accumulate(lambda state, x: (state, state), kinds)
    with pytest.raises(AccumulatorError, match=said):
        fold(front.arrays(np.ones(2)), microbatches=[front.arrays(np.ones(2))])


def test_the_stream_is_read_once_and_at_most_one_ahead(front):
    read, elements = [], []

    def stream():
        for i in range(5):
            read.append(i)
            # The microbatch before may still be at work; those before it are gone.
            assert sum(element() is not None for element in elements) <= 1
            rows = front.arrays(np.full(2, float(i)))
            elements.append(weakref.ref(rows))
            yield (rows,)
            del rows

    assert float(front.module.accumulate(lambda x: x.sum())(microbatches=stream())) == 20.0
    assert read == [0, 1, 2, 3, 4]


class Stopped(Exception):
    pass


def interrupted(front, x, after):
    """The stream, which breaks off after so many elements."""
    for i, element in enumerate(stream_of(front, x, size=4)):
        if i == after:
            raise Stopped
        yield element


@pytest.mark.parametrize("after", [1, 2])
def test_a_stream_that_broke_off_continues_bit_for_bit(front, after, tmp_path, monkeypatch):
    # Time stands still, so that every microbatch is saved.
    monkeypatch.setattr("microbatch._checkpoint.time", SimpleNamespace(monotonic=lambda: 0.0))
    x = np.random.default_rng(0).normal(size=(11, 3))
    path = tmp_path / "state"
    scale = front.arrays(np.float64(0.3))
    fold = front.module.accumulate(statistics(front), KINDS)
    uninterrupted = front.results(fold(scale, microbatches=stream_of(front, x, size=4)))
    with pytest.raises(Stopped):
        fold(scale, microbatches=interrupted(front, x, after), checkpoint=path)
    assert path.exists()
    # A process that is killed while it writes leaves half a file beside the whole one.
    path.with_name("state.part").write_bytes(b"half")
    result = fold(scale, microbatches=stream_of(front, x, size=4), checkpoint=path)
    assert_same_tree(front.results(result), uninterrupted, units_of_rounding=0)
    assert not list(tmp_path.iterdir())


def test_a_foreign_checkpoint_is_refused(front, tmp_path, monkeypatch):
    # Time stands still, so that every microbatch is saved.
    monkeypatch.setattr("microbatch._checkpoint.time", SimpleNamespace(monotonic=lambda: 0.0))
    x = np.random.default_rng(0).normal(size=(11, 3))
    path = tmp_path / "state"
    scale, other = front.arrays((np.float64(0.3), np.float64(0.4)))
    fold = front.module.accumulate(statistics(front), KINDS)
    with pytest.raises(Stopped):
        fold(scale, microbatches=interrupted(front, x, 2), checkpoint=path)
    whole = lambda size=4, x=x: {"microbatches": stream_of(front, x, size=size), "checkpoint": path}
    wider = {**KINDS, "top": MIN}
    refusals = {
        "function": lambda: front.module.accumulate(lambda s, x: x.sum())(scale, **whole()),
        "accumulator": lambda: front.module.accumulate(statistics(front), wider)(scale, **whole()),
        "set of arguments": lambda: fold(other, **whole()),
        "microbatch": lambda: fold(scale, **whole(size=3)),
        "stream": lambda: fold(scale, **whole(x=x[:6])),
    }
    for aspect, call in refusals.items():
        with pytest.raises(CheckpointError, match=aspect):
            call()
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        fold(scale, **whole())


@pytest.mark.parametrize("path", ["", "missing/state"])
def test_a_checkpoint_that_could_not_be_written_is_refused_before_anything_runs(
    front, path, tmp_path
):
    ran = []
    with pytest.raises(CheckpointError, match="folder that exists"):
        front.module.accumulate(ran.append)(microbatches=[0.0], checkpoint=tmp_path / path)
    assert not ran


def test_a_stream_whose_first_microbatches_were_skipped_continues(front, tmp_path, monkeypatch):
    # Time stands still, so that every microbatch is saved.
    monkeypatch.setattr("microbatch._checkpoint.time", SimpleNamespace(monotonic=lambda: 0.0))
    x, mask = np.arange(1.0, 10.0), np.array([0.0] * 3 + [1.0, 0.0] + [1.0] * 4)
    x[:3] = np.nan
    elements = [front.arrays((x[a:b], mask[a:b])) for a, b in ((0, 3), (3, 5), (5, 8), (8, 9))]
    fold = front.module.accumulate(
        lambda x, mask: ((x * mask).sum() / mask.sum(), x),
        (MEAN, CONCAT),
        weight_fn=lambda x, mask: mask.sum(),
    )

    def broken(after):
        yield from elements[:after]
        raise Stopped

    for after in (2, 3):
        with pytest.raises(Stopped):
            fold(microbatches=broken(after), checkpoint=tmp_path / "state")
        result = front.results(fold(microbatches=elements, checkpoint=tmp_path / "state"))
        rows = np.where(np.arange(9) < 3, 0.0, x)
        assert_same_tree(result, (np.array(34.0 / 5), rows), units_of_rounding=4)


def test_keys_of_an_output_may_come_in_any_order(front):
    turn = []

    def fun(x):
        turn.append(None)
        total = {"a": x.sum(), "b": -2 * x.sum()}
        return total if len(turn) % 2 else dict(reversed(total.items()))

    x = np.arange(6.0)
    for result in (
        front.module.accumulate(fun)(microbatches=stream_of(front, x, size=2)),
        front.microbatch(fun, 0, 2)(front.arrays(x)),
    ):
        assert_same_tree(front.results(result), {"a": np.array(15.0), "b": np.array(-30.0)})
