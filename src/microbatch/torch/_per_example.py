"""A `vmap` on a batch that does not fit: examples are mapped a microbatch at a time, and their outputs combined."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from microbatch._accumulation import EXTREMES, MEANS, AccumulationType, Accumulator, Carry
from microbatch._checks import (
    check_choice,
    check_function,
    check_place,
    check_places,
    name_of,
    signature_of,
)
from microbatch._errors import AccumulatorError, BatchError, MicrobatchError
from microbatch._outputs import assemble, canonical, parts_of
from microbatch._splitting import Order, Remainder
from microbatch._trees import leaves_with_paths, map_leaves, map_prefix
from microbatch.torch._differentiate import Differentiate
from microbatch.torch._microbatch import Settings, checked, run
from microbatch.torch._tensors import as_tensor, carry_dtype, limits

Engine = Literal["vmap", "loop"]
CONCAT, SUM, LAST = AccumulationType.CONCAT, AccumulationType.SUM, AccumulationType.LAST


def micro_vmap(
    fun: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    *,
    microbatch_size: int | None = None,
    accumulator: Any = CONCAT,
    num_real_microbatches: int | torch.Tensor | None = None,
    num_microbatches: int | None = None,
    order: Order = "contiguous",
    remainder: Remainder = "error",
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: torch.dtype | None = None,
    rng: Any = "replay",
    randomness: str = "different",
    differentiate: Differentiate = "auto",
    engine: Engine = "vmap",
) -> Callable[..., Any]:
    """A `torch.vmap` that fits: examples are mapped a microbatch at a time, and their outputs combined.

    Equivalent to ``combine([fun(example) for example in batch])``, where `combine` stacks the outputs ``[B, ...]``
    for CONCAT and reduces over the examples for every other accumulator. Never more than one microbatch of per-example
    outputs exists (``torch.vmap(chunk_size=)`` builds all of them).

    Args:
      fun: the function of one example.
      in_dims: as `torch.vmap`'s: an integer, or a sequence with an entry (an integer, None or a tree of them) per
        positional argument. Keyword arguments are mapped over dimension 0.
      out_dims: where CONCAT puts the examples; 0 for everything else.
      microbatch_size: examples in a microbatch; None maps all at once.
      accumulator: how the examples' outputs combine, a tree that is a prefix of the output. SUM of integers and
        booleans is `torch.sum`'s, a count in int64. An `Accumulator` needs its `aggregate`.
      num_real_microbatches: see `microbatch`.
      num_microbatches: see `microbatch`.
      order: see `microbatch`.
      remainder: see `microbatch`.
      weight_fn: maps the arguments of `fun` to one example's weight in MEAN. An example of weight 0 contributes
        exactly nothing, whatever it holds; CONCAT has zeros in its row, and an `aggregate` is called without it.
      accumulator_dtype: see `microbatch`.
      rng: see `microbatch`.
      randomness: as `torch.vmap`'s: "different" draws for each example (dropout), "same" once for a microbatch, "error"
        refuses to draw.
      differentiate: see `microbatch`.
      engine: "vmap", or "loop", which runs one example after another: slow, and for every function.

    Returns:
      A function of the arguments of `fun`, each with an additional dimension of examples.

    Raises:
      MicrobatchError: `fun` cannot be mapped; the message names the submodule that stopped it.
      AccumulatorError: `out_dims` without CONCAT, a `Carry`, or an `Accumulator` without `aggregate`.

    >>> micro_vmap(lambda x: x**2, microbatch_size=2)(torch.arange(4)).tolist()
    [0, 1, 4, 9]
    """
    where = f"micro_vmap({name_of(fun)})"
    check_function(where, "fun", fun)
    spec = example_map(
        where,
        in_dims=in_dims,
        out_dims=out_dims,
        weight_fn=weight_fn,
        accumulator=canonical(where, accumulator),
        randomness=randomness,
        engine=engine,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        limit=num_real_microbatches,
        order=order,
        remainder=remainder,
        accumulator_dtype=accumulator_dtype,
        rng=rng,
        differentiate=differentiate,
    )

    @functools.wraps(fun, updated=())
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return run_example_map(spec, fun, fun, args, kwargs)

    return mapped


class ExampleMap(NamedTuple):
    """What `micro_vmap` was asked for; `options` are those of `microbatch`."""

    where: str
    in_dims: Any
    out_dims: Any
    weight_fn: Callable[..., Any] | None
    randomness: str
    engine: Engine
    accumulator: Any
    options: dict[str, Any]


def example_map(
    where: str,
    *,
    accumulator: Any,
    randomness: str,
    engine: Engine,
    in_dims: Any = 0,
    out_dims: Any = 0,
    weight_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> ExampleMap:
    """The arguments of `micro_vmap`, checked; `accumulator` is canonical."""
    check_choice(where, "randomness", randomness, ("different", "same", "error"))
    check_choice(where, "engine", engine, ("vmap", "loop"))
    if weight_fn is not None:
        check_function(where, "weight_fn", weight_fn)
    spec = ExampleMap(where, in_dims, out_dims, weight_fn, randomness, engine, accumulator, options)
    _check_accumulators(spec)
    return spec


def _check_accumulators(spec: ExampleMap) -> None:
    entries = [entry for _, entry in leaves_with_paths(spec.accumulator)]
    check_places(spec.where, "out_dims", [dim for _, dim in leaves_with_paths(spec.out_dims)])
    moved = any(dim != 0 for _, dim in leaves_with_paths(spec.out_dims))
    if moved and any(entry is not CONCAT for entry in entries):
        raise AccumulatorError(
            f"{spec.where}: out_dims={spec.out_dims!r} needs the examples side by side, and the accumulator is not "
            "CONCAT.\nUse out_dims=0, or accumulator=CONCAT."
        )
    for entry in entries:
        if isinstance(entry, Carry):
            raise AccumulatorError(
                f"{spec.where}: Carry hands one microbatch's state to the next, and examples are mapped independently.\n"
                "Use microbatch for it."
            )
        if isinstance(entry, Accumulator) and entry.aggregate is None:
            raise AccumulatorError(
                f"{spec.where}: the custom accumulator has no aggregate, which combines the examples of a microbatch.\n"
                "Give it one: a function of [m, ...]."
            )


def run_example_map(
    spec: ExampleMap,
    fun: Callable[..., Any],
    subject: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One call: examples to microbatches' outputs, and those to the batch's by `microbatch`.

    Args:
      spec: how.
      fun: the function of one example.
      subject: what the user knows of `fun`.
      args: its arguments, with all examples.
      kwargs: its keyword arguments, with all examples.
    """
    dims = _dims_per_argument(spec, args)
    weight_fn = spec.weight_fn
    map_examples = _in_vmap if spec.engine == "vmap" else _in_loop

    def weights_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        if weight_fn is None:
            return None
        with torch.no_grad():
            weights = map_examples(spec, weight_fn, dims, args, kwargs)
        weights = as_tensor(weights)
        if weights.ndim != 1:
            raise MicrobatchError(
                f"{spec.where}: weight_fn returned shape {tuple(weights.shape[1:])} for one example.\n"
                "Return one number for each example, for example mask.sum()."
            )
        return weights if weights.device.type == "mps" else weights.double()

    def microbatch_weight(*args: Any, **kwargs: Any) -> Any:
        weights = weights_of(args, kwargs)
        assert weights is not None
        # A weight that cannot be is handed on, to be refused where weights are read; a sum might hide it.
        return torch.where((weights < 0).any(), weights.amin(), weights.sum())

    dtypes: list[torch.dtype | None] = []

    def reduced(*args: Any, **kwargs: Any) -> Any:
        output = map_examples(spec, fun, dims, args, kwargs)
        weights = weights_of(args, kwargs)
        parts = parts_of(spec.where, spec.accumulator, output)
        dtypes[:] = [getattr(part.value, "dtype", None) for part in parts]
        values = [
            _reduce(part.accumulator, part.value, weights, spec.options["accumulator_dtype"])
            for part in parts
        ]
        return assemble(spec.accumulator, output, values)

    def narrowed(result: Any) -> Any:
        """The result in the dtypes of the examples' outputs; until here it was held as sums are."""
        parts = parts_of(spec.where, spec.accumulator, result)
        values = [
            part.value.to(dtype)
            if part.accumulator in (SUM, *MEANS) and _is_inexact(part.value.dtype)
            else part.value
            for part, dtype in zip(parts, dtypes, strict=True)
        ]
        return assemble(spec.accumulator, result, values)

    mapped = [i for i, dim in enumerate(dims) if any(d is not None for d in _entries(dim))]
    size = spec.options["microbatch_size"]
    whole = size is None and spec.options["num_microbatches"] is None
    single: dict[str, Any] = {"num_microbatches": 1} if whole else {}
    settings = checked(
        Settings(
            where=spec.where,
            signature=signature_of(subject),
            argnums=tuple(mapped),
            argnames=tuple(kwargs),
            in_dims=(*(dims[i] for i in mapped), *(0 for _ in kwargs)),
            accumulator=spec.accumulator,
            weight_fn=None if weight_fn is None else microbatch_weight,
            # Each example is a batch of its own, whatever its modules do with the rows of one.
            allow_row_mixing=True,
            **(spec.options | single),
        )
    )
    result = narrowed(run(reduced, settings, args, kwargs, subject))

    def moved(dim: int, leaf: torch.Tensor) -> torch.Tensor:
        check_place(spec.where, "out_dims", dim, leaf.ndim)
        return leaf.movedim(0, dim)

    return map_prefix(lambda dim, leaf: moved(dim, leaf) if dim else leaf, spec.out_dims, result)


