"""One small function per primitive, found by the primitive's name."""

from collections.abc import Callable, Sequence

from microbatch.jax._factored._context import Context
from microbatch.jax._factored._values import Value

Rule = Callable[..., "Value | Sequence[Value] | None"]
"""Called as ``rule(ctx, eqn, *values)``; None means that the operation needs entries."""

RULES: dict[str, Rule] = {}
"""Run where an input is factored or known to be zero."""

MAKERS: dict[str, Rule] = {}
"""Run where all inputs are arrays and examples differ in them; their result may be factored."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of the primitives called `names`."""
    return _into(RULES, names)


def maker(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule that makes factored values of arrays."""
    return _into(MAKERS, names)


def _into(table: dict[str, Rule], names: tuple[str, ...]):
    def register(function: Rule) -> Rule:
        for name in names:
            table[name] = function
        return function

    return register


__all__ = ["MAKERS", "RULES", "Context", "Rule", "maker", "rule"]
