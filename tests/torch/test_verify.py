"""Every reason for a difference in PyTorch, made on purpose, is found; and nothing of the user's changes."""

import copy

import pytest
import torch
from torch import nn

from microbatch._accumulation import AccumulationType
from microbatch._errors import BatchError, MicrobatchSizeError
from microbatch.torch._verification import verify

MEAN, SUM, CONCAT = AccumulationType.MEAN, AccumulationType.SUM, AccumulationType.CONCAT


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def batch(rows=24):
    return torch.randn(rows, 8), torch.randn(rows, 4)


def kinds(found):
    return [cause.kind for cause in found.causes]


def mean_loss_of(model):
    return lambda x, y: (model(x) - y).square().mean()


def test_a_mean_loss_and_its_gradient_are_the_same_up_to_rounding():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    found = verify(mean_loss_of(model), (0, 1), MEAN, microbatch_size=4)(*batch())
    assert found.verdict in ("exact", "rounding"), str(found)
    assert [c.role for c in found.comparisons] == ["value"] + ["gradient"] * 4
    assert "weight" in found.comparisons[1].path
    assert found.causes == () and found.exit_code == 0
    assert any(c.whole_error is not None for c in found.comparisons)


def test_rows_are_exact():
    found = verify(lambda x: x * 2, 0, CONCAT, microbatch_size=6)(batch()[0])
    assert found.verdict == "exact"


def test_N1_unequal_means_and_the_weight_function_that_repairs_them():
    w = torch.randn((), requires_grad=True)
    mask = (torch.rand(24, 5) < torch.linspace(0.1, 1, 24)[:, None]).float()
    inputs = {"x": torch.randn(24, 5), "mask": mask}
    loss = lambda batch: ((w * batch["x"]).square() * batch["mask"]).sum() / batch["mask"].sum()
    found = verify(loss, 0, MEAN, microbatch_size=4)(inputs)
    assert found.verdict == "different"
    assert kinds(found) == ["unequal_means"]
    assert "lambda batch: batch['mask'].sum()" in found.causes[0].remedy
    weigh = eval(found.causes[0].remedy.split("weight_fn=")[1].split(" (tried")[0])
    repaired = verify(loss, 0, MEAN, microbatch_size=4, weight_fn=weigh)(inputs)
    assert repaired.verdict in ("exact", "rounding")


def test_N1_labels_with_an_index_to_ignore():
    head = nn.Linear(8, 7)
    labels = torch.where(torch.rand(24) < torch.linspace(0, 0.7, 24), -100, torch.arange(24) % 7)
    labels[::4] = 1
    loss = lambda x, labels: nn.functional.cross_entropy(head(x), labels)
    found = verify(loss, (0, 1), MEAN, microbatch_size=4)(batch()[0], labels)
    assert kinds(found) == ["unequal_means"]
    assert "(labels != -100).sum()" in found.causes[0].remedy


def test_N4_a_microbatch_without_a_valid_label_is_named_and_its_weight_of_zero_repairs_it():
    head = nn.Linear(8, 7)
    labels = torch.arange(24) % 7
    labels[8:12], labels[20] = -100, -100
    loss = lambda x, labels: nn.functional.cross_entropy(head(x), labels)
    found = verify(loss, (0, 1), MEAN, microbatch_size=4)(batch()[0], labels)
    assert kinds(found) == ["not_finite", "unequal_means"]
    assert "microbatch 2 " in found.causes[0].sentence
    count = lambda x, labels: (labels != -100).sum()
    repaired = verify(loss, (0, 1), MEAN, microbatch_size=4, weight_fn=count)(batch()[0], labels)
    assert repaired.verdict in ("exact", "rounding")


def test_N2_a_sum_given_as_mean_and_a_mean_given_as_sum():
    model = nn.Linear(8, 4)
    total = lambda x, y: (model(x) - y).square().sum()
    assert kinds(verify(total, (0, 1), MEAN, microbatch_size=4)(*batch())) == ["sum_given_as_mean"]
    mean = mean_loss_of(model)
    assert kinds(verify(mean, (0, 1), SUM, microbatch_size=4)(*batch())) == ["mean_given_as_sum"]


def test_rows_that_influence_each_other_and_the_module_that_makes_them():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    for found in (
        verify(mean_loss_of(model), (0, 1), MEAN, microbatch_size=4)(*batch()),
        verify(lambda x: model(x), 0, CONCAT, microbatch_size=4)(batch()[0]),
    ):
        assert found.verdict == "different"
        assert kinds(found) == ["rows_influence_each_other"]
        assert "BatchNorm1d" in found.causes[0].sentence and ".1 " in found.causes[0].sentence
    model.eval()
    found = verify(mean_loss_of(model), (0, 1), MEAN, microbatch_size=4)(*batch())
    assert found.verdict in ("exact", "rounding")


