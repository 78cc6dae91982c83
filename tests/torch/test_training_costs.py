"""What a call costs beside the loop that one would write by hand: memory, kernels, host synchronisations, compilations."""

import collections
import functools

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import microbatch.torch as mb
from microbatch.torch._tracking import TensorBytes


class Kernels(TorchDispatchMode):
    """Counts every operator that reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Notes what makes the host wait for values, and in which order with forwards."""

    WAITS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy")

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.WAITS:
            self.log.append(func.__name__)
        return func(*args, **(kwargs or {}))


def net():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def square(model, x):
    return model(x).square().mean()


def by_hand(model, x, size):
    total = 0.0
    for start in range(0, len(x), size):
        rows = x[start : start + size]
        loss = square(model, rows) * (len(rows) / len(x))
        loss.backward()
        total += loss.detach()
    return total


def peak_of(run, model, x):
    model.zero_grad()
    with TensorBytes() as tracked:
        tracked.hold([*model.parameters(), x])
        run()
    return tracked.peak_bytes


@pytest.mark.parametrize("size", [16, 64, 256, 1024])
def test_peak_is_that_of_the_loop_by_hand(size):
    model, x = net(), torch.randn(1024, 64)
    hand = peak_of(lambda: by_hand(model, x, size), model, x)
    ours = peak_of(
        lambda: mb.backward(functools.partial(square, model), x, microbatch_size=size), model, x
    )
    assert ours <= 1.01 * hand
    if size < 1024:
        assert ours < peak_of(lambda: by_hand(model, x, 1024), model, x)


def test_peak_of_a_batch_argument_that_needs_a_gradient():
    """One gradient of the batch's size for all microbatches together, not one for each."""
    model, x = net(), torch.randn(1024, 64, requires_grad=True)
    loss_fn = functools.partial(square, model)
    ours = peak_of(lambda: mb.backward(loss_fn, x, microbatch_size=16), model, x)
    leaf = x.detach()
    hand = peak_of(lambda: by_hand(model, leaf, 16), model, leaf)
    assert ours <= hand + 1.05 * leaf.nbytes


def test_value_and_grad_keeps_one_set_of_gradients():
    model, x = net(), torch.randn(1024, 64)
    valued = mb.value_and_grad(
        functools.partial(square, model), model.parameters(), microbatch_size=64
    )
    hand = peak_of(lambda: by_hand(model, x, 64), model, x)
    assert peak_of(lambda: valued(x), model, x) <= 1.01 * hand


def test_kernels_are_those_of_the_loop_by_hand():
    model, x = net(), torch.randn(64, 64)
    counted = []
    runs = [
        lambda: by_hand(model, x, 8),
        lambda: mb.backward(functools.partial(square, model), x, microbatch_size=8),
    ]
    for run in runs:
        run()
        with Kernels() as kernels:
            run()
        counted.append(kernels.counts)
    hand, ours = counted
    extra = {k: ours[k] - hand[k] for k in ours | hand if ours[k] > hand[k]}
    views = {"view", "detach", "slice", "alias", "_unsafe_view"}
    # At most the scale of the first value and the casts of the result; per microbatch nothing but views.
    assert sum(n for name, n in extra.items() if name not in views) <= 3, extra


def test_weights_are_read_once_before_the_first_forward():
    model, x = net(), torch.randn(64, 64)

    def loss_fn(x):
        reads.log.append("forward")
        return square(model, x)

    with Reads() as reads:
        mb.backward(loss_fn, x, microbatch_size=16, weight_fn=lambda x: (x > 0).sum())
    assert reads.log == ["tolist"] + ["forward"] * 4
    with Reads() as reads:
        mb.backward(loss_fn, x, microbatch_size=16)
    assert reads.log == ["forward"] * 4


def test_checks_of_one_call_do_not_wait_for_values_and_copy_buffers_once():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(64))

        def forward(self, x):
            return x + self.table

    model = nn.Sequential(Positions(), net())
    loss_fn, x = functools.partial(square, model), torch.randn(64, 64)
    clones = []
    for _ in range(2):
        with Kernels() as kernels:
            mb.backward(loss_fn, x, microbatch_size=16)
        clones.append(kernels.counts["clone"])
    assert clones == [clones[0], clones[0] - 1]


class Compilable(nn.Module):
    """A module of one's own: PyTorch leaves its own containers alone when they are compiled in place."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        return self.inner(x)


def test_compiled_modules_compile_for_two_shapes_and_no_more():
    compiled = []

    def counting(graph, _):
        compiled.append(graph)
        return graph.forward

    for wrap in ("module", "in place", "function"):
        torch._dynamo.reset()
        compiled.clear()
        model = Compilable()
        loss_fn = functools.partial(square, model)
        if wrap == "module":
            loss_fn = functools.partial(
                square, torch.compile(model, backend=counting, dynamic=False)
            )
        elif wrap == "in place":
            model.compile(backend=counting, dynamic=False)
        else:
            loss_fn = torch.compile(loss_fn, backend=counting, dynamic=False)
        x = torch.randn(11, 64)
        for _ in range(3):
            mb.backward(loss_fn, x, microbatch_size=4)
        assert len(compiled) == 2, wrap


def test_microbatches_are_moved_one_at_a_time():
    model, x = net(), torch.randn(64, 64)
    moved = []

    def loss_fn(x):
        moved.append(x.device.type)
        return square(model, x)

    mb.backward(loss_fn, x, microbatch_size=16, device="cpu")
    assert moved == ["cpu"] * 4
    model.to("meta")
    model.zero_grad()
    mb.backward(loss_fn, x, microbatch_size=16, device="meta", weight_fn=lambda x: (x > 0).sum())
    assert moved[4:] == ["meta"] * 4
    assert all(p.grad.device.type == "meta" for p in model.parameters())
