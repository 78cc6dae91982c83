"""Whether microbatching keeps a JAX function's numbers, and why not: the whole batch beside its microbatches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from microbatch._accumulation import AccumulationType, as_accumulator
from microbatch._checks import (
    as_argnames,
    as_argnums,
    batch_size_of,
    check_size,
    locate,
    name_of,
    per_argument,
    signature_of,
)
from microbatch._errors import MicrobatchSizeError
from microbatch._explaining import explained
from microbatch._splitting import Remainder, Split, make_split
from microbatch._verification import Cause, Leaf, Verification, compare
from microbatch.jax._binding import Call, batch_leaves, flatten_call
from microbatch.jax._compiled import compile_program, spec_of
from microbatch.jax._memory import device_budget
from microbatch.jax._microbatch import microbatch


def verify(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    accumulator: Any = AccumulationType.SUM,
    *,
    microbatch_size: int,
    memory_budget: int | str | None = None,
    argnames: str | Sequence[str] = (),
    in_axes: Any = 0,
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

    Outputs that are scalars, and outputs given as CONCAT, are differentiated too: with respect to the inexact arrays
    among the other arguments, or else among the batch arguments. A leaf is "exact" bit for bit, "rounding" where its
    error against float64 is at most twice the whole batch's or 16 units of rounding (64 where float64 is not possible:
    a function that casts), and "different" beyond.

    Args:
      fun: as in `microbatch`.
      argnums: as in `microbatch`.
      accumulator: as in `microbatch`.
      microbatch_size: rows in a microbatch.
      memory_budget: as in `plan`. Where the whole batch does not fit in it, as many of its first rows are compared as do.
      argnames: as in `microbatch`.
      in_axes: as in `microbatch`.
      remainder: as in `microbatch`.
      weight_fn: as in `microbatch`.
      **options: `microbatch`'s other keywords.

    Returns:
      A function of `fun`'s arguments to a `Verification`.

    Raises:
      MicrobatchSizeError: the size is not a positive integer, or the batch has fewer rows than two microbatches.

    >>> loss = lambda x: jnp.sum(x ** 2)
    >>> found = verify(loss, 0, AccumulationType.MEAN, microbatch_size=2)(jnp.arange(4.0))
    >>> found.verdict, found.causes[0].kind
    ('different', 'sum_given_as_mean')
    """
    where = f"verify({name_of(fun)})"
    size = check_size(where, "microbatch_size", microbatch_size)
    options = {
        "argnames": argnames,
        "in_axes": in_axes,
        "remainder": remainder,
        "weight_fn": weight_fn,
        **options,
    }
    microbatch(
        fun, argnums, size, accumulator, **options
    )  # refuses what is wrong before there is a call
    numbers, names = as_argnums(where, argnums), as_argnames(where, argnames)

    def verified(*args: Any, **kwargs: Any) -> Verification:
        batch = locate(where, signature_of(fun), numbers, names, args, kwargs)
        axes = per_argument(where, "in_axes", in_axes, batch)
        total, subject = batch_size_of(where, batch_leaves(where, batch, axes, args, kwargs))
        call = flatten_call(where, args, kwargs, batch, axes, (), ())
        split = make_split(
            total,
            size,
            order=options.get("order", "strided"),
            remainder=remainder,
            subject=f"{where}: {subject}",
        )
        if split.num_microbatches < 2:
            raise MicrobatchSizeError(
                f"{where}: {subject} has {total} rows, which is one microbatch of {size}.\n"
                "Use a microbatch_size of at most half the rows, or more rows."
            )
        run = _Run(where, fun, accumulator, options, call, split, argnums)
        return _verify(run.that_fits(memory_budget), total, name_of(fun))

    return verified


def _verify(run: "_Run", total: int, name: str) -> Verification:
    whole, pieces = run.results(run.fun), run.results(run.microbatched())
    precise = run.in_float64()
    reference = None if precise is None else precise.results(precise.fun)
    comparisons = compare(whole, pieces, reference)
    return explained(precise or run, comparisons, name=name, framework="jax", batch_size=total)


