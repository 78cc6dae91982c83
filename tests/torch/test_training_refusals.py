"""What `backward` refuses, before anything has changed, and the way out that each message names."""

import collections
import dataclasses
import functools
import gc
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import microbatch
import microbatch.torch as mb
from microbatch.torch._out_of_memory import is_out_of_memory


def square(model, x):
    return model(x).square().mean()


def untouched(module):
    return all(p.grad is None for p in module.parameters())


def message(error):
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    "call",
    [
        lambda loss, x: mb.backward(loss, x, microbatch_size=2),
        lambda loss, x: mb.backward_window(loss, [(x,)]),
        lambda loss, x: mb.value_and_grad(loss, {"x": x}, microbatch_size=2),
    ],
)
def test_a_loss_in_place_of_its_function(call):
    with pytest.raises(microbatch.MicrobatchError) as refused:
        call(torch.tensor(1.5), torch.ones(4, requires_grad=True))
    assert message(refused)[0].endswith("loss_fn=tensor(1.5000) is a Tensor, not a function.")
    assert message(refused)[1] == "Give the function itself, not what it returns."


def test_C4_no_batch_argument():
    with pytest.raises(microbatch.BatchError) as refused:
        mb.backward(lambda *_: None, 3, "a", None, microbatch_size=2)
    assert message(refused) == [
        "backward(<lambda>): the arguments hold no tensor with rows.",
        "Pass the batch's tensors as positional arguments, or name their dimensions in in_dims.",
    ]


@pytest.mark.parametrize("size", [0, -5, 2.0, True, "8"])
def test_C3_sizes_that_are_not_positive_integers(size):
    with pytest.raises(microbatch.MicrobatchSizeError, match="microbatch_size="):
        mb.backward(lambda x: x.mean(), torch.ones(3), microbatch_size=size)


def test_C5_unequal_rows_name_every_tensor():
    def loss_fn(batch, mask):
        raise AssertionError("never runs")

    batch = {"x": torch.ones(6, 2), "y": torch.ones(6)}
    with pytest.raises(microbatch.BatchError) as refused:
        mb.backward(loss_fn, batch, torch.ones(4, 4), microbatch_size=2)
    assert message(refused) == [
        "backward(loss_fn): every tensor is a batch, and these have different numbers of rows:",
        "  batch['x']: 6 along dimension 0 of shape (6, 2)",
        "  batch['y']: 6 along dimension 0 of shape (6,)",
        "  mask: 4 along dimension 0 of shape (4, 4)",
        "Give them equally many rows, or None in in_dims for what is not a batch, for example in_dims=(0, None).",
    ]


def test_in_dims_that_do_not_fit():
    x = torch.ones(4, 2)
    for in_dims, words in {
        (0, 0): "has 2 entries for 1 argument",
        (3,): r"x has shape \(4, 2\) and no dimension 3",
        ("rows",): "in_dims has 'rows' for x",
        "0": "is a str",
    }.items():
        with pytest.raises(microbatch.BatchError, match=words):
            mb.backward(lambda x: x.sum(), x, microbatch_size=2, in_dims=in_dims)


def test_objects_that_hide_tensors():
    class Graphs:
        def __init__(self):
            self.nodes = torch.ones(4)

    with pytest.raises(
        microbatch.BatchError, match=r"graphs is a Graphs that holds a tensor in .nodes"
    ):
        mb.backward(lambda x, graphs: x.sum(), torch.ones(4), Graphs(), microbatch_size=2)
    w = torch.ones(1, requires_grad=True)
    mb.backward(
        lambda x, g: (w * x).sum() * g.nodes.sum(),
        torch.ones(4), Graphs(), microbatch_size=2, in_dims=(0, None),
    )  # fmt: skip


def test_collections_and_slots_that_hide_tensors():
    @dataclasses.dataclass(slots=True)
    class Graphs:
        nodes: torch.Tensor

    for hidden, words in [
        (Graphs(torch.ones(4)), r"a Graphs that holds a tensor in .nodes"),
        (collections.deque([torch.ones(4)]), r"a deque that holds a tensor in \[0\]"),
        (np.ones(4), r"a ndarray of shape \(4,\), not a tensor"),
    ]:
        with pytest.raises(microbatch.BatchError, match=words):
            mb.backward(lambda x, hidden: x.sum(), torch.ones(4), hidden, microbatch_size=2)
        with pytest.raises(microbatch.BatchError, match=words):
            mb.microbatch(lambda x, hidden: x.sum(), (0, 1), 2)(torch.ones(4), hidden)


