"""Clipping, moments and the noise scale, against NumPy on gradients made one by one, and against Opacus."""

import numpy as np
import pytest
import torch
from torch import nn

from microbatch.torch import (
    AccumulationType,
    _transforms,
    clip_by_global_norm,
    micro_grad,
    noise_scale,
    per_example_moments,
    squared_norm,
)


def loss(model, x, y):
    return ((model(x) - y) ** 2).mean()


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    batch = torch.randn(8, 5), torch.randn(8, 3)
    names = [name for name, _ in model.named_parameters()]
    one = lambda i: torch.autograd.grad(
        loss(model, *(a[i : i + 1] for a in batch)), list(model.parameters())
    )
    gradients = [dict(zip(names, map(np.asarray, one(i)), strict=True)) for i in range(8)]
    return model, batch, gradients


def norm_of(gradient):
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in gradient.values()))


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_clipped_sum_is_the_sum_of_clipped_gradients(problem, engine):
    model, batch, gradients = problem
    bound = float(np.median([norm_of(g) for g in gradients]))
    clipped, aux = micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=4,
        transform_fn=clip_by_global_norm(bound),
        metrics_fn=squared_norm,
        engine=engine,
    )(model, *batch)
    scales = [min(1, bound / norm_of(g)) for g in gradients]
    for name, found in clipped.items():
        want = sum(scale * g[name] for scale, g in zip(scales, gradients, strict=True))
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(aux.metrics.sqrt(), [norm_of(g) for g in gradients], rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_clipped_mean_is_that_of_opacus(problem):
    optimizers = pytest.importorskip("opacus.optimizers")
    from opacus import GradSampleModule

    model, batch, _ = problem
    clipped, _ = micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=2,
        accumulator=AccumulationType.MEAN,
        transform_fn=clip_by_global_norm(0.5),
    )(model, *batch)
    wrapped = GradSampleModule(model)
    optimizer = optimizers.DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        expected_batch_size=8,
    )
    loss(wrapped, *batch).backward()
    optimizer.pre_step()
    for name, parameter in model.named_parameters():
        # It adds 1e-6 to every norm.
        torch.testing.assert_close(clipped[name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bound", [0.0, 1.0, float("inf")])
def test_zero_gradient_stays_zero(bound):
    zeros = {"w": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    clipped = clip_by_global_norm(bound)(zeros)
    assert clipped["b"].dtype == torch.bfloat16
    assert not any(leaf.any() for leaf in clipped.values())


def test_clipping_has_no_nan_derivative():
    clip = clip_by_global_norm(1.0)
    for entries in (torch.full((3,), 1e-3), torch.zeros(3)):
        jacobian = torch.autograd.functional.jacobian(lambda g: clip({"w": g})["w"], entries)
        torch.testing.assert_close(jacobian, torch.eye(3))


def test_the_norm_of_complex_gradients_is_real():
    gradient = {"w": torch.tensor([3.0 + 4.0j, 0.0]), "b": torch.tensor(12.0)}
    assert squared_norm(gradient).item() == 169.0
    clipped = clip_by_global_norm(1.3)(gradient)
    torch.testing.assert_close(clipped["w"], torch.tensor([0.3 + 0.4j, 0.0]))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_squares_are_added_up_as_in_float64(size, dtype, monkeypatch):
    monkeypatch.setattr(_transforms, "MANY", 0)
    leaf = torch.randn(3, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    exact = leaf.to(torch.complex128).abs().square().sum(1).numpy()
    found = torch.func.vmap(lambda row: squared_norm([row]))(leaf)
    np.testing.assert_allclose(found.double(), exact, rtol=3e-7)
    np.testing.assert_allclose([squared_norm(row).item() for row in leaf], exact, rtol=3e-7)


def test_squares_have_every_derivative(monkeypatch):
    """At zero, too, where a norm has none."""
    monkeypatch.setattr(_transforms, "MANY", 0)
    x = torch.cat([torch.zeros(1024), torch.randn(3)]).double()
    func = torch.func
    torch.testing.assert_close(func.grad(squared_norm)(x), 2 * x)
    torch.testing.assert_close(func.jvp(squared_norm, (x,), (x,))[1], 2 * (x * x).sum())
    product = func.grad(lambda x: func.grad(squared_norm)(x) @ x.detach())
    torch.testing.assert_close(product(x), 2 * x)
    identity = func.vmap(lambda t: func.jvp(func.grad(squared_norm), (x,), (t,))[1])(
        torch.eye(1027).double()
    )
    torch.testing.assert_close(identity, 2 * torch.eye(1027).double())
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(squared_norm(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(second, torch.full_like(x, 2))


def test_bounds_zero_and_infinity():
    gradient = {"w": torch.tensor([3.0, 4.0])}
    assert clip_by_global_norm(0)(gradient)["w"].tolist() == [0.0, 0.0]
    assert clip_by_global_norm(float("inf"))(gradient)["w"].tolist() == [3.0, 4.0]


def test_a_nan_is_kept():
    clipped = clip_by_global_norm(1.0)({"w": torch.tensor([float("nan"), 4.0])})
    assert clipped["w"][0].isnan()


@pytest.mark.parametrize("bound", [-1.0, float("nan"), True, "1"])
def test_a_wrong_bound_is_refused_with_the_way_out(bound):
    with pytest.raises(ValueError) as error:
        clip_by_global_norm(bound)
    assert str(error.value).splitlines() == [
        f"clip_by_global_norm: max_norm={bound!r} is not a number that is at least 0.",
        "Use clip_by_global_norm(1.0).",
    ]


def test_moments_are_those_of_the_examples(problem):
    model, batch, gradients = problem
    (mean, square), _ = micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=4,
        accumulator=AccumulationType.MEAN,
        transform_fn=per_example_moments(),
    )(model, *batch)
    for name in mean:
        stacked = np.stack([g[name] for g in gradients])
        np.testing.assert_allclose(mean[name], stacked.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(square[name], (stacked**2).mean(0), rtol=1e-5, atol=1e-6)


def test_noise_scale_is_sample_variance_over_squared_norm(problem):
    _, _, gradients = problem
    flat = np.stack([np.concatenate([leaf.ravel() for leaf in g.values()]) for g in gradients])
    norms = torch.as_tensor(np.sum(flat**2, 1))
    estimate = noise_scale(torch.as_tensor(flat.mean(0)), norms)
    variance = flat.var(0, ddof=1).sum()
    squared = np.sum(flat.mean(0) ** 2) - variance / len(flat)
    np.testing.assert_allclose(estimate.variance.item(), variance, rtol=1e-4)
    np.testing.assert_allclose(estimate.value.item(), variance / squared, rtol=1e-3)


def test_groups_of_examples_give_an_estimate_of_the_same_variance():
    examples = torch.randn(4096, 3, generator=torch.Generator().manual_seed(1)) + 2
    groups = examples.reshape(256, 16, 3).mean(1)
    estimate = noise_scale(examples.mean(0), groups.square().sum(1), group_size=16)
    np.testing.assert_allclose(estimate.variance.item(), 3.0, rtol=0.2)


def test_C15_noise_scale_of_one_microbatch_is_undefined():
    estimate = noise_scale(torch.tensor([2.0]), torch.tensor([4.0]))
    assert not estimate.defined and estimate.value.isnan()
    assert str(estimate).startswith("undefined")


def test_noise_that_hides_the_gradient_is_infinite():
    estimate = noise_scale(torch.zeros(1), torch.ones(2))
    assert estimate.value.isinf() and estimate.defined


def test_squared_norms_may_be_integers():
    assert noise_scale(torch.tensor([2.0]), torch.tensor([1, 9])).variance == 2.0


def test_a_norm_whose_square_overflows_leaves_nothing():
    assert not clip_by_global_norm(1.0)(torch.tensor([1e30, 0.0])).any()


def test_equal_gradients_have_no_noise():
    assert noise_scale(torch.tensor([2.0]), torch.tensor([4.0, 4.0])).value == 0


@pytest.mark.parametrize("shape, size", [((2, 2), 1), ((0,), 1), ((2,), 0)])
def test_wrong_groups_are_refused(shape, size):
    with pytest.raises(ValueError, match="noise_scale: "):
        noise_scale(torch.ones(1), torch.ones(shape), size)