def _reduce(
    kind: Any, value: Any, weights: torch.Tensor | None, accumulator_dtype: torch.dtype | None
) -> Any:
    """The outputs of a microbatch's examples ``[m, ...]`` as one output; weight 0 is out by selection.

    Sums and means are in the dtype in which microbatches are accumulated, so that nothing is rounded in between.
    """
    if isinstance(kind, Accumulator):
        if weights is not None:
            value = map_leaves(lambda leaf: leaf[weights != 0], value)
        assert kind.aggregate is not None
        return kind.aggregate(value)
    if not _can_reduce(kind, value.dtype):
        return value[0]  # `microbatch` refuses it, with the leaf's path.
    if weights is not None:
        real = (weights != 0).reshape(-1, *(1,) * (value.ndim - 1))
        if kind is LAST:
            # By index, and with the last row where none counts: reading a value would make the host wait.
            places = torch.arange(len(weights), device=weights.device)
            last = torch.where(weights != 0, places, -1).amax() % len(weights)
            return value.index_select(0, last.to(value.device).reshape(1)).squeeze(0)
        value = torch.where(real, value, _neutral(kind, value))
    if kind is CONCAT:
        return value
    if kind is LAST:
        return value[-1]
    if kind is AccumulationType.MAX:
        return value.amax(0)
    if kind is AccumulationType.MIN:
        return value.amin(0)
    if not _is_inexact(value.dtype):
        # Booleans are counted, and small integers do not overflow, as `torch.sum` has it.
        return value.sum(0)
    wide = carry_dtype(value.dtype, accumulator_dtype)
    if kind is SUM:
        return value.sum(0, dtype=wide)
    if weights is None:
        return value.mean(0, dtype=wide)
    total = weights.sum()
    share = (weights / torch.where(total == 0, 1, total)).to(wide)
    return torch.tensordot(share, value.to(wide), dims=([0], [0]))


