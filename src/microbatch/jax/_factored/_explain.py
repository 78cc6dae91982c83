"""How each statistic of a per-example function is computed, told before anything runs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from microbatch._tables import text_table
from microbatch.jax._factored._context import Context, Event
from microbatch.jax._factored._evaluate import plan_run
from microbatch.jax._factored._values import is_factored, sites_of


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf.

    Attributes:
      leaf: the path of the output leaf, or the name that the program gives it (`jax.ad_checkpoint.checkpoint_name`).
      shape: of one example's value.
      statistics: pairs of a statistic (``"norm"``, ``"dot"``, ``"sum"``) and how it is computed: ``"factored"``, ``"Gram"``
        or ``"dense"``.
      forced_by: the primitive that asked for entries of a factored value, or None.
      bytes: of the factors, or of the entries where these are made, for all examples of one microbatch.
    """

    leaf: str
    shape: tuple[int, ...]
    statistics: tuple[tuple[str, str], ...]
    forced_by: str | None
    bytes: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns; prints as a table, one row per leaf, the largest first.

    Attributes:
      engine: the engine that was asked for.
      microbatch_size: the examples in the microbatch that was looked at.
      rows: one `Row` per leaf.
    """

    engine: str
    microbatch_size: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = ("leaf", "shape", "computed", "made dense by", "bytes")
        lines = text_table([head, *map(_cells, self.rows)], words=range(len(head)))
        title = f"engine={self.engine!r}, {self.microbatch_size} examples in a microbatch"
        return "\n".join([title, *lines])


def explain(
    fun: Callable[..., Any],
    args: tuple,
    in_axes: Any = 0,
    *,
    aggregate: Any = "stack",
    weight: Any = None,
    engine: str = "auto",
    norms: str = "gram",
    vmap_fn: Callable[..., Callable] = jax.vmap,
) -> Explanation:
    """Tells how `evaluate`, called with the same arguments, computes each leaf's statistics; nothing is run.

    Args:
      fun: see `evaluate`, and so for the other arguments; arrays may be `jax.ShapeDtypeStruct`.
      args: of one microbatch.
      in_axes: a tree prefix of `args`.
      aggregate: a tree prefix of the outputs.
      weight: ``[m]`` or None.
      engine: ``"auto"``, ``"factored"`` or ``"vmap"``.
      norms: ``"gram"`` or ``"safe"``.
      vmap_fn: `jax.vmap` or a partial of it.

    Returns:
      An `Explanation`.
    """
    if engine == "vmap":
        shapes = _stacked(fun, args, in_axes, vmap_fn)
        rows = [_dense_row(path, leaf.shape, leaf.dtype) for path, leaf in shapes]
        size = rows and shapes[0][1].shape[0]
        return Explanation(engine, int(size or 0), _by_size(rows))
    ctx, paths, values = plan_run(fun, args, in_axes, aggregate, weight, engine, norms, vmap_fn)
    return Explanation(engine, ctx.batch_size, _by_size(_rows(ctx, paths, values)))


def _rows(ctx: Context, paths: list[str], values: list) -> list[Row]:
    labels = dict(ctx.recorder.labels)
    rows = []
    for path, value in zip(paths, values, strict=True):
        if not is_factored(value):
            rows.append(_dense_row(path, (ctx.batch_size, *value.shape), value.dtype))
        for site in sites_of(value):
            labels.setdefault(site, path)
    by_label: dict[str, list[Event]] = {}
    for event in ctx.recorder.events:
        names = {labels[site] for site in event.sites if site in labels}
        for name in names or {f"a value made by {_maker(ctx, event)}"}:
            by_label.setdefault(name, []).append(event)
    for label, events in by_label.items():
        made = [e for e in events if e.statistic == "made"]
        asked = [e for e in events if e.statistic not in ("made", "entries")]
        forced = [e.primitive for e in events if e.statistic == "entries"]
        size = max(
            (e.bytes if forced or e.how == "dense" else e.factor_bytes for e in made), default=0
        )
        statistics = tuple(dict.fromkeys((e.statistic, e.how) for e in asked))
        shape = (made or events)[0].shape
        forced_by = ", ".join(dict.fromkeys(forced)) or None
        rows.append(Row(label, shape, statistics, forced_by, int(size)))
    return rows


def _maker(ctx: Context, event: Event) -> str:
    made = [e for e in ctx.recorder.events if e.statistic == "made" and e.sites == event.sites]
    return made[0].primitive if made else event.primitive


def _dense_row(path: str, shape: tuple[int, ...], dtype) -> Row:
    is_key = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    size = math.prod(shape) * (4 if is_key else jax.numpy.dtype(dtype).itemsize)
    return Row(path, tuple(shape[1:]), (("entries", "dense"),), None, size)


def _stacked(fun, args, in_axes, vmap_fn):
    out = jax.eval_shape(lambda a: vmap_fn(fun, in_axes=in_axes)(*a), tuple(args))
    leaves = jax.tree_util.tree_flatten_with_path(out)[0]
    return [(jax.tree_util.keystr(path) or "output", leaf) for path, leaf in leaves]


def _by_size(rows: list[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _cells(row: Row) -> tuple[str, ...]:
    computed = ", ".join(f"{statistic}: {how}" for statistic, how in row.statistics)
    shape = "x".join(map(str, row.shape)) or "scalar"
    return (row.leaf, shape, computed or "entries: dense", row.forced_by or "-", f"{row.bytes:,}")