@pytest.mark.parametrize(
    "make, words",
    [
        (torch.Tensor.to_sparse, "layout torch.sparse_coo"),
        (torch.Tensor.to_sparse_csr, "layout torch.sparse_csr"),
        (torch.Tensor.to_mkldnn, "layout torch._mkldnn"),
        (lambda x: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged), "nested tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layouts_without_views_of_rows(make, words):
    with pytest.raises(microbatch.BatchError, match=words):
        mb.backward(lambda x: x.sum(), make(torch.ones(4, 2)), microbatch_size=2)
    with pytest.raises(microbatch.BatchError, match=words):
        mb.microbatch(lambda x: x.sum(), 0, 2)(make(torch.ones(4, 2)))


@pytest.mark.parametrize(
    "returned, words",
    [
        (lambda m, x: m(x), r"has shape \(2, 3\), not one element"),
        (lambda m, x: (square(m, x), 3), "is a tuple, not a tensor"),
        (lambda m, x: square(m, x).item(), "is a float, not a tensor"),
        (lambda m, x: {"a": square(m, x), "logits": m(x)}, "the loss 'logits' has shape"),
        (lambda m, x: {}, "an empty mapping"),
        (lambda m, x: types.SimpleNamespace(loss=None, logits=m(x)), r"whose .loss is None"),
    ],
)
def test_losses_that_are_not_one(returned, words):
    model = nn.Linear(5, 3)
    with pytest.raises(microbatch.MicrobatchError, match=words):
        mb.backward(functools.partial(returned, model), torch.randn(6, 5), microbatch_size=2)
    assert untouched(model)


@pytest.mark.parametrize(
    "returned, words",
    [
        (lambda x: ({"a" if x[0] else "b": (x * 1).sum()}, None), "has the keys"),
        (
            lambda x: (x.sum(), {"a" if x[0] else "b": x}),
            "aux of the microbatches cannot be joined",
        ),
        (lambda x: (x.sum(), x.new_ones(2, 1 + int(x[0]))), "aux of the microbatches cannot be"),
    ],
)
def test_what_differs_between_microbatches(returned, words):
    scale = torch.ones(1, requires_grad=True)
    with pytest.raises(microbatch.MicrobatchError, match=words):
        mb.backward(
            lambda x: returned(x * scale),
            torch.tensor([0.0, 0, 1, 1]),
            microbatch_size=2,
            has_aux=True,
        )
    assert scale.grad is None


def test_a_loss_without_a_graph():
    model = nn.Linear(5, 3)
    with pytest.raises(
        microbatch.GraphError, match="depends on no tensor that requires a gradient"
    ):
        mb.backward(lambda x: square(model, x).detach(), torch.randn(6, 5), microbatch_size=2)
    with torch.no_grad(), pytest.raises(microbatch.GraphError, match="gradients enabled"):
        mb.backward(functools.partial(square, model), torch.randn(6, 5), microbatch_size=2)


def test_reductions_and_weights_that_do_not_fit():
    x, w = torch.ones(4), torch.ones(1, requires_grad=True)
    loss_fn = lambda x: (w * x).mean()
    for words, kwargs in {
        "reduction='median' is unknown": {"reduction": "median"},
        '"sum" has no weights': {"reduction": "sum", "weight_fn": len},
        "weight_fn=3 is not a function": {"weight_fn": 3},
        r"of shape \(2,\)": {"weight_fn": lambda x: x},
        "returned -1.0 for microbatch 0": {"weight_fn": lambda x: -1},
        "returned nan for microbatch 1": {"weight_fn": lambda x: float("nan") if x[0] > 0 else 1},
        "a single loss, but reduction and weight_fn name 'a'": {"reduction": {"a": "mean"}},
        "which reduction lacks": {"reduction": {"a": "mean"}, "weight_fn": {"b": len}},
    }.items():
        batch = torch.tensor([0.0, 0.0, 1.0, 1.0]) if "nan" in words else x
        with pytest.raises(microbatch.MicrobatchError, match=words):
            mb.backward(loss_fn, batch, microbatch_size=2, **kwargs)
    assert w.grad is None


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 4), middle, nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))

    def loss(self, x):
        return self(x).square().mean()


