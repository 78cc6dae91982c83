"""Which values of a program are sums over the devices that hold the rows, or linear in such sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from microbatch.jax._graph import Graph, Node
from microbatch.jax._rows import varying_axes

# Linear in one operand, whatever the lengths of its axes; and those whose parameters hold lengths.
UNARY = frozenset(["neg", "transpose", "copy", "copy_p", "squeeze", "stop_gradient"])
SIZED = frozenset(["slice", "rev"])
RESHARDS = frozenset(["reshard", "sharding_constraint"])
ADDITIONS = frozenset(["add", "add_any", "sub"])
PSUMS = frozenset(["psum_invariant"])


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
        return jax.reshard(partial, NamedSharding(self.mesh, PartitionSpec(*spec_of(aval))))

    def partial_spec(self, aval: Any) -> PartitionSpec:
        """How a partial sum of this type lies: unreduced over the rows' axes."""
        spec = [tuple(n for n in _ordered(entry) if n not in self.axes) for entry in spec_of(aval)]
        return PartitionSpec(*(entry or None for entry in spec), unreduced=self.axes)

    def shape_on_one(self, aval: Any) -> tuple[int, ...]:
        """The shape of a partial sum on one device."""
        if self.mesh is None:
            return tuple(aval.shape)
        whole = PartitionSpec(*self.partial_spec(aval).partitions)
        return NamedSharding(self.mesh, whole).shard_shape(aval.shape)

    def zeros(self, aval: Any) -> jax.Array:
        """The partial sum of nothing."""
        if self.mesh is None:
            missing = tuple(sorted(self.axes | varying_axes(aval)))
            return lax.pcast(jnp.zeros(aval.shape, aval.dtype), missing, to="varying")
        sharding = NamedSharding(self.mesh, self.partial_spec(aval))
        return jnp.zeros(aval.shape, aval.dtype, out_sharding=sharding)


@dataclass(frozen=True)
class RowSums:
    """What is known about the values of a graph.

    Attributes:
      graph: the operations' values.
      rows: over what the rows lie.
      maker: the operation that makes each value.
      partial: the values found to be sums over devices, or linear in them.
    """

    graph: Graph
    rows: RowAxes
    maker: dict[int, Node]
    partial: set[int]

    def is_partial(self, ref: Any) -> bool:
        """Whether a value is a sum over devices, or linear in such sums."""
        return not isinstance(ref, Literal) and ref in self.partial

    def has_rows(self, ref: Any) -> bool:
        """Whether a value lies over the rows' mesh axes."""
        aval = self.graph.aval(ref)
        if self.rows.mesh is None:
            return not isinstance(ref, Literal) and bool(varying_axes(aval) & self.rows.axes)
        return any(names_of(entry) & self.rows.axes for entry in spec_of(aval))

    def is_zero(self, ref: Any) -> bool:
        """Whether a value is made of literal zeros."""
        if isinstance(ref, Literal):
            return not np.any(ref.val)
        node = self.maker.get(ref)
        same = ("broadcast_in_dim", "reshard", "convert_element_type", "pvary", "pcast")
        return node is not None and node.name in same and self.is_zero(node.inputs[0])

    def is_sum(self, node: Node) -> bool:
        """Whether the operation adds up over the devices, and does nothing else that a device cannot do alone."""
        if node.eqn is None:
            return False
        params, (first, *others) = node.eqn.params, node.inputs or (None,)
        if self.rows.mesh is None:
            return node.name in PSUMS and frozenset(params["axes"]) == self.rows.axes
        # A product with what is a sum already is a product of two sums.
        if not any(map(self.has_rows, node.inputs)) or any(map(self.is_partial, node.inputs)):
            return False
        match node.name:
            case "reduce_sum":
                return self.summed(first, params["axes"])
            case "dot_general":
                (left, right), _ = params["dimension_numbers"]
                return self.summed(first, left) and self.summed(others[0], right)
            case "conv_general_dilated":
                numbers = params["dimension_numbers"]
                return (
                    params["feature_group_count"] == params["batch_group_count"] == 1
                    and not self.is_split(*node.inputs)
                    and self.summed(first, (numbers.lhs_spec[1],))
                    and self.summed(others[0], (numbers.rhs_spec[1],))
                )
        return False

    def is_linear(self, node: Node, out: int) -> bool:
        """Whether the operation is linear in sums over devices."""
        if node.eqn is None:
            return False
        partial = [self.is_partial(x) for x in node.inputs]
        others = [x for x, p in zip(node.inputs, partial, strict=True) if not p]
        if not any(partial) or any(map(self.has_rows, others)):
            return False
        whole = not self.is_split(out, *node.inputs)
        match node.name:
            case "convert_element_type":
                old = self.graph.aval(node.inputs[0]).dtype
                return _keeps_sums(old, node.eqn.params["new_dtype"])
            case "broadcast_in_dim":
                return not self.has_rows(out)
            case "mul":
                return sum(partial) == 1
            case "div":
                return partial == [True, False]
            case "dot_general":
                return whole and sum(partial) == 1
            case "pad":
                return whole and partial == [True, False] and self.is_zero(node.inputs[1])
            case "concatenate":
                return whole and all(partial)
            case "reduce_sum":
                axes = node.eqn.params["axes"]
                return not any(self._elsewhere(node.inputs[0])[axis] for axis in axes)
            case "reshape":
                lengths = [
                    [n for n in self.graph.aval(ref).shape if n != 1]
                    for ref in (node.inputs[0], out)
                ]
                return whole or lengths[0] == lengths[1]
        if node.name in RESHARDS:
            return self._elsewhere(out) == self._elsewhere(node.inputs[0])
        return node.name in UNARY or node.name in ADDITIONS or (whole and node.name in SIZED)

    def summed(self, ref: Any, axes: Sequence[int]) -> bool:
        """Whether the rows lie over these axes of an array, and over no other."""
        spec = spec_of(self.graph.aval(ref))
        here = frozenset().union(*(names_of(spec[axis]) for axis in axes))
        others = [names_of(entry) for axis, entry in enumerate(spec) if axis not in axes]
        return here == self.rows.axes and not any(o & self.rows.axes for o in others)

    def is_split(self, *refs: Any) -> bool:
        """Whether a value lies over further mesh axes, so that its lengths on a device are others."""
        return self.rows.mesh is not None and any(any(self._elsewhere(ref)) for ref in refs)

    def _elsewhere(self, ref: Any) -> list[frozenset[str]]:
        """For each array axis, the mesh axes that are not the rows'."""
        return [names_of(entry) - self.rows.axes for entry in spec_of(self.graph.aval(ref))]


def spec_of(aval: Any) -> tuple[Any, ...]:
    """One entry per array axis: the mesh axes over which it lies."""
    sharding = getattr(aval, "sharding", None)
    given = () if sharding is None else tuple(sharding.spec.partitions)
    return (*given, *(None,) * (len(aval.shape) - len(given)))


def names_of(entry: Any) -> frozenset[str]:
    """The mesh axes of one array axis."""
    return frozenset(_ordered(entry))


def _ordered(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _keeps_sums(old: Any, new: Any) -> bool:
    """Whether a conversion is linear: not to integers, nor from complex to real."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    rank = lambda dtype: next((i for i, k in enumerate(kinds) if jnp.issubdtype(dtype, k)), -1)
    return 0 <= rank(old) <= rank(new)
