"""`accumulate`: a stream folded in JAX gives what the whole batch would, compiled once, in bounded memory."""

import gc
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from microbatch import (
    AccumulationType,
    Accumulator,
    AccumulatorError,
    BatchError,
    Carry,
    EmptyStream,
    MicrobatchError,
)
from microbatch.jax import accumulate

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def problem(rows=12, seed=0):
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=(3, 5)), "v": rng.normal(size=5)}
    params = {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}
    return params, rng.normal(size=(rows, 3)), rng.normal(size=rows)


def cut(sizes, *arrays):
    """The rows of the arrays as a list of microbatches of these sizes."""
    ends = np.cumsum([0, *sizes])
    return [tuple(a[i:j] for a in arrays) for i, j in itertools.pairwise(ends)]


def oracle(fun, *args):
    """The whole batch in float64."""
    with jax.enable_x64(True):
        wide = [jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), a) for a in args]
        return jax.tree.map(np.asarray, fun(*wide))


def by_hand(params, x, y):
    """The loss and its gradient in NumPy and float64."""
    w, v = (np.asarray(params[k], np.float64) for k in "wv")
    hidden = np.tanh(x @ w)
    error = hidden @ v - y
    pulled = 2 / len(x) * error[:, None]
    return np.mean(error**2), {
        "w": x.T @ (pulled * v * (1 - hidden**2)),
        "v": hidden.T @ pulled[:, 0],
    }


FOLD = accumulate(jax.value_and_grad(loss), MEAN)


def assert_close(got, want, rtol=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(np.abs(b), initial=1e-30))


class compiled:
    """Counts what XLA compiles inside ``with``, by the name of the function."""

    def __enter__(self):
        self.names = []
        self._now = True
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *_):
        self._now = False

    def _hear(self, event, duration, fun_name="", **_):
        if self._now and event == "/jax/core/compile/backend_compile_duration":
            self.names.append(fun_name)

    def count(self, name="stepped"):
        return sum(name in each for each in self.names)


class TestValues:
    @settings(max_examples=10)
    @given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def test_any_cut_of_the_stream_gives_the_whole_batch(self, sizes):
        params, x, y = problem(sum(sizes))
        got = FOLD(params, microbatches=cut(sizes, x, y))
        assert_close(got, by_hand(params, x, y), rtol=1e-5)

    def test_a_tree_of_kinds(self):
        _, x, _ = problem()
        fun = lambda x: {
            "sum": x.sum(0), "mean": (x.mean(0), x.mean()), "rows": jnp.sin(x),
            "top": x.max(0), "low": x.min(0), "last": x[-1],
        }  # fmt: skip
        kinds = {
            "sum": SUM, "mean": (MEAN, RUNNING_MEAN), "rows": CONCAT, "top": MAX, "low": MIN, "last": LAST,
        }  # fmt: skip
        got = accumulate(fun, kinds)(microbatches=cut([5, 5, 2], x))
        assert_close(got, oracle(fun, x))
        assert isinstance(got["rows"], np.ndarray)

    @pytest.mark.parametrize("kind", [MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST])
    def test_N10_one_element_is_the_function_bit_for_bit(self, kind):
        x = np.array([[-0.0, np.inf, -np.inf, np.nan, 1e-42, 3.3]], np.float32)
        got = accumulate(lambda s, x: s * x, kind)(np.float32(1), microbatches=[(x,)])
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x))
        np.testing.assert_array_equal(got, jax.jit(lambda s, x: s * x)(np.float32(1), x))

    def test_one_element_of_a_gradient_is_bit_for_bit(self):
        params, x, y = problem()
        whole = jax.jit(jax.value_and_grad(loss))(params, x, y)
        got = accumulate(jax.value_and_grad(loss), MEAN)(params, microbatches=[(x, y)])
        jax.tree.map(np.testing.assert_array_equal, got, whole)

    @pytest.mark.parametrize("weighted", [False, True])
    def test_N6_small_bfloat16_numbers_are_not_lost(self, weighted):
        fun = lambda x: x.sum().astype(jnp.bfloat16)
        small = jnp.full((1,), 1e-3, jnp.bfloat16)
        weight_fn = (lambda x: 1) if weighted else None
        got = accumulate(fun, SUM, weight_fn=weight_fn)(microbatches=[(small,)] * 1024)
        assert got.dtype == jnp.bfloat16
        assert abs(float(got) - 1024 * float(small[0])) < 2**-8 * 1.03

    def test_accumulator_dtype_is_what_sums_are_held_in(self):
        ones = [(jnp.ones(1, jnp.bfloat16),)] * 300
        fold = accumulate(lambda x: x.sum(), SUM, accumulator_dtype=jnp.bfloat16)
        assert float(fold(microbatches=ones)) == 256
        assert float(accumulate(lambda x: x.sum(), SUM)(microbatches=ones)) == 300

    def test_integers_and_complex(self):
        x = np.arange(6)
        total, mean = accumulate(lambda x: (x.sum(), (x * 1j).mean()), (SUM, MEAN))(
            microbatches=cut([4, 2], x)
        )
        assert total.dtype == jnp.int32 and int(total) == 15
        assert complex(mean) == 2.5j

    def test_the_count_of_a_long_stream_does_not_stop(self):
        """In float32 alone, 2²⁴ + 1 is 2²⁴."""
        stream = [(np.float32(w), np.float32(w > 1)) for w in (1, 2**24, *[1] * 100)]
        fold = accumulate(lambda w, x: x, MEAN, weight_fn=lambda w, x: w)
        got = np.float64(fold(microbatches=stream))
        np.testing.assert_allclose(1 - got, 101 / (2**24 + 101), rtol=0.02)


