"""What two processes check about the training step; started by `test_torch_training.py`.

Each check compares with one process that has both processes' rows, computed here without any wrapper.
"""

import contextlib
import functools
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import microbatch
import microbatch.torch as mb

CHECKS = []


def check(fun):
    CHECKS.append(fun)
    return fun


class Model(nn.Module):
    """A trunk, and one of two heads."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 16))
        self.heads = nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])

    def forward(self, x, head=None):
        features = self.trunk(x)
        if head is None:
            return self.heads[0](features) + self.heads[1](features)
        return self.heads[head](features)


def fresh():
    torch.manual_seed(3)
    return Model()


def rows_of(rank, rows, width=4):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rows, width, 5, generator=generator)
    labels = torch.randint(0, 3, (rows, width), generator=generator)
    labels[torch.rand(rows, width, generator=generator) < (0.2 if rank else 0.7)] = -100
    labels[0, 0] = 1
    return x, labels


def token_loss(model, x, labels, **kwargs):
    logits = model(x, **kwargs).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100)


def token_sum(model, x, labels):
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def count_tokens(x, labels):
    return (labels != -100).sum()


def one_process(loss_of, batches):
    """Loss and gradients of all processes' rows in float64, without any wrapper."""
    model = fresh().double()
    x, labels = (torch.cat(parts) for parts in zip(*batches))
    loss = loss_of(model, x.double(), labels)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_grads(module, wanted, rtol=3e-6):
    for p, b in zip(module.parameters(), wanted, strict=True):
        assert p.grad is not None or b is None or not b.any()
        if b is not None and p.grad is not None:
            error = (full(p.grad).double() - b).abs().max()
            assert error <= rtol * b.abs().max(), (error, b.abs().max())


def assert_equal_on_all_ranks(module):
    for p in module.parameters():
        if p.grad is not None:
            both = [torch.empty_like(full(p.grad)) for _ in range(dist.get_world_size())]
            dist.all_gather(both, full(p.grad).contiguous())
            assert torch.equal(both[0], both[1])


class Collectives:
    """Counts collectives, by name and size, from the calls that reach the process group."""

    def __init__(self):
        self.sizes = []

    def __enter__(self):
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()
        return self

    def __exit__(self, *exc):
        self._profile.__exit__(*exc)
        for event in self._profile.events():
            if event.name.startswith("c10d::"):
                self.sizes.append(event.name.removeprefix("c10d::"))

    def count(self, name):
        return sum(found.startswith(name) for found in self.sizes)


@contextlib.contextmanager
def raises(kind, words):
    try:
        yield
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__} with {words!r}")


@check
def N16_unequal_token_counts_ddp(rank):
    batches = [rows_of(r, 6) for r in range(2)]
    wanted, grads = one_process(token_loss, batches)
    for size in (6, 4, 2, 1):
        ddp = DDP(fresh())
        loss_fn = functools.partial(token_loss, ddp)
        loss = mb.backward(loss_fn, *batches[rank], microbatch_size=size, weight_fn=count_tokens)
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
        assert_grads(ddp, grads)


@check
def sum_and_sum_over_weight_ddp(rank):
    batches = [rows_of(r, 6) for r in range(2)]
    ddp = DDP(fresh())
    loss_fn = functools.partial(token_sum, ddp)
    wanted, grads = one_process(token_sum, batches)
    loss = mb.backward(loss_fn, *batches[rank], microbatch_size=2, reduction="sum")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_grads(ddp, grads)
    ddp.zero_grad()
    _, grads = one_process(token_loss, batches)
    mb.backward(
        loss_fn,
        *batches[rank],
        microbatch_size=2,
        reduction="sum_over_weight",
        weight_fn=count_tokens,
    )
    assert_grads(ddp, grads)


@check
def rows_weigh_where_nothing_else_does(rank):
    batches = [rows_of(0, 2), rows_of(1, 7)]
    mean_square = lambda model, x, labels: model(x).square().mean()
    wanted, grads = one_process(mean_square, batches)
    ddp = DDP(fresh())
    loss, aux = mb.backward(
        lambda x, labels: (mean_square(ddp, x, labels), len(x)), *batches[rank], microbatch_size=3,
        has_aux=True,
    )  # fmt: skip
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_grads(ddp, grads)
    assert aux == ([2] if rank == 0 else [3, 3, 1])


