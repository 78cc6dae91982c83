"""A traced program as one flat list of operations, so that it can be cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from microbatch.jax._programs import bind

CALLS = frozenset(
    [
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "remat",
        "remat2",
        "checkpoint",
    ]
)


@dataclass(frozen=True)
class Node:
    """One operation: an equation, or a function of the values.

    Attributes:
      eqn: the equation; None where `apply` stands for it.
      inputs: literals, or numbers of values.
      outputs: numbers of values.
      apply: maps the inputs' values to the outputs'.
    """

    eqn: JaxprEqn | None
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    apply: Callable[[list[Any]], Sequence[Any]] | None = None

    @property
    def name(self) -> str:
        """The primitive's name."""
        return "" if self.eqn is None else self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The equation's parameters."""
        return {} if self.eqn is None else self.eqn.params

    def run(self, values: list[Any]) -> Sequence[Any]:
        """The outputs' values."""
        if self.apply is not None:
            return self.apply(values)
        assert self.eqn is not None
        return bind(self.eqn, values)


@dataclass
class Graph:
    """A program without calls: the operations in order; values are numbered.

    Attributes:
      avals: the abstract value of each number.
      consts: the values that are known.
      nodes: the operations, each after those that it needs.
    """

    avals: list[Any] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def value(self, aval: Any) -> int:
        """A new value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def add(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Adds a program's operations, those of the programs that it calls included, and returns its outputs."""
        env = dict(zip(jaxpr.constvars, map(self._constant, consts), strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        read = lambda atom: atom if isinstance(atom, Literal) else env[atom]
        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            inner = _called(eqn)
            if inner is None:
                outputs = [self.value(v.aval) for v in eqn.outvars]
                self.nodes.append(Node(eqn, inputs, tuple(outputs)))
            else:
                if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
                    inputs = self._behind_barrier(inputs)
                outputs = self.add(inner.jaxpr, inner.consts, inputs)
            env |= zip(eqn.outvars, outputs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def aval(self, ref: Any) -> Any:
        """The abstract value of a literal or a number."""
        return ref.aval if isinstance(ref, Literal) else self.avals[ref]

    def _constant(self, const: Any) -> int:
        number = self.value(jax.typeof(const))
        self.consts[number] = const
        return number

    def _behind_barrier(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs of a part that is evaluated again; the compiler must not see that it was before."""
        real = [x for x in inputs if not isinstance(x, Literal)]
        hidden = [self.value(self.avals[x]) for x in real]
        self.nodes.append(Node(None, tuple(real), tuple(hidden), lax.optimization_barrier))
        found = iter(hidden)
        return tuple(x if isinstance(x, Literal) else next(found) for x in inputs)


def needed_for(nodes: Sequence[Node], refs: Sequence[Any]) -> tuple[list[Node], set[int]]:
    """The operations that `refs` depend on, in order, and all values among them."""
    needed = {ref for ref in refs if not isinstance(ref, Literal)}
    found = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs):
            found.append(node)
            needed |= {x for x in node.inputs if not isinstance(x, Literal)}
    return found[::-1], needed


def evaluated(nodes: Sequence[Node], refs: Sequence[Any], env: dict[int, Any]) -> list[Any]:
    """The values of `refs`, from those in `env`."""
    env = dict(env)
    for node in needed_for(nodes, refs)[0]:
        values = [read(x, env) for x in node.inputs]
        env |= zip(node.outputs, node.run(values), strict=True)
    return [read(ref, env) for ref in refs]


def read(ref: Any, env: dict[int, Any]) -> Any:
    """The value of a literal or a number."""
    return ref.val if isinstance(ref, Literal) else env[ref]


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    if eqn.primitive.name not in CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        if isinstance(inner, ClosedJaxpr):
            return inner
        if isinstance(inner, Jaxpr) and not inner.constvars:
            return ClosedJaxpr(inner, ())
    return None
