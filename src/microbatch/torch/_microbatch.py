"""The transformation of the PyTorch front."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from microbatch._accumulation import AccumulationType, as_accumulator
from microbatch._checks import (
    Leaf,
    as_argnames,
    as_argnums,
    batch_size_of,
    check_choice,
    check_declared,
    check_function,
    check_size,
    locate,
    name_of,
    per_argument,
    signature_of,
)
from microbatch._errors import MicrobatchError, MicrobatchSizeError
from microbatch._outputs import canonical
from microbatch._splitting import Order, Remainder, make_split
from microbatch._trees import leaves_with_paths, map_leaves, map_numbered_leaves
from microbatch.torch._accumulators import FoldOptions
from microbatch.torch._arguments import Arguments, arguments_of
from microbatch.torch._batch import NOT_SPLIT, Batch
from microbatch.torch._differentiate import (
    DIFFERENTIATE,
    Differentiate,
    Task,
    alone,
    evaluate,
    refuse_row_mixing,
)
from microbatch.torch._memory import resolve_auto
from microbatch.torch._randomness import Randomness
from microbatch.torch._schedule import schedule_of


def microbatch(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    microbatch_size: int | str | None,
    accumulator: Any = AccumulationType.SUM,
    *,
    argnames: str | Sequence[str] = (),
    in_dims: Any = 0,
    num_real_microbatches: int | torch.Tensor | None = None,
    num_microbatches: int | None = None,
    order: Order = "contiguous",
    remainder: Remainder = "error",
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: torch.dtype | None = None,
    rng: Any = "replay",
    differentiate: Differentiate = "auto",
    allow_row_mixing: bool = False,
    memory_budget: int | str | None = None,
) -> Callable[..., Any]:
    """Evaluates `fun` on a few rows of the batch at a time and gives what the whole batch would have given.

    The function returned by ``microbatch(fun, 0, m)`` is equivalent to::

        def microbatched(batch):
            total = 0
            for i in range(len(batch) // m):
                total += fun(batch[i * m : (i + 1) * m])
            return total

    in the memory of one microbatch and one accumulator, and it can be differentiated in that memory too: by
    ``backward()``, `torch.autograd.grad` and the reverse-mode transformations of `torch.func`. Gradients reach the arguments, what
    `fun` closes over, and the parameters of modules that it calls.

    Args:
      fun: the function of a whole batch, or a module. Its batch arguments are trees of tensors ``[B, ...]``; it is
        called with ``[m, ...]`` in their places, views. Numbers, strings and None in them are passed on.
      argnums: the positions of the batch arguments; negative numbers count from the end.
      microbatch_size: m, rows in a microbatch; "auto" for the largest that fits (see `plan`). None returns `fun`, unless
        `num_microbatches` is given.
      accumulator: how the outputs combine: one kind, or a tree of them that is a prefix of the output. See
        `AccumulationType`, `Accumulator` and `Carry`.
      argnames: batch arguments by name. Either way of naming goes with either way of passing.
      in_dims: the dimension with the rows: one integer, or one entry per batch argument (`argnums` first, then
        `argnames`), an integer or a tree of integers and None that is a prefix of the argument. Negative dimensions are
        resolved tensor by tensor.
      num_real_microbatches: k, stop after so many; clamped to [0, n]. A tensor without dimensions is read.
      num_microbatches: at most so many microbatches, instead of `microbatch_size`.
      order: "contiguous": microbatch i holds rows i·m … i·m + m − 1; "strided": rows i, i + n, …. The result's rows are
        in the batch's own order with both.
      remainder: "error" refuses a batch that m does not divide; "allow" makes the last microbatch a smaller one.
      weight_fn: maps the arguments of `fun` to the microbatch's weight in MEAN and RUNNING_MEAN, in any unit (rows,
        valid tokens). Default: rows. A microbatch of weight 0 is skipped. All weights are read before the first
        microbatch runs, at once.
      accumulator_dtype: holds sums and means in this dtype. Default: float32 for float16 and bfloat16, the output's own
        dtype for others. The result has the output's dtype.
      rng: "replay": when a microbatch is evaluated again for its derivative, it draws the random numbers that it drew
        before, on every device; so do generators that are found in closures, arguments and modules. One
        `torch.Generator`, or several, where `fun` draws from others. None where nothing is drawn.
      differentiate: "auto": where one real scalar is differentiated, with SUM or MEAN, its gradients are made together
        with its value ("in_forward"; backward then runs once, and not twice differentiably); otherwise, and under
        float16 or `torch.func`, backward evaluates each microbatch again ("recompute"). "store" keeps everything.
      allow_row_mixing: lets modules pass whose rows influence each other or whose buffers change (BatchNorm in training
        mode); the result is then not the whole batch's.
      memory_budget: for ``microbatch_size="auto"``: bytes, ``"12GiB"`` or ``"80%"``.

    Returns:
      A function of the arguments of `fun`.

    Raises:
      MicrobatchSizeError: the size is not a positive integer, or does not divide the batch.
      BatchError: no batch argument, one that the call lacks, one without rows, or unequal rows.
      AccumulatorError: an unknown accumulator, one that does not fit the output or cannot take its dtype.
      RowMixingError: a module mixes rows.
      GraphError: the function uses a tensor that carries a graph and that cannot be found from it; in backward, one
        that only a later microbatch uses.
      EmptyStream: MAX or MIN of zero rows.

    ==========================  =======================================================================
    input                       result
    ==========================  =======================================================================
    one microbatch              ``fun`` of the whole batch, bit for bit
    zero rows                   SUM and MEAN zeros, CONCAT an empty tensor; `fun` is followed for shapes alone
    k = 0, or total weight 0    zeros, and zero gradients
    k < n                       SUM of k; MEAN divided by all n, with `weight_fn` by the weights that ran;
                                RUNNING_MEAN of k; CONCAT zeros in the rows that did not run
    weight 0, output NaN        the microbatch is skipped: no NaN in value or gradient
    NaN, weight ≠ 0             NaN, as the whole batch would give
    integers                    SUM keeps their dtype; MEAN and RUNNING_MEAN refuse them
    a scalar with CONCAT        ``[num_microbatches]``
    equal values with MAX, MIN  the gradient goes to the first microbatch that has the value
    ==========================  =======================================================================

    Compile `fun` (``microbatch(torch.compile(fun), …)``): views of all full microbatches share one program. A caller that
    is compiled itself runs the loop in Python.

    >>> w = torch.tensor(3.0, requires_grad=True)
    >>> loss = microbatch(lambda x: (w * x).square().mean(), 0, 2, AccumulationType.MEAN)
    >>> value = loss(torch.tensor([1.0, 2.0, 3.0, 4.0]))     # 9 · (1 + 4 + 9 + 16) / 4
    >>> value.backward()                                     # 2 · 3 · (1 + 4 + 9 + 16) / 4
    >>> value.item(), w.grad.item()
    (67.5, 45.0)
    """
    if microbatch_size is None and num_microbatches is None:
        return fun
    where = f"microbatch({name_of(fun)})"
    check_function(where, "fun", fun)
    settings = Settings(
        where=where,
        signature=signature_of(fun.forward if isinstance(fun, nn.Module) else fun),
        argnums=as_argnums(where, argnums),
        argnames=as_argnames(where, argnames),
        in_dims=in_dims,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        limit=num_real_microbatches,
        accumulator=accumulator,
        order=order,
        remainder=remainder,
        weight_fn=weight_fn,
        accumulator_dtype=accumulator_dtype,
        rng=rng,
        differentiate=differentiate,
        allow_row_mixing=allow_row_mixing,
        memory_budget=memory_budget,
    )
    check_declared(where, settings.signature, settings.argnums, settings.argnames)
    settings = checked(settings)

    def microbatched(*args: Any, **kwargs: Any) -> Any:
        return run(fun, settings, args, kwargs)

    # Python's own names of `fun` are kept; a module's state is not copied into a function.
    updated = () if isinstance(fun, nn.Module) else functools.WRAPPER_UPDATES
    return functools.update_wrapper(microbatched, fun, updated=updated)


def reshape_batch_axis(tree: Any, microbatch_size: int, axis: int = 0) -> Any:
    """Splits the batch axis of every tensor into microbatches: ``[…, B, …]`` to ``[…, n, m, …]``.

    Strided order, as in the other fronts: microbatch i holds rows i, i + n, …. Equivalent to::

        torch.stack([tensor[i::n] for i in range(n)])       # for axis 0

    but a view wherever the tensor's memory allows one, which it does for contiguous tensors.

    Args:
      tree: tensors with B rows along `axis`.
      microbatch_size: m, rows in a microbatch; it divides B.
      axis: the batch axis; negative axes are resolved tensor by tensor.

    Returns:
      The tree with ``[…, n, m, …]`` in place of ``[…, B, …]``; microbatch i is at index i of the n axis.

    Raises:
      MicrobatchSizeError: `microbatch_size` is not a positive integer or does not divide B.
      BatchError: a leaf has no such axis, or the numbers of rows differ.

    >>> reshape_batch_axis(torch.arange(6), microbatch_size=3).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    where = "reshape_batch_axis"
    size = check_size(where, "microbatch_size", microbatch_size)
    leaves = [
        Leaf(path, tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None, axis)
        for path, leaf in leaves_with_paths(tree, "tree")
    ]
    batch_size, subject = batch_size_of(where, leaves, option="axis")
    split = make_split(batch_size, size, subject=f"{where}: {subject}")

    def split_leaf(leaf: torch.Tensor) -> torch.Tensor:
        at = axis % leaf.ndim
        shape = (*leaf.shape[:at], size, split.full, *leaf.shape[at + 1 :])
        return leaf.reshape(shape).transpose(at, at + 1)

    return map_leaves(split_leaf, tree)