@check
def losses_with_reductions_of_their_own(rank):
    batches = [rows_of(r, 4 + 2 * r) for r in range(2)]
    penalty = lambda model, x: model(x).square().mean()
    both = lambda m, x, y: token_loss(m, x, y) + penalty(m, x)
    wanted, grads = one_process(both, batches)
    ddp = DDP(fresh())

    def loss_fn(x, labels):
        logits = ddp(x)  # Once: DDP takes one forward for each backward.
        tokens = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"tokens": tokens, "penalty": logits.square().mean()}

    losses = mb.backward(
        loss_fn, *batches[rank], microbatch_size=2,
        weight_fn={"tokens": count_tokens, "penalty": None},
    )  # fmt: skip
    torch.testing.assert_close(sum(losses.values()).double(), wanted, rtol=1e-6, atol=0)
    assert_grads(ddp, grads)


@check
def S8_uneven_counts_ddp(rank):
    batches = [rows_of(0, 2), rows_of(1, 7)]
    wanted, grads = one_process(token_loss, batches)
    ddp = DDP(fresh())
    loss_fn = functools.partial(token_loss, ddp)
    loss = mb.backward(loss_fn, *batches[rank], microbatch_size=2, weight_fn=count_tokens)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_grads(ddp, grads)
    assert_equal_on_all_ranks(ddp)
    with raises(microbatch.DistributedError, 'sync="every" with different numbers'):
        mb.backward(loss_fn, *batches[rank], microbatch_size=2, sync="every")


@check
def one_gradient_reduction_per_call_ddp(rank):
    x, labels = rows_of(rank, 8)
    ddp = DDP(fresh())
    loss_fn = functools.partial(token_loss, ddp)
    mb.backward(loss_fn, x, labels, microbatch_size=1, weight_fn=count_tokens)
    counts = {}
    for size in (1, 8):
        with Collectives() as seen:
            mb.backward(loss_fn, x, labels, microbatch_size=size, weight_fn=count_tokens)
        counts[size] = seen.count("allreduce_")
    # One bucket of gradients, one message of weights before it and the loss after it.
    assert counts == {1: 3, 8: 3}, counts
    with Collectives() as seen:
        mb.backward(loss_fn, x, labels, microbatch_size=2, weight_fn=count_tokens, sync="every")
    assert seen.count("allreduce_") == 6, seen.sizes


@check
def S9_every_window_length_synchronises_ddp(rank):
    ddp = DDP(fresh())
    loss_fn = functools.partial(token_loss, ddp)
    for k in range(1, 9):
        batches = [rows_of(r + 2 * k, k) for r in range(2)]
        x, labels = batches[rank]
        ddp.zero_grad()
        mb.backward_window(loss_fn, list(zip(x.split(1), labels.split(1))), weight_fn=count_tokens)
        assert_equal_on_all_ranks(ddp)
        assert_grads(ddp, one_process(token_loss, batches)[1])


@check
def zero_weights_ddp(rank):
    batches = [rows_of(r, 6) for r in range(2)]
    batches[0][1][:] = -100  # Process 0 has nothing that counts.
    batches[1][1][4:] = -100  # The last microbatch of process 1 neither.
    batches[0][0][:] = float("nan")
    loss_of = lambda m, x, y: token_loss(m, x[6:], y[6:])
    wanted, grads = one_process(loss_of, batches)
    ddp = DDP(fresh())
    loss_fn = functools.partial(token_loss, ddp)
    loss = mb.backward(loss_fn, *batches[rank], microbatch_size=2, weight_fn=count_tokens)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_grads(ddp, grads)
    assert_equal_on_all_ranks(ddp)
    ddp.zero_grad()
    batches[1][1][:] = -100
    loss = mb.backward(loss_fn, *batches[rank], microbatch_size=2, weight_fn=count_tokens)
    assert loss == 0 and not any(p.grad.any() for p in ddp.parameters())


def two_heads(model, x, labels, head):
    return token_loss(model, x, labels, head=int(head[0]))


