"""Per-example functions on a batch that does not fit: a `vmap` in microbatches, and gradients made with it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from microbatch._accumulation import AccumulationType, Accumulator, Carry
from microbatch._checks import as_argnums, check_choice, name_of, signature_of
from microbatch._errors import AccumulatorError, BatchError, MicrobatchError
from microbatch._outputs import assemble, canonical, parts_of
from microbatch._splitting import Order, Remainder
from microbatch._trees import leaves_with_paths, map_leaves, map_prefix
from microbatch.torch._accumulators import as_tensor, carry_dtype
from microbatch.torch._captured import Member, installed
from microbatch.torch._differentiate import Differentiate
from microbatch.torch._microbatch import Settings, checked, run

Engine = Literal["vmap", "loop"]
CONCAT, SUM, LAST = AccumulationType.CONCAT, AccumulationType.SUM, AccumulationType.LAST


class Aux(NamedTuple):
    """What `micro_grad` returns beside the gradients, per example.

    Attributes:
      values: the function's values ``[B]``.
      metrics: `metrics_fn` of each example's gradient ``[B, ...]``.
      aux: the function's auxiliary output ``[B, ...]``; None without `has_aux`.
    """

    values: Any
    metrics: Any
    aux: Any


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
      accumulator: how the examples' outputs combine, a tree that is a prefix of the output. An `Accumulator` needs
        its `aggregate`.
      num_real_microbatches: see `microbatch`.
      num_microbatches: see `microbatch`.
      order: see `microbatch`.
      remainder: see `microbatch`.
      weight_fn: maps the arguments of `fun` to one example's weight in MEAN. An example of weight 0 contributes
        exactly nothing, whatever it holds; CONCAT has zeros in its row.
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
    spec = _Spec(
        where,
        in_dims,
        out_dims,
        weight_fn,
        check_choice(where, "randomness", randomness, ("different", "same", "error")),
        check_choice(where, "engine", engine, ("vmap", "loop")),
        canonical(where, accumulator),
        {
            "microbatch_size": microbatch_size,
            "num_microbatches": num_microbatches,
            "limit": num_real_microbatches,
            "order": order,
            "remainder": remainder,
            "accumulator_dtype": accumulator_dtype,
            "rng": rng,
            "differentiate": differentiate,
        },
    )
    _check(spec)

    @functools.wraps(fun, updated=())
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return _run(spec, fun, fun, args, kwargs)

    return mapped


def micro_grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    *,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    microbatch_size: int | None = None,
    accumulator: Any = SUM,
    transform_fn: Callable[[Any], Any] = lambda gradients: gradients,
    metrics_fn: Callable[[Any], Any] = lambda gradients: None,
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
    """Per-example gradients: each transformed, then combined; those of one microbatch exist at a time.

    Equivalent to::

        grads, values = zip(*[grad_and_value(fun, argnums)(params, example) for example in batch])
        combine([transform_fn(g) for g in grads]), Aux(values, [metrics_fn(g) for g in grads], aux)

    Args:
      fun: a loss, called with one example; with `keep_batch_dim` as a batch of one ``[1, ...]``.
      has_aux: whether `fun` returns ``(loss, aux)``.
      argnums: what to differentiate: trees of tensors, or modules, whose gradients are dicts by parameter name.
      batch_argnums: which positional arguments hold examples along dimension 0. Keyword arguments do, too.
      keep_batch_dim: whether `fun` expects a batch dimension; keyword arguments never get one.
      microbatch_size: examples in a microbatch; None takes all at once.
      accumulator: how the transformed gradients combine, a tree that is a prefix of them.
      transform_fn: maps one example's gradient to a tree. `global_norm` is an accurate norm for clipping.
      metrics_fn: maps one example's gradient to a tree that is returned per example.
      num_real_microbatches: see `microbatch`.
      num_microbatches: see `microbatch`.
      order: see `microbatch`.
      remainder: see `microbatch`.
      weight_fn: maps the arguments of `fun` to one example's weight, see `micro_vmap`.
      accumulator_dtype: see `microbatch`.
      rng: see `microbatch`.
      randomness: see `micro_vmap`.
      differentiate: see `microbatch`.
      engine: see `micro_vmap`.

    Returns:
      A function of the same arguments that returns ``(gradients, Aux(values, metrics, aux))``.

    Raises:
      MicrobatchError: `fun` cannot be mapped; the message names the submodule and offers ``engine="loop"``.

    The gradient of ½(w·x − y)² at w = 0, x = 1 is −y; its mean, the mean of its square, and its norm:

    >>> def loss(params, features, targets):
    ...     return 0.5 * ((features @ params - targets) ** 2).mean()
    >>> (mean, square), aux = micro_grad(
    ...     loss,
    ...     batch_argnums=(1, 2),
    ...     accumulator=AccumulationType.MEAN,
    ...     transform_fn=lambda g: (g, g**2),
    ...     metrics_fn=global_norm,
    ... )(torch.zeros(1), torch.ones(4, 1), torch.tensor([0.0, 2.0, 4.0, 6.0]))
    >>> mean.tolist(), square.tolist(), aux.values.tolist(), aux.metrics.tolist()
    ([-3.0], [14.0], [0.0, 2.0, 8.0, 18.0], [0.0, 2.0, 4.0, 6.0])
    """
    where = f"micro_grad({name_of(fun)})"
    batch = as_argnums(where, batch_argnums)
    if not batch or min(batch) < 0:
        raise BatchError(
            f"{where}: batch_argnums={batch_argnums!r} names no positional argument.\n"
            "Give one or more numbers from 0."
        )
    single = not isinstance(argnums, Sequence)
    wanted = as_argnums(where, argnums)
    spec = _Spec(
        where,
        0,
        0,
        None,
        check_choice(where, "randomness", randomness, ("different", "same", "error")),
        check_choice(where, "engine", engine, ("vmap", "loop")),
        (canonical(where, accumulator), CONCAT),
        {
            "microbatch_size": microbatch_size,
            "num_microbatches": num_microbatches,
            "limit": num_real_microbatches,
            "order": order,
            "remainder": remainder,
            "accumulator_dtype": accumulator_dtype,
            "rng": rng,
            "differentiate": differentiate,
        },
    )
    _check(spec)
    gradient_fn = _by_transformation if engine == "vmap" else _by_autograd

    def as_batch_of_one(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not keep_batch_dim:
            return args
        one = lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, torch.Tensor) else leaf
        return tuple(map_leaves(one, a) if i in batch else a for i, a in enumerate(args))

    @functools.wraps(fun, updated=())
    def gradients_of(*args: Any, **kwargs: Any) -> tuple[Any, Aux]:
        modules = {i: args[i] for i in wanted if isinstance(args[i], nn.Module)}
        given = tuple(_trainable(modules[i]) if i in modules else a for i, a in enumerate(args))

        def of_example(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            members = [m for i, module in modules.items() for m in _members(module, args[i])]
            args = tuple(modules.get(i, a) for i, a in enumerate(as_batch_of_one(args)))
            with installed(members):
                output = fun(*args, **kwargs)
            return output if has_aux else (output, None)

        def example_gradient(*args: Any, **kwargs: Any) -> Any:
            found, (value, aux) = gradient_fn(of_example, wanted, args, kwargs)
            found = found[0] if single else found
            return transform_fn(found), Aux(value, metrics_fn(found), aux)

        def example_weight(*args: Any, **kwargs: Any) -> Any:
            args = as_batch_of_one(args)
            return weight_fn(*(modules.get(i, a) for i, a in enumerate(args)), **kwargs)

        dims = tuple(0 if i in batch else None for i in range(len(args)))
        weighted = None if weight_fn is None else example_weight
        mine = spec._replace(in_dims=dims, weight_fn=weighted)
        return _run(mine, example_gradient, fun, given, kwargs)

    return gradients_of


def global_norm(tree: Any) -> torch.Tensor:
    """The Euclidean norm over all entries of a tree of tensors, accurate enough to decide a clipping.

    A sum of squares, in float32 or wider: on a CPU, `torch.linalg.vector_norm` of two million float32 entries was seen
    3e-5 too low, this one 2e-8 off.

    >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0])}).item()
    5.0
    """
    squares = []
    for _, leaf in leaves_with_paths(tree):
        leaf = leaf.to(carry_dtype(leaf.dtype, None))
        squares.append(
            (leaf * leaf.conj()).real.sum() if leaf.is_complex() else leaf.square().sum()
        )
    return torch.stack(squares).sum().sqrt()


class _Spec(NamedTuple):
    """A per-example transformation: what `micro_vmap` was asked for."""

    where: str
    in_dims: Any
    out_dims: Any
    weight_fn: Callable[..., Any] | None
    randomness: str
    engine: Engine
    accumulator: Any
    options: dict[str, Any]


def _check(spec: _Spec) -> None:
    entries = [entry for _, entry in leaves_with_paths(spec.accumulator)]
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


def _run(
    spec: _Spec,
    fun: Callable[..., Any],
    subject: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One call: examples to microbatches' outputs, and those to the batch's by `microbatch`."""
    dims = _dims_per_argument(spec, args)
    weight_fn = spec.weight_fn
    map_examples = _in_vmap if spec.engine == "vmap" else _in_loop

    def weights_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        if weight_fn is None:
            return None
        with torch.no_grad():
            weights = map_examples(spec, weight_fn, dims, args, kwargs)
        weights = as_tensor(weights)
        return weights if weights.device.type == "mps" else weights.double()

    def microbatch_weight(*args: Any, **kwargs: Any) -> Any:
        return weights_of(args, kwargs).sum()

    def reduced(*args: Any, **kwargs: Any) -> Any:
        output = map_examples(spec, fun, dims, args, kwargs)
        weights = weights_of(args, kwargs)
        parts = parts_of(spec.where, spec.accumulator, output)
        values = [_reduce(part.accumulator, part.value, weights) for part in parts]
        return assemble(spec.accumulator, output, values)

    mapped = [i for i, dim in enumerate(dims) if any(d is not None for d in _entries(dim))]
    size = spec.options["microbatch_size"]
    whole = size is None and spec.options["num_microbatches"] is None
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
            **(spec.options | ({"num_microbatches": 1} if whole else {})),
        )
    )
    result = run(reduced, settings, args, kwargs, subject)
    return map_prefix(
        lambda dim, leaf: leaf.movedim(0, dim) if dim else leaf, spec.out_dims, result
    )


