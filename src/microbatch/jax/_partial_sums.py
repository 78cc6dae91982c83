"""Sums over devices, put off until after the loop.

Where rows lie over devices, whatever sums over rows (a loss, a gradient) costs a reduction over the devices, and in a loop
one in every microbatch. All that follows such a sum on its way out of the microbatch is linear as a rule: a division
by the number of rows, a transpose, an addition. Linear operations and the sum over devices can be exchanged. So
the traced microbatch is cut where its sums begin: the part before runs as written, the sums and what follows run on
each device for its own rows, the loop adds up these partial sums, and one reduction afterwards adds up the devices.

On a mesh with explicit axes partial sums have JAX's *unreduced* type; inside `shard_map` they vary over its axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding, PartitionSpec

from microbatch.jax._programs import bind
from microbatch.jax._rows import varying_axes

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
# Linear in one operand, whatever the lengths of its axes; and those whose parameters hold lengths.
UNARY = frozenset(["neg", "transpose", "copy", "copy_p", "squeeze"])
SIZED = frozenset(["reshape", "broadcast_in_dim", "reduce_sum", "slice", "rev"])
RESHARDS = frozenset(["reshard", "sharding_constraint"])
ADDITIONS = frozenset(["add", "add_any", "sub"])
PSUMS = frozenset(("psum_invariant",))


@dataclass(frozen=True)
class RowAxes:
    """Over what the rows lie.

    Attributes:
      axes: the mesh axes.
      mesh: the mesh where these axes are explicit; None inside `shard_map`.
      through_sharded: whether sums that end sharded over these axes are put off, too.
    """

    axes: frozenset[str]
    mesh: Any = None
    through_sharded: bool = True

    def added_up(self, partial: jax.Array, aval: Any) -> jax.Array:
        """A partial sum added up over the devices, laid out like `aval`."""
        if self.mesh is None:
            return lax.psum(partial, tuple(sorted(self.axes)))
        return jax.reshard(partial, NamedSharding(self.mesh, PartitionSpec(*_spec(aval))))


@dataclass(frozen=True)
class _Node:
    """One operation: an equation, or the barrier before a recomputed part (None)."""

    eqn: JaxprEqn | None
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]


@dataclass
class _Graph:
    """A program without calls: values are numbers, or literals."""

    avals: list[Any] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    nodes: list[_Node] = field(default_factory=list)

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, const: Any) -> int:
        number = self.value(jax.typeof(const))
        self.consts[number] = const
        return number

    def add(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Adds a program's operations, those of the programs that it calls included."""
        env = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        read = lambda atom: atom if isinstance(atom, Literal) else env[atom]
        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            inner = _called(eqn)
            if inner is None:
                outputs = [self.value(v.aval) for v in eqn.outvars]
                self.nodes.append(_Node(eqn, inputs, tuple(outputs)))
            else:
                if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
                    inputs = self.behind_barrier(inputs)
                outputs = self.add(inner.jaxpr, inner.consts, inputs)
            env |= zip(eqn.outvars, outputs, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def behind_barrier(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Values that the compiler cannot tell to be the same as the inputs, so that what is made of them is made again."""
        real = [x for x in inputs if not isinstance(x, Literal)]
        hidden = [self.value(self.avals[x]) for x in real]
        self.nodes.append(_Node(None, tuple(real), tuple(hidden)))
        found = iter(hidden)
        return tuple(x if isinstance(x, Literal) else next(found) for x in inputs)


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


class Program:
    """A traced program, with the sums over devices found in it.

    Attributes:
      rows: over what the rows lie.
      wrap: applied to every part of the program that is evaluated, for example `canonical_convolutions`.
      partial: for each output, whether it can be given as a partial sum.
    """

    def __init__(self, closed: ClosedJaxpr, rows: RowAxes, wrap: Callable[..., Any]) -> None:
        self.rows = rows
        self.wrap = wrap
        self.graph = _Graph()
        self.inputs = [self.graph.value(v.aval) for v in closed.jaxpr.invars]
        self.outputs = self.graph.add(closed.jaxpr, closed.consts, self.inputs)
        self.maker = {out: node for node in self.graph.nodes for out in node.outputs}
        self.known: dict[int, bool] = {}
        for node in self.graph.nodes:
            for out in node.outputs:
                self.known[out] = self._is_partial(node, out)
        self.partial = [self.is_partial(out) and self._may_end(out) for out in self.outputs]

    def is_partial(self, ref: Any) -> bool:
        """Whether a value is a sum over devices, or linear in such sums."""
        return not isinstance(ref, Literal) and self.known.get(ref, False)

    def run(
        self,
        args: Sequence[Any],
        wanted: Sequence[bool],
        finish: Callable[[list[Any], list[Any]], list[Any]] = lambda sums, extra: sums,
        extra: Sequence[Any] = (),
    ) -> list[Any]:
        """The outputs, those that are `wanted` as partial sums.

        Args:
          args: the program's inputs.
          wanted: for each output, whether it is given as a partial sum; only where `partial` is true.
          finish: a linear function of all partial sums and `extra`, run on each device.
          extra: replicated arrays.
        """
        sums = [out for out, want in zip(self.outputs, wanted, strict=True) if want]
        frontier = self._frontier(sums)
        plain = [out for out, want in zip(self.outputs, wanted, strict=True) if not want]
        evaluated = self.wrap(lambda args: self._evaluated([*plain, *frontier], args))(list(args))
        whole, values = evaluated[: len(plain)], evaluated[len(plain) :]
        values = dict(zip(frontier, values, strict=True))
        partial = iter(self._sums(sums, values, finish, list(extra)) if sums else [])
        whole = iter(whole)
        return [next(partial if want else whole) for want in wanted]

    # What is a sum over devices.

    def _is_partial(self, node: _Node, out: int) -> bool:
        if node.eqn is None:
            return False
        name = node.eqn.primitive.name
        if self._is_sum(node):
            return True
        partial = [self.is_partial(x) for x in node.inputs]
        others = [x for x, p in zip(node.inputs, partial, strict=True) if not p]
        if not any(partial) or any(map(self._has_rows, others)):
            return False
        whole = not self._is_split(out, *node.inputs)
        match name:
            case "convert_element_type":
                return _keeps_sums(self._aval(node.inputs[0]).dtype, node.eqn.params["new_dtype"])
            case "mul":
                return sum(partial) == 1
            case "div":
                return partial == [True, False]
            case "dot_general":
                return whole and sum(partial) == 1
            case "pad":
                return whole and partial == [True, False] and self._is_zero(node.inputs[1])
            case "concatenate":
                return whole and all(partial)
        if name in RESHARDS:
            return self._elsewhere(out) == self._elsewhere(node.inputs[0])
        return name in UNARY or name in ADDITIONS or (whole and name in SIZED)

    def _is_sum(self, node: _Node) -> bool:
        eqn, name = node.eqn, node.eqn.primitive.name
        if self.rows.mesh is None:
            return name in PSUMS and frozenset(eqn.params["axes"]) == self.rows.axes
        if not any(self._has_rows(x) for x in node.inputs):
            return False
        if name == "reduce_sum":
            return self._summed(node.inputs[0], eqn.params["axes"])
        if name == "dot_general":
            (left, right), _ = eqn.params["dimension_numbers"]
            return self._summed(node.inputs[0], left) and self._summed(node.inputs[1], right)
        if name == "conv_general_dilated":
            numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
            left, right = (numbers.lhs_spec[1],), (numbers.rhs_spec[1],)
            plain = groups == 1 and eqn.params["batch_group_count"] == 1
            plain &= not self._is_split(*node.inputs)
            return plain and all(map(self._summed, node.inputs, (left, right)))
        if name == "scatter-add":
            return self._is_scattered_sum(node)
        return False

    def _is_scattered_sum(self, node: _Node) -> bool:
        """Whether rows' updates are added to zeros: the gradient of a look-up."""
        operand, indices, updates = node.inputs
        plain = not node.eqn.params["dimension_numbers"].operand_batching_dims
        window = node.eqn.params["dimension_numbers"].update_window_dims
        rows = [i for i in range(len(self._aval(updates).shape)) if i not in window]
        axes = range(len(self._aval(indices).shape) - 1)
        return (
            plain
            and self._is_zero(operand)
            and not self._is_split(*node.inputs)
            and self._summed(updates, rows)
            and self._summed(indices, axes)
        )

    def _is_zero(self, ref: Any) -> bool:
        if isinstance(ref, Literal):
            return not jnp.any(ref.val)
        node = self.maker.get(ref)
        names = ("broadcast_in_dim", "reshard", "convert_element_type")
        is_same = node is not None and node.eqn is not None and node.eqn.primitive.name in names
        return is_same and self._is_zero(node.inputs[0])

    def _summed(self, ref: Any, axes: Sequence[int]) -> bool:
        """Whether the rows' mesh axes are those of the summed array axes, and of no other."""
        spec = _spec(self._aval(ref))
        names = [_names(spec[axis]) for axis in axes]
        others = [_names(entry) for axis, entry in enumerate(spec) if axis not in axes]
        together = frozenset().union(*names)
        return together == self.rows.axes and not any(o & self.rows.axes for o in others)

    def _may_end(self, ref: Any) -> bool:
        return self.rows.through_sharded or not self._has_rows(ref)

    def _has_rows(self, ref: Any) -> bool:
        """Whether a value lies over the rows' mesh axes."""
        if self.rows.mesh is None:
            return not isinstance(ref, Literal) and bool(
                varying_axes(self._aval(ref)) & self.rows.axes
            )
        return any(_names(entry) & self.rows.axes for entry in _spec(self._aval(ref)))

    def _is_split(self, *refs: Any) -> bool:
        """Whether a value lies over further mesh axes, so that its lengths on a device are others."""
        if self.rows.mesh is None:
            return False
        return any(any(self._elsewhere(ref)) for ref in refs)

    def _elsewhere(self, ref: Any) -> list[frozenset[str]]:
        """For each array axis, the mesh axes that are not the rows'."""
        return [_names(entry) - self.rows.axes for entry in _spec(self._aval(ref))]

    def _aval(self, ref: Any) -> Any:
        return ref.aval if isinstance(ref, Literal) else self.graph.avals[ref]

    # Evaluation, before the sums and from the sums on.

    def _frontier(self, sums: Sequence[int]) -> list[int]:
        """What the sums, and all that is linear in them, are made of."""
        found, stack, seen = [], list(sums), set()
        while stack:
            ref = stack.pop()
            if isinstance(ref, Literal) or ref in seen:
                continue
            seen.add(ref)
            if not self.is_partial(ref):
                found.append(ref)
            else:
                stack.extend(self._needed(self.maker[ref]))
        return found

    def _needed(self, node: _Node) -> Sequence[Any]:
        return node.inputs[1:] if node.eqn.primitive.name == "scatter-add" else node.inputs

    def _evaluated(self, refs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env = dict(zip(self.inputs, args, strict=True)) | self.graph.consts
        needed = {ref for ref in refs if not isinstance(ref, Literal)}
        nodes = []
        for node in reversed(self.graph.nodes):
            if not needed.isdisjoint(node.outputs):
                nodes.append(node)
                needed |= {x for x in node.inputs if not isinstance(x, Literal)}
        for node in reversed(nodes):
            values = [_read(x, env) for x in node.inputs]
            out = lax.optimization_barrier(values) if node.eqn is None else bind(node.eqn, values)
            env |= zip(node.outputs, out, strict=True)
        return [_read(ref, env) for ref in refs]

    def _sums(
        self, sums: list[int], values: dict[int, Any], finish: Callable[..., Any], extra: list[Any]
    ) -> list[Any]:
        local = self.wrap(lambda values, extra: finish(self._on_device(sums, values), extra))
        if self.rows.mesh is None:
            return local(values, extra)
        partitions = lambda ref: _spec(self._aval(ref))
        mapped = jax.shard_map(
            local,
            mesh=self.rows.mesh,
            in_specs=(
                {ref: PartitionSpec(*partitions(ref)) for ref in values},
                [PartitionSpec()] * len(extra),
            ),
            out_specs=[self.partial_spec(ref) for ref in sums],
            check_vma=False,
        )
        return mapped(values, extra)

    def partial_spec(self, ref: int) -> PartitionSpec:
        """The sharding of a partial sum: unreduced over the rows' axes."""
        spec = [_without(entry, self.rows.axes) for entry in _spec(self._aval(ref))]
        return PartitionSpec(*spec, unreduced=self.rows.axes)

    def _on_device(self, sums: list[int], values: dict[int, Any]) -> list[Any]:
        env = dict(values)

        def of(ref: Any) -> Any:
            if isinstance(ref, Literal):
                return ref.val
            if ref not in env:
                env.update(zip(self.maker[ref].outputs, [self._device_value(self.maker[ref], of)]))
            return env[ref]

        return [of(ref) for ref in sums]

    def _device_value(self, node: _Node, of: Callable[[Any], Any]) -> Any:
        eqn, name = node.eqn, node.eqn.primitive.name
        if name in PSUMS or name in RESHARDS:
            return of(node.inputs[0])
        if name == "scatter-add":
            aval = self._aval(node.outputs[0])
            operands = [jnp.zeros(aval.shape, aval.dtype), *map(of, node.inputs[1:])]
        else:
            operands = list(map(of, node.inputs))
        if name in ADDITIONS:
            # A term that is the same on all devices is counted once, on the first.
            partial = [self.is_partial(x) for x in node.inputs]
            first = lax.axis_index(tuple(sorted(self.rows.axes))) == 0
            operands = [
                x if p else jnp.where(first, x, jnp.zeros_like(x))
                for x, p in zip(operands, partial, strict=True)
            ]
        if self.rows.mesh is None:
            missing = [
                tuple(sorted(self.rows.axes - varying_axes(jax.typeof(x)))) for x in operands
            ]
            operands = [
                lax.pcast(x, axes, to="varying") if axes else x
                for x, axes in zip(operands, missing, strict=True)
            ]
        unsharded = {
            k: None if k in ("out_sharding", "sharding") else v for k, v in eqn.params.items()
        }
        # Not in the equation's own context: its mesh is that of all devices.
        return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(unsharded))


def _read(ref: Any, env: dict[int, Any]) -> Any:
    return ref.val if isinstance(ref, Literal) else env[ref]


def _keeps_sums(old: Any, new: Any) -> bool:
    """Whether a conversion is linear: not to integers, nor from complex to real."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    rank = lambda dtype: next((i for i, k in enumerate(kinds) if jnp.issubdtype(dtype, k)), -1)
    return 0 <= rank(old) <= rank(new)


def _spec(aval: Any) -> tuple[Any, ...]:
    """One entry per array axis: the mesh axes over which it lies."""
    sharding = getattr(aval, "sharding", None)
    given = () if sharding is None else tuple(sharding.spec.partitions)
    return (*given, *(None,) * (len(aval.shape) - len(given)))


def _names(entry: Any) -> frozenset[str]:
    return frozenset((entry,) if isinstance(entry, str) else entry or ())


def _without(entry: Any, axes: frozenset[str]) -> Any:
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return tuple(name for name in names if name not in axes) or None
