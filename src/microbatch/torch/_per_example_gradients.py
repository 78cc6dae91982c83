"""Gradients of single examples: each made, transformed and measured by itself, those of one microbatch at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from microbatch._accumulation import AccumulationType
from microbatch._checks import as_argnums, as_positions, check_function, name_of
from microbatch._errors import BatchError, MicrobatchError
from microbatch._outputs import canonical
from microbatch._splitting import Order, Remainder
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._captured import Member, installed
from microbatch.torch._differentiate import Differentiate
from microbatch.torch._per_example import Engine, example_map, run_example_map
from microbatch.torch._tensors import as_tensor, type_words


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


def micro_grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    argnums: int | Sequence[int] = 0,
    *,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    microbatch_size: int | None = None,
    accumulator: Any = AccumulationType.SUM,
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
      transform_fn: maps one example's gradient to a tree, for example `clip_by_global_norm(1.0)`.
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
      BatchError: `argnums` names an argument that is not passed by position.

    The gradient of ½(w·x − y)² at w = 0, x = 1 is −y; its mean, the mean of its square, and its norm:

    >>> def loss(params, features, targets):
    ...     return 0.5 * ((features @ params - targets) ** 2).mean()
    >>> (mean, square), aux = micro_grad(
    ...     loss,
    ...     batch_argnums=(1, 2),
    ...     accumulator=AccumulationType.MEAN,
    ...     transform_fn=lambda g: (g, g**2),
    ...     metrics_fn=lambda g: g.norm(),
    ... )(torch.zeros(1), torch.ones(4, 1), torch.tensor([0.0, 2.0, 4.0, 6.0]))
    >>> mean.tolist(), square.tolist(), aux.values.tolist(), aux.metrics.tolist()
    ([-3.0], [14.0], [0.0, 2.0, 8.0, 18.0], [0.0, 2.0, 4.0, 6.0])
    """
    where = f"micro_grad({name_of(fun)})"
    for name, value in (("fun", fun), ("transform_fn", transform_fn), ("metrics_fn", metrics_fn)):
        check_function(where, name, value)
    batch = as_argnums(where, batch_argnums, "batch_argnums")
    if not batch or min(batch) < 0:
        raise BatchError(
            f"{where}: batch_argnums={batch_argnums!r} names no positional argument.\n"
            "Give one or more numbers from 0."
        )
    single = not isinstance(argnums, Sequence)
    numbers = as_argnums(where, argnums)
    if weight_fn is not None:
        check_function(where, "weight_fn", weight_fn)
    spec = example_map(
        where,
        accumulator=(canonical(where, accumulator), AccumulationType.CONCAT),
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
    gradient_fn = _by_transformation if engine == "vmap" else _by_autograd

    def as_batch_of_one(args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not keep_batch_dim:
            return args
        one = lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, torch.Tensor) else leaf
        return tuple(map_leaves(one, a) if i in batch else a for i, a in enumerate(args))

    @functools.wraps(fun, updated=())
    def gradients_of(*args: Any, **kwargs: Any) -> tuple[Any, Aux]:
        wanted = as_positions(where, "argnums", numbers, len(args))
        modules = {i: args[i] for i in wanted if isinstance(args[i], nn.Module)}
        given = tuple(_trainable(modules[i]) if i in modules else a for i, a in enumerate(args))

        def of_example(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            members = [m for i, module in modules.items() for m in _members(module, args[i])]
            args = tuple(modules.get(i, a) for i, a in enumerate(as_batch_of_one(args)))
            with installed(members):
                output = fun(*args, **kwargs)
            return _loss_and_aux(where, output, has_aux)

        def example_gradient(*args: Any, **kwargs: Any) -> Any:
            found, (value, aux) = gradient_fn(of_example, wanted, args, kwargs)
            found = found[0] if single else found
            return transform_fn(found), Aux(value, metrics_fn(found), aux)

        def example_weight(*args: Any, **kwargs: Any) -> Any:
            assert weight_fn is not None
            args = as_batch_of_one(args)
            return weight_fn(*(modules.get(i, a) for i, a in enumerate(args)), **kwargs)

        dims = tuple(0 if i in batch else None for i in range(len(args)))
        weighted = None if weight_fn is None else example_weight
        its_spec = spec._replace(in_dims=dims, weight_fn=weighted)
        return run_example_map(its_spec, example_gradient, fun, given, kwargs)

    return gradients_of


def _loss_and_aux(where: str, output: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    """One example's loss and the rest; what has no gradient by its type is refused, not differentiated to zero."""
    if has_aux and not (isinstance(output, tuple) and len(output) == 2):
        raise MicrobatchError(
            f"{where}: has_aux=True, and the function returned a {type(output).__name__}.\n"
            "Return (loss, aux)."
        )
    loss, aux = output if has_aux else (output, None)
    if not isinstance(loss, torch.Tensor):
        advice = (
            "Return (loss, aux) with has_aux=True."
            if isinstance(loss, tuple)
            else "Return a tensor."
        )
        raise MicrobatchError(
            f"{where}: the loss is a {type(loss).__name__}, not a tensor.\n{advice}"
        )
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise MicrobatchError(
            f"{where}: the loss of one example is {type_words(loss)}, not one real number.\n"
            "Reduce it, for example by .mean(), and give its real part."
        )
    return loss.reshape(()), aux


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
    # Those of a sparse embedding are held like all others.
    remaining = iter([g.to_dense() if g.is_sparse else g for g in found])
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