def _can_reduce(kind: AccumulationType, dtype: torch.dtype) -> bool:
    if kind in MEANS:
        return _is_inexact(dtype)
    return kind not in EXTREMES or not dtype.is_complex


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _neutral(kind: AccumulationType, like: torch.Tensor) -> torch.Tensor:
    """What changes no reduction of `kind`."""
    lowest, highest = limits(like.dtype) if kind in EXTREMES else (0, 0)
    return like.new_full((), lowest if kind is AccumulationType.MAX else highest)


def _in_vmap(
    spec: ExampleMap,
    fun: Callable[..., Any],
    dims: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    templates: list[Any] = []

    # `torch.vmap` does not map keyword arguments by itself.
    def flat(named: dict[str, Any], *args: Any) -> tuple[torch.Tensor, ...]:
        output = fun(*args, **named)
        templates[:] = [map_leaves(lambda _: 0, output)]
        return tuple(as_tensor(leaf) for _, leaf in leaves_with_paths(output))

    try:
        in_dims = (0 if kwargs else None, *dims)
        mapped = torch.vmap(flat, in_dims=in_dims, randomness=spec.randomness)(kwargs, *args)
        remaining = iter(mapped)
        return map_leaves(lambda _: next(remaining), templates[0])
    except RuntimeError as error:
        if isinstance(error, MicrobatchError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise MicrobatchError(
            f"{spec.where}: {_culprit(error)} cannot be mapped over examples: {reason}\n"
            'Use engine="loop", which runs one example after another.'
        ) from error


def _in_loop(
    spec: ExampleMap,
    fun: Callable[..., Any],
    dims: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    leaves = [
        (leaf, dim)
        for arg, entry in zip((*args, *kwargs.values()), (*dims, *(0 for _ in kwargs)))
        for leaf, dim in zip([x for _, x in leaves_with_paths(arg)], _dims_of_leaves(entry, arg))
        if dim is not None and isinstance(leaf, torch.Tensor)
    ]
    tensor, dim = leaves[0]

    def example(index: int, entry: Any, arg: Any) -> Any:
        chosen = iter(_dims_of_leaves(entry, arg))

        def pick(leaf: Any) -> Any:
            dim = next(chosen)
            mapped = dim is not None and isinstance(leaf, torch.Tensor)
            return leaf.select(dim, index) if mapped else leaf

        return map_leaves(pick, arg)

    outputs = []
    for index in range(tensor.shape[dim]):
        one = [example(index, entry, arg) for entry, arg in zip(dims, args)]
        named = {name: example(index, 0, value) for name, value in kwargs.items()}
        outputs.append(map_leaves(as_tensor, fun(*one, **named)))
    return map_leaves(lambda *rows: torch.stack(rows), *outputs)


def _culprit(error: BaseException) -> str:
    """The innermost module of the user's that was running when the error was raised."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = owner
        trace = trace.tb_next
    return "the function" if found is None else f"its {type(found).__name__}"


def _dims_per_argument(spec: ExampleMap, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(spec.in_dims, tuple | list):
        return (spec.in_dims,) * len(args)
    if len(spec.in_dims) > len(args):
        raise BatchError(
            f"{spec.where}: in_dims={spec.in_dims!r} has {len(spec.in_dims)} entries for {len(args)} argument"
            f"{'s' * (len(args) != 1)}.\nGive one entry per positional argument."
        )
    return (*spec.in_dims, *(None for _ in range(len(args) - len(spec.in_dims))))


def _dims_of_leaves(entry: Any, arg: Any) -> list[Any]:
    found: list[Any] = []
    map_prefix(lambda dim, _: found.append(dim), entry, arg, is_prefix_leaf=lambda d: d is None)
    return found


def _entries(dims: Any) -> list[Any]:
    return [None] if dims is None else [dim for _, dim in leaves_with_paths(dims)]