def reachable(model):
    """Every way in which a loss function may hold its model."""

    class Trainer:
        def __init__(self):
            self.model = model

        def loss(self, x):
            return square(self.model, x)

        def __call__(self, x):
            return square(self.model, x)

    holder = {"models": [model]}
    namespace = {"model": model, "square": square}
    exec("def from_global(x): return square(model, x)", namespace)
    return {
        "closure": lambda x: square(model, x),
        "method of a module": model.loss,
        "method of an object": Trainer().loss,
        "callable object": Trainer(),
        "partial": functools.partial(square, model),
        "container": lambda x: square(holder["models"][0], x),
        "global": namespace["from_global"],
    }


@pytest.mark.parametrize("way", list(reachable(Net(nn.Identity()))))
def test_batch_norm_is_refused_before_the_first_forward(way):
    model = Net(nn.BatchNorm1d(4))
    ran = []
    model.first.register_forward_hook(lambda *_: ran.append(1))
    loss_fn = reachable(model)[way]
    with pytest.raises(microbatch.RowMixingError, match="BatchNorm1d that is in training mode"):
        mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2)
    assert untouched(model) and not ran
    mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2, allow_row_mixing=True)
    model.zero_grad()
    model.eval()
    mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2)


def test_batch_norm_as_an_argument_and_its_message():
    model = Net(nn.BatchNorm1d(4))
    with pytest.raises(microbatch.RowMixingError) as refused:
        mb.backward(square, model, torch.randn(6, 5), microbatch_size=2)
    assert message(refused) == [
        "backward(square): Net.middle is a BatchNorm1d that is in training mode; it would normalise each microbatch "
        "by itself, and the gradient would not be the whole batch's.",
        "Call Net.middle.eval(), replace it by GroupNorm or LayerNorm, or accept the difference with "
        "allow_row_mixing=True.",
    ]


def test_batch_norm_without_running_statistics_mixes_rows_also_in_eval():
    model = Net(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(microbatch.RowMixingError, match="has no running statistics"):
        mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2)


def test_batch_norm_that_is_found_late_is_refused_and_nothing_has_changed():
    class Hidden:
        __slots__ = ("model",)

    hidden = Hidden()
    hidden.model = Net(nn.BatchNorm1d(4))
    with pytest.raises(microbatch.RowMixingError, match="BatchNorm1d that is in training mode"):
        mb.backward(lambda x: square(hidden.model, x), torch.randn(6, 5), microbatch_size=2)
    assert untouched(hidden.model) and hidden.model.middle.num_batches_tracked == 0
    # The hook that found it is gone.
    hidden.model(torch.randn(6, 5))


class Counting(nn.Module):
    def __init__(self, size=1):
        super().__init__()
        self.register_buffer("count", torch.zeros(size))

    def forward(self, x):
        self.count += 1
        return x


@pytest.mark.parametrize("hidden", [False, True])
def test_buffers_that_change_are_restored_and_refused(hidden):
    class Hidden:
        __slots__ = ("model",)

    holder = Hidden()
    holder.model = model = Net(Counting())
    loss_fn = (lambda x: square(holder.model, x)) if hidden else model.loss
    with pytest.raises(microbatch.RowMixingError, match=r"count of a Counting changed .* restored"):
        mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2)
    assert model.middle.count == 0 and untouched(model)
    mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2, allow_row_mixing=True)
    assert model.middle.count == 3


def test_buffers_that_changed_before_a_late_refusal_are_restored():
    class Hidden:
        __slots__ = ("first", "second")

    hidden = Hidden()
    hidden.first, hidden.second = Counting(), Net(nn.BatchNorm1d(4))
    loss_fn = lambda x: square(hidden.second, hidden.first(x))
    with pytest.raises(microbatch.RowMixingError, match="BatchNorm1d"):
        mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2)
    assert hidden.first.count == 0