def _reduce(kind: Any, value: Any, weights: torch.Tensor | None) -> Any:
    """The outputs of a microbatch's examples ``[m, ...]`` as one output; weight 0 is out by selection."""
    if isinstance(kind, Accumulator):
        if weights is not None:
            value = map_leaves(lambda leaf: leaf[weights != 0], value)
        return kind.aggregate(value)
    if weights is not None:
        real = (weights != 0).reshape(-1, *(1,) * (value.ndim - 1))
        if kind is LAST:
            return value[weights.nonzero()[-1, 0]] if real.any() else value[-1]
        value = torch.where(real, value, _neutral(kind, value.dtype))
    if kind is CONCAT:
        return value
    if kind is LAST:
        return value[-1]
    if kind is AccumulationType.MAX:
        return value.amax(0)
    if kind is AccumulationType.MIN:
        return value.amin(0)
    wide = carry_dtype(value.dtype, None)
    if kind is SUM:
        return value.sum(0, dtype=wide).to(value.dtype)
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return value[0]  # `microbatch` refuses the mean of integers, with the leaf's path.
    if weights is None:
        return value.mean(0, dtype=wide).to(value.dtype)
    total = weights.sum()
    share = (weights / torch.where(total == 0, 1, total)).to(wide)
    return torch.tensordot(share, value.to(wide), dims=([0], [0])).to(value.dtype)


