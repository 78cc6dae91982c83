"""`backward` and its kin give the whole batch's loss and gradient; the oracle is the whole batch in float64."""

import collections
import copy
import dataclasses
import functools
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import microbatch
import microbatch.torch as mb


def mlp(width=8, out=3, dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, out)).to(dtype)


def grads_of(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def whole_batch(model, loss_of, *args):
    """Loss and gradients of the whole batch in float64."""
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    cast = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    loss = loss_of(exact, *cast)
    loss.backward()
    return loss.detach(), grads_of(exact)


def assert_same_grads(got, wanted, rtol=2e-6):
    for a, b in zip(got, wanted, strict=True):
        if a is None or b is None:
            assert a is None and (b is None or not b.any())
            continue
        scale = max(b.abs().max().item(), 1e-30)
        error = (a.double() - b.double()).abs().max().item()
        assert error <= rtol * scale, f"{error} against {scale}"


def mean_square(model, x, y):
    return ((model(x) - y) ** 2).mean()


@given(rows=st.integers(1, 17), size=st.integers(1, 20), seed=st.integers(0, 99))
def test_any_size_gives_the_whole_batch(rows, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)
    model = mlp()
    wanted, grads = whole_batch(model, mean_square, x, y)
    loss = mb.backward(functools.partial(mean_square, model), x, y, microbatch_size=size)
    torch.testing.assert_close(loss.double(), wanted, rtol=2e-6, atol=0)
    assert_same_grads(grads_of(model), grads)


def test_the_comparison_of_gradients_can_fail():
    with pytest.raises(AssertionError):
        assert_same_grads([torch.tensor([1.0])], [torch.tensor([1.00001])])


@pytest.mark.parametrize("size", [6, 100, None])
def test_N10_one_microbatch_is_the_whole_batch_bit_for_bit(size):
    model, x, y = mlp(), torch.randn(6, 5), torch.randn(6, 3)
    loss = mean_square(model, x, y)
    loss.backward()
    wanted = grads_of(model)
    model.zero_grad()
    got = mb.backward(functools.partial(mean_square, model), x, y, microbatch_size=size)
    assert torch.equal(got, loss.detach())
    assert all(map(torch.equal, grads_of(model), wanted))


def test_gradients_add_to_what_is_there():
    model, x, y = mlp(), torch.randn(6, 5), torch.randn(6, 3)
    loss_fn = functools.partial(mean_square, model)
    mb.backward(loss_fn, x, y, microbatch_size=2)
    once = grads_of(model)
    mb.backward(loss_fn, x, y, microbatch_size=4)
    assert_same_grads(grads_of(model), [2 * g for g in once])


def test_sum_and_sum_over_weight():
    model, x, y = mlp(), torch.randn(7, 5), torch.randn(7, 3)
    square_sum = lambda model, x, y: ((model(x) - y) ** 2).sum()
    wanted, grads = whole_batch(model, square_sum, x, y)
    loss_fn = functools.partial(square_sum, model)
    loss = mb.backward(loss_fn, x, y, microbatch_size=3, reduction="sum")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_same_grads(grads_of(model), grads)
    model.zero_grad()
    loss = mb.backward(loss_fn, x, y, microbatch_size=3, reduction="sum_over_weight")
    torch.testing.assert_close(loss.double(), wanted / 7, rtol=1e-6, atol=0)
    assert_same_grads(grads_of(model), [g / 7 for g in grads])


def masked(rows=8, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, 5, generator=generator)
    labels = torch.randint(0, 3, (rows, width), generator=generator)
    keep = torch.tensor([1, 6, 3, 2, 5, 1, 4, 6][:rows])
    labels[torch.arange(width) >= keep[:, None]] = -100
    return x, labels


def token_loss(model, x, labels):
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def count_tokens(x, labels):
    return (labels != -100).sum()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_N1_masked_mean_loss(size):
    model, (x, labels) = mlp(), masked()
    wanted, grads = whole_batch(model, token_loss, x, labels)
    loss_fn = functools.partial(token_loss, model)
    loss = mb.backward(loss_fn, x, labels, microbatch_size=size, weight_fn=count_tokens)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_same_grads(grads_of(model), grads)


def test_N1_the_mean_of_means_is_something_else():
    model, (x, labels) = mlp(), masked()
    wanted, _ = whole_batch(model, token_loss, x, labels)
    loss = mb.backward(functools.partial(token_loss, model), x, labels, microbatch_size=1)
    assert abs(loss.item() - wanted.item()) > 1e-3


def test_N4_a_microbatch_without_labels_and_a_batch_without_labels():
    model, (x, labels) = mlp(), masked()
    labels[2:4] = -100
    wanted, grads = whole_batch(model, token_loss, x, labels)
    loss_fn = functools.partial(token_loss, model)
    loss = mb.backward(loss_fn, x, labels, microbatch_size=2, weight_fn=count_tokens)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_same_grads(grads_of(model), grads)
    model.zero_grad()
    labels[:] = -100
    loss = mb.backward(loss_fn, x, labels, microbatch_size=2, weight_fn=count_tokens)
    assert loss.item() == 0
    assert all(g is not None and not g.any() for g in grads_of(model))


def test_N4_a_mean_whose_own_gradient_would_be_nan():
    model, x, mask = mlp(), torch.randn(6, 5), torch.tensor([0.0, 0, 0, 0, 1, 1])
    masked_mean = lambda model, x, mask: (model(x).sum(1) * mask).sum() / mask.sum()
    wanted, grads = whole_batch(model, masked_mean, x, mask)
    loss_fn = functools.partial(masked_mean, model)
    options = {"microbatch_size": 2, "weight_fn": lambda x, mask: mask.sum()}
    loss = mb.backward(loss_fn, x, mask, **options)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_same_grads(grads_of(model), grads)
    model.zero_grad()
    loss = mb.backward(loss_fn, x, 0 * mask, **options)
    assert loss.item() == 0
    assert all(g is not None and not g.any() for g in grads_of(model))


def test_N13_a_nan_that_counts_is_not_hidden():
    model, x, y = mlp(), torch.randn(6, 5), torch.randn(6, 3)
    y[3] = float("nan")
    assert mb.backward(functools.partial(mean_square, model), x, y, microbatch_size=2).isnan()
    assert all(g.isnan().any() for g in grads_of(model)[-1:])


def test_N11_zero_rows():
    model = mlp()
    loss_fn = functools.partial(mean_square, model)
    loss = mb.backward(loss_fn, torch.zeros(0, 5), torch.zeros(0, 3), microbatch_size=2)
    assert loss.item() == 0
    assert all(not g.any() for g in grads_of(model))


def test_N14_the_last_window_is_divided_by_what_is_in_it():
    model, loader = mlp(), [(torch.randn(2, 5), torch.randn(2, 3)) for _ in range(10)]
    loss_fn = functools.partial(mean_square, model)
    sizes = []
    for window in mb.windows(loader, 4):
        model.zero_grad()
        sizes.append(len(window))
        x, y = (torch.cat(parts) for parts in zip(*window))
        _, grads = whole_batch(model, mean_square, x, y)
        mb.backward_window(loss_fn, window)
        assert_same_grads(grads_of(model), grads)
    assert sizes == [4, 4, 2]


def test_N15_microbatches_of_2_and_20_tokens():
    model = mlp()
    window = [
        (torch.randn(1, 2, 5), torch.tensor([[0, 2]])),
        (torch.randn(1, 20, 5), torch.randint(0, 3, (1, 20))),
    ]
    x, labels = (torch.cat(parts, dim=1) for parts in zip(*window))
    wanted, grads = whole_batch(model, token_loss, x, labels)
    loss_fn = functools.partial(token_loss, model)
    loss = mb.backward_window(loss_fn, window, weight_fn=count_tokens)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_same_grads(grads_of(model), grads)


def test_N17_the_loss_is_divided_exactly_once():
    """A loss that divides by the whole batch's tokens itself is a sum; one that does not is a sum over its weight."""
    model, (x, labels) = mlp(), masked()
    wanted, grads = whole_batch(model, token_loss, x, labels)
    total = count_tokens(x, labels).item()
    token_sum = lambda x, labels: F.cross_entropy(
        model(x).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    ways = {
        "sum": {"loss_fn": lambda x, y: token_sum(x, y) / total, "reduction": "sum"},
        "sum_over_weight": {
            "loss_fn": token_sum,
            "reduction": "sum_over_weight",
            "weight_fn": count_tokens,
        },
    }
    for way in ways.values():
        model.zero_grad()
        loss = mb.backward(way.pop("loss_fn"), x, labels, microbatch_size=3, **way)
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
        assert_same_grads(grads_of(model), grads)


def test_N18_each_loss_has_its_own_reduction():
    model, (x, labels) = mlp(), masked()
    z_loss = lambda model, x: (model(x).logsumexp(-1) ** 2).mean()
    both = lambda model, x, labels: token_loss(model, x, labels) + 0.1 * z_loss(model, x)
    wanted, grads = whole_batch(model, both, x, labels)
    loss_fn = lambda x, labels: {
        "tokens": token_loss(model, x, labels),
        "z": 0.1 * z_loss(model, x),
    }
    losses = mb.backward(
        loss_fn,
        x,
        labels,
        microbatch_size=3,
        reduction={"tokens": "mean", "z": "mean"},
        weight_fn={"tokens": count_tokens},
    )
    assert set(losses) == {"tokens", "z"}
    torch.testing.assert_close(sum(losses.values()).double(), wanted, rtol=1e-6, atol=0)
    assert_same_grads(grads_of(model), grads)


def test_N18_a_loss_of_weight_0_beside_one_that_counts():
    model, (x, labels) = mlp(), masked()
    labels[:3] = -100  # The first microbatch has no token: its token loss is 0/0.
    penalty = lambda model, x: model(x).square().mean()
    both = lambda model, x, labels: token_loss(model, x, labels) + penalty(model, x)
    wanted, grads = whole_batch(model, both, x, labels)
    loss_fn = lambda x, labels: {"tokens": token_loss(model, x, labels), "p": penalty(model, x)}
    losses = mb.backward(
        loss_fn, x, labels, microbatch_size=3, weight_fn={"tokens": count_tokens, "p": None}
    )
    torch.testing.assert_close(sum(losses.values()).double(), wanted, rtol=1e-6, atol=0)
    assert_same_grads(grads_of(model), grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_N19_side_buffers_are_as_accurate_as_float32_accumulation(dtype):
    parameter = nn.Parameter(torch.zeros(64, dtype=dtype))
    x = torch.rand(4096, 64, dtype=dtype) * 0.1 + 1
    loss_fn = lambda x: (parameter.float() * x.float()).sum()
    mb.backward(loss_fn, x, microbatch_size=64, reduction="sum", accumulator_dtype=torch.float32)
    shares = [x[i : i + 64].float().sum(0).to(dtype).float() for i in range(0, 4096, 64)]
    wanted = torch.stack(shares).sum(0).to(dtype)
    assert torch.equal(parameter.grad, wanted)
    assert parameter.grad.dtype == dtype
    parameter.grad = None
    mb.backward(loss_fn, x, microbatch_size=64, reduction="sum")
    assert not torch.equal(parameter.grad, wanted)


def test_N19_side_buffers_add_to_what_is_there_and_see_every_leaf():
    model = mlp(dtype=torch.bfloat16)
    hidden = {"late": nn.Linear(3, 3, dtype=torch.bfloat16)}
    find = lambda: hidden["late"]
    x = torch.randn(64, 5, dtype=torch.bfloat16)
    loss_fn = lambda x: find()(model(x)).float().square().mean()
    parameters = [*model.parameters(), *find().parameters()]
    for p in parameters:
        p.grad = torch.ones_like(p)
    before = [p.grad for p in parameters]
    mb.backward(loss_fn, x, microbatch_size=1, accumulator_dtype=torch.float32)
    exact_model, exact_late = copy.deepcopy(model).double(), copy.deepcopy(find()).double()
    exact = [*exact_model.parameters(), *exact_late.parameters()]
    grads = torch.autograd.grad(exact_late(exact_model(x.double())).square().mean(), exact)
    for p, earlier, grad in zip(parameters, before, grads, strict=True):
        assert p.grad is earlier
        torch.testing.assert_close(p.grad.double(), grad + 1, rtol=2e-2, atol=2e-2)
        assert not p._post_accumulate_grad_hooks


def test_N19_side_buffers_leave_the_gradients_of_arguments_alone():
    weight, scale = (torch.ones(5, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    x = torch.randn(6, 5).bfloat16().requires_grad_()
    loss_fn = lambda scale, x: (x * weight * scale).sum(1).mean()
    leaves = [weight, scale, x]
    wanted = torch.autograd.grad(loss_fn(scale * 1, x), leaves)
    mb.backward(
        loss_fn, scale * 1, x, microbatch_size=2, in_dims=(None, 0), accumulator_dtype=torch.float32
    )
    assert_same_grads([leaf.grad for leaf in leaves], wanted, rtol=2e-2)


def test_N8_adam_gives_the_same_parameters_and_counts_updates_once():
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    results = []
    for size in (12, 4, 1):
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            mb.backward(functools.partial(mean_square, model), x, y, microbatch_size=size)
            optimizer.step()
        state = optimizer.state[next(model.parameters())]
        assert state["step"] == 20
        results.append([p.detach().clone() for p in model.parameters()])
    for other in results[1:]:
        assert_same_grads(other, results[0], rtol=1e-12)


def test_value_and_grad_leaves_grad_alone():
    model, x, y = mlp(), torch.randn(7, 5), torch.randn(7, 3)
    wanted, grads = whole_batch(model, mean_square, x, y)
    unused = nn.Parameter(torch.ones(2))
    marks = [torch.full_like(p, 7) for p in model.parameters()]
    for p, mark in zip(model.parameters(), marks):
        p.grad = mark
    params = {**dict(model.named_parameters()), "unused": unused}
    loss_fn = functools.partial(mean_square, model)
    value, got = mb.value_and_grad(loss_fn, params, microbatch_size=2)(x, y)
    torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=0)
    assert list(got) == list(params)
    assert_same_grads(list(got.values()), [*grads, torch.zeros(2)])
    assert all(p.grad is mark and (mark == 7).all() for p, mark in zip(model.parameters(), marks))
    assert unused.grad is None


def test_value_and_grad_of_some_parameters_touches_no_other():
    model, x, y = mlp(), torch.randn(7, 5), torch.randn(7, 3)
    _, grads = whole_batch(model, mean_square, x, y)
    loss_fn = functools.partial(mean_square, model)
    (_, aux), got = mb.value_and_grad(
        lambda x, y: (loss_fn(x, y), len(x)), model[2].parameters(), microbatch_size=2, has_aux=True
    )(x, y)
    assert aux == [2, 2, 2, 1]
    assert_same_grads(got, grads[2:])
    assert grads_of(model) == [None] * 4


def test_value_and_grad_refuses_an_empty_tree():
    with pytest.raises(microbatch.GraphError, match="params is empty"):
        mb.value_and_grad(lambda x: x.sum(), {}, microbatch_size=2)


def test_value_and_grad_refuses_what_is_not_a_leaf():
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(microbatch.GraphError, match=r"params\['w'\] is not a leaf"):
        mb.value_and_grad(lambda x: x.sum(), {"w": w * 2}, microbatch_size=2)
    with pytest.raises(microbatch.GraphError, match=r"params\[0\] is a tensor that requires no"):
        mb.value_and_grad(lambda x: x.sum(), [torch.ones(2)], microbatch_size=2)


def test_aux_is_detached_and_joined():
    model, x, y = mlp(), torch.randn(7, 5), torch.randn(7, 3)

    def loss_fn(x, y):
        out = model(x)
        aux = {"rows": out, "total": out.sum(), "name": f"{len(x)} rows", "nothing": None}
        return ((out - y) ** 2).mean(), aux

    loss, aux = mb.backward(loss_fn, x, y, microbatch_size=3, has_aux=True)
    assert loss.ndim == 0 and not loss.requires_grad
    torch.testing.assert_close(aux["rows"], model(x).detach())
    assert aux["total"].shape == (3,) and not aux["total"].requires_grad
    assert aux["name"] == ["3 rows", "3 rows", "1 rows"] and aux["nothing"] is None


def test_outputs_with_a_loss_are_accepted():
    class Output(dict):
        loss = property(lambda self: self["loss"])

    model, x, y = mlp(), torch.randn(6, 5), torch.randn(6, 3)
    wanted, grads = whole_batch(model, mean_square, x, y)

    def loss_fn(x, y):
        out = model(x)
        return Output(loss=((out - y) ** 2).mean(), logits=out)

    loss, aux = mb.backward(loss_fn, x, y, microbatch_size=4, has_aux=True)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert aux["logits"].shape == (6, 3) and aux["loss"].shape == (2,)
    model.zero_grad()
    mb.backward(loss_fn, x, y, microbatch_size=4)
    assert_same_grads(grads_of(model), grads)


def test_C11_a_batch_with_strings_numbers_and_none():
    model, x, y = mlp(), torch.randn(6, 5), torch.randn(6, 3)
    seen = []

    def loss_fn(batch, name):
        seen.append((name, batch["meta"], batch["inner"]["y"].shape, batch["inner"]["none"]))
        return mean_square(model, batch["x"], batch["inner"]["y"]) * batch["factor"]

    batch = {
        "x": x,
        "inner": {"y": y, "none": None},
        "meta": ["a", 3],
        "factor": torch.tensor(2.0),
    }
    _, grads = whole_batch(model, lambda m, x, y: 2 * mean_square(m, x, y), x, y)
    mb.backward(loss_fn, batch, "train", microbatch_size=4)
    assert seen[0] == ("train", ["a", 3], (4, 3), None) and seen[1][2] == (2, 3)
    assert_same_grads(grads_of(model), grads)


@pytest.mark.parametrize(
    "kind",
    [
        lambda items: collections.defaultdict(list, items),
        collections.OrderedDict,
        collections.UserDict,
        lambda items: collections.namedtuple("Batch", list(items))(**items),
    ],
)
def test_C11_mappings_of_every_kind(kind):
    model, x, y = mlp(), torch.randn(6, 5), torch.randn(6, 3)
    _, grads = whole_batch(model, mean_square, x, y)
    whole = kind({"x": x, "y": y})

    def loss_fn(batch):
        assert type(batch) is type(whole)
        named = batch._asdict() if hasattr(batch, "_asdict") else batch
        return mean_square(model, named["x"], named["y"])

    mb.backward(loss_fn, whole, microbatch_size=4)
    assert_same_grads(grads_of(model), grads)


def test_in_dims_per_argument_and_tree():
    model, x, y = mlp(), torch.randn(6, 5), torch.randn(6, 3)
    positions = torch.randn(5)

    def loss_fn(inputs, y, positions):
        assert positions.shape == (5,)
        return mean_square(model, inputs["x"].T + positions + inputs["shift"], y)

    shift = torch.randn(4, 5)[0]
    _, grads = whole_batch(model, lambda m, x, y: mean_square(m, x + positions + shift, y), x, y)
    in_dims = ({"x": -1, "shift": None}, 0, None)
    mb.backward(
        loss_fn, {"x": x.T, "shift": shift}, y, positions, microbatch_size=4, in_dims=in_dims
    )
    assert_same_grads(grads_of(model), grads)


def test_M7_the_function_never_sees_more_rows_and_gets_views():
    x, model = torch.randn(10, 5), mlp()

    def loss_fn(x):
        seen.append((len(x), x.data_ptr()))
        return model(x).square().mean()

    seen = []
    mb.backward(loss_fn, x, microbatch_size=4)
    assert [rows for rows, _ in seen] == [4, 4, 2]
    assert [p for _, p in seen] == [x[i:].data_ptr() for i in (0, 4, 8)]


def test_C19_a_tensor_computed_before_the_call_gets_its_gradient_once():
    features, labels = torch.randn(8, 5), torch.randn(8, 3)
    model, scale, encoder = mlp(), nn.Parameter(torch.tensor(0.3)), nn.Linear(5, 5)

    def loss_fn(x, y, factor):
        return ((model(x) * factor - y) ** 2).mean()

    loss_fn(encoder(features), labels, scale.exp()).backward()
    leaves = [scale, *encoder.parameters(), *model.parameters()]
    wanted = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    mb.backward(loss_fn, encoder(features), labels, scale.exp(), microbatch_size=3)
    assert_same_grads([leaf.grad for leaf in leaves], wanted)


def test_C19_a_batch_tensor_that_is_a_leaf_gets_its_gradient():
    model, x = mlp(), torch.randn(6, 5, requires_grad=True)
    loss_fn = lambda x: model(x).square().mean()
    (wanted,) = torch.autograd.grad(loss_fn(x), [x])
    mb.backward(loss_fn, x, microbatch_size=4)
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("cut", [True, False])
def test_C20_hooks_of_an_argument_see_its_whole_gradient_once(cut):
    x = torch.randn(6, 5, dtype=torch.float64)
    leaf = (x if cut else torch.randn(5, dtype=torch.float64)).requires_grad_()
    loss_fn = (lambda leaf, x: (leaf**2).mean()) if cut else (lambda leaf, x: (x * leaf).mean())
    loss_fn(leaf, x).backward()
    wanted, leaf.grad = leaf.grad.clamp(-1e-2, 1e-2), None
    seen = []
    leaf.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    mb.backward(loss_fn, leaf, x.detach(), microbatch_size=4, in_dims=(0 if cut else None, 0))
    torch.testing.assert_close(leaf.grad, wanted)
    assert len(seen) == 1 and torch.equal(seen[0], leaf.grad)


def test_C19_in_a_window_too():
    model, scale = mlp(), nn.Parameter(torch.tensor(0.3))
    window = [(torch.randn(2, 5), scale.exp()) for _ in range(3)]
    shared = scale.exp()
    window += [(torch.randn(2, 5), shared) for _ in range(2)]
    loss_fn = lambda x, factor: (model(x) * factor).square().mean()
    x = torch.cat([x for x, _ in window])
    (wanted,) = torch.autograd.grad(loss_fn(x, scale.exp()), [scale])
    mb.backward_window(loss_fn, window)
    torch.testing.assert_close(scale.grad, wanted)


def test_C19_from_a_closure_it_is_refused_before_anything_changes():
    model, scale = mlp(), nn.Parameter(torch.tensor(0.3))
    factor = scale.exp()
    loss_fn = lambda x: (model(x) * factor).square().mean()
    with pytest.raises(microbatch.GraphError) as refused:
        mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2)
    assert str(refused.value) == (
        "backward(<lambda>): factor was computed before the call, and every microbatch would go through its graph "
        "again.\nPass it as an argument (with None in in_dims if it is not a batch), or compute it inside the loss "
        "function."
    )
    assert grads_of(model) == [None] * 4
    mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=6)


def test_C19_a_stale_loss_in_a_closure_is_no_obstacle():
    model, x = mlp(), torch.randn(6, 5)
    stale = model(x).sum()

    def loss_fn(x):
        return model(x).square().mean() + 0 * len(stale.shape)

    _, grads = whole_batch(model, lambda m, x: m(x).square().mean(), x)
    mb.backward(loss_fn, x, microbatch_size=2)
    assert_same_grads(grads_of(model), grads)


def test_C19_where_discovery_cannot_see_the_error_is_typed_all_the_same():
    class Holder:
        __slots__ = ("factor",)

    holder, scale = Holder(), nn.Parameter(torch.tensor(0.3))
    holder.factor = scale.exp()
    with pytest.raises(microbatch.GraphError, match="computed before the call"):
        mb.backward(lambda x: (x * holder.factor).mean(), torch.randn(6, 5), microbatch_size=2)
    assert scale.grad is None or scale.grad.isfinite()


def test_C21_a_keyword_of_the_librarys_own_name():
    model, x = mlp(), torch.randn(6, 5)

    def loss_fn(x, *, reduction, microbatch_size):
        assert (reduction, microbatch_size) == ("median", "mine")
        return model(x).square().mean()

    mb.backward(
        functools.partial(loss_fn, reduction="median", microbatch_size="mine"), x, microbatch_size=2
    )
    with pytest.raises(TypeError, match="own_keyword"):
        mb.backward(loss_fn, x, microbatch_size=2, own_keyword=1)


def test_C10_windows_end_after_k_and_never_at_the_first():
    assert list(mb.windows(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert [len(mb.windows(range(n), 4)) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    loader = mb.windows([1, 2, 3], 2)
    assert list(loader) == list(loader) == [[1, 2], [3]]
    assert list(mb.windows(iter([]), 3)) == []
    with pytest.raises(microbatch.MicrobatchSizeError, match="k=0 is not positive"):
        mb.windows([1], 0)


def test_a_window_may_hold_dicts_and_must_hold_something():
    model = mlp()
    window = [{"x": torch.randn(2, 5)}, {"x": torch.randn(3, 5)}]
    loss = mb.backward_window(lambda batch: model(batch["x"]).square().mean(), window)
    exact = torch.cat([batch["x"] for batch in window])
    torch.testing.assert_close(loss, model(exact).square().mean().detach())
    with pytest.raises(microbatch.EmptyStream, match="the window has no microbatch"):
        mb.backward_window(lambda x: x.mean(), [])


def test_weights_may_be_any_numbers():
    w = torch.ones(1, requires_grad=True)
    for cast in (int, float, torch.tensor, np.float32, lambda n: torch.tensor([n])):
        w.grad = None
        mb.backward(
            lambda x: (w * x).mean(), torch.arange(5.0), microbatch_size=2,
            weight_fn=lambda x: cast(len(x)),
        )  # fmt: skip
        assert w.grad.item() == 2.0


def test_gradient_checkpointing_and_functional_calls():
    model, x, y = mlp(), torch.randn(6, 5), torch.randn(6, 3)
    _, grads = whole_batch(model, mean_square, x, y)
    for reentrant in (True, False):
        model.zero_grad()
        run = functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=reentrant)
        x_in = x.clone().requires_grad_() if reentrant else x
        mb.backward(lambda x, y: ((run(x) - y) ** 2).mean(), x_in, y, microbatch_size=4)
        assert_same_grads(grads_of(model), grads)
    params = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
    call = lambda x, y: ((torch.func.functional_call(model, params, x) - y) ** 2).mean()
    mb.backward(call, x, y, microbatch_size=4)
    assert_same_grads([p.grad for p in params.values()], grads)


def test_autocast_around_the_call():
    model, x, y = mlp(), torch.randn(8, 5), torch.randn(8, 3)
    loss_fn = functools.partial(mean_square, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mb.backward(loss_fn, x, y, microbatch_size=2)
    _, grads = whole_batch(model, mean_square, x, y)
    assert loss.dtype == torch.float32
    assert_same_grads(grads_of(model), grads, rtol=3e-2)


def test_auto_takes_the_largest_size_that_fits():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x, seen = torch.randn(512, 64), []

    def loss_fn(x):
        seen.append(len(x))
        return model(x).square().mean()

    mb.backward(loss_fn, x, microbatch_size="auto")
    assert seen[-1] == 512
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    seen.clear()
    mb.backward(loss_fn, x, microbatch_size="auto", memory_budget="1MiB")
    assert 1 <= seen[-1] < 512
    assert_same_grads(grads_of(model), wanted, rtol=1e-5)
    with pytest.raises(microbatch.BudgetError, match="memory_budget"):
        mb.backward(loss_fn, x, microbatch_size=8, memory_budget="1MiB")
    valued = mb.value_and_grad(
        loss_fn, model.parameters(), microbatch_size="auto", memory_budget="1MiB"
    )
    assert_same_grads(valued(x)[1], wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["backward", "backward_window", "value_and_grad"])
def test_C14_every_option_is_forwarded(name, monkeypatch):
    """Each keyword arrives where the step reads it, with the value that was given."""
    from microbatch.torch import _training
    from microbatch.torch._sources import Options

    marks = {
        "reduction": "sum", "weight_fn": None, "has_aux": True, "sync": "last", "sync_modules": [],
        "process_group": None, "backward_fn": lambda loss: None, "accumulator_dtype": torch.float64,
        "rollback": True, "allow_row_mixing": True, "allow_hooks": True, "device": "cpu",
    }  # fmt: skip
    assert set(marks) == {f.name for f in dataclasses.fields(Options)}
    function = getattr(mb, name)
    given = {k: v for k, v in marks.items() if k in inspect.signature(function).parameters}
    assert set(marks) - set(given) == (
        {"backward_fn", "rollback"} if name == "value_and_grad" else set()
    )
    seen = []

    def step(where, loss_fn, args, prepare, options, inputs=None):
        seen.append((options, prepare.cut(prepare.check(), None)))
        return torch.zeros(()), None

    monkeypatch.setattr(_training, "step", step)
    x = torch.randn(3, 6)
    if name == "backward":
        function(len, x, microbatch_size=4, in_dims=1, **given)
    elif name == "backward_window":
        function(len, [(x,)], in_dims=1, **given)
    else:
        function(len, torch.zeros((), requires_grad=True), microbatch_size=4, in_dims=1, **given)(x)
    [(options, source)] = seen
    for key, value in given.items():
        assert getattr(options, key) is value, key
    assert source.batch_size == (1 if name == "backward_window" else 6)
    assert source.rows(0) == (6 if name == "backward_window" else 4)


def test_the_three_functions_share_their_keywords_and_defaults():
    keywords = [
        {
            k: p.default
            for k, p in inspect.signature(f).parameters.items()
            if p.kind is p.KEYWORD_ONLY
        }
        for f in (mb.backward, mb.backward_window, mb.value_and_grad)
    ]
    full = keywords[0]
    for other in keywords[1:]:
        assert other == {k: full[k] for k in other}