class Settings(NamedTuple):
    """What `microbatch` was asked for; see there."""

    where: str
    signature: inspect.Signature | None
    argnums: tuple[int, ...]
    argnames: tuple[str, ...]
    in_dims: Any
    microbatch_size: Any
    num_microbatches: int | None
    limit: Any
    accumulator: Any
    order: Order
    remainder: Remainder
    weight_fn: Callable[..., Any] | None
    accumulator_dtype: torch.dtype | None
    rng: Any
    differentiate: Differentiate
    allow_row_mixing: bool = False
    memory_budget: int | str | None = None


def checked(settings: Settings) -> Settings:
    """The settings in this library's own types, or an error that names what is wrong."""
    where, size, count = settings.where, settings.microbatch_size, settings.num_microbatches
    if size is not None and not (isinstance(size, str) and size == "auto"):
        size = check_size(where, "microbatch_size", size)
    if count is not None:
        count = check_size(where, "num_microbatches", count)
        if size is not None:
            raise MicrobatchSizeError(
                f"{where}: microbatch_size={size!r} and num_microbatches={count} are both given.\n"
                "Give one of them, and None for microbatch_size with num_microbatches."
            )
    if settings.weight_fn is not None:
        check_function(where, "weight_fn", settings.weight_fn)
    _check_limit(where, settings.limit)
    check_choice(where, "order", settings.order, ("strided", "contiguous"))
    check_choice(where, "remainder", settings.remainder, ("error", "allow"))
    check_choice(where, "differentiate", settings.differentiate, DIFFERENTIATE)
    check_dtype(where, settings.accumulator_dtype)
    Randomness(where, settings.rng)
    return settings._replace(
        microbatch_size=size,
        num_microbatches=count,
        accumulator=canonical(where, settings.accumulator),
    )


