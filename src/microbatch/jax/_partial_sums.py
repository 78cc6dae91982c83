"""Sums over devices, put off until after the loop.

Where rows lie over devices, whatever sums over rows (a loss, a gradient) costs a reduction over the devices, and in a loop
one in every microbatch. All that follows such a sum on its way out of the microbatch is linear as a rule: a division
by the number of rows, a transpose, an addition. Linear operations and the sum over devices can be exchanged. So
the traced microbatch is cut where its sums begin: the part before runs as written, the sums and what follows run on
each device for its own rows, the loop adds up these partial sums, and one reduction afterwards adds up the devices.

On a mesh with explicit axes partial sums have JAX's *unreduced* type; inside `shard_map` they vary over its axes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import NamedSharding, PartitionSpec

from microbatch.jax._graph import Graph, Node, evaluated, needed_for
from microbatch.jax._row_sums import ADDITIONS, PSUMS, RESHARDS, RowAxes, RowSums, spec_of
from microbatch.jax._rows import varying_axes


class Program:
    """A traced program, cut at its sums over devices.

    Attributes:
      rows: over what the rows lie.
      wrap: applied to every part of the program that is evaluated, for example `canonical_convolutions`.
      partial: for each output, whether it can be given as a partial sum.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        rows: RowAxes,
        wrap: Callable[..., Any],
        partial_inputs: Sequence[int] = (),
    ) -> None:
        self.rows = rows
        self.wrap = wrap
        self.graph = Graph()
        self.inputs = [self.graph.value(v.aval) for v in closed.jaxpr.invars]
        self.outputs = self.graph.add(closed.jaxpr, closed.consts, self.inputs)
        self.given = {self.inputs[i] for i in partial_inputs}
        self.sums = RowSums(self.graph, rows, {}, set(self.given))
        # What a device needs of a sum's operands, where these are not the equation's own.
        self.operands: dict[int, tuple[Any, ...]] = {}
        self.nodes: list[Node] = []
        for node in self.graph.nodes:
            self._analyse(node)
        may_end = lambda ref: rows.through_sharded or not self.sums.has_rows(ref)
        self.partial = [self.sums.is_partial(out) and may_end(out) for out in self.outputs]

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
          finish: a linear function of all partial sums, and of `extra`, run on each device.
          extra: replicated arrays.
        """
        sums, plain, frontier = self._cut(wanted)
        start = lambda args: dict(zip(self.inputs, args, strict=True)) | self.graph.consts
        before = lambda args: evaluated(self.nodes, [*plain, *frontier], start(args))
        values = self.wrap(before)(list(args))
        whole, values = iter(values[: len(plain)]), values[len(plain) :]
        found = iter(self._on_devices(sums, frontier, values, finish, extra) if sums else [])
        return [next(found if want else whole) for want in wanted]

    def needs_given(self, wanted: Sequence[bool]) -> bool:
        """Whether something that is not linear needs an input that is a partial sum."""
        _, plain, frontier = self._cut(wanted)
        refs = [*plain, *(ref for ref in frontier if ref not in self.given)]
        return not self.given.isdisjoint(needed_for(self.nodes, refs)[1])

    def _analyse(self, node: Node) -> None:
        """Adds an operation, split where a part of it can be put off."""
        for part in self._scan(node) or [node]:
            self.nodes.append(part)
            self.sums.maker.update(dict.fromkeys(part.outputs, part))
        scattered = self._scattered(node)
        if scattered is not None:
            self.operands[node.outputs[0]] = scattered
        for out in node.outputs:
            known = out in self.operands or self.sums.is_sum(node)
            if known or self.sums.is_linear(node, out):
                self.sums.partial.add(out)

    def _cut(self, wanted: Sequence[bool]) -> tuple[list[Any], list[Any], list[int]]:
        """The outputs that are partial sums, those that are not, and what the former are made of."""
        sums = [out for out, want in zip(self.outputs, wanted, strict=True) if want]
        plain = [out for out, want in zip(self.outputs, wanted, strict=True) if not want]
        frontier, stack, seen = [], list(sums), set()
        while stack:
            ref = stack.pop()
            if isinstance(ref, Literal) or ref in seen:
                continue
            seen.add(ref)
            if self.sums.is_partial(ref) and ref not in self.given:
                stack.extend(self.operands.get(ref, self.sums.maker[ref].inputs))
            else:
                frontier.append(ref)
        return sums, plain, frontier

    def _on_devices(
        self,
        sums: list[int],
        frontier: list[int],
        values: list[Any],
        finish: Callable[..., Any],
        extra: Sequence[Any],
    ) -> list[Any]:
        """The sums, and what is linear in them, on each device for its own rows."""
        local = self.wrap(
            lambda values, extra: finish(
                self._on_one(sums, dict(zip(frontier, values, strict=True))), extra
            )
        )
        if self.rows.mesh is None:
            return local(values, list(extra))
        whole = lambda ref: PartitionSpec(*spec_of(self.graph.aval(ref)))
        partial = lambda ref: self.rows.partial_spec(self.graph.aval(ref))
        mapped = jax.shard_map(
            local,
            mesh=self.rows.mesh,
            in_specs=(
                [partial(ref) if ref in self.given else whole(ref) for ref in frontier],
                [PartitionSpec()] * len(extra),
            ),
            out_specs=[partial(ref) for ref in sums],
            check_vma=False,
        )
        return mapped(values, list(extra))

    def _on_one(self, sums: list[int], env: dict[int, Any]) -> list[Any]:
        """The partial sums of one device."""

        def of(ref: Any) -> Any:
            if isinstance(ref, Literal):
                return ref.val
            if ref not in env:
                env[ref] = self._of_own_rows(self.sums.maker[ref], of)
            return env[ref]

        return [of(ref) for ref in sums]

    def _of_own_rows(self, node: Node, of: Callable[[Any], Any]) -> Any:
        operands = list(map(of, self.operands.get(node.outputs[0], node.inputs)))
        if node.eqn is None or node.name in PSUMS or node.name in RESHARDS:
            return operands[0]
        if node.name == "scatter-add":
            aval = self.graph.aval(node.outputs[0])
            operands = [jnp.zeros(aval.shape, aval.dtype), *operands]
        if node.name in ADDITIONS:
            # A term that is the same on all devices is counted once, on the first.
            first = lax.axis_index(tuple(sorted(self.rows.axes))) == 0
            operands = [
                x if self.sums.is_partial(ref) else jnp.where(first, x, jnp.zeros_like(x))
                for x, ref in zip(operands, node.inputs, strict=True)
            ]
        if self.rows.mesh is None:
            operands = [self._varying(x) for x in operands]
        # The equation's shardings, and its context, are those of all devices together.
        params = {
            key: None if key in ("out_sharding", "sharding") else value
            for key, value in node.params.items()
        }
        for key in {"reshape": ["new_sizes"], "broadcast_in_dim": ["shape"]}.get(node.name, []):
            params[key] = self.rows.shape_on_one(self.graph.aval(node.outputs[0]))
        return node.eqn.primitive.bind(*operands, **node.eqn.primitive.get_bind_params(params))

    def _varying(self, value: Any) -> jax.Array:
        missing = tuple(sorted(self.rows.axes - varying_axes(jax.typeof(value))))
        return lax.pcast(value, missing, to="varying") if missing else value

    # Operations of which a part can be put off.

    def _scattered(self, node: Node) -> tuple[Any, ...] | None:
        """Indices and updates of the rows where updates of rows are added to zeros: the gradient of a look-up."""
        if node.name != "scatter-add" or self.rows.mesh is None:
            return None
        operand, indices, updates = node.inputs
        numbers = node.params["dimension_numbers"]
        if not self.sums.is_zero(operand) or self.sums.is_split(*node.inputs):
            return None
        while updates in self.sums.maker and self.sums.maker[updates].name in RESHARDS:
            updates = self.sums.maker[updates].inputs[0]
        aval = self.graph.aval(updates)
        axes = [i for i in range(len(aval.shape)) if i not in numbers.update_window_dims]
        if numbers.operand_batching_dims or not self.sums.summed(updates, axes):
            return None
        spec = PartitionSpec(*(spec_of(aval)[axis] for axis in axes), None)
        sharding = NamedSharding(self.rows.mesh, spec)
        own = self.graph.value(self.graph.aval(indices).update(sharding=sharding))
        self.nodes.append(Node(None, (indices,), (own,), lambda x: [jax.reshard(x[0], sharding)]))
        return own, updates

    def _scan(self, node: Node) -> list[Node] | None:
        """A loop inside the microbatch whose sums are put off: partial sums come out, and are then added up."""
        if node.name != "scan":
            return None
        params = node.params
        body, consts, carried = params["jaxpr"], params["num_consts"], params["num_carry"]
        init = node.inputs[consts : consts + carried]
        summing = [
            c for c, x in enumerate(init) if self.sums.is_zero(x) and not self.sums.has_rows(x)
        ]
        while True:
            given = [consts + c for c in summing]
            inner = Program(body, self.rows, self.wrap, given)
            kept = [c for c in summing if inner.sums.is_partial(inner.outputs[c])]
            wanted = [c in kept for c in range(carried)] + inner.partial[carried:]
            if kept == summing and inner.needs_given(wanted):
                kept = []
            if kept == summing:
                break
            summing = kept
        if not any(wanted):
            return None
        avals = [self.graph.aval(out) for out in node.outputs]

        def run(values: list[Any]) -> list[Any]:
            start = values[consts : consts + carried]
            start = [self.rows.zeros(avals[c]) if c in summing else x for c, x in enumerate(start)]

            def advance(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                out = inner.run([*values[:consts], *carry, *xs], wanted)
                return out[:carried], out[carried:]

            options = {key: params[key] for key in ("length", "reverse", "unroll")}
            carry, stacked = lax.scan(advance, start, values[consts + carried :], **options)
            return [*carry, *stacked]

        outputs, sums = list(node.outputs), []
        for i, want in enumerate(wanted):
            if want:
                outputs[i] = self.graph.value(avals[i])
                self.given.add(outputs[i])
                self.sums.partial.update([outputs[i], node.outputs[i]])
                add_up = lambda x, aval=avals[i]: [self.rows.added_up(x[0], aval)]
                sums.append(Node(None, (outputs[i],), (node.outputs[i],), add_up))
        return [Node(None, node.inputs, tuple(outputs), run), *sums]
