"""A fold that was stopped goes on where it was saved, bit for bit; a file of another fold is refused."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from microbatch import AccumulationType, Accumulator, Carry, CheckpointError
from microbatch._checkpoint import Checkpoint
from microbatch.jax import accumulate

MEAN, SUM, CONCAT = AccumulationType.MEAN, AccumulationType.SUM, AccumulationType.CONCAT


class Stop(Exception):
    pass


def stream(stop=None, rows=2, length=5, dtype=np.float32):
    for i in range(length):
        if i == stop:
            raise Stop
        yield (np.full((rows, 3), 0.1 * (i + 1), dtype),)


def fun(w, x):
    return w * x.mean(), (w * x).sum(1)


def stopped(path, fold, *args, stop=3, **kwargs):
    """The file that a fold leaves when its stream breaks off."""
    with pytest.raises(Stop):
        fold(*args, microbatches=stream(stop), checkpoint=path, **kwargs)
    assert path.exists()
    return path


def test_killed_at_twenty_random_moments_the_result_is_the_same_bit_for_bit(tmp_path):
    worker = Path(__file__).with_name("_worker_stream.py")
    done = subprocess.run(
        [sys.executable, worker, tmp_path, "20"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "XLA_FLAGS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    results = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    assert {line.removeprefix("result ") for line in results} == {lines["whole"]}
    assert len(lines["whole"]) > 400
    assert lines["left"] == ""
    killed, resumed = lines["killed"].split()[0], lines["killed"].split()[-1]
    assert int(killed) == 20 and int(resumed) >= 15


def test_it_reads_past_what_is_saved_and_evaluates_only_the_rest(tmp_path):
    ran = []

    def counted(w, x):
        jax.debug.callback(lambda: ran.append(1))
        return fun(w, x)

    fold = accumulate(counted, (MEAN, CONCAT))
    whole = fold(jnp.float32(3), microbatches=stream())
    path = stopped(tmp_path / "state", fold, jnp.float32(3))
    jax.effects_barrier()
    before = len(ran)
    got = fold(jnp.float32(3), microbatches=stream(), checkpoint=path)
    jax.effects_barrier()
    assert before == 5 + 3
    # The first is always saved; what came after it within a twentieth of the time may have to run again.
    assert len(ran) - before <= 4
    jax.tree.map(np.testing.assert_array_equal, got, whole)
    assert not path.exists()


def test_custom_accumulators_carries_and_keys_are_saved(tmp_path):
    spread = Accumulator(
        init=lambda spec: {"low": jnp.full((), jnp.inf), "n": 0},
        update=lambda c, x, i: {"low": jnp.minimum(c["low"], x), "n": c["n"] + 1},
        finalize=lambda c: c,
    )

    def step(key, x):
        key, use = jax.random.split(key)
        return x.mean() + jax.random.normal(use), key

    fold = accumulate(step, (spread, Carry(0)))
    whole, last = fold(jax.random.key(1), microbatches=stream())
    path = stopped(tmp_path / "state", fold, jax.random.key(1))
    got, key = fold(jax.random.key(1), microbatches=stream(), checkpoint=path)
    assert got == whole and (jax.random.key_data(key) == jax.random.key_data(last)).all()


def test_a_memory_map_keeps_its_rows_itself(tmp_path):
    out = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (10, 1000))
    fold = accumulate(lambda x: jnp.tile(x.sum(1, keepdims=True), 1000), CONCAT)
    path = stopped(tmp_path / "state", fold, out=out)
    assert path.stat().st_size < 4000
    fold(microbatches=stream(), checkpoint=path, out=out)
    np.testing.assert_array_equal(out, fold(microbatches=stream()))


def test_a_checkpoint_of_another_fold_is_refused(tmp_path):
    path = stopped(tmp_path / "state", accumulate(fun, (MEAN, CONCAT)), jnp.float32(3))
    other = lambda w, x: (w + x.mean(), (w * x).sum(1))
    w = jnp.float32(3)
    for aspect, fold, arguments, rows, dtype in [
        ("function", accumulate(other, (MEAN, CONCAT)), (w,), 2, np.float32),
        ("accumulator", accumulate(fun, (SUM, CONCAT)), (w,), 2, np.float32),
        ("weight_fn", accumulate(fun, (MEAN, CONCAT), weight_fn=lambda w, x: 1.0), (w,), 2, np.float32),
        ("accumulator_dtype", accumulate(fun, (MEAN, CONCAT), accumulator_dtype="float32"), (w,), 2, np.float32),
        ("set of arguments", accumulate(fun, (MEAN, CONCAT)), (w + 1,), 2, np.float32),
        ("set of arguments", accumulate(fun, (MEAN, CONCAT)), (w.astype(jnp.float16),), 2, np.float32),
        ("microbatch", accumulate(fun, (MEAN, CONCAT)), (w,), 3, np.float32),
        ("microbatch", accumulate(fun, (MEAN, CONCAT)), (w,), 2, np.int32),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError, match=f"is a checkpoint of another {aspect}") as caught:
            fold(*arguments, microbatches=stream(rows=rows, dtype=dtype), checkpoint=path)
        assert "delete the file to start anew" in str(caught.value)
    assert path.exists()


def test_a_shorter_stream_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "due", True)
    fold = accumulate(fun, (MEAN, CONCAT))
    path = stopped(tmp_path / "state", fold, jnp.float32(3), stop=4)
    with pytest.raises(CheckpointError, match="another stream") as caught:
        fold(jnp.float32(3), microbatches=stream(length=1), checkpoint=path)
    assert "saved: 8 rows in 4 microbatches" in str(caught.value)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "state").write_bytes(b"not mine")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        accumulate(fun, (MEAN, CONCAT))(1.0, microbatches=stream(), checkpoint=tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == b"not mine"