@dataclass(frozen=True)
class _Run:
    """A function with its arguments, which is evaluated in several ways; a `Subject` of explanations."""

    where: str
    fun: Callable[..., Any]
    kind: Any
    options: dict[str, Any]
    call: Call
    split: Split
    argnums: Any
    precise: bool = False

    @property
    def accumulator(self) -> Any:
        return as_accumulator(self.kind) or self.kind

    @property
    def weighted(self) -> bool:
        return self.options["weight_fn"] is not None

    def microbatched(self, accumulator: Any = None, weight_fn: Any = None) -> Callable[..., Any]:
        options = self.options if weight_fn is None else self.options | {"weight_fn": weight_fn}
        kind = self.kind if accumulator is None else accumulator
        size = self.split.microbatch_size
        return microbatch(self.fun, self.argnums, size, kind, **options)

    def whole(self, rows: np.ndarray | None = None) -> list[Leaf]:
        return self.results(self.fun, rows, gradient=False)

    def pieces(self, accumulator: Any = None, weight_fn: Any = None) -> list[Leaf]:
        return self.results(self.microbatched(accumulator, weight_fn), gradient=False)

    def results(
        self, target: Callable[..., Any], rows: np.ndarray | None = None, *, gradient: bool = True
    ) -> list[Leaf]:
        """The outputs of `target`, and their gradient where that has a meaning, on the host."""
        leaves = self.taken(rows)
        moving = self.moving(leaves) if gradient else []
        arrays = [i for i in range(len(leaves)) if i in {*self.call.shared, *self.call.rows}]

        def value(given: list[Any]) -> Any:
            filled = list(leaves)
            for i, x in zip(arrays, given, strict=True):
                filled[i] = x
            args, kwargs = self.call.treedef.unflatten(filled)
            return target(*args, **kwargs)

        def both(given: list[Any]) -> tuple[Any, list[Any]]:
            places = [arrays.index(i) for i in moving]

            def of(values: list[Any]) -> tuple[Any, Any]:
                filled = list(given)
                for place, x in zip(places, values, strict=True):
                    filled[place] = x
                out = value(filled)
                return _projection(out), out

            gradients, out = jax.grad(of, has_aux=True)([given[place] for place in places])
            return out, gradients

        wide = bool(jax.config.jax_enable_x64)  # pyrefly: ignore[missing-attribute]
        with jax.enable_x64(self.precise or wide):
            given = [jnp.asarray(leaves[i]) for i in arrays]
            if moving and _has_meaning(jax.eval_shape(value, given), self.accumulator):
                out, gradients = jax.jit(both)(given)
            else:
                out, gradients, moving = jax.jit(value)(given), [], []
            return [
                *(
                    Leaf(jax.tree_util.keystr(path), "value", _on_host(x))
                    for path, x in jax.tree_util.tree_leaves_with_path(out)
                ),
                *(
                    Leaf(self.path(i), "gradient", _on_host(g))
                    for i, g in zip(moving, gradients, strict=True)
                ),
            ]

    def taken(self, rows: np.ndarray | None) -> list[Any]:
        """The leaves with these rows of the batch."""
        leaves = list(self.call.leaves)
        if rows is not None:
            for i, axis in zip(self.call.rows, self.call.axes, strict=True):
                leaves[i] = leaves[i][(slice(None),) * axis + (rows,)]
        return leaves

    def moving(self, leaves: Sequence[Any]) -> list[int]:
        """What is differentiated: inexact arrays, not of the batch unless there is nothing else."""
        inexact = lambda places: [i for i in places if jnp.issubdtype(leaves[i].dtype, jnp.inexact)]
        return inexact(self.call.shared) or inexact(self.call.rows)

    def path(self, leaf: int) -> str:
        """Where a leaf is among the arguments, by the parameters' names."""
        paths, _ = jax.tree_util.tree_flatten_with_path(
            self.call.treedef.unflatten(range(len(self.call.leaves)))
        )
        path = paths[leaf][0]
        if path[0].idx == 1:
            return f"{path[1].key}{jax.tree_util.keystr(path[2:])}"
        signature = signature_of(self.fun)
        names = list(signature.parameters) if signature else []
        number = path[1].idx
        name = names[number] if number < len(names) else f"args[{number}]"
        return f"{name}{jax.tree_util.keystr(path[2:])}"

    def that_fits(self, memory_budget: int | str | None) -> "_Run":
        """The same on as many rows as fit whole."""
        budget = device_budget(memory_budget, self.call.leaves, self.where)
        rows = self.split.batch_size
        while rows > 2 * self.split.microbatch_size and not self._fits(rows, budget.bytes):
            half = rows // 2
            rows = max(half - half % self.split.microbatch_size, 2 * self.split.microbatch_size)
        if rows == self.split.batch_size:
            return self
        first = tuple(self.taken(np.arange(rows)))
        return replace(
            self, call=replace(self.call, leaves=first), split=replace(self.split, batch_size=rows)
        )

    def _fits(self, rows: int, budget_bytes: int) -> bool:
        leaves = list(self.call.leaves)
        for i in (*self.call.shared, *self.call.rows):
            leaves[i] = spec_of(leaves[i])
        for i, axis in zip(self.call.rows, self.call.axes, strict=True):
            shape = leaves[i].shape
            leaves[i] = leaves[i].update(shape=(*shape[:axis], rows, *shape[axis + 1 :]))
        args, kwargs = self.call.treedef.unflatten(leaves)
        return compile_program(self.where, self.fun, args, kwargs).total_bytes <= budget_bytes

    def in_float64(self) -> "_Run | None":
        """The same in float64, or None where the function does not follow its arguments' dtype."""
        leaves = list(self.call.leaves)
        arrays = (*self.call.shared, *self.call.rows)
        if any(_is_key(leaves[i]) for i in arrays):
            return None  # in another dtype other random numbers are drawn
        for i in arrays:
            leaves[i] = _widened(leaves[i])
        options = self.options | {"accumulator_dtype": None}
        run = replace(
            self, call=replace(self.call, leaves=tuple(leaves)), options=options, precise=True
        )
        try:
            found = run.results(run.fun)
        except Exception:  # whatever a function may raise for a dtype that it was not written for
            return None
        inexact = [leaf.array.dtype.name for leaf in found if leaf.array.dtype.kind not in "biu"]
        return run if all(name in ("float64", "complex128") for name in inexact) else None

    def weights(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        names = ", ".join(self._parameters())
        for i in self.call.rows:
            leaf = self.call.leaves[i]
            kind = jnp.dtype(leaf.dtype)
            if not (jnp.issubdtype(kind, jnp.number) or kind == jnp.bool_):
                continue
            ways = {"{x}.sum()": jnp.sum}
            if jnp.issubdtype(kind, jnp.integer):
                ways |= {
                    "({x} != -100).sum()": lambda x: jnp.sum(x != -100),
                    "({x} != 0).sum()": lambda x: jnp.sum(x != 0),
                    "({x} != -1).sum()": lambda x: jnp.sum(x != -1),
                    "({x} >= 0).sum()": lambda x: jnp.sum(x >= 0),
                }
            elif kind != jnp.bool_ and not _is_mask(leaf):
                continue
            for text, way in ways.items():
                weigh = lambda *args, _i=i, _way=way, **kwargs: _way(
                    jax.tree.leaves((args, kwargs))[_i]
                )
                yield f"lambda {names}: {text.format(x=self.path(i))}", weigh

    def random_numbers(self) -> Cause | None:
        keys = [i for i in self.call.shared if _is_key(self.call.leaves[i])]
        if not keys:
            return None
        leaves = list(self.call.leaves)
        for i in keys:
            leaves[i] = _other_keys(leaves[i])
        other = replace(self, call=replace(self.call, leaves=tuple(leaves)))
        before, after = self.whole(), other.whole()
        if all(a.array.tobytes() == b.array.tobytes() for a, b in zip(before, after, strict=True)):
            return None
        named = " and ".join(self.path(i) for i in keys)
        return Cause(
            "random_numbers",
            f"The function draws random numbers from {named} in the shape of what it is called with, so microbatches draw "
            "others than the whole batch (another key changes the whole batch's result, too).",
            "This is no error where numbers need not repeat. To make them equal give every row its own key: "
            "jax.random.split(key, batch_size) as a batch argument and jax.vmap over the rows, or micro_vmap with "
            "key_argnums.",
        )

    def influential_part(self, rows: np.ndarray) -> str | None:
        return None

    def _parameters(self) -> list[str]:
        args, kwargs = self.call.treedef.unflatten(self.call.leaves)
        signature = signature_of(self.fun)
        names = list(signature.parameters) if signature else []
        return [*(names[i] if i < len(names) else f"arg{i}" for i in range(len(args))), *kwargs]


def _has_meaning(out: Any, accumulator: Any) -> bool:
    """Whether outputs are to be differentiated: losses, and rows; not gradients, which are results already."""
    inexact = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    scalars = all(x.shape == () for x in inexact)
    return bool(inexact) and (scalars or accumulator is AccumulationType.CONCAT)


def _projection(out: Any) -> jax.Array:
    """One number that depends on every inexact output, by fixed cotangents."""
    total = jnp.zeros(())
    for x in jax.tree.leaves(out):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            wide = jnp.asarray(x)
            fixed = (
                jnp.ones(())
                if wide.ndim == 0
                else jnp.cos(jnp.arange(wide.size)).reshape(wide.shape)
            )
            total += jnp.sum(fixed.astype(wide.real.dtype) * (wide.real + wide.imag))
    return total


def _on_host(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _widened(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return np.asarray(x).astype(np.complex128)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return np.asarray(x).astype(np.float64)
    return x


def _is_mask(x: Any) -> bool:
    array = np.asarray(x).astype(np.float64)
    return bool(np.isfinite(array).all() and (array >= 0).all())


def _other_keys(x: jax.Array) -> jax.Array:
    """As many other keys: of one, or of any array of them."""
    fold = lambda key: jax.random.fold_in(key, 1)
    axes = x.ndim if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.ndim - 1
    for _ in range(axes):
        fold = jax.vmap(fold)
    return fold(jnp.asarray(x))


def _is_key(x: Any) -> bool:
    # A key of the older kind is two unsigned integers, and data of that shape is rare.
    old = x.dtype == jnp.uint32 and x.shape[-1:] == (2,)
    return old or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
