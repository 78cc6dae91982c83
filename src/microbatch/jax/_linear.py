"""A linear map that is given together with its transpose, so that a derivative can be evaluated piece by piece.

JAX derives reverse mode by transposing the tangent program equation by equation. Here the transpose of a whole
loop is known: it is another loop that evaluates each microbatch again. `linear_map` states both, and keeps forward mode,
reverse mode, `vmap`, `jit` and higher derivatives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Forward = Callable[[list[Any], list[Any]], list[Any]]
Transposed = Callable[[list[Any], list[Any | None]], list[Any]]


def linear_map(
    forward: Forward,
    transposed: Transposed,
    residuals: Sequence[Any],
    tangents: Sequence[Any],
    out_types: Sequence[Any],
) -> list[Any]:
    """``forward(residuals, tangents)``, linear in `tangents`; nothing is traced until it is needed.

    Args:
      forward: maps residuals and tangents to outputs of `out_types`. It closes over no array.
      transposed: maps residuals and the outputs' cotangents (None for zero) to the tangents' cotangents. It
        closes over no array.
      residuals: arrays in which the two need not be linear.
      tangents: arrays in which the map is linear.
      out_types: the outputs' abstract values.
    """
    return linear_map_p.bind(
        *residuals,
        *tangents,
        forward=forward,
        transposed=transposed,
        out_types=tuple(out_types),
        num_residuals=len(residuals),
    )


linear_map_p = Primitive("microbatch_linear_map")
linear_map_p.multiple_results = True


def _evaluate(
    *args: Any, forward: Forward, transposed: Transposed, out_types: Any, num_residuals: int
) -> list[Any]:
    return forward(list(args[:num_residuals]), list(args[num_residuals:]))


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    count = params["num_residuals"]
    if all(type(t) is ad.Zero for t in tangents[:count]):
        linear = [ad.instantiate_zeros(t) for t in tangents[count:]]
        out = linear_map_p.bind(*primals, **params)
        return out, linear_map_p.bind(*primals[:count], *linear, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moving(*values: Any) -> list[Any]:
        args = list(primals)
        for i, value in zip(moving, values, strict=True):
            args[i] = value
        return _evaluate(*args, **params)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _transpose(cotangents: Any, *args: Any, **params: Any) -> list[Any]:
    count = params["num_residuals"]
    given = [
        None if type(ct) is ad.Zero else jnp.asarray(ct, aval.dtype)
        for ct, aval in zip(cotangents, params["out_types"], strict=True)
    ]
    out = params["transposed"](list(args[:count]), given)
    return [None] * count + out


def _batch(axis_data: Any, args: Any, dims: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    forward, transposed = params["forward"], params["transposed"]
    count, size = params["num_residuals"], axis_data.size
    mapped = mapped_axes(dims)
    if all(axis is None for axis in mapped):
        out = linear_map_p.bind(*args, **params)
        return out, [dims[0]] * len(out)
    residual_axes, tangent_axes = mapped[:count], mapped[count:]
    options = vmap_options(axis_data)

    def batched_forward(residuals: list[Any], tangents: list[Any]) -> list[Any]:
        return jax.vmap(forward, (residual_axes, tangent_axes), 0, **options)(residuals, tangents)

    def batched_transposed(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        given = [None if ct is None else 0 for ct in cotangents]
        out = jax.vmap(transposed, (residual_axes, given), 0, **options)(residuals, cotangents)
        # A tangent shared by the whole axis gathers the cotangents of all of it.
        return [
            jnp.sum(ct, 0) if axis is None else jnp.moveaxis(ct, 0, axis)
            for ct, axis in zip(out, tangent_axes, strict=True)
        ]

    def with_axis(aval: Any) -> Any:
        # What varies inside `shard_map`, and how it lies on an explicit mesh, is part of the type.
        spec = aval.sharding.spec
        spec = spec.update(partitions=(axis_data.explicit_mesh_axis, *spec.partitions))
        shape = (size, *aval.shape)
        return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))

    params |= {
        "forward": batched_forward,
        "transposed": batched_transposed,
        "out_types": tuple(map(with_axis, params["out_types"])),
    }
    out = linear_map_p.bind(*args, **params)
    return out, [0] * len(out)


def mapped_axes(dims: Any) -> list[int | None]:
    """Where each operand of a batching rule is mapped, as `vmap`'s in_axes say it."""
    return [None if dim is None or type(dim).__name__ == "NotMapped" else dim for dim in dims]


def vmap_options(axis_data: Any) -> dict[str, Any]:
    """The options of the `vmap` that calls a batching rule."""
    options = {
        "axis_size": axis_data.size,
        "axis_name": axis_data.name,
        "spmd_axis_name": axis_data.spmd_name,
    }
    return {key: value for key, value in options.items() if value is not None}


linear_map_p.def_impl(_evaluate)
linear_map_p.def_abstract_eval(lambda *_, out_types, **__: list(out_types))
ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.fancy_primitive_batchers[linear_map_p] = _batch
mlir.register_lowering(linear_map_p, mlir.lower_fun(_evaluate, multiple_results=True))