class TestWeights:
    def masked(self, params, x, mask):
        return jnp.sum(mask * (x * params) ** 2) / jnp.sum(mask)

    def test_N1_masked_mean_loss(self):
        x, mask = np.array([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]]), np.array([[1, 0, 0], [1, 1, 1]])
        fold = accumulate(
            jax.value_and_grad(self.masked), MEAN, weight_fn=lambda params, x, mask: mask.sum()
        )
        got = fold(jnp.float32(2), microbatches=cut([1, 1], x, mask))
        assert_close(got, oracle(jax.value_and_grad(self.masked), jnp.float32(2), x, mask))
        assert float(got[0]) == 30.0

    def test_N4_a_microbatch_without_tokens_reaches_nothing(self):
        x = np.array([[np.nan, np.nan], [1.0, 2.0], [3.0, 4.0]])
        mask = np.array([[0, 0], [1, 1], [1, 0]])
        fold = accumulate(
            jax.value_and_grad(self.masked), MEAN, weight_fn=lambda params, x, mask: mask.sum()
        )
        for order in ([0, 1, 2], [1, 0, 2], [1, 2, 0]):
            value, grad = fold(jnp.float32(1), microbatches=cut([1] * 3, x[order], mask[order]))
            np.testing.assert_allclose((value, grad), (14 / 3, 28 / 3), rtol=1e-6)

    def test_N4_no_tokens_at_all_give_zeros(self):
        fun = lambda x: (x.mean(), x, x.sum())
        fold = accumulate(fun, (MEAN, CONCAT, SUM), weight_fn=lambda x: 0.0)
        mean, rows, total = fold(microbatches=cut([2, 1], np.full(3, np.nan)))
        assert (float(mean), rows.tolist(), float(total)) == (0, [0, 0, 0], 0)
        assert not np.signbit(total)

    def test_N5_rows_that_did_not_run_are_zeros(self):
        fold = accumulate(lambda x: x, CONCAT, weight_fn=lambda x: x[0] > 2)
        assert fold(microbatches=cut([2, 2], np.arange(1.0, 5))).tolist() == [0, 0, 3, 4]

    def test_N13_a_nan_of_weight_propagates(self):
        x = np.array([1.0, np.nan, 3.0])
        mean, top = accumulate(lambda x: (x.mean(), x.max()), (MEAN, MAX))(
            microbatches=cut([1, 1, 1], x)
        )
        assert np.isnan(mean) and np.isnan(top)

    def test_a_weight_that_is_no_number_is_refused(self):
        fold = accumulate(lambda x: x.mean(), MEAN, weight_fn=lambda x: x)
        with pytest.raises(MicrobatchError, match=r"accumulate\(<lambda>\): weight_fn returned sh"):
            fold(microbatches=[np.ones(2)])

    def test_N18_each_output_has_its_own_reduction(self):
        mask = np.array([[1, 0], [1, 1]])
        fun = lambda mask: (jnp.ones(()), mask.sum())
        mean, tokens = accumulate(fun, (MEAN, SUM), weight_fn=lambda mask: mask.sum())(
            microbatches=cut([1, 1], mask)
        )
        assert (float(mean), int(tokens)) == (1, 3)


