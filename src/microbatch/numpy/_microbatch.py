"""`microbatch` on NumPy arrays: a Python loop over views of the batch."""

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from microbatch._accumulation import AccumulationType, Carry, Step
from microbatch._checks import (
    Leaf,
    Slot,
    as_argnames,
    as_argnums,
    batch_size_of,
    check_choice,
    check_declared,
    check_function,
    check_size,
    check_weight,
    locate,
    name_of,
    per_argument,
    signature_of,
)
from microbatch._errors import AccumulatorError, BatchError, MicrobatchError, MicrobatchSizeError
from microbatch._outputs import Part, canonical, refuse_extremes
from microbatch._splitting import Order, Remainder, Split, make_split
from microbatch._trees import leaves_with_paths, map_prefix, map_subtrees
from microbatch.numpy._folding import Folding
from microbatch.numpy._folds import Fold, make_folds
from microbatch.numpy._rows import batch_concat, refuse_overlap, shape_of, take


def microbatch(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    microbatch_size: int | None,
    accumulator: Any = AccumulationType.SUM,
    *,
    argnames: str | Sequence[str] = (),
    in_axes: Any = 0,
    num_real_microbatches: int | None = None,
    num_microbatches: int | None = None,
    order: Order = "contiguous",
    remainder: Remainder = "error",
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: Any = None,
    out: Any = None,
) -> Callable[..., Any]:
    """Evaluates `fun` on a few rows of the batch at a time and combines the outputs.

    The function returned by ``microbatch(fun, 0, m)`` is equivalent to::

        def microbatched(batch):
            total = 0
            for i in range(len(batch) // m):
                total += fun(batch[i * m : (i + 1) * m])
            return total

    The batch is never copied and only one microbatch of it is touched at a time, so it may be a memory map
    larger than memory, or anything else that has a `shape` and can be sliced.

    Args:
      fun: any function of arrays and trees of them (dicts, lists, tuples, named tuples). A batch argument's leaves
        are ``[B, ...]``; `fun` sees ``[m, ...]``.
      argnums: the positions of the batch arguments; negative numbers count from the end.
      microbatch_size: m, rows in a microbatch. None returns `fun`, unless `num_microbatches` is given.
      accumulator: how the outputs combine: one kind, or a tree of them that is a prefix of the output.
        See `AccumulationType`, `Accumulator` and `Carry`.
      argnames: batch arguments by name. Either way of naming goes with either way of passing.
      in_axes: the axis of the rows: one integer, or one per batch argument (`argnums` first, then `argnames`), each
        an integer or a tree of them that is a prefix of the argument. Negative axes are resolved leaf by leaf.
      num_real_microbatches: k, stop after so many; clamped to [0, n].
      num_microbatches: at most so many microbatches, instead of `microbatch_size`.
      order: "contiguous": microbatch i holds rows i·m … i·m + m − 1, which is what a disk likes; "strided": rows i,
        i + n, …. The result's rows are in the batch's own order with both.
      remainder: "error" refuses a batch that m does not divide; "allow" makes the last microbatch a smaller one.
      weight_fn: maps the arguments of `fun` to the microbatch's weight in MEAN and RUNNING_MEAN, in any unit (rows,
        valid tokens). Default: rows. A microbatch of weight 0 is skipped.
      accumulator_dtype: holds sums and means in this dtype. Default: float32 for float16 and bfloat16, the output's
        own dtype for others. The result has the output's dtype.
      out: an array to write a CONCAT output into, a `np.memmap` for example; or a tree that is a prefix of the output,
        None where there is nothing to write into. The result holds this array.

    Returns:
      A function of the arguments of `fun`.

    Raises:
      MicrobatchSizeError: the size is not a positive integer, or does not divide the batch.
      BatchError: no batch argument, one that the call lacks, one without rows, or unequal rows.
      AccumulatorError: an unknown accumulator, one that does not fit the output or cannot take its dtype, or an
        `out` of another shape.
      EmptyStream: MAX or MIN of zero rows.

    ==========================  =======================================================================
    input                       result
    ==========================  =======================================================================
    one microbatch              ``fun`` of the whole batch, bit for bit
    zero rows                   SUM and MEAN zeros, CONCAT an empty array; `fun` runs once, on zero rows
    k = 0, or total weight 0    zeros; `fun` runs once for the shapes and its output is thrown away
    k < n                       SUM of k; MEAN divided by all n, with `weight_fn` by the weights that ran;
                                RUNNING_MEAN of k; CONCAT zeros in the rows that did not run
    weight 0, output NaN        the microbatch is skipped: no NaN
    NaN, weight ≠ 0             NaN, as the whole batch would give
    integers                    SUM keeps their dtype; MEAN and RUNNING_MEAN refuse them
    ==========================  =======================================================================

    >>> x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> totals = lambda x: {"sum": x.sum(), "square": x**2}
    >>> kinds = {"sum": AccumulationType.SUM, "square": AccumulationType.CONCAT}
    >>> result = microbatch(totals, 0, 2, kinds, remainder="allow")(x)
    >>> float(result["sum"]), result["square"]
    (15.0, array([ 1.,  4.,  9., 16., 25.]))
    >>> float(microbatch(np.mean, 0, 2, AccumulationType.MEAN, remainder="allow")(x))
    3.0
    """
    if microbatch_size is None and num_microbatches is None:
        return fun
    where = f"microbatch({name_of(fun)})"
    check_function(where, "fun", fun)
    if weight_fn is not None:
        check_function(where, "weight_fn", weight_fn)
    settings = _Settings(
        where=where,
        signature=signature_of(fun),
        argnums=as_argnums(where, argnums),
        argnames=as_argnames(where, argnames),
        in_axes=in_axes,
        size=_checked_size(where, "microbatch_size", microbatch_size),
        count=_checked_size(where, "num_microbatches", num_microbatches),
        limit=_checked_limit(where, num_real_microbatches),
        order=check_choice(where, "order", order, ("strided", "contiguous")),
        remainder=check_choice(where, "remainder", remainder, ("error", "allow")),
        accumulator=canonical(where, accumulator),
        accumulator_dtype=checked_dtype(where, accumulator_dtype),
        out=out,
    )
    if microbatch_size is not None and num_microbatches is not None:
        raise MicrobatchSizeError(
            f"{where}: microbatch_size and num_microbatches are both given.\nGive one of them."
        )
    check_declared(where, settings.signature, settings.argnums, settings.argnames)

    @functools.wraps(fun)
    def microbatched(*args: Any, **kwargs: Any) -> Any:
        return _run(fun, settings, weight_fn, args, kwargs)

    return microbatched


