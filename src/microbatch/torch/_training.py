"""A training step on a batch of any size: `backward`, `backward_window`, `windows` and `value_and_grad`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from microbatch._checks import check_function, check_size, name_of
from microbatch._errors import DistributedError, GraphError
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._discovery import discover
from microbatch.torch._distributed import Sync, Wrappers, wrappers_of
from microbatch.torch._gradients import kept_aside
from microbatch.torch._reduction import Reduction
from microbatch.torch._sources import check_microbatch_size, cutting, ready
from microbatch.torch._step import Options, step


def backward(
    loss_fn: Callable[..., Any],
    *args: Any,
    microbatch_size: int | str | None,
    in_dims: Any = 0,
    reduction: Reduction | Mapping[str, Reduction] = "mean",
    weight_fn: Callable[..., Any] | Mapping[str, Callable[..., Any] | None] | None = None,
    has_aux: bool = False,
    sync: Sync = "auto",
    sync_modules: Sequence[nn.Module] | nn.Module | None = None,
    process_group: Any = None,
    backward_fn: Callable[[torch.Tensor], Any] | None = None,
    accumulator_dtype: torch.dtype | None = None,
    rollback: bool = False,
    allow_row_mixing: bool = False,
    allow_hooks: bool = False,
    device: torch.device | str | None = None,
    memory_budget: int | str | None = None,
) -> Any:
    """As ``loss_fn(*args).backward()``, in the memory of one microbatch.

    For a loss that is a mean over rows it is equivalent to::

        def backward(loss_fn, *args, microbatch_size):
            batch_size, total = len(args[0]), 0.0
            for start in range(0, batch_size, microbatch_size):
                rows = [arg[start : start + microbatch_size] for arg in args]
                loss = loss_fn(*rows) * (len(rows[0]) / batch_size)
                loss.backward()
                total += loss.detach()
            return total

    Zero gradients before it and step the optimizer after it, once, as without it; the learning-rate schedule, gradient
    clipping and moving averages come after it as well. Nobody else divides: give it the loss as your model returns it.

    Args:
      loss_fn: called as ``loss_fn(*microbatch)``; returns a loss of one element, a mapping of losses whose total is
        propagated, or an output with a ``.loss``. Give keywords with `functools.partial`.
      *args: trees of tensors ``[B, ...]`` and anything else. Every tensor with a dimension is cut along `in_dims`; the
        rest, and modules, pass as they are. A tensor that was computed before the call is fine: its gradient goes into
        its graph once, at the end.
      microbatch_size: rows in a microbatch; the last one may have fewer. "auto" for the largest that fits (see `plan`);
        None for the whole batch at once.
      in_dims: an integer, or one entry per argument: an integer, None for "not a batch", or a tree of them.
      reduction: "mean", the loss is a mean over its weight; "sum", a plain sum; "sum_over_weight", a sum to be divided
        by the whole batch's weight. One for all, or by the keys of the losses. A loss that is a product of means over
        the batch, as some load-balancing losses are, is neither, and no sum over microbatches gives it exactly.
      weight_fn: ``weight_fn(*microbatch)`` is what a microbatch's loss is a mean over, such as its valid tokens; rows
        where None. One for all, or by the keys of the losses. All weights are read before the first forward, in the only
        host synchronisation of the call. A microbatch of weight 0 does not run.
      has_aux: `loss_fn` returns ``(loss, aux)``. The aux is detached: tensors without a dimension are stacked to
        ``[num_microbatches]``, others concatenated along their rows, other values listed.
      sync: when wrapped modules exchange gradients: "last" microbatch, "every", or "auto": "last" for
        DistributedDataParallel, "every" for fully_shard, whose gradients then stay sharded.
      sync_modules: wrapped modules that cannot be found from `loss_fn`.
      process_group: the processes that share the batch; those of the wrapped modules where None. Without a wrapped
        module each process gets its share of the gradient, to be summed by the caller; parameters beside a wrapped
        module get the number of processes times that, to be averaged.
      backward_fn: called in place of ``loss.backward()``, for example ``lambda loss: scaler.scale(loss).backward()``.
      accumulator_dtype: sums the gradients of parameters of a lower precision beside them in this dtype, and casts once.
      rollback: keeps a copy of gradients that exist before the call, so that they come back when it fails. Gradients
        that were None always do.
      allow_row_mixing: runs modules whose rows influence one another, or that change their buffers.
      allow_hooks: runs hooks on parameters, once per microbatch.
      device: moves microbatches there one at a time, where the batch waits on the CPU.
      memory_budget: for ``microbatch_size="auto"``: bytes, ``"12GiB"`` or ``"80%"``.

    Returns:
      The detached loss of the whole batch, over all processes; a mapping where `loss_fn` returns one; with `has_aux` a
      pair with the aux.

    Raises:
      BatchError: no tensor has rows, or they have different numbers of rows.
      RowMixingError: a BatchNorm in training mode, or a module whose buffers changed in the first microbatch.
      HookError: a parameter has a gradient hook, or an optimizer that steps in backward.
      GraphError: a tensor in a closure was computed before the call, or the loss has no gradient.
      DistributedError: processes or wrappers that cannot give one process's answer.
      OutOfMemory: a microbatch did not fit; gradients are as `rollback` says.

    ==============================  ===================================================
    batch                           result
    ==============================  ===================================================
    one microbatch                  as ``loss_fn(*args).backward()``, bit for bit
    total weight 0                  loss 0, gradients 0, never NaN
    NaN where the weight is not 0   NaN, as for the whole batch
    zero rows                       loss 0, gradients 0 (``"mean"``, ``"sum_over_weight"``)
    ==============================  ===================================================

    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> x = torch.tensor([1.0, 2.0, 6.0])
    >>> backward(lambda x: (w * x).mean(), x, microbatch_size=2)
    tensor(3.)
    >>> w.grad
    tensor([3.])
    """
    where = f"backward({name_of(loss_fn)})"
    check_function(where, "loss_fn", loss_fn)
    options = Options(
        reduction=reduction,
        weight_fn=weight_fn,
        has_aux=has_aux,
        sync=sync,
        sync_modules=sync_modules,
        process_group=process_group,
        backward_fn=backward_fn,
        accumulator_dtype=accumulator_dtype,
        rollback=rollback,
        allow_row_mixing=allow_row_mixing,
        allow_hooks=allow_hooks,
        device=device,
    )
    prepare = cutting(where, loss_fn, args, in_dims, microbatch_size, memory_budget, options)
    loss, aux = step(where, loss_fn, args, prepare, options)
    return (loss, aux) if has_aux else loss


def backward_window(
    loss_fn: Callable[..., Any],
    window: Sequence[Any],
    *,
    in_dims: Any = 0,
    reduction: Reduction | Mapping[str, Reduction] = "mean",
    weight_fn: Callable[..., Any] | Mapping[str, Callable[..., Any] | None] | None = None,
    has_aux: bool = False,
    sync: Sync = "auto",
    sync_modules: Sequence[nn.Module] | nn.Module | None = None,
    process_group: Any = None,
    backward_fn: Callable[[torch.Tensor], Any] | None = None,
    accumulator_dtype: torch.dtype | None = None,
    rollback: bool = False,
    allow_row_mixing: bool = False,
    allow_hooks: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """The backward of one logical batch that comes as ready microbatches, weighted by what is in this window.

    Equivalent to `backward` on the concatenated window, for microbatches of any lengths, such as sequences that are
    padded differently::

        def backward_window(loss_fn, window, weight_fn):
            weights = [weight_fn(*microbatch) for microbatch in window]
            for microbatch, weight in zip(window, weights):
                (loss_fn(*microbatch) * (weight / sum(weights))).backward()

    Args:
      loss_fn: called as ``loss_fn(*microbatch)`` for tuples and lists, as ``loss_fn(microbatch)`` for anything else.
      window: the microbatches, as `windows` makes them.
      in_dims: where the rows are that weigh a microbatch when there is no `weight_fn`; as in `backward`.
      reduction: as in `backward`, like all keywords that follow.
      weight_fn: as in `backward`.
      has_aux: as in `backward`.
      sync: as in `backward`.
      sync_modules: as in `backward`.
      process_group: as in `backward`.
      backward_fn: as in `backward`.
      accumulator_dtype: as in `backward`.
      rollback: as in `backward`.
      allow_row_mixing: as in `backward`.
      allow_hooks: as in `backward`.
      device: as in `backward`.

    Returns:
      As `backward`.

    Raises:
      EmptyStream: the window has no microbatch.

    The last window, of one batch, is divided by what is in it:

    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> loader = [torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([9.0])]
    >>> [backward_window(lambda x: (w * x).mean(), window).item() for window in windows(loader, 2)]
    [3.0, 9.0]
    """
    where = f"backward_window({name_of(loss_fn)})"
    check_function(where, "loss_fn", loss_fn)
    options = Options(
        reduction=reduction,
        weight_fn=weight_fn,
        has_aux=has_aux,
        sync=sync,
        sync_modules=sync_modules,
        process_group=process_group,
        backward_fn=backward_fn,
        accumulator_dtype=accumulator_dtype,
        rollback=rollback,
        allow_row_mixing=allow_row_mixing,
        allow_hooks=allow_hooks,
        device=device,
    )
    microbatches = [tuple(m) if isinstance(m, tuple | list) else (m,) for m in window]
    prepare = ready(where, loss_fn, microbatches, in_dims)
    loss, aux = step(where, loss_fn, microbatches, prepare, options)
    return (loss, aux) if has_aux else loss


class windows:  # Used as a function, with a length.
    """Lists of `k` consecutive batches of a loader; the last list is shorter where they do not divide.

    Equivalent to::

        def windows(loader, k):
            iterator = iter(loader)
            while window := list(itertools.islice(iterator, k)):
                yield window

    One window is one optimizer step; ``len(windows(loader, k))`` is the number of steps in an epoch where the loader
    has a length. It can be iterated once per epoch.

    Args:
      loader: any iterable of batches.
      k: batches in a window.

    Raises:
      MicrobatchSizeError: `k` is not a positive integer.

    >>> list(windows(range(5), 2)), len(windows(range(5), 2))
    ([[0, 1], [2, 3], [4]], 3)
    """

    def __init__(self, loader: Iterable[Any], k: int) -> None:
        self._loader = loader
        self._k = check_size("windows", "k", k)

    def __iter__(self) -> Iterator[list[Any]]:
        window: list[Any] = []
        for batch in self._loader:
            window.append(batch)
            if len(window) == self._k:
                yield window
                # A new list: the caller may keep the old one, and must not find it emptied.
                window = []
        if window:
            yield window

    def __len__(self) -> int:
        return -(-len(self._loader) // self._k)  # type: ignore[arg-type]


def value_and_grad(
    loss_fn: Callable[..., Any],
    params: Any,
    *,
    microbatch_size: int | str | None,
    in_dims: Any = 0,
    reduction: Reduction | Mapping[str, Reduction] = "mean",
    weight_fn: Callable[..., Any] | Mapping[str, Callable[..., Any] | None] | None = None,
    has_aux: bool = False,
    sync: Sync = "auto",
    sync_modules: Sequence[nn.Module] | nn.Module | None = None,
    process_group: Any = None,
    accumulator_dtype: torch.dtype | None = None,
    allow_row_mixing: bool = False,
    allow_hooks: bool = False,
    device: torch.device | str | None = None,
    memory_budget: int | str | None = None,
) -> Callable[..., Any]:
    """A function of the batch that gives the loss and its gradients in `params`, and leaves every ``.grad`` alone.

    The function returned by ``value_and_grad(loss_fn, params, microbatch_size=m)`` is equivalent to::

        def valued(*args):
            loss = loss_fn(*args)
            return loss.detach(), torch.autograd.grad(loss, params)

    Args:
      loss_fn: as in `backward`; it reaches `params` by closure, as a module does.
      params: a tree of leaves that require a gradient, for example ``dict(model.named_parameters())``.
      microbatch_size: as in `backward`, like all keywords that follow.
      in_dims: as in `backward`.
      reduction: as in `backward`.
      weight_fn: as in `backward`.
      has_aux: as in `backward`.
      sync: as in `backward`.
      sync_modules: as in `backward`.
      process_group: as in `backward`.
      accumulator_dtype: as in `backward`.
      allow_row_mixing: as in `backward`.
      allow_hooks: as in `backward`.
      device: as in `backward`.
      memory_budget: as in `backward`.

    Returns:
      A function of ``*args`` that returns ``(loss, grads)``, with `has_aux` ``((loss, aux), grads)``; `grads` is a tree
      like `params`, with zeros where the loss does not depend on one.

    Raises:
      GraphError: an entry of `params` is not a leaf that requires a gradient.

    >>> w = torch.tensor([1.0], requires_grad=True)
    >>> valued = value_and_grad(lambda x: (w * x).mean(), {"w": w}, microbatch_size=2)
    >>> valued(torch.tensor([1.0, 2.0, 6.0])), w.grad
    ((tensor(3.), {'w': tensor([3.])}), None)
    """
    where = f"value_and_grad({name_of(loss_fn)})"
    check_function(where, "loss_fn", loss_fn)
    tree = list(params) if isinstance(params, Iterator) else params
    leaves = _parameters(where, tree)
    check_microbatch_size(where, microbatch_size)
    options = Options(
        reduction=reduction,
        weight_fn=weight_fn,
        has_aux=has_aux,
        sync=sync,
        sync_modules=sync_modules,
        process_group=process_group,
        accumulator_dtype=accumulator_dtype,
        allow_row_mixing=allow_row_mixing,
        allow_hooks=allow_hooks,
        device=device,
    )

    def valued(*args: Any) -> Any:
        found = discover(loss_fn, args)
        wrappers = wrappers_of(
            where, list(found.modules.values()), options.sync_modules, options.process_group
        )
        _check_buckets(where, wrappers)
        # A wrapper exchanges the gradients of all its parameters, and needs a backward into all of them.
        others = [p for module in (*wrappers.ddp, *wrappers.fsdp) for p in module.parameters()]
        with kept_aside([*leaves, *others]):
            prepare = cutting(
                where, loss_fn, args, in_dims, microbatch_size, memory_budget, options
            )
            loss, aux = step(where, loss_fn, args, prepare, options, None if wrappers else leaves)
            grads = map_leaves(
                lambda leaf: (
                    torch.zeros_like(leaf, requires_grad=False) if leaf.grad is None else leaf.grad
                ),
                tree,
            )
        return ((loss, aux), grads) if has_aux else (loss, grads)

    return valued


def _parameters(where: str, tree: Any) -> list[torch.Tensor]:
    leaves = leaves_with_paths(tree, "params")
    if not leaves:
        raise GraphError(
            f"{where}: params is empty.\n"
            "Give leaves that require a gradient, for example dict(model.named_parameters())."
        )
    for path, leaf in leaves:
        if not (isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad):
            what = f"a {type(leaf).__name__}"
            if isinstance(leaf, torch.Tensor):
                what = "not a leaf" if leaf.requires_grad else "a tensor that requires no gradient"
            raise GraphError(
                f"{where}: {path} is {what}.\n"
                "Give leaves that require a gradient, for example dict(model.named_parameters())."
            )
    return [leaf for _, leaf in leaves]


def _check_buckets(where: str, wrappers: Wrappers) -> None:
    """Gradients that live in DDP's buckets cannot be set aside."""
    if any(module.gradient_as_bucket_view for module in wrappers.ddp):
        raise DistributedError(
            f"{where}: the module has gradient_as_bucket_view=True, so its gradients cannot leave .grad alone.\n"
            "Use backward, or DistributedDataParallel without gradient_as_bucket_view."
        )
