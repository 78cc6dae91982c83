"""Whether microbatching keeps a PyTorch function's numbers, and why not: the whole batch beside its microbatches."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from microbatch._accumulation import AccumulationType, as_accumulator
from microbatch._checks import check_size, name_of
from microbatch._errors import MicrobatchSizeError, PlanError
from microbatch._explaining import explained
from microbatch._splitting import Remainder, Split, make_split
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch._verification import Cause, Leaf, Verification, compare
from microbatch.torch._batch import NOT_SPLIT, Batch, argument_names, batch_of
from microbatch.torch._clues import influential_module, possible_weights
from microbatch.torch._discovery import Found, discover
from microbatch.torch._memory import device_budget, device_of
from microbatch.torch._microbatch import microbatch
from microbatch.torch._planning import bundle
from microbatch.torch._put_back import gradients_kept
from microbatch.torch._randomness import sources
from microbatch.torch._simulation import Work, fake_peak
from microbatch.torch._tensors import dtype_name


def verify(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    accumulator: Any = AccumulationType.SUM,
    *,
    microbatch_size: int,
    memory_budget: int | str | None = None,
    argnames: str | Sequence[str] = (),
    in_dims: Any = 0,
    remainder: Remainder = "error",
    weight_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[..., Verification]:
    """Runs `fun` on the whole batch and in microbatches, compares the numbers, and explains a difference.

    The function returned is equivalent to::

        def verified(*args):
            whole = fun(*args)
            pieces = microbatch(fun, argnums, microbatch_size, accumulator)(*args)
            exact = fun(*(args in float64))
            return Verification(compare(whole, pieces, exact), why)

    Scalar outputs, and outputs given as CONCAT, are differentiated too, with respect to the parameters and other leaves
    that `fun` uses. A leaf is "exact" bit for bit, "rounding" where its error against float64 is at most twice the whole
    batch's or 16 units of rounding (64 where float64 is not possible), and "different" beyond. Each run starts from the
    same random state; parameters, gradients, buffers and the random state are afterwards what they were.

    Args:
      fun: as in `microbatch`; for a training step, its loss function with MEAN. What `backward` computes are the same
        sums. Modules that mix rows, which `microbatch` refuses, are let pass here, to be explained.
      argnums: as in `microbatch`.
      accumulator: as in `microbatch`.
      microbatch_size: rows in a microbatch.
      memory_budget: as in `plan`. Where the whole batch does not fit in it, as many of its first rows are compared as do.
      argnames: as in `microbatch`.
      in_dims: as in `microbatch`.
      remainder: as in `microbatch`.
      weight_fn: as in `microbatch`.
      **options: `microbatch`'s other keywords.

    Returns:
      A function of `fun`'s arguments to a `Verification`.

    Raises:
      MicrobatchSizeError: the size is not a positive integer, or the batch has fewer rows than two microbatches.

    >>> loss = lambda x: x.square().sum()
    >>> found = verify(loss, 0, AccumulationType.MEAN, microbatch_size=2)(torch.arange(4.0))
    >>> found.verdict, found.causes[0].kind
    ('different', 'sum_given_as_mean')
    """
    where = f"verify({name_of(fun)})"
    size = check_size(where, "microbatch_size", microbatch_size)
    options = {"remainder": remainder, "allow_row_mixing": True, **options}
    # Refuses what is wrong before there is a call.
    microbatch(
        fun,
        argnums,
        size,
        accumulator,
        argnames=argnames,
        in_dims=in_dims,
        weight_fn=weight_fn,
        **options,
    )

    def verified(*args: Any, **kwargs: Any) -> Verification:
        target, values, dims = bundle(where, fun, argnums, argnames, in_dims, args, kwargs)
        batch = batch_of(where, target, values, dims)
        split = make_split(
            batch.batch_size,
            size,
            order=options.get("order", "contiguous"),
            remainder=remainder,
            subject=f"{where}: the batch",
        )
        if split.num_microbatches < 2:
            raise MicrobatchSizeError(
                f"{where}: the batch has {batch.batch_size} rows, which is one microbatch of {size}.\n"
                "Use a microbatch_size of at most half the rows, or more rows."
            )
        names = (*argument_names(fun, len(args)), *kwargs)
        weigh = None if weight_fn is None else _positional(weight_fn, len(args), tuple(kwargs))
        run = _Run(where, target, accumulator, options, weigh, batch, split, names)
        with gradients_kept(discover(fun, values), run.batch.args):
            return _verify(run.that_fits(memory_budget), batch.batch_size, name_of(fun))

    return verified


def _verify(run: "_Run", total: int, name: str) -> Verification:
    whole, pieces = run.results(run.fun), run.results(run.microbatched())
    random = run.random_numbers()
    with run.in_float64() if random is None else contextlib.nullcontext() as precise:
        reference = None if precise is None else precise.results(precise.fun)
        comparisons = compare(whole, pieces, reference)
        return explained(
            precise or run, comparisons, name=name, framework="torch", batch_size=total
        )


@dataclass(frozen=True)
class _Run:
    """A function with its arguments, which is evaluated in several ways; a `Subject` of explanations."""

    where: str
    fun: Callable[..., Any]
    kind: Any
    options: dict[str, Any]
    weight_fn: Callable[..., Any] | None
    batch: Batch
    split: Split
    names: tuple[str, ...]
    precise: bool = False

    @property
    def accumulator(self) -> Any:
        return as_accumulator(self.kind) or self.kind

    @property
    def weighted(self) -> bool:
        return self.weight_fn is not None

    def microbatched(self, accumulator: Any = None, weight_fn: Any = None) -> Callable[..., Any]:
        # A dimension of None makes an argument one that every microbatch sees whole.
        dims = self.batch.dims
        cut = [i for i, dim in enumerate(dims) if any(d != NOT_SPLIT for d in tree_leaves(dim))]
        entries = tuple(map_leaves(lambda d: None if d == NOT_SPLIT else d, dims[i]) for i in cut)
        return microbatch(
            self.fun,
            tuple(cut),
            self.split.microbatch_size,
            self.kind if accumulator is None else accumulator,
            in_dims=entries,
            weight_fn=self.weight_fn if weight_fn is None else weight_fn,
            **self.options,
        )

    def whole(self, rows: np.ndarray | None = None) -> list[Leaf]:
        return self.results(self.fun, rows, gradient=False)

    def pieces(self, accumulator: Any = None, weight_fn: Any = None) -> list[Leaf]:
        return self.results(self.microbatched(accumulator, weight_fn), gradient=False)

    def results(
        self, target: Callable[..., Any], rows: np.ndarray | None = None, *, gradient: bool = True
    ) -> list[Leaf]:
        """The outputs of `target`, and their gradient where that has a meaning, on the host."""
        args = self.taken(rows)
        devices = [t.device for t in tree_leaves(args) if _is_tensor(t) and t.is_cuda]
        with torch.random.fork_rng(devices), torch.set_grad_enabled(gradient):
            torch.manual_seed(0)
            out = target(*args)
            out = out.loss if hasattr(out, "loss") else out
            values = leaves_with_paths(out, "")
            found = [_leaf(path, "value", x) for path, x in values if x is not None]
            roots = [x for _, x in values if _is_tensor(x) and x.requires_grad]
            if gradient and roots and _has_meaning(roots, self.accumulator):
                named = self.leaves(args)
                total: Any = sum(_projection(x) for x in roots)
                grads = torch.autograd.grad(total, [t for _, t in named], allow_unused=True)
                found += [
                    _leaf(name, "gradient", g)
                    for (name, _), g in zip(named, grads, strict=True)
                    if g is not None
                ]
            return found

    def leaves(self, args: tuple[Any, ...]) -> list[tuple[str, torch.Tensor]]:
        """What is differentiated, by name."""
        named = list(discover(self.fun, args).named_leaves())
        seen = {id(t) for _, t in named}
        for name, arg in zip(self.names, args, strict=True):
            for path, leaf in leaves_with_paths(arg, name):
                if _is_tensor(leaf) and leaf.requires_grad and id(leaf) not in seen:
                    named.append((path, leaf))
        return named

    def taken(self, rows: np.ndarray | None) -> tuple[Any, ...]:
        """The arguments with these rows of the batch."""
        if rows is None:
            return self.batch.args
        index = torch.as_tensor(rows)
        take = lambda leaf, dim: (
            leaf if dim == NOT_SPLIT else leaf.index_select(dim, index.to(leaf.device))
        )
        return map_leaves(take, self.batch.args, self.batch.dims)

    def that_fits(self, memory_budget: int | str | None) -> "_Run":
        """The same on as many rows as fit whole."""
        place = device_of(self.fun, self.batch.args)
        budget = device_budget(memory_budget, place, self.where)
        rows, least = self.split.batch_size, 2 * self.split.microbatch_size
        try:
            while rows > least and self._peak(rows, place) > budget.bytes:
                half = rows // 2
                rows = max(half - half % self.split.microbatch_size, least)
        except PlanError:
            # Shapes do not tell. Then only a budget that was asked for is worth an error.
            if memory_budget is not None:
                raise
        if rows == self.split.batch_size:
            return self
        first = Batch(self.batch.rows(0, rows), self.batch.dims, rows)
        return replace(self, batch=first, split=replace(self.split, batch_size=rows))

    def _peak(self, rows: int, place: torch.device) -> int:
        batch = Batch(self.batch.rows(0, rows), self.batch.dims, rows)
        work = Work(self.where, self.fun, batch, False, None, None, None, place)
        return fake_peak(work, rows)

    @contextlib.contextmanager
    def in_float64(self) -> "Iterator[_Run | None]":
        """The same in float64; None where the function does not follow its arguments' and parameters' dtype."""
        args = tree_map_only(torch.Tensor, _widened, self.batch.args)
        batch = Batch(args, self.batch.dims, self.batch.batch_size)
        run = replace(
            self, batch=batch, precise=True, options=self.options | {"accumulator_dtype": None}
        )
        with _double(discover(self.fun, self.batch.args)):
            try:
                found = run.whole()
            except (
                Exception
            ):  # whatever a function may raise for a dtype that it was not written for
                found = []
            inexact = [leaf.dtype_name for leaf in found if leaf.array.dtype.kind not in "biu"]
            follows = bool(inexact) and all(n in ("float64", "complex128") for n in inexact)
            yield run if follows else None

    def weights(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        for i, (name, arg, dims) in enumerate(
            zip(self.names, self.batch.args, self.batch.dims, strict=True)
        ):
            cut = [d for _, d in leaves_with_paths(dims)]
            for k, (path, leaf) in enumerate(leaves_with_paths(arg, name)):
                if cut[k] == NOT_SPLIT or not _is_tensor(leaf):
                    continue
                for text, way in possible_weights(leaf):
                    weigh = lambda *args, _i=i, _k=k, _way=way: _way(
                        leaves_with_paths(args[_i])[_k][1]
                    )
                    yield f"lambda {', '.join(self.names)}: {text.format(x=path)}", weigh

    def random_numbers(self) -> Cause | None:
        args = self.batch.args
        before = [(source, source.get_state()) for source in sources()]
        with torch.no_grad():
            self.fun(*args)
        drew = [source for source, state in before if not torch.equal(source.get_state(), state)]
        for source, state in before:
            source.set_state(state)
        if not drew:
            return None
        modules = [
            f"{name} ({type(m).__name__})"
            for name, m in discover(self.fun, args).modules.values()
            if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0
        ]
        place = f" in {', '.join(modules[:3])}" if modules else ""
        return Cause(
            "random_numbers",
            f"The function draws random numbers{place} in the shape of what it is called with, so microbatches draw others "
            "than the whole batch.",
            "This is no error where numbers need not repeat. To compare the rest, switch it off: model.eval(), or "
            "dropout probability 0.",
        )

    def influential_part(self, rows: np.ndarray) -> str | None:
        others = torch.as_tensor(np.flatnonzero(rows == np.arange(len(rows))))
        found = discover(self.fun, self.batch.args)
        return influential_module(found, self.whole, lambda: self.whole(rows), others, len(rows))


@contextlib.contextmanager
def _double(found: Found) -> Iterator[None]:
    """Parameters, buffers and other tensors that a function holds, in float64 for a while."""
    held = {id(t): t for _, t in found.named_leaves()}
    held |= {id(t): t for _, t in found.tensors if t.is_leaf}
    for _, module in found.modules.values():
        held |= {
            id(t): t
            for t in (*module._parameters.values(), *module._buffers.values())
            if t is not None
        }
    narrow = {key: t.data for key, t in held.items()}
    try:
        for key, tensor in held.items():
            tensor.data = _widened(narrow[key])
        yield
    finally:
        for key, tensor in held.items():
            tensor.data = narrow[key]


def _positional(
    weight_fn: Callable[..., Any], count: int, names: tuple[str, ...]
) -> Callable[..., Any]:
    if not names:
        return weight_fn
    return lambda *values: weight_fn(
        *values[:count], **dict(zip(names, values[count:], strict=True))
    )


def _has_meaning(roots: list[torch.Tensor], accumulator: Any) -> bool:
    return all(x.ndim == 0 for x in roots) or accumulator is AccumulationType.CONCAT


def _projection(x: torch.Tensor) -> torch.Tensor:
    """One number that depends on all of `x`, by fixed cotangents."""
    real = torch.view_as_real(x).sum(-1) if x.is_complex() else x
    if real.ndim == 0:
        return real
    fixed = (
        torch.arange(real.numel(), device=x.device, dtype=torch.float64).cos().reshape(real.shape)
    )
    return (real * fixed.to(real.dtype)).sum()


def _leaf(path: str, role: Literal["value", "gradient"], x: Any) -> Leaf:
    if not _is_tensor(x):
        return Leaf(path, role, np.asarray(x))
    host = x.detach().cpu().resolve_conj().resolve_neg()
    if host.is_floating_point() and host.dtype not in _IN_NUMPY:
        host = host.to(torch.float32)  # NumPy lacks the dtype; its numbers are among these
    return Leaf(path, role, host.numpy(), dtype_name(x.dtype))


_IN_NUMPY = (torch.float16, torch.float32, torch.float64)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(torch.float64).requires_grad_(tensor.requires_grad)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