def test_large_buffers_are_not_copied_and_the_message_says_so():
    model = Net(Counting(size=300_000))
    with pytest.raises(microbatch.RowMixingError, match="large and was not restored"):
        mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2)


def test_buffers_that_are_replaced_are_put_back():
    class Replacing(Counting):
        def forward(self, x):
            self.count = self.count + 1
            return x

    model = Net(Replacing())
    with pytest.raises(microbatch.RowMixingError, match="changed during the first microbatch"):
        mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2)
    assert model.middle.count == 0


def test_spectral_norm_in_training_is_found_by_its_buffers():
    model = Net(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    with pytest.raises(microbatch.RowMixingError, match="changed during the first microbatch"):
        mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2)
    model.eval()
    mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2)


@pytest.mark.parametrize("hidden", [False, True])
def test_C20_a_gradient_hook_is_refused_with_the_opt_in(hidden):
    class Hidden:
        __slots__ = ("model",)

    holder = Hidden()
    holder.model = model = Net(nn.Identity())
    model.last.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    loss_fn = (lambda x: square(holder.model, x)) if hidden else model.loss
    with pytest.raises(
        microbatch.HookError, match=r"last.weight has a gradient hook.*allow_hooks=True"
    ):
        try:
            mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2)
        except microbatch.HookError as error:
            raise microbatch.HookError(str(error).replace("\n", " ")) from None
    assert untouched(model)
    mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2, allow_hooks=True)


def test_C20_a_hook_of_a_leaf_that_only_the_graph_shows():
    hidden = types.ModuleType("hidden")
    hidden.w = torch.ones(5, requires_grad=True)
    hidden.w.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    loss_fn = lambda x: (x @ hidden.w).mean()
    with pytest.raises(microbatch.HookError, match=r"a leaf of shape \(5,\) has a gradient hook"):
        mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2)
    assert hidden.w.grad is None
    mb.backward(loss_fn, torch.randn(6, 5), microbatch_size=2, allow_hooks=True)


def test_an_optimizer_stepped_in_backward_is_refused():
    model = Net(nn.Identity())
    optimizer = torch.optim.SGD([model.last.weight], lr=0.1)

    def step(parameter):
        optimizer.step()
        optimizer.zero_grad()

    handle = model.last.weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(microbatch.HookError, match="optimizer stepped in backward"):
        mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2)
    handle.remove()
    mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2)


def test_an_accelerator_that_divides_again_is_refused():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = Net(nn.Identity())
    for backward_fn in (accelerator.backward, lambda loss: accelerator.backward(loss)):
        with pytest.raises(
            microbatch.MicrobatchError, match="gradient_accumulation_steps=4 once more"
        ):
            mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2, backward_fn=backward_fn)
    accelerator.gradient_accumulation_steps = 1
    mb.backward(model.loss, torch.randn(6, 5), microbatch_size=2, backward_fn=accelerator.backward)


MESSAGES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "MPS backend out of memory (MPS allocated: 17 GB)",
    "HIP out of memory. Tried to allocate 3.00 MiB",
]


@pytest.mark.parametrize("text", MESSAGES)
def test_known_messages_of_memory(text):
    assert is_out_of_memory(RuntimeError(text))


def failing_at(model, call, kind, text):
    """A loss function that raises at one call, with its activations alive in the frame."""
    calls = []

    def loss_fn(x):
        calls.append(1)
        activations = model(x)
        if len(calls) == call:
            loss_fn.alive = weakref.ref(activations)
            raise kind(text)
        return activations.square().mean()

    return loss_fn


@pytest.mark.parametrize(
    "error", [(torch.OutOfMemoryError, MESSAGES[0]), (RuntimeError, MESSAGES[2])]
)
def test_M8_out_of_memory_is_typed_and_gradients_are_as_before(error):
    model = Net(nn.Identity())
    loss_fn = failing_at(model, 2, *error)
    with pytest.raises(microbatch.OutOfMemory) as refused:
        mb.backward(loss_fn, torch.randn(12, 5), microbatch_size=6)
    text = str(refused.value)
    assert "backward(loss_fn): out of memory in microbatch 1 of 6 rows; it asked for " in text
    assert "are available on cpu. Gradients are as before the call.\nUse microbatch_size=3." in text
    assert untouched(model)
    assert isinstance(refused.value, MemoryError)