class TestAccumulators:
    def test_carry_hands_the_state_on(self):
        fun = lambda state, x: (
            x.sum(),
            {"mean": 0.5 * state["mean"] + x.mean(), "n": state["n"] + 1},
        )
        start = {"mean": jnp.zeros(()), "n": jnp.int32(0)}
        total, state = accumulate(fun, (SUM, Carry(0)))(
            start, microbatches=cut([1] * 3, np.array([4.0, 2.0, 1.0]))
        )
        assert (float(total), float(state["mean"]), int(state["n"])) == (7, 3, 3)
        assert float(start["mean"]) == 0  # the caller's own is as before

    def test_carry_of_keys(self):
        def fun(key, x):
            key, use = jax.random.split(key)
            return jax.random.normal(use) + 0 * x.sum(), key

        drawn, key = accumulate(fun, (CONCAT, Carry(0)))(
            jax.random.key(0), microbatches=cut([1, 1], np.ones(2))
        )
        first, expected = fun(jax.random.key(0), np.ones(1))
        second, expected = fun(expected, np.ones(1))
        np.testing.assert_allclose(drawn, [first, second], rtol=1e-6)
        assert (jax.random.key_data(key) == jax.random.key_data(expected)).all()

    def test_carry_that_changes_is_refused(self):
        with pytest.raises(
            AccumulatorError, match=r"output:   float32\[1\].*argument: float32\[\]"
        ):
            _flat(lambda: accumulate(lambda s, x: s + x, Carry(0))(0.0, microbatches=[np.ones(1)]))
        with pytest.raises(AccumulatorError, match=r"Carry\(1\) names no argument; the call has 1"):
            accumulate(lambda s, x: s, Carry(1))(0.0, microbatches=[np.ones(1)])

    def test_custom_accumulator_with_weights(self):
        moments = Accumulator(
            init=lambda spec: (0.0, 0),
            update=lambda carry, x, i, weight: (carry[0] + weight * x**2, carry[1] + i),
            finalize=lambda carry: carry,
        )
        squares, indices = accumulate(lambda x: x.mean(), moments)(
            microbatches=cut([2, 1], np.array([1.0, 3.0, 5.0]))
        )
        assert (float(squares), int(indices)) == (2 * 4 + 25, 1)

    def test_custom_accumulator_that_cannot_weigh_is_refused_on_a_smaller_microbatch(self):
        plain = Accumulator(lambda spec: jnp.zeros(()), lambda c, x, i: c + x, lambda c: c)
        fold = accumulate(lambda x: x.sum(), plain)
        assert float(fold(microbatches=cut([2, 2], np.ones(4)))) == 4
        with pytest.raises(AccumulatorError, match="Give its update a keyword parameter weight"):
            fold(microbatches=cut([2, 1], np.ones(3)))

    def test_custom_accumulator_whose_carry_grows_is_refused(self):
        grows = Accumulator(lambda spec: [], lambda c, x, i: [*c, x], lambda c: c)
        with pytest.raises(AccumulatorError, match=r"init:   \[\]"):
            accumulate(lambda x: x.sum(), grows)(microbatches=[np.ones(1)])

    def test_C6_a_tree_that_is_no_prefix_is_refused(self):
        with pytest.raises(AccumulatorError, match="not a prefix of the output"):
            accumulate(lambda x: x.sum(), (SUM, MEAN))(microbatches=[np.ones(1)])
        with pytest.raises(AccumulatorError, match="accumulator is 'mean', not an accumulator"):
            accumulate(lambda x: x.sum(), "mean")

    def test_N12_a_mean_of_integers_is_refused(self):
        with pytest.raises(AccumulatorError, match=r"dtype int32; MEAN averages"):
            accumulate(lambda x: x.sum(), MEAN)(microbatches=[np.ones(1, int)])

    def test_an_output_that_changes_its_shape_is_refused(self):
        with pytest.raises(
            AccumulatorError, match=r"float32\[1\] in one microbatch and float32\[2"
        ):
            accumulate(lambda x: x, SUM)(microbatches=cut([2, 1], np.ones(3)))