def test_a_contrastive_loss_is_not_a_sum():
    encode = nn.Linear(8, 4)
    loss = lambda x, y: nn.functional.cross_entropy(encode(x) @ encode(y).T, torch.arange(len(x)))
    found = verify(loss, (0, 1), MEAN, microbatch_size=4)(batch()[0], torch.randn(24, 8))
    assert kinds(found) == ["not_a_sum"]
    assert "CONCAT" in found.causes[0].remedy


def test_random_numbers_and_where_they_are_drawn():
    # Two of them: a single one would draw the same numbers in the same order on a CPU.
    layers = [nn.Dropout(0.2), nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4)]
    model = nn.Sequential(*layers)
    found = verify(mean_loss_of(model), (0, 1), MEAN, microbatch_size=4)(*batch())
    assert kinds(found) == ["random_numbers"]
    assert "Dropout" in found.causes[0].sentence and "eval()" in found.causes[0].remedy
    model.eval()
    found = verify(mean_loss_of(model), (0, 1), MEAN, microbatch_size=4)(*batch())
    assert found.verdict in ("exact", "rounding")


def test_a_function_that_is_not_repeatable():
    calls = []

    def fun(x):
        calls.append(1)
        return (x * len(calls)).mean()

    found = verify(fun, 0, MEAN, microbatch_size=4)(batch()[0])
    assert kinds(found) == ["not_repeatable"]


def test_low_precision_accumulation():
    ones = torch.ones(4096, 2, dtype=torch.bfloat16)
    fun = lambda x: x.sum(0)
    assert verify(fun, 0, SUM, microbatch_size=1)(ones[:512]).verdict in ("exact", "rounding")
    poor = verify(fun, 0, SUM, microbatch_size=1, accumulator_dtype=torch.bfloat16)(ones)
    assert poor.verdict == "different"
    assert poor.comparisons[0].dtype == "bfloat16"
    assert kinds(poor) == ["low_precision"]


def test_N13_values_that_are_not_finite_are_placed():
    x, y = batch()
    x[9] = float("nan")
    found = verify(mean_loss_of(nn.Linear(8, 4)), (0, 1), MEAN, microbatch_size=4)(x, y)
    assert kinds(found) == ["not_finite"]
    assert (
        "microbatch 2 " in found.causes[0].sentence and "rows 8 to 11" in found.causes[0].sentence
    )


def test_a_prefix_where_the_whole_does_not_fit():
    fun = lambda x: (x[:, :, None] * x[:, None, :]).exp().sum((1, 2)).mean()
    found = verify(fun, 0, MEAN, microbatch_size=8, memory_budget="1MiB")(torch.randn(256, 64))
    assert 16 <= found.rows < 256 and found.rows % 8 == 0
    assert "the first" in str(found)
    assert found.verdict in ("exact", "rounding")


def test_arguments_by_name_and_arguments_that_are_no_batch():
    table = torch.randn(8, 4, requires_grad=True)
    fun = lambda table, x, *, scale: (x @ table).square().mean() * scale
    found = verify(fun, 1, MEAN, microbatch_size=4)(table, batch()[0], scale=2.0)
    assert found.verdict in ("exact", "rounding")
    assert [(c.role, c.path) for c in found.comparisons] == [("value", ""), ("gradient", "table")]


def test_nothing_of_the_users_changes():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    x, y = batch()
    mean_loss_of(model)(x, y).backward()
    grads = [p.grad for p in model.parameters()]
    before = copy.deepcopy((model.state_dict(), grads))
    state = torch.get_rng_state()
    verify(mean_loss_of(model), (0, 1), MEAN, microbatch_size=4)(x, y)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name]) and tensor.dtype == before[0][name].dtype
    for grad, old in zip(grads, before[1], strict=True):
        assert torch.equal(grad, old)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[1]._forward_hooks and x.dtype == torch.float32


def test_bad_input_is_refused():
    fun = mean_loss_of(nn.Linear(8, 4))
    with pytest.raises(MicrobatchSizeError, match="not positive"):
        verify(fun, (0, 1), MEAN, microbatch_size=0)
    with pytest.raises(MicrobatchSizeError, match="one microbatch"):
        verify(fun, (0, 1), MEAN, microbatch_size=24)(*batch())
    with pytest.raises(MicrobatchSizeError, match="divisible"):
        verify(fun, (0, 1), MEAN, microbatch_size=5)(*batch())
    with pytest.raises(BatchError):
        verify(fun, 9, MEAN, microbatch_size=5)
    with pytest.raises(TypeError, match="unknown"):
        verify(fun, (0, 1), MEAN, microbatch_size=5, unknown=1)
