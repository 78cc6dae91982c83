"""Evaluating a traced program equation by equation."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn


def bind(eqn: JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """The equation's outputs on `values`, with other parameters where given."""
    bound = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **bound)
    return list(out) if eqn.primitive.multiple_results else [out]