class TestStreams:
    def test_any_iterable(self):
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        params, x, y = problem()
        expected = oracle(loss, params, x, y)
        xs, ys = x.astype(np.float32), y.astype(np.float32)
        data = TensorDataset(torch.from_numpy(xs), torch.from_numpy(ys))

        class Grain:
            """Has ``__next__`` alone, as some data iterators."""

            def __init__(self):
                self.left = cut([5, 5, 2], xs, ys)

            def __iter__(self):
                return self

            def __next__(self):
                if not self.left:
                    raise StopIteration
                return self.left.pop(0)

        streams = [
            cut([4, 4, 4], jnp.asarray(xs), jnp.asarray(ys)),
            (pair for pair in cut([4, 8], xs, ys)),
            DataLoader(data, batch_size=5),
            Grain(),
            map(list, cut([6, 6], xs, ys)),
        ]
        fold = accumulate(loss, MEAN)
        for stream in streams:
            assert_close(fold(params, microbatches=stream), expected)

    def test_a_single_argument_needs_no_tuple(self):
        assert float(accumulate(lambda x: x.sum())(microbatches=np.arange(6.0).reshape(3, 2))) == 15
        batches = ({"x": x} for x in np.arange(6.0).reshape(3, 2))
        assert float(accumulate(lambda b: b["x"].sum())(microbatches=batches)) == 15

    def test_bfloat16_tensors(self):
        import torch

        tensors = torch.arange(6.0, dtype=torch.bfloat16).reshape(3, 2)
        total = accumulate(lambda x: x.sum())(microbatches=list(tensors))
        assert total.dtype == jnp.bfloat16 and float(total) == 15

    def test_the_iterable_may_fill_one_array_again_and_again(self):
        def refilled():
            buffer = np.empty(1 << 16, np.float32)
            for i in range(5):
                buffer[:] = i
                yield (buffer,)
                buffer[:] = np.nan

        rows, total = accumulate(lambda x: (x[:1], x.mean()), (CONCAT, SUM))(
            microbatches=refilled()
        )
        assert rows.tolist() == [0, 1, 2, 3, 4] and float(total) == 10

    def test_the_next_element_is_read_and_sent_while_one_is_computed(self, monkeypatch):
        """Nothing waits for a microbatch before the next one is on its way, and no more than two are."""
        from microbatch.jax import _stream_program

        events = []

        class Marker:
            def __init__(self, index):
                self.index = index

            def block_until_ready(self):
                events.append(f"wait {self.index}")

        step = _stream_program.Program.step

        def spy(program, state, shared, rows, index):
            assert all(isinstance(x, jax.Array) for x in rows)
            events.append(f"compute {index}")
            state, _, pieces = step(program, state, shared, rows, index)
            return state, Marker(index), pieces

        def stream():
            for i in range(4):
                events.append(f"read {i}")
                yield np.float32([i])

        monkeypatch.setattr(_stream_program.Program, "step", spy)
        assert float(accumulate(lambda x: x.sum())(microbatches=stream())) == 6
        assert events == [
            "read 0", "compute 0", "read 1", "compute 1",
            "read 2", "wait 0", "compute 2", "read 3", "wait 1", "compute 3", "wait 2", "wait 3",
        ]  # fmt: skip

    def test_an_empty_stream_is_refused(self):
        with pytest.raises(EmptyStream, match=r"accumulate\(<lambda>\): microbatches had no elem"):
            accumulate(lambda x: x.sum())(microbatches=iter(()))

    def test_N11_zero_rows(self):
        runs = []

        def fun(x):
            jax.debug.callback(lambda: runs.append(1))
            return x.sum(), x.mean(), x

        total, mean, rows = accumulate(fun, (SUM, MEAN, CONCAT))(microbatches=[np.ones((0, 4))])
        jax.effects_barrier()
        assert (float(total), float(mean), rows.shape, runs) == (0, 0, (0, 4), [])
        with pytest.raises(EmptyStream, match="MAX of zero rows has no value"):
            accumulate(lambda x: jnp.max(x, initial=0), MAX)(microbatches=[np.ones((0, 4))])

    def test_an_empty_last_microbatch_changes_nothing(self):
        fun = lambda x: (x.mean(), x)
        mean, rows = accumulate(fun, (MEAN, CONCAT))(microbatches=cut([2, 0, 1, 0], np.arange(3.0)))
        assert float(mean) == 1 and rows.tolist() == [0, 1, 2]

    def test_rows_that_cannot_be_counted_are_refused(self):
        with pytest.raises(BatchError, match=r"no rows that could be counted \(\[0\]: float32\[2"):
            accumulate(lambda x, y: x.mean(), MEAN)(
                microbatches=[(np.ones(2, np.float32), np.ones(3, np.float32))]
            )
        with pytest.raises(BatchError, match="no rows that could be counted"):
            accumulate(lambda x: x, MEAN)(microbatches=[1.0])
        assert float(accumulate(lambda x: x, SUM)(microbatches=[1.0, 2.0])) == 3

    def test_what_is_no_array_is_refused_with_its_path(self):
        with pytest.raises(BatchError, match=re.escape("[0]['text'] = 'hello', which is not an a")):
            accumulate(lambda b: b["x"].sum())(microbatches=[{"x": np.ones(2), "text": "hello"}])

    def test_an_error_of_the_iterable_comes_through(self):
        def stream():
            yield np.ones(1)
            raise OSError("disk")

        with pytest.raises(OSError, match="disk"):
            accumulate(lambda x: x.sum())(microbatches=stream())

    def test_inside_a_transformation_it_is_refused(self):
        fold = accumulate(lambda w, x: w * x.sum())
        with pytest.raises(MicrobatchError, match="called inside a transformation"):
            jax.grad(lambda w: fold(w, microbatches=[np.ones(2)]))(1.0)
        with pytest.raises(MicrobatchError, match="called inside a transformation"):
            jax.jit(lambda x: fold(1.0, microbatches=[x]))(np.ones(2))

    def test_C2_leaves_that_are_no_arrays_are_passed_on(self):
        def fun(options, x):
            assert options["name"] == "tanh" and options["none"] is None
            return options["fn"](options["scale"] * x).sum()

        options = {"name": "tanh", "none": None, "fn": jnp.tanh, "scale": 2}
        got = accumulate(fun)(options, microbatches=cut([2, 1], np.ones(3)))
        np.testing.assert_allclose(got, 3 * np.tanh(2), rtol=1e-6)

    def test_C3_an_accumulator_dtype_that_is_no_float_is_refused(self):
        with pytest.raises(AccumulatorError, match="is not a floating-point dtype"):
            accumulate(lambda x: x, accumulator_dtype=int)


