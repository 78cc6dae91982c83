"""`accumulate` in PyTorch: what the laws that all fronts share do not say."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from microbatch import Accumulator, AccumulatorError, CheckpointError, MicrobatchError
from microbatch.torch import AccumulationType, accumulate, value_and_grad
from microbatch.torch._tracking import TensorBytes
from tests.torch import _worker_stream as worker

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType


def test_a_killed_stream_continues_bit_for_bit(tmp_path):
    path = tmp_path / "fold.safetensors"
    program = f"from tests.torch import _worker_stream as w; w.fold({str(path)!r}, 8, 0.05)"
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[2]
    killed = subprocess.run(command, cwd=root, capture_output=True, timeout=120)
    assert killed.returncode == -9 and path.exists()
    resumed = worker.fold(path)
    assert not path.exists()
    whole = worker.fold(None)
    for found, expected in zip(resumed, whole, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_a_foreign_checkpoint_is_refused(tmp_path):
    path = tmp_path / "fold.safetensors"
    stream = [(torch.ones(2, 3),), (torch.ones(2, 3),)]

    def interrupted():
        yield from stream
        raise KeyboardInterrupt

    fun = lambda net, x: net(x).sum(0)
    net = nn.Linear(3, 2)
    with pytest.raises(KeyboardInterrupt):
        accumulate(fun)(net, microbatches=interrupted(), checkpoint=path)
    others = [
        (lambda net, x: net(x).sum(1), SUM, net, stream),
        (fun, MEAN, net, stream),
        (fun, SUM, nn.Linear(3, 2), stream),
        (fun, SUM, net, [(torch.ones(3, 3),)]),
        (fun, SUM, net, [(torch.ones(2, 3).double(),)]),
    ]
    for other, kind, module, data in others:
        with pytest.raises(CheckpointError, match="is a checkpoint of another"):
            accumulate(other, kind)(module, microbatches=data, checkpoint=path)
    found = accumulate(fun)(net, microbatches=stream, checkpoint=path)
    assert torch.equal(found, 2 * fun(net, stream[0][0]))


def test_full_batch_gradients_over_a_loader():
    net = nn.Linear(3, 1).double()
    x, y = torch.randn(10, 3).double(), torch.randn(10, 1).double()
    loss = lambda x, y: (net(x) - y).square().mean()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    step = value_and_grad(loss, dict(net.named_parameters()), microbatch_size=2)
    value, grads = accumulate(step, MEAN)(microbatches=loader)
    expected = torch.autograd.grad(loss(x, y), list(net.parameters()))
    torch.testing.assert_close(value, loss(x, y).detach())
    torch.testing.assert_close(tuple(grads.values()), expected)


def test_outputs_are_detached_and_memory_does_not_grow():
    w = torch.randn(64, 64, requires_grad=True)
    fun = lambda x: (x @ w).tanh().sum(0)

    def peak(count):
        with TensorBytes() as tracked:
            tracked.hold([w])
            found = accumulate(fun)(microbatches=(torch.randn(8, 64) for _ in range(count)))
        assert not found.requires_grad
        return tracked.peak_bytes

    assert peak(3) == peak(30)


def test_rows_go_to_the_host_and_into_a_given_array():
    stream = [torch.arange(3.0), torch.arange(2.0)]
    found = accumulate(lambda x: (x * 2, x.sum()), CONCAT)(microbatches=stream)
    assert found[0].tolist() == [0, 2, 4, 0, 2] and found[1].tolist() == [3, 1]
    out = np.zeros(6, np.float32)
    rows, total = accumulate(lambda x: (x * 2, x.sum()), (CONCAT, SUM))(
        microbatches=stream, out=(out, None)
    )
    assert rows.base is out and len(rows) == 5 and out.tolist() == [0, 2, 4, 0, 2, 0] and total == 4


def test_weights_and_skipped_elements():
    stream = [
        (torch.tensor([1.0, torch.nan]), 0),
        (torch.tensor([2.0]), 1),
        (torch.tensor([5.0]), 2),
    ]
    fun = lambda x, w: (x.mean(), x)
    mean, rows = accumulate(fun, (MEAN, CONCAT), weight_fn=lambda x, w: torch.tensor(w))(
        microbatches=stream
    )
    assert mean == 4 and rows.tolist() == [0, 0, 2, 5]
    mean, rows = accumulate(fun, (MEAN, CONCAT), weight_fn=lambda x, w: 0)(microbatches=stream)
    assert mean == 0 and rows.tolist() == [0, 0, 0, 0]


def test_custom_accumulators_get_the_weight():
    total = Accumulator(
        lambda spec: torch.zeros(spec.shape),
        lambda carry, x, index, weight: carry + weight * x,
        lambda carry: carry,
    )
    stream = [torch.ones(3), torch.ones(2)]
    assert accumulate(lambda x: x.mean(), total)(microbatches=stream) == 5


def test_transformations_are_refused():
    fold = accumulate(lambda w, x: (w * x).sum())
    with pytest.raises(MicrobatchError, match="cannot be followed by transformations"):
        torch.func.grad(lambda w: fold(w, microbatches=[torch.ones(2)]))(torch.ones(()))


def test_rows_keep_the_dtype_of_the_first_microbatch():
    stream = [(torch.ones(1, dtype=torch.float32),), (torch.ones(1, dtype=torch.float64),)]
    assert accumulate(lambda x: x, CONCAT)(microbatches=stream).dtype == torch.float32
    stream = [(torch.ones(1, dtype=torch.int64),), (torch.ones(1),)]
    with pytest.raises(AccumulatorError, match=r"output is float32\[1\] in microbatch 1 and int64"):
        accumulate(lambda x: x, CONCAT)(microbatches=stream)
