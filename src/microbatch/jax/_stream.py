"""`accumulate` in JAX: a fold over microbatches that arrive one after another."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from microbatch._accumulation import AccumulationType, is_accumulator
from microbatch._checks import check_function, name_of
from microbatch._stream import Settings, fold_stream
from microbatch.jax._accumulators import checked_dtype
from microbatch.jax._outputs import accumulators_of
from microbatch.jax._stream_fold import Folding
from microbatch.jax._stream_leaves import with_paths


def accumulate(
    fun: Callable[..., Any],
    accumulator: Any = AccumulationType.SUM,
    *,
    weight_fn: Callable[..., Any] | None = None,
    accumulator_dtype: Any = None,
) -> Callable[..., Any]:
    """Folds `fun` over a stream of microbatches, so that the batch never exists in memory.

    The function returned by ``accumulate(fun, accumulator)`` is equivalent to::

        def accumulated(*args, microbatches):
            carry = init(typeof(fun(*args, *first)))
            for i, microbatch in enumerate(microbatches):
                carry = update(carry, fun(*args, *microbatch), i)
            return finalize(carry)

    `fun` is compiled together with the update, once for all calls with the same shapes, as `jax.jit` compiles; the
    program is kept as long as `fun` is, so define `fun` once, outside the training loop. The accumulator's memory is
    used again for the next one, and a microbatch travels to the device while the one before it is computed; at most
    two are there.

    Args:
      fun: called as ``fun(*args, *microbatch)``; a microbatch's arrays are ``[m, ...]`` with m rows, which may differ
        between microbatches (a number of rows that is new compiles anew).
      accumulator: how the outputs combine: one kind, or a tree of kinds that is a prefix of the output. A `Carry`
        names one of `args`.
      weight_fn: maps the arguments of `fun` to the microbatch's weight in MEAN and RUNNING_MEAN, in any unit (rows,
        valid tokens). Default: rows. A microbatch of weight 0 is skipped.
      accumulator_dtype: holds sums and means in this dtype. Default: float32 for float16 and bfloat16, the output's
        own dtype for others. The result has the output's dtype.

    Returns:
      A function of ``*args``, arrays as they are for `jax.jit`, and other leaves (functions, strings, Python's
      numbers) as constants of the program: a new value compiles anew, so a number that changes is given as an array.
      Its keywords are

      - `microbatches`: an iterable that is consumed once, one element ahead; each element is a tuple or list of
        arguments, or a single argument that is neither. Arrays of any library that NumPy can read (a PyTorch
        DataLoader's tensors) are copied before the next element is asked for. Progress is the iterable's business:
        ``microbatches=tqdm(loader)``.
      - `checkpoint`: a file in which the state is saved as the stream goes by (at most a twentieth of the time is
        spent on it) and which is deleted at the end. A killed run that is started again with the same stream reads
        past what is in the file and continues, bit for bit. Needs safetensors.
      - `out`: an array, or a tree like the output with None elsewhere, to write CONCAT rows into, with room for all
        rows. The result is the part of it that was written. CONCAT gives NumPy arrays in the host's memory: the
        memory of the device does not depend on the stream's length.

    Raises:
      EmptyStream: the iterable had no element, so that not even the shapes of the result are known; or MAX and MIN of
        zero rows.
      BatchError: rows are to be counted and a microbatch has none, or unequal ones; or it holds what is no array.
      AccumulatorError: as for `microbatch`.
      CheckpointError: the file belongs to another function, other arguments, or another tree, dtype or size of
        microbatches.
      MicrobatchError: it is called inside `jax.jit`, `jax.grad` or another transformation.

    ================  ================================================================
    stream            result
    ================  ================================================================
    one element       ``jax.jit(fun)(*args, *element)``, bit for bit
    total weight 0    zeros for SUM and MEAN, never NaN
    weight 0          skipped; its CONCAT rows are zeros
    zero rows         skipped; `fun` is traced for shapes, not run
    a NaN output      NaN, as the whole batch would give
    a scalar, CONCAT  ``[number of microbatches]``
    ================  ================================================================

    >>> import jax, jax.numpy as jnp
    >>> stream = [(jnp.array([1.0, 2.0]),), (jnp.array([6.0]),)]
    >>> mean = accumulate(lambda scale, x: scale * x.mean(), AccumulationType.MEAN)
    >>> float(mean(10.0, microbatches=stream))
    30.0

    A full-batch gradient, three optimizer steps, one compilation:

    >>> gradient = accumulate(jax.grad(lambda w, x: jnp.mean((w - x) ** 2)), AccumulationType.MEAN)
    >>> w = jnp.array(0.0)
    >>> for _ in range(3):
    ...     w = w - 0.5 * gradient(w, microbatches=stream)
    >>> float(w)
    3.0
    """
    where = f"accumulate({name_of(fun)})"
    check_function(where, "fun", fun)
    if weight_fn is not None:
        check_function(where, "weight_fn", weight_fn)
    kinds = accumulators_of(where, accumulator)
    paths = [f"output{path}" for path, _ in with_paths(accumulator, is_leaf=is_accumulator)]
    entries = tuple(zip(paths, kinds, strict=True))
    dtype = checked_dtype(where, accumulator_dtype)
    settings = Settings(where, accumulator, entries, weight_fn, dtype)

    def accumulated(
        *args: Any,
        microbatches: Iterable[Any],
        checkpoint: str | os.PathLike[str] | None = None,
        out: Any = None,
    ) -> Any:
        return fold_stream(Folding(fun, settings, args, out), microbatches, checkpoint)

    return accumulated