class TestOut:
    def test_rows_are_written_into_the_array_given(self):
        out = np.full(5, 9.0, np.float32)
        total, rows = accumulate(lambda x: (x.sum(), -x), (SUM, CONCAT))(
            microbatches=cut([2, 1], np.arange(3.0)), out=(None, out)
        )
        assert rows.base is out and out.tolist() == [0, -1, -2, 9, 9]
        assert float(total) == 3

    def test_a_memory_map(self, tmp_path):
        out = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (3, 2))
        x = np.arange(6, dtype=np.float32).reshape(3, 2)
        rows = accumulate(lambda x: x, CONCAT)(microbatches=cut([2, 1], x), out=out)
        assert rows is out
        np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), x)

    def test_an_array_that_does_not_fit_is_refused(self):
        fold = accumulate(lambda x: x, CONCAT)
        stream = cut([2, 1], np.ones((3, 2)))
        with pytest.raises(AccumulatorError, match="has 2 rows, and the stream has more"):
            fold(microbatches=stream, out=np.empty((2, 2), np.float32))
        with pytest.raises(
            AccumulatorError, match=r"is int32\[3, 2\], and the result is float32\["
        ):
            fold(microbatches=stream, out=np.empty((3, 2), np.int32))
        with pytest.raises(AccumulatorError, match="out does not fit the output"):
            fold(microbatches=stream, out=(None, np.empty(3)))
        with pytest.raises(AccumulatorError, match="what is not one CONCAT output"):
            accumulate(lambda x: x.sum())(microbatches=stream, out=np.empty(3))

    def test_keys_are_refused(self):
        with pytest.raises(AccumulatorError, match=r"Return jax.random.key_data\(key\)"):
            accumulate(lambda k: k, CONCAT)(microbatches=[jax.random.split(jax.random.key(0))])