class _Settings(NamedTuple):
    """The arguments of `microbatch`, checked."""

    where: str
    signature: Any
    argnums: tuple[int, ...]
    argnames: tuple[str, ...]
    in_axes: Any
    size: int | None
    count: int | None
    limit: int | None
    order: Order
    remainder: Remainder
    accumulator: Any
    accumulator_dtype: np.dtype | None
    out: Any


def _run(
    fun: Callable[..., Any],
    settings: _Settings,
    weight_fn: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    where = settings.where
    slots = locate(where, settings.signature, settings.argnums, settings.argnames, args, kwargs)
    axes = per_argument(where, "in_axes", settings.in_axes, slots)
    batch = {**dict(enumerate(args)), **kwargs}
    batch_size, subject = batch_size_of(where, _batch_leaves(where, slots, axes, batch))
    split = make_split(
        batch_size,
        settings.size,
        settings.count,
        order=settings.order,
        remainder=settings.remainder,
        subject=f"{where}: {subject}",
    )
    if settings.out is not None:
        # Rows along another axis than the output's are not where the output goes.
        in_place = {slot.key for slot in slots} if settings.in_axes == 0 else set()
        others = [value for key, value in batch.items() if key not in in_place]
        refuse_overlap(where, settings.out, [batch[key] for key in in_place], others)
    carried = _carried_slots(settings, slots, args, kwargs)
    state = {key: batch[key] for key in carried.values()}

    def arguments(rows: slice) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of `fun` for the rows `rows`."""
        given = {**batch, **state}
        for slot, axis in zip(slots, axes, strict=True):
            given[slot.key] = map_prefix(lambda a, x: take(x, a, rows), axis, given[slot.key])
        return [given[i] for i in range(len(args))], {name: given[name] for name in kwargs}

    def make(parts: list[Part], targets: dict[str, Any], rows: int) -> list[Fold]:
        if batch_size == 0:
            refuse_extremes(where, parts)
        return make_folds(
            where,
            parts,
            lambda part: batch_concat(where, split, part, rows, targets.get(part.path)),
            initial=lambda carry: state[carried[carry]],
            accumulator_dtype=settings.accumulator_dtype,
            ragged=split.tail > 0 and split.full > 0,
        )

    def run_quietly(rows: slice) -> Any:
        """The output on `rows` where only its types matter."""
        given, named = arguments(rows)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return fun(*given, **named)

    folding = Folding(where, settings.accumulator, settings.out, make)
    if batch_size == 0:
        folding.start(run_quietly(slice(0, 0)), 0)
        return folding.result(0)
    limit = split.num_microbatches
    if settings.limit is not None:
        limit = min(max(settings.limit, 0), limit)
    total: Any = 0
    for index in range(limit):
        rows = split.size(index)
        given, named = arguments(split.rows(index))
        weight, own_weight = _rows_weight(split, index), rows
        if weight_fn is not None:
            weight = own_weight = checked_weight(where, weight_fn(*given, **named), index)
            if weight == 0:
                folding.skip(Step(index, rows))
                continue
        output = fun(*given, **named)
        step = Step(index, rows, weight, total, own_weight, first=not folding.started)
        if not folding.started:
            folding.start(output, rows)
        if split.num_microbatches == 1:
            return folding.alone(output, step)
        carries = folding.add(output, step)
        state.update((carried[carry], value) for carry, value in carries.items())
        total += 1 if weight is None else weight
        # Released before the next evaluation makes another.
        del given, named, output, carries
    if not folding.started:
        folding.start(run_quietly(split.rows(0)), split.size(0))
    for index in range(limit, split.num_microbatches if folding.skips_matter else limit):
        folding.skip(Step(index, split.size(index)))
    if weight_fn is None:
        total = split.batch_size / split.microbatch_size if split.tail else split.full
    return folding.result(total)


def _batch_leaves(
    where: str, slots: Sequence[Slot], axes: Sequence[Any], batch: dict[Any, Any]
) -> list[Leaf]:
    leaves: list[Leaf] = []

    def collect(axis: Any, path: str, subtree: Any) -> None:
        for leaf_path, leaf in leaves_with_paths(subtree, path):
            leaves.append(Leaf(leaf_path, shape_of(leaf), axis))

    for slot, axis in zip(slots, axes, strict=True):
        try:
            map_subtrees(collect, axis, batch[slot.key], slot.name)
        except MicrobatchError as error:
            raise BatchError(
                f"{where}: in_axes does not fit {slot.name}: {error}.\n"
                "Give one integer for it, or a tree of them that is a prefix of it."
            ) from None
    return leaves


def _carried_slots(
    settings: _Settings, slots: Sequence[Slot], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Carry, int | str]:
    """Which argument each `Carry` of the accumulator feeds."""
    carried: dict[Carry, int | str] = {}
    for entry in accumulators_in(settings.accumulator):
        if isinstance(entry, Carry):
            (slot,) = locate(settings.where, settings.signature, (entry.argnum,), (), args, kwargs)
            if slot.key in {s.key for s in slots}:
                raise BatchError(
                    f"{settings.where}: {slot.name} is a batch argument and cannot be carried.\n"
                    "Take it out of argnums and argnames, or out of Carry."
                )
            carried[entry] = slot.key
    return carried


def accumulators_in(accumulator: Any) -> list[Any]:
    """The entries of an accumulators' tree."""
    return [entry for _, entry in leaves_with_paths(accumulator)]


def _rows_weight(split: Split, index: int) -> float | None:
    """The weight of a microbatch relative to the first one's; None for 1."""
    size, first = split.size(index), split.size(0)
    return None if size == first else size / first


def checked_weight(where: str, weight: Any, index: int) -> int | float:
    """A weight as a number; anything that is not one, negative or not finite is refused."""
    array = np.asarray(weight)
    if array.size != 1 or array.dtype.kind not in "iufb":
        raise MicrobatchError(
            f"{where}: weight_fn returned shape {array.shape} of dtype {array.dtype}.\n"
            "Return one number per microbatch, for example mask.sum()."
        )
    return check_weight(where, array.item(), index)


def checked_dtype(where: str, dtype: Any) -> np.dtype | None:
    """`accumulator_dtype` as a dtype; only floating and complex ones can hold means."""
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not (found.kind in "fc" or found.name.startswith(("float", "bfloat"))):
        raise AccumulatorError(
            f"{where}: accumulator_dtype={dtype!r} is not a floating-point dtype.\n"
            "Use for example accumulator_dtype=np.float32."
        )
    return found


def _checked_size(where: str, name: str, value: Any) -> int | None:
    return None if value is None else check_size(where, name, value)


def _checked_limit(where: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise MicrobatchSizeError(
            f"{where}: num_real_microbatches={value!r} is not an integer.\nUse an int."
        )
    return operator.index(value)