def run(
    fun: Callable[..., Any],
    settings: Settings,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    subject: Callable[..., Any] | None = None,
) -> Any:
    """One call of a microbatched function; `subject` is what the user knows of `fun`, where that is less."""
    if torch.compiler.is_compiling():
        # The loop stays in Python; a compiled `fun` is compiled for a microbatch.
        return torch.compiler.disable(run)(fun, settings, args, kwargs, subject)
    where = settings.where
    slots = locate(where, settings.signature, settings.argnums, settings.argnames, args, kwargs)
    dims = per_argument(where, "in_dims", settings.in_dims, slots)
    arguments = arguments_of(where, slots, dims, args, kwargs)
    size = settings.microbatch_size
    if isinstance(size, str) or settings.memory_budget is not None:
        size = _resolved(settings, fun, arguments)
    split = make_split(
        arguments.batch_size,
        size,
        settings.num_microbatches,
        order=settings.order,
        remainder=settings.remainder,
        subject=arguments.subject,
    )

    def weight_of(index: int) -> Any:
        assert settings.weight_fn is not None
        its_args, its_kwargs = arguments.cut(split.rows(index))
        return settings.weight_fn(*its_args, **its_kwargs)

    weigh = None if settings.weight_fn is None else weight_of
    schedule = schedule_of(where, split, weigh, settings.limit)
    options = FoldOptions(
        where,
        split,
        settings.accumulator_dtype,
        weighted=settings.weight_fn is not None,
        complete=schedule.complete,
    )
    task = Task(
        where,
        fun,
        arguments,
        settings.accumulator,
        schedule,
        options,
        settings.differentiate,
        settings.rng,
        settings.allow_row_mixing,
        subject or fun,
    )
    if split.num_microbatches == 1 and schedule.complete:
        refuse_row_mixing(task)
        return alone(task, fun(*args, **kwargs))
    return evaluate(task)