class TestCompilation:
    def test_a_hundred_optimizer_steps_compile_once(self):
        params, x, y = problem()
        traces = []

        def traced(params, x, y):
            traces.append(1)
            return loss(params, x, y)

        gradient = jax.grad(traced)
        stream = cut([4, 4, 4], x, y)
        with compiled() as seen:
            for _ in range(100):
                # Made anew in every step: the program belongs to the function.
                step = accumulate(gradient, MEAN)(params, microbatches=stream)
                params = jax.tree.map(lambda p, g: p - 0.1 * g, params, step)
        assert (seen.count("stepped"), len(traces)) == (1, 1)
        own = [name for name in seen.names if "_" in name]
        assert len(set(own)) == len(own) == 3  # start, step, finish

        with compiled() as seen:
            accumulate(gradient, MEAN)(params, microbatches=cut([4, 4, 3], x, y))
        assert (seen.count("stepped"), len(traces)) == (1, 2)
        with compiled() as seen:
            accumulate(gradient, MEAN)(params, microbatches=cut([4, 3, 3], x, y))
        assert seen.names == []

    def test_a_bound_method_compiles_once(self):
        class Model:
            def loss(self, w, x):
                return (w * x).mean()

        model = Model()
        with compiled() as seen:
            for _ in range(3):
                accumulate(model.loss, MEAN)(1.0, microbatches=cut([2, 2], np.ones(4)))
        assert seen.count("stepped") == 1

    def test_a_new_constant_compiles_anew_and_is_right(self):
        fold = accumulate(lambda n, x: x[:n].sum())
        assert [float(fold(n, microbatches=[np.ones(4)])) for n in (1, 2, 2)] == [1, 2, 2]
        assert float(fold(True, microbatches=[np.arange(4.0)])) == 0

    def test_parameters_on_a_device_of_their_own_compile_once(self):
        device = jax.devices()[1]
        w = jax.device_put(jnp.ones(3), device)
        with compiled() as seen:
            got = accumulate(lambda w, x: w * x.sum(), MEAN)(
                w, microbatches=cut([1] * 3, np.ones(3))
            )
        assert seen.count("stepped") == 1 and got.devices() == {device}

    def test_S3_accumulators_are_laid_out_as_sharded_parameters(self, monkeypatch):
        from microbatch.jax import _stream_program

        mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        w = jax.device_put(jnp.arange(8.0), rows)
        gradient = jax.grad(lambda w, x: jnp.sum(w**2) * x.mean())
        stream = cut([1] * 4, np.ones(4))
        seen_states = []
        start = _stream_program.Program.start

        def spy(*args):
            seen_states.append(start(*args))
            return seen_states[-1]

        monkeypatch.setattr(_stream_program.Program, "start", spy)
        with compiled() as first:
            accumulate(gradient, MEAN)(w, microbatches=stream)
        assert first.count("stepped") == 2  # one to learn the layout, one that is used
        (accumulator,) = seen_states[0].accumulators
        assert accumulator.sharding.is_equivalent_to(rows, 1)
        with compiled() as again:
            got = accumulate(gradient, MEAN)(w, microbatches=stream)
        assert again.names == []
        np.testing.assert_array_equal(got, 2 * np.arange(8.0))
        assert got.sharding.is_equivalent_to(rows, 1)

    def test_an_explicit_mesh(self):
        mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            w = jax.device_put(jnp.arange(8.0), jax.sharding.PartitionSpec("d"))
            gradient = jax.grad(lambda w, x: jnp.sum(w**2) * x.mean())
            got = accumulate(gradient, MEAN)(w, microbatches=cut([1] * 3, np.ones(3)))
            np.testing.assert_array_equal(got, 2 * np.arange(8.0))
            assert jax.typeof(got).sharding.spec == jax.sharding.PartitionSpec("d")

    @pytest.mark.parametrize("kind", ["Auto", "Explicit"])
    def test_a_mesh_of_one_device(self, kind):
        """Its specs are for arrays of one rank, and the accumulators have others."""
        kinds = (getattr(jax.sharding.AxisType, kind),)
        mesh = jax.make_mesh((1,), ("d",), axis_types=kinds, devices=jax.devices()[:1])
        with jax.set_mesh(mesh):
            w = jax.device_put(jnp.ones((2, 3)), NamedSharding(mesh, PartitionSpec("d", None)))
            got = accumulate(lambda w, x: (w * x.sum()).sum())(
                w, microbatches=cut([1] * 3, np.ones(3))
            )
        assert got == 18.0

    def test_the_program_goes_with_its_function(self):
        from microbatch.jax import _stream_program

        def use():
            fun = lambda x: x.sum()
            accumulate(fun)(microbatches=[np.ones(2)])

        gc.collect()
        before = len(_stream_program._PROGRAMS)
        use()
        gc.collect()
        assert len(_stream_program._PROGRAMS) == before

    def test_C17_a_convolution_in_a_weighted_step_is_canonical(self):
        """A branch is as slow as a loop for XLA on a CPU, unless the dimension numbers are canonical."""

        def fun(w, x):
            out = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jnp.mean(out**2)

        w, x = jnp.ones((3, 3, 2, 4)), np.ones((2, 5, 5, 2), np.float32)
        fold = accumulate(jax.grad(fun), MEAN, weight_fn=lambda w, x: x.sum())
        np.testing.assert_allclose(
            fold(w, microbatches=[x, x]), jax.grad(fun)(w, jnp.asarray(x)), rtol=1e-5
        )
        assert all(spec == "b01f_01io->b01f" for spec in _convolutions_of(fold, w, x))