def test_M8_nothing_of_the_attempt_stays_alive_while_the_error_is_handled():
    model = Net(nn.Identity())
    loss_fn = failing_at(model, 2, torch.OutOfMemoryError, MESSAGES[0])
    gc.disable()
    try:
        mb.backward(loss_fn, torch.randn(12, 5), microbatch_size=6)
    except microbatch.OutOfMemory as error:
        assert error.__context__ is None and error.__cause__ is None
        assert loss_fn.alive() is None
    finally:
        gc.enable()


def test_M8_a_real_allocation_that_fails():
    model = Net(nn.Identity())

    def loss_fn(x):
        return square(model, x) + torch.empty(1 << 50, dtype=torch.uint8)[0]

    words = r"it asked for 1,073,741,824\.0 MiB, a peak of 1,073,741,824\.\d MiB is predicted, parameters included, "
    with pytest.raises(microbatch.OutOfMemory, match=words):
        mb.backward(loss_fn, torch.randn(4, 5), microbatch_size=1)


@pytest.mark.parametrize("rollback", [False, True])
def test_M8_rollback_keeps_gradients_that_existed(rollback):
    model = Net(nn.Identity())
    mb.backward(model.loss, torch.randn(6, 5), microbatch_size=6)
    before = [p.grad.clone() for p in model.parameters()]
    loss_fn = failing_at(model, 2, torch.OutOfMemoryError, MESSAGES[0])
    words = "Gradients are as before" if rollback else r"hold a part of this batch \(rollback=True"
    with pytest.raises(microbatch.OutOfMemory, match=words):
        mb.backward(loss_fn, torch.randn(12, 5), microbatch_size=6, rollback=rollback)
    same = all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before))
    assert same is rollback


def test_other_errors_pass_unchanged_and_leave_gradients_as_they_were():
    model = Net(nn.Identity())
    loss_fn = failing_at(model, 2, KeyError, "mine")
    with pytest.raises(KeyError, match="mine"):
        mb.backward(loss_fn, torch.randn(12, 5), microbatch_size=6)
    assert untouched(model)
    model.bfloat16()
    with pytest.raises(KeyError, match="mine"):
        mb.backward(
            failing_at(model, 2, KeyError, "mine"), torch.randn(12, 5, dtype=torch.bfloat16),
            microbatch_size=6, accumulator_dtype=torch.float32,
        )  # fmt: skip
    assert untouched(model) and not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_interrupt_leaves_gradients_of_arguments_and_of_hidden_leaves_as_they_were():
    hidden = types.ModuleType("hidden")
    hidden.w, shared, behind = (torch.ones(5, requires_grad=True) for _ in range(3))
    x = torch.randn(6, 5, requires_grad=True)
    calls = []

    def loss_fn(shared, computed, x):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return (x * shared * computed * hidden.w).mean()

    with pytest.raises(KeyboardInterrupt):
        mb.backward(loss_fn, shared, behind * 2, x, microbatch_size=2, in_dims=(None, None, 0))
    assert all(leaf.grad is None for leaf in (hidden.w, shared, behind, x))


def test_M8_rollback_of_sparse_gradients():
    embed = nn.Embedding(10, 3, sparse=True)
    embed(torch.tensor([1])).sum().backward()
    before = embed.weight.grad.to_dense()
    calls = []

    def loss_fn(ids):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError
        return embed(ids).mean()

    with pytest.raises(KeyError):
        mb.backward(loss_fn, torch.arange(6), microbatch_size=2, rollback=True)
    torch.testing.assert_close(embed.weight.grad.to_dense(), before)


def test_accumulator_dtype_that_is_none():
    with pytest.raises(microbatch.MicrobatchError, match="not a floating-point dtype"):
        mb.backward(
            lambda x: x.sum(), torch.ones(2), microbatch_size=1, accumulator_dtype=torch.int64
        )