def _resolved(settings: Settings, fun: Callable[..., Any], arguments: Arguments) -> Any:
    """The size that a plan finds for ``microbatch_size="auto"``."""
    axes = arguments.axes
    names = tuple(arguments.kwargs)
    count = len(arguments.args)

    def positional(*values: Any) -> Any:
        return fun(*values[:count], **dict(zip(names, values[count:], strict=True)))

    def dims_of(key: int | str, value: Any) -> Any:
        found = axes.get(key, {})
        return map_numbered_leaves(lambda number, _: found.get(number, NOT_SPLIT), value)

    keys = (*range(count), *names)
    values = (*arguments.args, *arguments.kwargs.values())
    dims = tuple(dims_of(key, value) for key, value in zip(keys, values, strict=True))
    return resolve_auto(
        settings.microbatch_size,
        settings.where,
        positional if names else fun,
        Batch(values, dims, arguments.batch_size),
        memory_budget=settings.memory_budget,
        concat=as_accumulator(settings.accumulator) is AccumulationType.CONCAT,
        remainder=settings.remainder,
        accumulator_dtype=settings.accumulator_dtype,
    )


def _check_limit(where: str, limit: Any) -> None:
    if limit is None:
        return
    is_count = (
        isinstance(limit, torch.Tensor) and limit.numel() == 1 and not limit.is_floating_point()
    )
    if is_count or (hasattr(limit, "__index__") and not isinstance(limit, bool | torch.Tensor)):
        return
    raise MicrobatchSizeError(
        f"{where}: num_real_microbatches={limit!r} is not an integer.\n"
        "Use an int, or a tensor of one integer; it is clamped to 0 … the number of microbatches."
    )


def check_dtype(where: str, dtype: Any) -> None:
    """Refuses what is not a floating dtype."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    raise MicrobatchError(
        f"{where}: accumulator_dtype={dtype!r} is not a floating dtype.\nUse torch.float32 or torch.float64."
    )