class TestMemory:
    def live_bytes(self):
        return sum(x.nbytes for x in jax.live_arrays())

    @pytest.mark.parametrize("weighted", [False, True])
    def test_device_memory_does_not_depend_on_the_length(self, weighted):
        weight_fn = (lambda w, x: x.sum()) if weighted else None
        fold = accumulate(lambda w, x: (w * x.sum(), x), (MEAN, CONCAT), weight_fn=weight_fn)
        w = jnp.ones(1000)

        def most(length):
            peak = []

            def stream():
                for _ in range(length):
                    yield np.ones((4, 500), np.float32)
                    peak.append((self.live_bytes(), len(jax.live_arrays())))

            before = self.live_bytes(), len(jax.live_arrays())
            mean, rows = fold(w, microbatches=stream())
            assert rows.shape == (4 * length, 500)
            del mean, rows
            gc.collect()
            return tuple(np.max(peak, 0) - before)

        most(3)
        short, long = most(6), most(60)
        assert long == short
        # Two microbatches with their CONCAT rows, and the accumulator.
        assert short[0] <= 2 * 2 * 8000 + 4000 + 1000

    @pytest.mark.parametrize("weighted", [False, True])
    def test_M1_one_accumulator_and_it_is_donated(self, weighted):
        """The compiled step needs no second accumulator: its output has the memory of its input."""
        weight_fn = (lambda w, x: x.sum()) if weighted else None
        gradient = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)))
        fold = accumulate(gradient, MEAN, weight_fn=weight_fn)
        w, x = jnp.ones((256, 256)), jnp.ones((4, 256))
        analysis = _compiled_step(fold, w, x).memory_analysis()
        assert analysis.alias_size_in_bytes >= w.nbytes
        # One gradient that is added, and what one microbatch needs.
        assert analysis.temp_size_in_bytes <= w.nbytes + 8 * x.nbytes + 4096

    def test_arguments_are_left_alone(self):
        w = jnp.ones(3)
        fold = accumulate(lambda w, x: (w + x.sum(), w * x.sum()), (Carry(0), SUM))
        fold(w, microbatches=cut([1] * 3, np.ones(3)))
        assert w.tolist() == [1, 1, 1]


def _compiled_step(fold, *args):
    """The step of `fold` for these arguments and one microbatch, compiled by hand."""
    from microbatch.jax import _stream_program

    *params, x = args
    made = []
    original = _stream_program.Program.step

    def spy(program, state, shared, rows, index):
        made.append(program._step.lower(state, shared, rows, index).compile())
        return original(program, state, shared, rows, index)

    _stream_program.Program.step = spy
    try:
        fold(*params, microbatches=[x])
    finally:
        _stream_program.Program.step = original
    return made[0]


def _convolutions_of(fold, *args):
    text = _compiled_step(fold, *args).as_text()
    found = re.findall(r"dim_labels=(\S+?),? ", text.replace("\n", " "))
    assert found
    return found


def _flat(call):
    """`call`, its error on one line."""
    try:
        call()
    except AccumulatorError as error:
        raise AccumulatorError(str(error).replace("\n", " ")) from None
