"""Derivatives through `microbatch` in PyTorch: the whole batch's, in one microbatch's memory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from microbatch import Accumulator, AccumulatorError, GraphError, MicrobatchError
from microbatch.torch import AccumulationType, Carry, microbatch
from microbatch.torch._tracking import TensorBytes

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType
MODES = ("auto", "recompute", "store")


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def network(dropout=0.0):
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def gradients(output, inputs):
    return torch.autograd.grad(output.square().sum(), inputs)


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


FUNCTIONS = [
    (lambda net, x: net(x).square().mean(), MEAN),
    (lambda net, x: net(x).square().sum(), SUM),
    (lambda net, x: net(x).sum(0), SUM),
    (lambda net, x: net(x), CONCAT),
    (lambda net, x: net(x).amax(0), MAX),
    (lambda net, x: net(x).amin(0), MIN),
    (lambda net, x: (net(x).sum(), [net(x).tanh(), None]), (SUM, [CONCAT, SUM])),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["contiguous", "strided"])
@pytest.mark.parametrize(("fun", "kind"), FUNCTIONS)
def test_gradients_are_the_whole_batchs(fun, kind, order, mode):
    net, x = network(), rows(12, 4).requires_grad_()
    inputs = [x, *net.parameters()]

    def flat(output):
        first = output if isinstance(output, torch.Tensor) else output[0] + output[1][0].sum()
        return gradients(first, inputs)

    expected = flat(fun(net, x))
    for size in (1, 3, 5, 12):
        small = microbatch(fun, 1, size, kind, order=order, remainder="allow", differentiate=mode)
        assert_same(flat(small(net, x)), expected)


def test_running_mean_last_and_early_stops():
    w, x = rows(()).requires_grad_(), rows(12)
    fun = lambda x: (w * x).mean()
    for kind, expected in [
        (RUNNING_MEAN, x[:6].mean()),
        (MEAN, x[:6].sum() / 12),
        (LAST, x[3:6].mean()),
        (SUM, x[:3].mean() + x[3:6].mean()),
        (CONCAT, x[:3].mean() + x[3:6].mean()),
    ]:
        small = microbatch(fun, 0, 3, kind, num_real_microbatches=2)
        assert_same(torch.autograd.grad(small(x).sum(), w), [expected])
        nothing = microbatch(fun, 0, 3, kind, num_real_microbatches=0)
        assert torch.autograd.grad(nothing(x).sum(), w)[0] == 0


def test_in_forward_is_chosen_for_one_scalar_and_recompute_for_rows():
    w, x = torch.ones((), requires_grad=True), torch.arange(6.0)
    calls = []
    fun = lambda x: calls.append(len(x)) or (w * x)
    microbatch(lambda x: fun(x).sum(), 0, 2)(x).backward()
    assert calls == [2] * 3 and w.grad == 15
    calls.clear()
    microbatch(fun, 0, 2, CONCAT)(x).sum().backward()
    assert calls == [2] * 6 and w.grad == 30


def test_in_forward_has_one_pullback_per_scalar():
    w, x = rows(3).requires_grad_(), rows(6, 3)
    fun = lambda x: {"a": (x @ w).sum(), "b": ((x @ w) ** 2).mean(), "n": len(x)}
    kinds = {"a": SUM, "b": MEAN, "n": SUM}
    small = microbatch(fun, 0, 2, kinds, differentiate="in_forward")
    for weigh in (lambda o: o["a"], lambda o: 3 * o["b"], lambda o: o["a"] * o["b"]):
        assert_same(torch.autograd.grad(weigh(small(x)), w), torch.autograd.grad(weigh(fun(x)), w))
    assert small(x)["n"] == 6


def test_in_forward_runs_backward_once_and_says_so():
    w, x = torch.ones((), requires_grad=True), torch.arange(6.0)
    value = microbatch(lambda x: (w * x).sum(), 0, 2)(x)
    value.backward(retain_graph=True)
    with pytest.raises(GraphError, match='Use differentiate="recompute"'):
        value.backward()
    with pytest.raises(MicrobatchError, match="output has CONCAT"):
        microbatch(lambda x: w * x, 0, 2, CONCAT, differentiate="in_forward")(x)


def test_a_gradient_penalty_is_not_silently_left_out():
    w, x = torch.ones(3, requires_grad=True), rows(6, 3).float()
    loss = lambda x: (x @ w).sin().mean()

    def penalised(fun):
        first = torch.autograd.grad(fun(x), w, create_graph=True)[0]
        return torch.autograd.grad(w.sum() + first.square().sum(), w)

    for mode in ("in_forward", "auto"):
        with pytest.raises(GraphError, match='Use differentiate="recompute"'):
            penalised(microbatch(loss, 0, 2, MEAN, differentiate=mode))
    small = microbatch(loss, 0, 2, MEAN, differentiate="recompute")
    torch.testing.assert_close(penalised(small), penalised(loss))


def test_float16_is_not_made_before_the_loss_scale():
    w = torch.ones((), dtype=torch.float16, requires_grad=True)
    value = microbatch(lambda x: (w * x).sum(), 0, 2)(torch.ones(4, dtype=torch.float16))
    assert type(value.grad_fn).__name__ == "MicrobatchedBackward"


def test_N1_N4_weighted_means_and_a_masked_microbatch():
    w = rows(()).requires_grad_()
    x, mask = rows(6), torch.tensor([1.0, 0, 0, 0, 1, 1], dtype=torch.float64)
    x[2:4] = torch.nan
    loss = lambda x, mask: (w * x.log().abs() * mask).sum() / mask.sum()
    x[[0, 4, 5]] = x[[0, 4, 5]].abs()
    x[1] = 1.0
    for mode in MODES:
        small = microbatch(
            loss, (0, 1), 2, MEAN, weight_fn=lambda x, mask: mask.sum(), differentiate=mode
        )
        value = small(x, mask)
        expected = loss(x[[0, 1, 4, 5]], mask[[0, 1, 4, 5]])
        torch.testing.assert_close(value, expected)
        assert_same(torch.autograd.grad(value, w), torch.autograd.grad(expected, w))


def test_N13_a_nan_that_counts_is_not_hidden():
    w = torch.ones((), requires_grad=True)
    x = torch.tensor([1.0, torch.nan, 1.0, 1.0])
    value = microbatch(lambda x: (w * x).sum(), 0, 2)(x)
    value.backward()
    assert value.isnan() and w.grad.isnan()


def test_N19_gradients_of_bfloat16_parameters_are_summed_in_float32():
    w = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    x = torch.full((4096,), 1e-3, dtype=torch.bfloat16)
    for mode in ("in_forward", "recompute"):
        small = microbatch(lambda w, x: (w * x).sum(), 1, 1, differentiate=mode)
        (found,) = torch.autograd.grad(small(w, x), w)
        assert found.dtype == torch.bfloat16
        assert abs(found.item() - 4096 * x[0].item()) <= 2**-8 * 4.096


def test_N21_the_second_pass_draws_what_the_first_drew():
    net, x = network(dropout=0.5), rows(12, 4)
    torch.manual_seed(3)
    output = microbatch(net, 0, 3, CONCAT)(x)
    after = torch.get_rng_state()
    found = gradients(output, list(net.parameters()))
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(3)
    by_hand = torch.cat([net(x[i : i + 3]) for i in range(0, 12, 3)])
    assert torch.equal(output, by_hand)
    assert_same(found, gradients(by_hand, list(net.parameters())))


def test_N21_generators_of_ones_own_are_replayed_where_they_are_named():
    generator = torch.Generator().manual_seed(0)
    w, x = torch.ones((), requires_grad=True), torch.ones(6)

    def noisy(x):
        return w * x * torch.randn(len(x), generator=generator)

    output = microbatch(noisy, 0, 2, CONCAT, rng=generator)(x)
    (found,) = torch.autograd.grad(output.sum(), w)
    torch.testing.assert_close(found, output.detach().sum())
    with pytest.raises(MicrobatchError, match="rng=3 is not understood"):
        microbatch(noisy, 0, 2, CONCAT, rng=3)


@pytest.mark.parametrize("held", ["closure", "module", "argument"])
def test_N21_generators_that_can_be_found_are_replayed(held):
    generator = torch.Generator().manual_seed(0)
    net = network()
    net[1].generator = generator

    def noisy(x, drawn=None):
        drawn = {"closure": generator, "module": net[1].__dict__.get("generator")}.get(held, drawn)
        return net(x * torch.randn(len(x), 1, generator=drawn, dtype=x.dtype))

    x = rows(6, 4)
    output = microbatch(noisy, 0, 2, CONCAT)(x, generator)
    found = gradients(output, list(net.parameters()))
    generator.manual_seed(0)
    by_hand = torch.cat([noisy(x[i : i + 2], generator) for i in range(0, 6, 2)])
    assert_same(found, gradients(by_hand, list(net.parameters())))


def test_modules_are_evaluated_again_in_the_mode_that_they_were_in():
    net, x = network(dropout=0.9), rows(6, 4)
    net.eval()
    output = microbatch(net, 0, 2, CONCAT)(x)
    net.train()
    found = gradients(output, list(net.parameters()))
    assert net.training and net[2].training
    assert_same(found, gradients(net.eval()(x), list(net.parameters())))


def test_arguments_that_change_in_place_are_not_evaluated_again():
    w = rows(4).requires_grad_()

    def scaled(x):
        return (x.mul_(2) @ w).square().mean()

    x = rows(6, 4)
    (wanted,) = torch.autograd.grad(scaled(x.clone()), w)
    (found,) = torch.autograd.grad(microbatch(scaled, 0, 2, MEAN)(x.clone()), w)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(MicrobatchError, match=r"changes args\[0\] in place"):
        microbatch(scaled, 0, 2, MEAN, differentiate="recompute")(x.clone())
    with pytest.raises(MicrobatchError, match=r"changes args\[1\] in place"):
        # Under a transformation it shows when it would be evaluated again.
        weigh = lambda v, x: (x.mul_(2) @ v).square().mean()
        grad(microbatch(weigh, 1, 2, MEAN))(w.detach(), x.clone())


def test_C19_a_tensor_with_a_graph_is_followed_where_it_can_be_found():
    s, x = rows(()).requires_grad_(), rows(6)
    expected = torch.autograd.grad((s.exp() * x).square().sum(), s)
    for mode in MODES:
        passed = microbatch(lambda scale, x: (scale * x).square().sum(), 1, 2, differentiate=mode)
        assert_same(torch.autograd.grad(passed(s.exp(), x), s), expected)
        scale = s.exp()
        closed = microbatch(lambda x: (scale * x).square().sum(), 0, 2, differentiate=mode)
        assert_same(torch.autograd.grad(closed(x), s), expected)


def test_C19_a_tensor_with_a_graph_that_cannot_be_found_is_refused():
    class Holder:
        pass

    s, holder = rows(()).requires_grad_(), Holder()
    holder.scale = s.exp()
    for kind in (SUM, CONCAT):
        with pytest.raises(GraphError, match=r"computed before the call \(by ExpBackward0\)"):
            microbatch(lambda x: holder.scale * x.sum(), 0, 2, kind)(rows(6))


def test_a_leaf_is_found_wherever_it_is_if_the_first_microbatch_uses_it():
    class Holder:
        pass

    holder, x = Holder(), rows(6)
    holder.late = rows(()).requires_grad_()
    holder.hidden = {"deep": [[[[[[rows(()).requires_grad_()]]]]]]}
    leaf = holder.hidden["deep"][0][0][0][0][0][0]
    fun = lambda x: holder.hidden["deep"][0][0][0][0][0][0] * x
    for kind in (SUM, CONCAT):
        output = microbatch(
            lambda x, kind=kind: fun(x).sum() if kind is SUM else fun(x), 0, 2, kind
        )
        assert_same(torch.autograd.grad(output(x).sum(), leaf), [x.sum()])


def test_a_leaf_that_only_a_later_microbatch_uses_is_refused_never_missing():
    class Opaque:
        __slots__ = ()

        def __call__(self, x):
            return known * x * (weight if x[0] > 3 else 1.0)

    weight, known = rows(()).requires_grad_(), rows(()).requires_grad_()
    x = torch.arange(6.0, dtype=torch.float64)
    for kind in (SUM, CONCAT):
        small = microbatch(Opaque(), 0, 2 if kind is CONCAT else 1, kind)
        with pytest.raises(GraphError, match="that the first microbatch did not use"):
            small(x).sum().backward()


def test_experts_that_only_some_microbatches_use_are_found_in_modules():
    experts = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2).double()])
    unused = nn.Linear(2, 2).double()
    x = torch.cat([torch.ones(4, 2), -torch.ones(4, 2)]).double()
    both = nn.ModuleList([experts, unused])
    fun = lambda x: both[0][0 if x[0, 0] > 0 else 1](x).square()
    for mode in ("recompute", "store"):
        microbatch(fun, 0, 4, CONCAT, differentiate=mode)(x).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in experts.parameters())
    # Not zeros: an optimizer would decay what the whole batch leaves alone.
    assert all(p.grad is None for p in unused.parameters())


def test_C20_a_users_hook_acts_once_on_the_whole_gradient():
    net, x = nn.Linear(3, 1, bias=False).double(), rows(6, 3)
    seen = []
    net.weight.register_hook(lambda g: seen.append(g) or g.clamp(max=0.5))
    for mode in ("in_forward", "recompute"):
        seen.clear()
        net.zero_grad()
        microbatch(lambda x: net(x).exp().sum(), 0, 2, differentiate=mode)(x).backward()
        assert len(seen) == 1
        found = net.weight.grad.clone()
        net.zero_grad()
        net(x).exp().sum().backward()
        torch.testing.assert_close(found, net.weight.grad)


def test_a_carry_that_matters_is_refused_and_one_that_does_not_is_fine():
    w, x = rows(()).requires_grad_(), rows(6)
    loss = lambda state, x: (0.9 * state + x.mean(), (w * x - state).square().sum())
    state, value = microbatch(loss, 1, 2, (Carry(0), SUM))(torch.zeros(()).double(), x)
    start, expected = torch.zeros(()).double(), 0
    for i in range(0, 6, 2):
        following, term = loss(start, x[i : i + 2])
        start, expected = following.detach(), expected + term
    torch.testing.assert_close(state, start)
    assert_same(torch.autograd.grad(value, w), torch.autograd.grad(expected, w))
    through = lambda state, x: (state + (w * x).sum(), (w * x).sum() * state)
    with pytest.raises(AccumulatorError, match="no derivative flows through a Carry"):
        microbatch(through, 1, 2, (Carry(0), SUM))(torch.zeros(()).double(), x)


def test_batch_statistics_are_carried():
    stats = torch.zeros(3).double()

    def net(stats, x, w):
        mean = x.mean(0)
        return 0.5 * stats + 0.5 * mean.detach(), ((x - mean) @ w).square().sum()

    w, x = rows(3).requires_grad_(), rows(6, 3)
    new, value = microbatch(net, 1, 3, (Carry(0), SUM))(stats, x, w)
    torch.testing.assert_close(new, 0.25 * x[:3].mean(0) + 0.5 * x[3:].mean(0))
    expected = sum(net(stats, x[i : i + 3], w)[1] for i in (0, 3))
    assert_same(torch.autograd.grad(value, w), torch.autograd.grad(expected, w))


def test_custom_accumulators_are_followed():
    root = Accumulator(
        init=lambda spec: torch.zeros(spec.shape, dtype=spec.dtype),
        update=lambda carry, x, index: carry + x,
        finalize=lambda carry: carry.sqrt(),
    )
    w, x = rows(3).requires_grad_(), rows(6, 3)
    fun = lambda x: ((x @ w).square().sum(), x @ w)
    norm, out = microbatch(fun, 0, 2, (root, CONCAT))(x)
    expected = (x @ w).square().sum().sqrt() + (x @ w).sum()
    assert_same(torch.autograd.grad(norm + out.sum(), w), torch.autograd.grad(expected, w))


@pytest.mark.parametrize("kind", [MEAN, CONCAT, MAX])
def test_transformations_of_torch_func(kind):
    net, x = network(), rows(6, 4)
    params = {name: p.detach() for name, p in net.named_parameters()}
    batches = rows(5, 6, 4)

    def fun(p, x):
        out = functional_call(net, p, (x,))
        return {MEAN: lambda: out.mean(), CONCAT: lambda: out, MAX: lambda: out.amax(0)}[kind]()

    small = microbatch(fun, 1, 2, kind)
    scalar = lambda f: lambda p, x: f(p, x).square().sum()
    assert_same(
        grad(scalar(small), 0)(params, x).values(), grad(scalar(fun), 0)(params, x).values()
    )
    assert_same([grad(scalar(small), 1)(params, x)], [grad(scalar(fun), 1)(params, x)])
    assert_same([vmap(small, (None, 0))(params, batches)], [vmap(fun, (None, 0))(params, batches)])
    assert_same(
        vmap(grad(scalar(small)), (None, 0))(params, batches).values(),
        vmap(grad(scalar(fun)), (None, 0))(params, batches).values(),
    )
    assert_same(
        [jacrev(jacrev(scalar(small), 1), 1)(params, x)], [hessian(scalar(fun), 1)(params, x)]
    )


def test_closures_under_torch_func():
    net, x = network(), rows(6, 4)
    params = {name: p.detach() for name, p in net.named_parameters()}
    whole = lambda p: functional_call(net, p, (x,)).square().mean()

    def closed(p):
        return microbatch(lambda x: functional_call(net, p, (x,)).square().mean(), 0, 2, MEAN)(x)

    assert_same(grad(closed)(params).values(), grad(whole)(params).values())


def test_second_derivatives_and_vmap_under_ordinary_autograd():
    net, x = network(), rows(6, 4).requires_grad_()
    inputs = [x, *net.parameters()]
    small, whole = microbatch(lambda x: net(x).tanh(), 0, 2, CONCAT), lambda x: net(x).tanh()

    def second(fun):
        first = torch.autograd.grad(fun(x).square().sum(), inputs, create_graph=True)
        total = sum(g.square().sum() for g in first)
        return torch.autograd.grad(total, inputs)

    assert_same(second(small), second(whole))
    batches = rows(3, 6, 4).requires_grad_()
    mapped = lambda fun: gradients(vmap(fun)(batches), [batches, *net.parameters()])
    assert_same(mapped(small), mapped(whole))


def test_functional_call_around_a_module_that_microbatches():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3).double()

        def forward(self, x):
            return microbatch(self.inner, 0, 2, CONCAT)(x)

    model, x = Model(), rows(6, 4)
    params = {k: (2 * p.detach()).requires_grad_() for k, p in model.named_parameters()}
    # Not leaves, and no longer in the module when backward runs.
    output = functional_call(model, {k: 1 * p for k, p in params.items()}, (x,))
    found = gradients(output, list(params.values()))
    whole = F.linear(x, params["inner.weight"], params["inner.bias"])
    assert_same(found, gradients(whole, list(params.values())))
    scalar = lambda p: functional_call(model, p, (x,)).square().sum()
    detached = {k: p.detach() for k, p in params.items()}
    assert_same(grad(scalar)(detached).values(), found)


def test_autocast_is_restored_in_backward():
    net, x = nn.Linear(4, 8), torch.randn(12, 4)
    for mode in ("in_forward", "recompute"):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole = net(x).float().square().mean()
            fun = lambda x: net(x).float().square().mean()
            value = microbatch(fun, 0, 3, MEAN, differentiate=mode)(x)
            again = net(x).float().square().mean()
        assert value.item() == pytest.approx(whole.item(), rel=1e-6)
        value.backward()
        found = net.weight.grad.clone()
        for other in (whole, again):  # the cached casts around the call still carry their graph
            net.zero_grad()
            other.backward()
            torch.testing.assert_close(found, net.weight.grad, rtol=2e-2, atol=1e-4)


def test_nothing_is_recorded_where_nothing_is_differentiated():
    net, x = network(), rows(6, 4)
    small = microbatch(net, 0, 2, CONCAT)
    with torch.no_grad():
        assert not small(x).requires_grad
    with torch.inference_mode():
        assert small(x).is_inference()
    assert not microbatch(lambda x: x.exp(), 0, 2, CONCAT)(x).requires_grad


def test_microbatches_nest():
    net, x = network(), rows(12, 4)
    inner = microbatch(net, 0, 2, CONCAT)
    outer = microbatch(lambda x: inner(x).square().sum(), 0, 6)
    found = torch.autograd.grad(outer(x), list(net.parameters()))
    assert_same(found, gradients(net(x), list(net.parameters())))


def test_tied_and_sparse_parameters():
    table = nn.Embedding(5, 3, sparse=True).double()
    tokens = torch.tensor([0, 1, 1, 4, 2, 0])
    fun = lambda t: table(t).square().sum()
    for mode in ("in_forward", "recompute"):
        (found,) = torch.autograd.grad(
            microbatch(fun, 0, 2, differentiate=mode)(tokens), table.weight
        )
        assert found.is_sparse
        assert_same(
            [found.to_dense()], [torch.autograd.grad(fun(tokens), table.weight)[0].to_dense()]
        )


def test_complex_parameters():
    w, x = torch.randn(3, dtype=torch.complex128, requires_grad=True), rows(6, 3)
    fun = lambda x: ((x * w).sum(1).abs() ** 2).mean()
    expected = torch.autograd.grad(fun(x), w)
    for mode in MODES:
        assert_same(
            torch.autograd.grad(microbatch(fun, 0, 2, MEAN, differentiate=mode)(x), w), expected
        )


def test_M5_peak_memory_is_that_of_a_hand_written_loop():
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(256, 64)

    def whole():
        net(x).square().mean().backward()

    def by_hand():
        for i in range(0, 256, 16):
            (net(x[i : i + 16]).square().mean() / 16).backward()

    def ours(mode):
        fun = lambda x: net(x).square().mean()
        return lambda: microbatch(fun, 0, 16, MEAN, differentiate=mode)(x).backward()

    def peak(fun):
        net.zero_grad()
        fun()  # what is made once and kept
        net.zero_grad()
        with TensorBytes() as tracked:
            tracked.hold([x, *net.parameters()])
            before = tracked.live_bytes
            fun()
        return tracked.peak_bytes - before

    hand = peak(by_hand)
    # The activations of one microbatch more: the graph's first output and its cotangents, and the probe of a leaf.
    assert peak(ours("in_forward")) <= 1.05 * hand
    assert peak(ours("recompute")) <= 1.05 * hand
    assert hand < 0.6 * peak(whole)


def test_forward_mode_is_refused_with_the_way_out():
    with pytest.raises(MicrobatchError, match=r"jacrev\(jacrev\(fun\)\) for a Hessian"):
        hessian(microbatch(lambda x: x.square().sum(), 0, 2))(rows(4))


def test_in_forward_over_ddp():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        x = rows(12, 4)
        for option in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            net = network()
            wrapped = nn.parallel.DistributedDataParallel(net, **option)
            fun = lambda x, net: net(x).square().mean()
            expected = torch.autograd.grad(fun(x, net), list(net.parameters()))
            for mode in ("in_forward", "auto", "recompute"):
                small = microbatch(fun, 0, 3, MEAN, differentiate=mode)
                if mode == "in_forward" and option:
                    with pytest.raises(MicrobatchError, match=f"with {next(iter(option))}=True"):
                        small(x, wrapped)
                    continue
                net.zero_grad()
                small(x, wrapped).backward()
                assert_same([p.grad for p in net.parameters()], expected)
    finally:
        torch.distributed.destroy_process_group()


def test_the_private_parts_of_pytorch_are_where_they_were():
    from microbatch.torch import _internals
    from microbatch.torch._graph import reach_of

    leaf = torch.ones((), requires_grad=True)
    before = leaf.exp()
    since = _internals.graph_clock()
    reached = reach_of(leaf.exp() * 2, since=since)
    assert list(reached.leaves.values()) == [leaf] and reached.earlier is None
    assert reach_of(before * 2, since=since).earlier == "ExpBackward0"
    assert not _internals.transforms_active() and not _internals.is_transformed(leaf)
    seen = []
    grad(
        lambda x: seen.append((_internals.transforms_active(), _internals.is_transformed(x))) or x
    )(torch.ones(()))
    assert seen == [(True, True)]
    calls = []
    leaf.register_hook(lambda g: calls.append("theirs"))
    with _internals.own_hooks_only([leaf]):
        leaf.register_hook(lambda g: calls.append("ours"))
        torch.autograd.grad(leaf.exp(), leaf)
    torch.autograd.grad(leaf.exp(), leaf)
    assert calls == ["ours", "theirs"]
    module = nn.Linear(1, 1)
    old = _internals.swap_member(module, "bias", torch.zeros(1))
    assert isinstance(old, nn.Parameter) and not isinstance(module.bias, nn.Parameter)
    assert copy.deepcopy(leaf).requires_grad
    changed = torch.zeros(1)
    version = _internals.version_of(changed)
    changed.add_(1)
    assert _internals.version_of(changed) > version
    with torch.inference_mode():
        assert _internals.version_of(torch.zeros(1)) == -1
    assert _internals.acts_on_gradient(leaf) and not _internals.acts_after_gradient(leaf)
    other = torch.ones((), requires_grad=True)
    other.register_post_accumulate_grad_hook(lambda p: None)
    assert _internals.acts_after_gradient(other) and not _internals.acts_on_gradient(other)
    assert not _internals.is_compiled(module)
    assert _internals.is_compiled(torch.compile(module, backend="eager"))
    module.compile(backend="eager")
    assert _internals.is_compiled(module)
    fun = lambda x: x
    assert _internals.before_compiling(torch.compile(fun, backend="eager")) is fun
    assert _internals.before_compiling(fun) is None
