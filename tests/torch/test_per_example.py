"""`micro_vmap` and `micro_grad` in PyTorch against a loop over examples."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from microbatch import Accumulator, AccumulatorError, BatchError, MicrobatchError
from microbatch.torch import AccumulationType, Aux, Carry, global_norm, micro_grad, micro_vmap
from microbatch.torch._tracking import TensorBytes

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType
ENGINES = ("vmap", "loop")


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).double()


def loss(net, x, y):
    return F.cross_entropy(net(x), y)


def per_example(net, x, y):
    inputs = dict(net.named_parameters())
    found = [
        torch.autograd.grad(loss(net, x[i : i + 1], y[i : i + 1]), list(inputs.values()))
        for i in range(len(x))
    ]
    return [dict(zip(inputs, gradients, strict=True)) for gradients in found]


def clip(gradients):
    share = torch.clamp(1 / global_norm(gradients), max=1.0)
    return {name: share * g for name, g in gradients.items()}


def total(trees):
    return {name: sum(tree[name] for tree in trees) for name in trees[0]}


@pytest.fixture
def data():
    return torch.randn(10, 4, dtype=torch.float64), torch.randint(0, 3, (10,))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [None, 1, 3, 5, 10])
def test_clipped_gradients_are_those_of_a_loop(data, engine, size):
    net = network()
    examples = per_example(net, *data)
    found, aux = micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=size,
        remainder="allow",
        transform_fn=clip,
        metrics_fn=global_norm,
        engine=engine,
    )(net, *data)
    assert isinstance(aux, Aux) and aux.aux is None
    torch.testing.assert_close(found, total([clip(g) for g in examples]))
    torch.testing.assert_close(aux.metrics, torch.stack([global_norm(g) for g in examples]))
    torch.testing.assert_close(aux.values, F.cross_entropy(net(data[0]), data[1], reduction="none"))


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_as_trees_aux_and_several_arguments(data, engine):
    net = network()
    params = {name: p.detach() for name, p in net.named_parameters()}
    shift = torch.zeros(4, dtype=torch.float64)

    def fun(params, shift, x, y):
        out = functional_call(net, params, (x + shift,))
        return F.cross_entropy(out, y), {"logits": out[0], "label": y[0]}

    (grads, of_shift), aux = micro_grad(
        fun, True, (0, 1), batch_argnums=(2, 3), microbatch_size=5, engine=engine
    )(params, shift, *data)
    torch.testing.assert_close(grads, total(per_example(net, *data)))
    assert of_shift.shape == (4,)
    torch.testing.assert_close(aux.aux["logits"], net(data[0]))
    assert torch.equal(aux.aux["label"], data[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_of_weight_zero_contributes_nothing(data, engine):
    net, (x, y) = network(), data
    weights = torch.tensor([1.0, 0, 2, 1, 0, 0, 0, 0, 0, 1], dtype=torch.float64)
    examples = per_example(net, x, y)
    x = x.clone()
    x[weights == 0] = torch.nan
    found, aux = micro_grad(
        lambda net, x, y, w: loss(net, x, y),
        batch_argnums=(1, 2, 3),
        microbatch_size=2,
        accumulator=MEAN,
        weight_fn=lambda net, x, y, w: w.sum(),
        engine=engine,
    )(net, x, y, weights)
    expected = {
        name: sum(w * g[name] for w, g in zip(weights, examples)) / weights.sum()
        for name in examples[0]
    }
    torch.testing.assert_close(found, expected)
    assert torch.equal(aux.values == 0, weights == 0)


def test_frozen_and_tied_parameters_of_a_module():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    net[1].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    x = torch.randn(4, 3, dtype=torch.float64)
    found, _ = micro_grad(lambda net, x: net(x).square().sum(), microbatch_size=2)(net, x)
    wanted = {name: p for name, p in net.named_parameters() if p.requires_grad}
    expected = torch.autograd.grad(net(x).square().sum(), list(wanted.values()))
    assert list(found) == list(wanted) == ["0.weight", "1.bias"]
    torch.testing.assert_close(tuple(found.values()), expected)
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())


def test_gradients_of_a_sparse_embedding_are_held_like_others():
    table, tokens = nn.Embedding(5, 3, sparse=True), torch.tensor([[0, 1], [4, 4], [1, 2]])
    fun = lambda table, tokens: table(tokens).square().sum()
    gradient = micro_grad(fun, microbatch_size=2, remainder="allow", engine="loop")(table, tokens)[
        0
    ]
    fun(table, tokens).backward()
    torch.testing.assert_close(gradient["weight"], table.weight.grad.to_dense())


def test_norms_are_accurate():
    entries = torch.full((2_000_000,), 0.1)
    exact = entries.double().square().sum().sqrt().item()
    assert abs(global_norm([entries]).item() / exact - 1) < 1e-7
    assert global_norm([torch.full((3,), 3e4, dtype=torch.float16)]).isfinite()
    assert global_norm([torch.tensor([3 + 4j])]).item() == 5


def test_dropout_draws_per_example():
    ones = torch.ones(8, 64)
    drop = lambda x: F.dropout(x, 0.5, True)
    for engine in ENGINES:
        found = micro_vmap(drop, microbatch_size=4, engine=engine)(ones)
        assert len({tuple(row.tolist()) for row in found}) == 8
    same = micro_vmap(drop, microbatch_size=4, randomness="same")(ones)
    assert torch.equal(same[0], same[3])


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


class Checkpointed(nn.Module):
    def forward(self, x):
        return checkpoint(torch.tanh, x, use_reentrant=False)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen.add_(x.detach().sum(0))
        return x


@pytest.mark.parametrize("inner", [Branching, Checkpointed, Counting])
def test_a_module_that_cannot_be_mapped_is_named_and_runs_in_a_loop(inner):
    net = nn.Sequential(nn.Linear(3, 3), inner())
    x = torch.randn(4, 3)
    fun = lambda net, x: net(x).square().sum()
    with pytest.raises(MicrobatchError) as caught:
        micro_grad(fun, microbatch_size=2)(net, x)
    assert f"its {inner.__name__} cannot be mapped over examples" in str(caught.value)
    assert 'Use engine="loop"' in str(caught.value).splitlines()[-1]
    found, _ = micro_grad(fun, microbatch_size=2, engine="loop")(net, x)
    expected = torch.autograd.grad(fun(net, x), list(net.parameters()))
    torch.testing.assert_close(tuple(found.values()), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_micro_vmap_maps_like_vmap(engine):
    a, b = torch.randn(3, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    fun = lambda pair, c, scale: {"sum": pair["a"] + c, "dot": scale * (pair["b"] @ c)}
    in_dims = ({"a": 1, "b": 0}, None)
    c = torch.randn(3, dtype=torch.float64)
    scale = torch.arange(6.0, dtype=torch.float64)
    args = ({"a": a, "b": b}, c)
    # `torch.vmap` itself does not map keyword arguments; here they are, as in the other fronts.
    expected = torch.vmap(fun, (*in_dims, 0))(*args, scale)
    for size in (None, 2, 3):
        found = micro_vmap(fun, in_dims, microbatch_size=size, engine=engine)(*args, scale=scale)
        torch.testing.assert_close(found, expected)


def test_every_kind_reduces_over_examples():
    x = torch.tensor([1.0, 5, 2, 4, 3, 9])
    kinds = {SUM: 24, MEAN: 4, RUNNING_MEAN: 4, MAX: 9, MIN: 1, LAST: 9}
    for kind, expected in kinds.items():
        assert micro_vmap(lambda x: x, microbatch_size=2, accumulator=kind)(x) == expected
    weigh = lambda x: (x > 2).float()
    weighted = {SUM: 21, MEAN: 5.25, MAX: 9, MIN: 3, LAST: 9}
    for kind, expected in weighted.items():
        found = micro_vmap(lambda x: x, microbatch_size=2, accumulator=kind, weight_fn=weigh)(x)
        assert found == expected, kind
    total = Accumulator(lambda spec: 0, lambda c, x, i: c + x, lambda c: c, lambda rows: rows.sum())
    assert micro_vmap(lambda x: x, microbatch_size=2, accumulator=total)(x) == 24


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weight_fn", [None, lambda x: x >= 0])
@pytest.mark.parametrize("size", [None, 50])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_booleans_and_small_integers_are_counted(dtype, size, weight_fn, engine):
    """As `torch.sum` of the examples: a hundred true ones are no single one, and int8 does not overflow."""
    x = (torch.arange(100) % 3 * 50).to(dtype)
    counted = micro_vmap(
        lambda x: x, microbatch_size=size, accumulator=SUM, weight_fn=weight_fn, engine=engine
    )(x)
    assert counted.dtype == torch.vmap(lambda x: x)(x).sum().dtype == torch.int64
    assert counted.item() == x.numpy().sum(dtype="int64")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [None, 2, 3, 6])
def test_ones_own_accumulator_never_sees_an_example_of_weight_0(size, engine):
    largest = Accumulator(
        lambda spec: torch.full((), -torch.inf),
        lambda carry, value, index: torch.maximum(carry, value),
        lambda carry: 2 * carry,
        lambda values: values.amax(0),
    )
    x = torch.tensor([-5.0, torch.nan, torch.inf, -3.0, torch.nan, torch.nan])
    found = micro_vmap(
        lambda x: 10 * x,
        microbatch_size=size,
        accumulator=largest,
        weight_fn=torch.isfinite,
        engine=engine,
    )
    assert found(x) == -60


def test_examples_may_go_to_another_dimension():
    x = torch.arange(12.0).reshape(4, 3)
    found = micro_vmap(lambda x: 2 * x, out_dims=-1, microbatch_size=2)(x)
    assert torch.equal(found, 2 * x.T)
    with pytest.raises(AccumulatorError, match="out_dims=1 needs the examples side by side"):
        micro_vmap(lambda x: x, out_dims=1, accumulator=SUM)
    with pytest.raises(AccumulatorError, match="Use microbatch for it"):
        micro_vmap(lambda x: x, accumulator=Carry(0))
    with pytest.raises(AccumulatorError, match="has no aggregate"):
        micro_vmap(lambda x: x, accumulator=Accumulator(None, None, None))


def test_gradients_of_one_microbatch_exist_at_a_time():
    net = nn.Linear(128, 128, bias=False)
    x = torch.randn(32, 128)
    one = 128 * 128 * 4

    def peak(size):
        with TensorBytes() as tracked:
            tracked.hold([x, *net.parameters()])
            before = tracked.live_bytes
            micro_grad(lambda net, x: net(x).square().sum(), microbatch_size=size)(net, x)
        return (tracked.peak_bytes - before) / one

    assert peak(2) < 8
    assert peak(32) > 32


def test_per_example_functions_are_differentiable():
    w, x = torch.randn(3, dtype=torch.float64, requires_grad=True), torch.randn(6, 3).double()
    penalty = lambda w, x: (w * x).sum().tanh()
    found, _ = micro_grad(penalty, microbatch_size=2, keep_batch_dim=False)(w, x)
    (second,) = torch.autograd.grad(found.square().sum(), w)
    first = torch.autograd.grad((x @ w).tanh().sum(), w, create_graph=True)[0]
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), w)[0])


@pytest.mark.parametrize("kind", [MAX, MIN])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32])
def test_extremes_of_every_dtype_leave_out_what_has_no_weight(kind, dtype):
    values = torch.tensor([0, 1, 0, 1, 1, 0]).to(dtype)
    kept = torch.tensor([1, 0, 1, 0, 0, 1]) if kind is MAX else torch.tensor([0, 1, 0, 1, 1, 0])
    found = micro_vmap(
        lambda x, w: x, microbatch_size=2, accumulator=kind, weight_fn=lambda x, w: w
    )(values, kept)
    assert found.dtype == dtype and found == (kind is MIN)


@pytest.mark.parametrize("kind", [SUM, MEAN])
def test_sums_of_examples_are_rounded_once(kind):
    values = torch.tensor([256.0, 1.0] + [1.0] * 124 + [-256.0, 1.0], dtype=torch.bfloat16)
    right = values.double().sum() if kind is SUM else values.double().mean()
    found = micro_vmap(lambda x: x, microbatch_size=2, accumulator=kind)(values)
    assert found.dtype == torch.bfloat16 and found == right.bfloat16()


def test_examples_are_summed_in_the_dtype_that_is_asked_for():
    values = torch.tensor([1e8, *[1.0] * 6, -1e8])
    total = micro_vmap(
        lambda x: x, microbatch_size=4, accumulator=SUM, accumulator_dtype=torch.float64
    )
    assert total(values) == 6 and total(values).dtype == torch.float32


def test_complex_extremes_are_refused_with_the_path():
    with pytest.raises(AccumulatorError, match="output has dtype complex64, which has no order"):
        micro_vmap(lambda x: x, microbatch_size=2, accumulator=MAX)(
            torch.ones(4, dtype=torch.cfloat)
        )


def test_argnums_count_from_the_end_and_are_checked(data):
    net = network()
    found, _ = micro_grad(loss, argnums=-3, batch_argnums=(1, 2))(net, *data)
    torch.testing.assert_close(found, total(per_example(net, *data)))
    with pytest.raises(BatchError, match="argnums names argument 3, and the call has 3 positional"):
        micro_grad(loss, argnums=3, batch_argnums=(1, 2))(net, *data)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_last_of_examples_that_all_have_weight_0(engine):
    x = torch.arange(4.0)
    last = micro_vmap(
        lambda x: x, microbatch_size=2, accumulator=LAST, weight_fn=lambda x: 0, engine=engine
    )
    assert last(x) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_is_no_number_is_refused(engine):
    with pytest.raises(AccumulatorError, match="an output is a str"):
        micro_vmap(lambda x: {"name": "a"}, microbatch_size=2, engine=engine)(torch.arange(4.0))


@pytest.mark.parametrize(
    ("weight_fn", "words"),
    [
        (lambda x: x, r"weight_fn returned shape \(2,\) for one example"),
        (lambda x: x[0], r"weight_fn returned -1\.0 for microbatch 0"),
    ],
)
def test_weights_of_examples_that_cannot_be_are_refused(weight_fn, words):
    rows = torch.tensor([[2.0, 1.0], [-1.0, 5.0], [1.0, 1.0], [1.0, 1.0]])
    mean = micro_vmap(lambda x: x.sum(), microbatch_size=2, accumulator=MEAN, weight_fn=weight_fn)
    with pytest.raises(MicrobatchError, match=words):
        mean(rows)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "fun, has_aux, words",
    [
        (lambda w, x: (x @ w).sum().int(), False, r"is int32\[\], not one real number"),
        (lambda w, x: (x @ w).sum() * 1j, False, r"is complex128\[\], not one real number"),
        (lambda w, x: x * w, False, r"is float64\[1, 3\], not one real number"),
        (lambda w, x: ((x @ w).sum(), x), False, "is a tuple, not a tensor"),
        (lambda w, x: (x @ w).sum(), True, "has_aux=True, and the function returned a Tensor"),
    ],
)
def test_losses_without_a_gradient_by_their_type(fun, has_aux, words, engine):
    w, x = torch.ones(3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(MicrobatchError, match=words):
        micro_grad(fun, has_aux, microbatch_size=2, engine=engine)(w, x)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_of_one_element_is_a_number_per_example(engine):
    w, x = torch.ones(3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    found, aux = micro_grad(lambda w, x: x @ w, microbatch_size=2, engine=engine)(w, x)
    assert found.tolist() == [4.0, 4.0, 4.0] and aux.values.shape == (4,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out_dims": "0"}, "out_dims holds '0', not an integer"),
        ({"out_dims": 1.0}, "out_dims holds 1.0, not an integer"),
        ({"out_dims": 7}, "on axis 7, and the output with them has 2 axes.\nUse -2 to 1"),
        ({"in_dims": "0"}, "has '0' for its axis of rows"),
        ({"weight_fn": "rows"}, "weight_fn='rows' is a str, not a function"),
        ({"fun": None}, "fun=None is a NoneType, not a function"),
    ],
)
def test_wrong_words_to_micro_vmap_are_refused_by_name(options, words):
    with pytest.raises(MicrobatchError, match=words):
        micro_vmap(**{"fun": lambda x: x, "microbatch_size": 2, **options})(torch.ones(4, 3))


@pytest.mark.parametrize("name", ["transform_fn", "metrics_fn"])
def test_what_is_no_function_of_a_gradient_is_refused(name):
    with pytest.raises(MicrobatchError, match=f"{name}=None is a NoneType, not a function"):
        micro_grad(lambda w, x: (w * x).sum(), **{name: None})