@check
def S7_parameters_used_in_some_microbatches_ddp(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    x, labels = batches[rank]
    window = [(x[:2], labels[:2], [0]), (x[2:], labels[2:], [1])]
    weigh = lambda x, labels, head: count_tokens(x, labels)
    ddp = DDP(fresh())
    with raises(microbatch.DistributedError, "find_unused_parameters=True"):
        mb.backward_window(functools.partial(two_heads, ddp), window, weight_fn=weigh)
    assert all(p.grad is None for p in ddp.parameters())
    dist.barrier()
    exact = fresh().double()
    total = sum(count_tokens(*b) for b in batches)
    for x, labels in batches:
        for head, rows in enumerate((slice(0, 2), slice(2, 4))):
            tokens = count_tokens(x[rows], labels[rows])
            loss = token_loss(exact, x[rows].double(), labels[rows], head=head)
            (loss * tokens / total).backward()
    ddp = DDP(fresh(), find_unused_parameters=True)
    mb.backward_window(functools.partial(two_heads, ddp), window, weight_fn=weigh)
    assert_grads(ddp, [p.grad for p in exact.parameters()])
    assert_equal_on_all_ranks(ddp)


@check
def static_graph_ddp(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    _, grads = one_process(token_loss, batches)
    ddp = DDP(fresh(), static_graph=True)
    loss_fn = functools.partial(token_loss, ddp)
    with raises(microbatch.DistributedError, "static_graph=True communicates in each"):
        rows = 2 * (rank + 1)
        mb.backward(loss_fn, batches[rank][0][:rows], batches[rank][1][:rows], microbatch_size=2)
    for _ in range(3):
        ddp.zero_grad()
        mb.backward(loss_fn, *batches[rank], microbatch_size=2, weight_fn=count_tokens)
        assert_grads(ddp, grads)


@check
def S6_a_wrapped_module_found_late_is_refused_and_named_it_works(rank):
    class Hidden:
        __slots__ = ("model",)

    hidden = Hidden()
    hidden.model = DDP(fresh())
    batches = [rows_of(r, 4) for r in range(2)]
    loss_fn = lambda x, labels: token_loss(hidden.model, x, labels)
    with raises(microbatch.DistributedError, "sync_modules=[model]"):
        mb.backward(loss_fn, *batches[rank], microbatch_size=2)
    options = {"microbatch_size": 2, "weight_fn": count_tokens, "sync_modules": [hidden.model]}
    mb.backward(loss_fn, *batches[rank], **options)
    assert_grads(hidden.model, one_process(token_loss, batches)[1])


@check
def a_refusal_on_one_process_is_raised_on_all(rank):
    x, labels = rows_of(rank, 4)
    for module in (DDP(fresh()), fully_shard(fresh())):
        words = "another process refused" if rank == 0 else "different numbers of rows"
        kind = microbatch.DistributedError if rank == 0 else microbatch.BatchError
        with raises(kind, words):
            mb.backward(
                functools.partial(token_loss, module), x, labels[: 4 - rank], microbatch_size=2
            )


@check
def weights_that_cannot_be_are_refused_on_all(rank):
    x, labels = rows_of(rank, 4)
    ddp = DDP(fresh())
    for bad in (-1.0, float("nan"), torch.tensor(-1.0), torch.tensor(float("inf"))):
        kind = microbatch.MicrobatchError if rank else microbatch.DistributedError
        with raises(kind, "for microbatch 0" if rank else "another process refused"):
            mb.backward(
                functools.partial(token_loss, ddp), x, labels, microbatch_size=2,
                weight_fn=lambda x, labels: bad if rank else torch.tensor(1.0),
            )  # fmt: skip
    assert all(p.grad is None for p in ddp.parameters())


@check
def weights_that_are_no_numbers_are_refused_on_all(rank):
    x, labels = rows_of(rank, 4)
    ddp = DDP(fresh())
    for bad in (torch.ones(2), "three", None):
        kind = microbatch.MicrobatchError if rank else microbatch.DistributedError
        with raises(kind, "weight_fn returned a" if rank else "another process refused"):
            mb.backward(
                functools.partial(token_loss, ddp), x, labels, microbatch_size=2,
                weight_fn=lambda x, labels: bad if rank else torch.tensor(1.0),
            )  # fmt: skip
    assert all(p.grad is None for p in ddp.parameters())


@check
def auto_agrees_on_one_size(rank):
    batches = [rows_of(r, 32) for r in range(2)]
    _, grads = one_process(token_loss, batches)
    ddp, seen = DDP(fresh()), []

    def loss_fn(x, labels):
        seen.append(len(x))
        return token_loss(ddp, x, labels)

    budget = 40_000 * (1 + rank)
    options = {"microbatch_size": "auto", "memory_budget": budget, "weight_fn": count_tokens}
    mb.backward(loss_fn, *batches[rank], **options)
    sizes = [None, None]
    dist.all_gather_object(sizes, seen[-1])
    assert sizes[0] == sizes[1] < 32, sizes
    assert_grads(ddp, grads)
    kind = microbatch.BatchError if rank else microbatch.DistributedError
    x, labels = batches[rank]
    with raises(kind, "rows" if rank else "another process refused"):
        mb.backward(loss_fn, x, labels[: 32 - rank], **options)


class Positions(nn.Module):
    """Adds a table that is a buffer, which DDP broadcasts before a forward that synchronises."""

    def __init__(self, counts=False):
        super().__init__()
        torch.manual_seed(4)
        self.register_buffer("table", torch.randn(5))
        self.inner, self.counts = fresh(), counts

    def forward(self, x):
        if self.counts:
            self.table += 1
        return self.inner(x + self.table)


@check
def buffers_that_ddp_broadcasts_are_no_change(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    for size in (4, 2):
        ddp = DDP(Positions())
        loss_fn = functools.partial(token_loss, ddp)
        for _ in range(3):
            mb.backward(loss_fn, *batches[rank], microbatch_size=size, weight_fn=count_tokens)
    counting = DDP(Positions(counts=True))
    with raises(microbatch.RowMixingError, "table of a Positions changed"):
        mb.backward(functools.partial(token_loss, counting), *batches[rank], microbatch_size=2)
    torch.manual_seed(4)
    assert torch.equal(counting.module.table, torch.randn(5))


@check
def value_and_grad_fsdp2(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    wanted, grads = one_process(token_loss, batches)
    for sync in ("every", "last"):
        model = sharded()
        params = list(model.parameters())
        valued = mb.value_and_grad(
            functools.partial(token_loss, model), params, microbatch_size=1, weight_fn=count_tokens,
            sync=sync,
        )  # fmt: skip
        loss, got = valued(*batches[rank])
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
        assert all(p.grad is None for p in params)
        for p, g in zip(params, got):
            p.grad = g
        assert_grads(model, grads)


@check
def refused_wrappers(rank):
    x, labels = rows_of(rank, 4)
    hooked = DDP(fresh())
    hooked.register_comm_hook(None, lambda state, bucket: bucket)
    with raises(microbatch.DistributedError, "communication hook"):
        mb.backward(functools.partial(token_loss, hooked), x, labels, microbatch_size=2)
    divided = fully_shard(fresh())
    divided.set_gradient_divide_factor(1.0)
    with raises(microbatch.DistributedError, "gradient divide factor"):
        mb.backward(functools.partial(token_loss, divided), x, labels, microbatch_size=2)
    # DistributedDataParallel itself takes them on GPUs only.
    normed = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(5)))
    with raises(microbatch.RowMixingError, "SyncBatchNorm"):
        mb.backward(lambda x: normed(x).sum(), x[:, 0], microbatch_size=2, allow_row_mixing=True)
    with raises(microbatch.DistributedError, "MixedPrecisionPolicy(reduce_dtype=torch.float32)"):
        mb.backward(
            functools.partial(token_loss, DDP(fresh())), x, labels, microbatch_size=2,
            accumulator_dtype=torch.float32,
        )  # fmt: skip


@check
def value_and_grad_ddp(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    wanted, grads = one_process(token_loss, batches)
    ddp = DDP(fresh())
    params = list(ddp.parameters())
    valued = mb.value_and_grad(
        functools.partial(token_loss, ddp), params, microbatch_size=1, weight_fn=count_tokens
    )
    loss, got = valued(*batches[rank])
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert all(p.grad is None for p in params)
    for p, g in zip(params, got):
        p.grad = g
    assert_grads(ddp, grads)
    ddp.zero_grad()
    some = list(ddp.module.heads.parameters())
    _, got = mb.value_and_grad(
        functools.partial(token_loss, ddp), some, microbatch_size=1, weight_fn=count_tokens
    )(*batches[rank])
    assert all(p.grad is None for p in params)
    for p, g in zip(some, got):
        p.grad = g
    assert_grads(ddp.module.heads, grads[-len(some) :])
    views = DDP(fresh(), gradient_as_bucket_view=True)
    with raises(microbatch.DistributedError, "gradient_as_bucket_view"):
        mb.value_and_grad(
            functools.partial(token_loss, views), [*views.parameters()], microbatch_size=1
        )(*batches[rank])
    mb.backward(
        functools.partial(token_loss, views),
        *batches[rank],
        microbatch_size=1,
        weight_fn=count_tokens,
    )
    assert_grads(views, grads)


@check
def processes_without_a_wrapper_get_their_share(rank):
    batches = [rows_of(r, 3 + r) for r in range(2)]
    wanted, grads = one_process(token_loss, batches)
    model = fresh()
    loss = mb.backward(
        functools.partial(token_loss, model), *batches[rank], microbatch_size=2,
        weight_fn=count_tokens, process_group=dist.group.WORLD,
    )  # fmt: skip
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    for p in model.parameters():
        dist.all_reduce(p.grad)
    assert_grads(model, grads)
    # Without a group each process is on its own.
    alone = mb.backward(functools.partial(token_loss, model), *batches[rank], microbatch_size=2)
    assert alone.isfinite()


def sharded(**kwargs):
    model = fresh()
    fully_shard(model.trunk, **kwargs)
    return fully_shard(model, **kwargs)


@check
def fsdp2_both_ways(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    wanted, grads = one_process(token_loss, batches)
    scatters = {}
    for sync in ("auto", "every", "last"):
        model = sharded()
        loss_fn = functools.partial(token_loss, model)
        for _ in range(2):
            model.zero_grad()
            with Collectives() as seen:
                loss = mb.backward(
                    loss_fn, *batches[rank], microbatch_size=1, weight_fn=count_tokens, sync=sync
                )
            torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
            assert_grads(model, grads)
        scatters[sync] = seen.count("_reduce_scatter_base_")
        # It is as it was: a plain step after it is right.
        model.zero_grad()
        loss_fn(*batches[0]).backward()
        assert_grads(model, one_process(token_loss, batches[:1])[1])
    assert scatters == {"auto": 8, "every": 8, "last": 2}, scatters


@check
def a_failure_leaves_fsdp2_as_it_was(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    model = sharded()

    def loss_fn(x, labels):
        token_loss(model, x, labels)
        raise KeyError("mine")

    with raises(KeyError, "mine"):
        mb.backward(loss_fn, *batches[rank], microbatch_size=2, sync="last")
    token_loss(model, *batches[0]).backward()
    assert_grads(model, one_process(token_loss, batches[:1])[1])


@check
def S8_uneven_counts_fsdp2_are_refused_on_all(rank):
    batches = [rows_of(r, 2 + 2 * r) for r in range(2)]
    model = sharded()
    with raises(microbatch.DistributedError, "different numbers of microbatches"):
        mb.backward(functools.partial(token_loss, model), *batches[rank], microbatch_size=2)
    assert all(p.grad is None for p in model.parameters())


@check
def zero_weights_fsdp2(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    batches[0][1][:] = -100
    batches[1][1][2:] = -100
    loss_of = lambda m, x, y: token_loss(m, x[4:], y[4:])
    wanted, grads = one_process(loss_of, batches)
    for sync in ("every", "last"):
        model = sharded()
        loss_fn = functools.partial(token_loss, model)
        loss = mb.backward(
            loss_fn, *batches[rank], microbatch_size=2, weight_fn=count_tokens, sync=sync
        )
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
        assert_grads(model, grads)


@check
def hybrid_sharding_all_reduces_once(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    batches = [rows_of(r, 4) for r in range(2)]
    wanted, grads = one_process(token_loss, batches)
    model = sharded(mesh=mesh)
    loss_fn = functools.partial(token_loss, model)
    with Collectives() as seen:
        loss = mb.backward(loss_fn, *batches[rank], microbatch_size=1, weight_fn=count_tokens)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    assert_grads(model, grads)
    # Two groups of parameters once; the weights and the loss once per dimension of the mesh.
    assert seen.count("allreduce_") == 2 + 2 * 2, seen.sizes


@check
def graph_carrying_arguments_ddp(rank):
    batches = [rows_of(r, 4) for r in range(2)]
    scale = nn.Parameter(torch.tensor(0.3))

    def scaled(model, x, labels, factor):
        return F.cross_entropy(model(x).flatten(0, 1) * factor, labels.flatten(), ignore_index=-100)

    exact = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    one_process(lambda m, x, y: scaled(m, x, y, exact.exp()), batches)
    ddp = DDP(fresh())
    mb.backward(
        functools.partial(scaled, ddp), *batches[rank], scale.exp(), microbatch_size=1,
        weight_fn=lambda x, labels, factor: count_tokens(x, labels),
    )  # fmt: skip
    # The scale is in no wrapper: this process has world times its share.
    dist.all_reduce(scale.grad, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(scale.grad.double(), exact.grad, rtol=1e-5, atol=0)


def main():
    rank, port, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for fun in CHECKS:
        if names and fun.__name__ not in names:
            continue
        try:
            fun(rank)
            print(f"passed {fun.__name__}", flush=True)
        except BaseException:
            print(f"failed {fun.__name__}\n{traceback.format_exc()}", flush=True)
            os._exit(1)  # The other process waits for this one.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Tearing gloo down may abort when the other process is quicker.


if __name__ == "__main__":
    main()