def _neutral(kind: AccumulationType, dtype: torch.dtype) -> Any:
    if kind not in (AccumulationType.MAX, AccumulationType.MIN):
        return torch.zeros((), dtype=dtype)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    lowest = -torch.inf if dtype.is_floating_point else limits.min
    highest = torch.inf if dtype.is_floating_point else limits.max
    return torch.tensor(lowest if kind is AccumulationType.MAX else highest, dtype=dtype)


def _in_vmap(
    spec: _Spec, fun: Callable[..., Any], dims: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
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
    spec: _Spec, fun: Callable[..., Any], dims: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
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


def _by_transformation(
    fun: Callable[..., Any], argnums: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    templates: list[Any] = []

    def bundled(*args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        value, aux = fun(*args, **kwargs)
        templates[:] = [map_leaves(lambda _: 0, aux)]
        return value, [as_tensor(leaf) for _, leaf in leaves_with_paths(aux)]

    gradients, (value, leaves) = torch.func.grad_and_value(bundled, argnums, has_aux=True)(*args)
    remaining = iter(leaves)
    return gradients, (value, map_leaves(lambda _: next(remaining), templates[0]))


def _by_autograd(
    fun: Callable[..., Any], argnums: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Gradients for functions that `torch.func` cannot transform."""
    wanted = {i: [leaf for _, leaf in leaves_with_paths(args[i])] for i in argnums}
    follows = torch.is_grad_enabled() and any(t.requires_grad for ts in wanted.values() for t in ts)
    with torch.enable_grad():
        own = {
            i: map_leaves(
                lambda t: t if follows and t.requires_grad else t.detach().requires_grad_(), args[i]
            )
            for i in argnums
        }
        value, aux = fun(*(own.get(i, a) for i, a in enumerate(args)), **kwargs)
        leaves = [leaf for i in argnums for _, leaf in leaves_with_paths(own[i])]
        found = torch.autograd.grad(
            value, leaves, create_graph=follows, allow_unused=True, materialize_grads=True
        )
    remaining = iter(found)
    gradients = tuple(map_leaves(lambda _: next(remaining), own[i]) for i in argnums)
    if follows:
        return gradients, (value, aux)
    detached = lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
    return gradients, map_leaves(detached, (value, aux))


def _trainable(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def _members(module: nn.Module, parameters: dict[str, torch.Tensor]) -> list[Member]:
    """Where each parameter is in the module, a tied one at several places."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        Member(child, name, parameters[names[id(parameter)]])
        for child in module.modules()
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False)
        if names[id(parameter)] in parameters
    ]


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


def _dims_per_argument(spec: _Spec, args: tuple[Any, ...]) -> tuple[Any, ...]:
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
