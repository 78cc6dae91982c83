"""`microbatch` in PyTorch: what the laws that all fronts share do not say."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from microbatch import (
    Accumulator,
    AccumulatorError,
    BatchError,
    MicrobatchError,
    MicrobatchSizeError,
    RowMixingError,
)
from microbatch.torch import AccumulationType, Carry, accumulate, microbatch, reshape_batch_axis
from microbatch.torch._tracking import TensorBytes

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_M7_the_function_never_sees_more_rows_and_sees_views():
    x = rows(12, 3)
    seen = []

    def fun(x_):
        seen.append(len(x_))
        assert x_.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return x_.sum()

    for order in ("contiguous", "strided"):
        microbatch(fun, 0, 4, order=order)(x)
    assert seen == [4] * 6


def test_C11_strings_numbers_and_none_beside_tensors_are_passed_on():
    batch = {
        "x": torch.arange(6.0),
        "name": "train",
        "k": 3,
        "nothing": None,
        "in": [torch.arange(6)],
    }

    def fun(batch):
        assert batch["name"] == "train" and batch["k"] == 3 and batch["nothing"] is None
        return (batch["x"] * batch["in"][0]).sum()

    assert microbatch(fun, 0, 2)(batch) == 55


def test_an_array_of_another_library_is_refused():
    with pytest.raises(
        BatchError, match=r"x is a ndarray of shape \(4,\), not a tensor.\nConvert it"
    ):
        microbatch(lambda x: x.sum(), 0, 2)(np.ones(4))


def test_C2_C8_modules_are_arguments_and_names_are_positions():
    net = nn.Linear(3, 2).double()
    x = rows(6, 3)
    fun = lambda module, x, scale: scale * module(x)
    by_name = microbatch(fun, (), 2, CONCAT, argnames="x")
    by_number = microbatch(fun, -2, 2, CONCAT)
    torch.testing.assert_close(by_name(net, x, 2.0), 2 * net(x))
    torch.testing.assert_close(by_number(net, x=x, scale=2.0), 2 * net(x))


def test_a_module_is_a_function():
    net = nn.Linear(3, 2).double()
    x = rows(6, 3)
    torch.testing.assert_close(microbatch(net, 0, 2, CONCAT)(x), net(x))
    with pytest.raises(BatchError, match="argnums holds 3"):
        microbatch(net, 3, 2)


def test_C21_a_keyword_of_the_librarys_own_name_is_never_swallowed():
    fun = functools.partial(nn.functional.mse_loss, reduction="sum")
    x, y = rows(6), rows(6)
    torch.testing.assert_close(microbatch(fun, (0, 1), 2)(x, y), fun(x, y))


def test_dimensions_per_argument_are_trees_with_none():
    x, y = rows(2, 6), rows(6)
    fun = lambda batch: (batch["x"] * batch["y"]).sum() + batch["all"].sum()
    batch = {"x": x, "y": y, "all": torch.ones(())}
    found = microbatch(fun, 0, 3, in_dims=({"x": -1, "y": 0, "all": None},))(batch)
    torch.testing.assert_close(found, (x * y).sum() + 2)


@pytest.mark.parametrize("limit", [0, 1, torch.tensor(1), 2, 99])
def test_N5_rows_that_did_not_run_are_zero(limit):
    x = rows(6, 2)
    found = microbatch(lambda x: x + 1, 0, 3, CONCAT, num_real_microbatches=limit)(x)
    ran = 3 * min(int(limit), 2)
    torch.testing.assert_close(found[:ran], x[:ran] + 1)
    assert not found[ran:].any()


@pytest.mark.parametrize("limit", [1.0, True, "2", torch.tensor(1.0), torch.tensor([1, 2])])
def test_a_limit_that_is_no_integer_is_refused(limit):
    with pytest.raises(MicrobatchSizeError, match="num_real_microbatches"):
        microbatch(lambda x: x, 0, 2, num_real_microbatches=limit)


def test_N10_one_microbatch_is_the_function_itself():
    x = torch.randn(7, 3)
    output = x.cos()
    assert microbatch(lambda x: output, 0, 7, LAST)(x) is output
    assert torch.equal(microbatch(lambda x: x.sum(), 0, 7)(x), x.sum())


def test_N11_zero_rows_run_nothing():
    def fun(x):
        assert x.device.type != "meta"
        return x.sum(0), x * 2, (x + 1).mean()

    total, concat, mean = microbatch(fun, 0, 3, (SUM, CONCAT, MEAN))(torch.zeros(0, 4))
    assert total.tolist() == [0] * 4 and concat.shape == (0, 4) and mean == 0
    assert not isinstance(total, torch._subclasses.FakeTensor)


def test_N7_sums_of_bfloat16_do_not_lose_count():
    ones = torch.ones(4096, dtype=torch.bfloat16)
    total = microbatch(lambda x: x.sum(), 0, 1)(ones)
    assert total == 4096 and total.dtype == torch.bfloat16
    assert ones.cumsum(0)[-1] <= 4096


def test_a_scalar_is_stacked_and_a_number_stays_one():
    x = torch.arange(6.0)
    assert microbatch(lambda x: x.sum(), 0, 2, CONCAT)(x).tolist() == [1, 5, 9]
    found = microbatch(lambda x: float(x.sum()), 0, 2)(x)
    assert type(found) is float and found == 15.0


def test_outputs_with_other_numbers_of_rows_keep_the_batchs_order():
    x = torch.arange(8.0)
    twice = lambda x: x.repeat_interleave(2)
    assert microbatch(twice, 0, 4, CONCAT)(x).tolist() == twice(x).tolist()
    assert microbatch(lambda x: x[:1], 0, 4, CONCAT, order="strided")(x).tolist() == [0, 1]


def test_an_output_that_changes_is_refused():
    with pytest.raises(
        AccumulatorError, match=r"output is float32\[4\] in microbatch 1 and float32\[2\]"
    ):
        sizes = iter([2, 4])
        microbatch(lambda x: torch.ones(next(sizes)), 0, 2, SUM)(torch.ones(4))
    with pytest.raises(AccumulatorError, match="output is a str, which cannot be accumulated"):
        microbatch(lambda x: "text", 0, 2, LAST)(torch.ones(4))


def test_complex_means_work_and_have_no_order():
    x = torch.randn(6, dtype=torch.complex128)
    torch.testing.assert_close(microbatch(lambda x: x.mean(), 0, 2, MEAN)(x), x.mean())
    with pytest.raises(AccumulatorError, match="no order for MAX"):
        microbatch(lambda x: x.sum(), 0, 2, MAX)(x)


def test_weights_are_read_before_anything_runs_and_weight_zero_is_skipped():
    events = []

    def loss(x, mask):
        events.append("run")
        return (x * mask).sum() / mask.sum()

    def tokens(x, mask):
        events.append("weigh")
        return mask.sum()

    x = torch.tensor([1.0, 5.0, torch.nan, torch.nan, 2.0, 3.0])
    mask = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    found = microbatch(loss, (0, 1), 2, MEAN, weight_fn=tokens)(x, mask)
    assert found == 2.0
    assert events == ["weigh"] * 3 + ["run"] * 2


def test_custom_accumulators_are_given_weights():
    root = Accumulator(
        init=lambda spec: torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device),
        update=lambda carry, x, index, weight: carry + weight * x,
        finalize=lambda carry: carry.sqrt(),
    )
    x = rows(5)
    found = microbatch(lambda x: x.square().mean(), 0, 2, root, remainder="allow")(x)
    torch.testing.assert_close(found, x.square().sum().sqrt())
    plain = Accumulator(lambda spec: 0, lambda carry, x, index: carry + x, lambda carry: carry)
    with pytest.raises(AccumulatorError, match="keyword parameter weight"):
        microbatch(lambda x: x.sum(), 0, 2, plain, remainder="allow")(x)


def test_a_state_is_carried_and_the_last_one_is_returned():
    def step(state, x):
        assert state["n"].dtype == torch.int64
        return {"n": state["n"] + len(x), "sum": state["sum"] + x.sum()}, x.sum()

    start = {"n": torch.tensor(0), "sum": torch.tensor(0.0)}
    state, last = microbatch(step, 1, 2, (Carry(0), LAST))(start, torch.arange(6.0))
    assert state["n"] == 6 and state["sum"] == 15 and last == 9 and start["n"] == 0
    with pytest.raises(AccumulatorError, match=r"Carry\(1\) names no argument"):
        microbatch(step, 1, 2, (Carry(1), LAST))(start, torch.arange(6.0))


def test_modules_that_mix_rows_are_refused_before_they_run():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = torch.randn(6, 3)
    with pytest.raises(
        RowMixingError, match=r"Sequential\.1 is a BatchNorm1d that is in training mode"
    ):
        microbatch(net, 0, 2, CONCAT)(x)
    assert not net[1].num_batches_tracked
    torch.testing.assert_close(microbatch(net.eval(), 0, 2, CONCAT)(x), net(x))
    microbatch(net.train(), 0, 2, CONCAT, allow_row_mixing=True)(x)


def test_reshape_is_a_view_in_strided_order():
    x = torch.arange(24.0).reshape(2, 12)
    found = reshape_batch_axis(x, 4, axis=-1)
    assert found.shape == (2, 3, 4)
    assert torch.equal(found[:, 1], x[:, 1::3])
    assert found.data_ptr() == x.data_ptr()
    with pytest.raises(MicrobatchSizeError, match="not divisible by microbatch_size=5"):
        reshape_batch_axis(x, 5, axis=1)


def test_M1_M4_memory_is_one_microbatch_and_one_accumulator():
    x, w = torch.randn(64, 256), torch.randn(256, 256)
    fun = lambda x: (x @ w).relu().sum(0)

    def peak(size):
        with torch.no_grad(), TensorBytes() as tracked:
            tracked.hold([x, w])
            tracked.restart_peak()
            before = tracked.live_bytes
            microbatch(fun, 0, size)(x)
        return tracked.peak_bytes - before

    peaks = [peak(size) for size in (64, 32, 16, 4)]
    assert peaks == sorted(peaks, reverse=True)
    # Two activations of four rows, the output, the accumulator and a spare, 1 KiB each; no more with more microbatches.
    assert peaks[-1] <= (2 * 4 + 4) * 1024


def test_the_size_is_found_where_it_is_asked_for():
    x = torch.randn(64, 256)
    seen = []

    def fun(x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            seen.append(len(x))
        return (x @ x.new_ones(256, 256)).relu().sum()

    microbatch(fun, 0, "auto", memory_budget="380KiB", remainder="allow")(x)
    assert len(seen) > 1 and sum(seen) == 64


def test_a_compiled_function_is_compiled_once_for_all_views():
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    weight = nn.Parameter(torch.randn(3, 3))
    fun = torch.compile(lambda x: (x @ weight).tanh().sum(), backend=backend)
    x = torch.randn(64, 3)
    counts = []
    for size in (8, 24, 1):
        microbatch(fun, 0, size, remainder="allow")(x).backward()
        counts.append(len(compiled))
    assert counts == [1, 2, 3]


def test_a_compiled_caller_runs_the_loop_in_python():
    weight = nn.Parameter(torch.randn(3, 3))
    x = torch.randn(6, 3)
    inner = lambda x: (x @ weight).tanh().sum()
    caller = torch.compile(lambda x: microbatch(inner, 0, 2)(x) * 2, backend="eager")
    torch.testing.assert_close(caller(x), 2 * inner(x))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (float("nan"), "weight_fn returned nan for microbatch 0"),
        (torch.tensor(-1), r"weight_fn returned -1(\.0)? for microbatch 0"),
        (torch.ones(3), r"weight_fn returned a Tensor of shape \(3,\)"),
        (None, "weight_fn returned a NoneType"),
    ],
)
def test_weights_that_cannot_be_are_refused(weight, words):
    x = torch.arange(4.0)
    with pytest.raises(MicrobatchError, match=words):
        microbatch(lambda x: x.mean(), 0, 2, MEAN, weight_fn=lambda x: weight)(x)
    with pytest.raises(MicrobatchError, match=words):
        accumulate(lambda x: x.mean(), MEAN, weight_fn=lambda x: weight)(microbatches=[(x,)])


def test_large_integer_weights_keep_all_their_digits():
    weights = torch.tensor([2**30 + 1, 1.0 / 3], dtype=torch.float64)
    given = lambda x: (weights[:1].long() if x[0] == 0 else weights[1:].float()).sum()
    seen = []
    add = Accumulator(
        lambda spec: 0, lambda c, x, i, weight: seen.append(weight) or c, lambda c: torch.tensor(0)
    )
    microbatch(lambda x: x.sum(), 0, 1, add, weight_fn=given)(torch.arange(2.0))
    assert seen[0] == 2**30 + 1
