"""This library beside the installed `optax.microbatching`, on the same inputs."""

import importlib.util
import io
import re
import sys
import types
import unittest
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from optax import microbatching as theirs

from microbatch import BatchError, MicrobatchSizeError
from microbatch import jax as ours
from tests.laws.trees import assert_same_tree

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS = 12


def differences():
    """The inputs of the table of differences."""
    text = Path(__file__).with_name("optax_differences.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return [row[0] for row in rows if row[0] != "input"]


FUNCTIONS = {
    "sum": lambda x, y: (x + 2 * y).sum(0),
    "mean": lambda x, y: {"a": (x * y).mean(), "b": [y.mean(0)]},
    "rows": lambda x, y: (x * y, y),
    "scalar and rows": lambda x, y: (x.sum(), x - y),
}
KINDS = ["SUM", "MEAN", "RUNNING_MEAN", "CONCAT"]


@dataclass(frozen=True)
class Case:
    function: str
    kinds: tuple[str, ...]
    size: int
    axes: tuple[int, int]
    dtype: str
    stop: int | None
    named: bool

    def difference(self):
        """The row of the table that this input belongs to, None where both must agree."""
        sums = {"SUM", "MEAN", "RUNNING_MEAN"} & set(self.kinds)
        if self.stop is not None and self.stop > ROWS // self.size:
            return "num_real_microbatches > n"
        if self.dtype in ("float16", "bfloat16") and sums:
            return "float16, bfloat16 SUM, MEAN"
        if self.dtype == "complex64" and sums - {"SUM"}:
            return "complex MEAN"
        return "negative in_axes" if min(self.axes) < 0 else None

    def accumulator(self, library):
        kinds = tuple(library.AccumulationType[name] for name in self.kinds)
        two = self.function in ("rows", "scalar and rows")
        return kinds if two else kinds[0]

    def run(self, library):
        rng = np.random.default_rng(0)
        arrays = [
            jnp.asarray(np.moveaxis(rng.integers(-9, 10, (ROWS, 2)) / 4.0, 0, axis)).astype(
                self.dtype
            )
            for axis in self.axes
        ]

        def fun(x, y):
            x, y = (jnp.moveaxis(a, axis, 0) for a, axis in zip((x, y), self.axes, strict=True))
            return FUNCTIONS[self.function](x, y)

        micro = library.microbatch(
            fun,
            argnums=0 if self.named else (0, 1),
            argnames="y" if self.named else (),
            microbatch_size=self.size,
            accumulator=self.accumulator(library),
            in_axes=self.axes,
            num_real_microbatches=self.stop,
        )
        return micro(arrays[0], y=arrays[1]) if self.named else micro(*arrays)


@st.composite
def cases(draw):
    function = draw(st.sampled_from(list(FUNCTIONS)))
    kind = st.sampled_from(KINDS)
    return Case(
        function=function,
        kinds=(draw(kind), draw(kind)),
        size=draw(st.sampled_from([1, 3, 4, 12])),
        axes=(draw(st.sampled_from([0, 0, 1, -1])), draw(st.sampled_from([0, 1]))),
        dtype=draw(st.sampled_from(["float32", "float32", "int32", "bfloat16", "complex64"])),
        stop=draw(st.sampled_from([None, None, 0, 1, 2, 13])),
        named=draw(st.booleans()),
    )


@settings(max_examples=60)
@given(case=cases())
def test_equal_to_optax_outside_the_table(case):
    difference = case.difference()
    if difference is not None:
        assert difference in differences()
        event(difference)
        return
    averages = {"MEAN", "RUNNING_MEAN"} & set(
        case.kinds[: 1 + isinstance(case.accumulator(ours), tuple)]
    )
    if case.dtype == "int32" and averages and case.function != "mean":
        for library in (ours, theirs):
            with pytest.raises(ValueError):
                case.run(library)
        return
    assert_same_tree(to_numpy(case.run(ours)), to_numpy(case.run(theirs)), units_of_rounding=2)


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def half_sum(library):
    x = jnp.ones(512, jnp.bfloat16)
    return float(library.microbatch(jnp.sum, 0, 1)(x))


def shows_half(ours, theirs):
    assert half_sum(theirs) == 256
    assert half_sum(ours) == 512


def shows_sizes(ours, theirs):
    x = jnp.arange(4.0)
    assert float(theirs.microbatch(jnp.sum, 0, True)(x)) == 6.0
    with pytest.raises(ZeroDivisionError):
        theirs.microbatch(jnp.sum, 0, 0)(x)
    for size in (0, -1, True, 2.0, "2"):
        with pytest.raises(MicrobatchSizeError, match="microbatch_size"):
            ours.microbatch(jnp.sum, 0, size)


def shows_arguments(ours, theirs):
    calls = {
        "none": lambda library: library.microbatch(jnp.sum, (), 2)(jnp.arange(4.0)),
        "scalar": lambda library: library.microbatch(jnp.sum, 0, 2)(1.0),
        "argnum": lambda library: library.microbatch(lambda x: x, 1, 2)(jnp.arange(4.0)),
    }
    for call in calls.values():
        with pytest.raises((IndexError, AttributeError)):
            call(theirs)
        with pytest.raises(BatchError):
            call(ours)


def shows_zero_rows(ours, theirs):
    kinds = lambda library: (library.AccumulationType.SUM, library.AccumulationType.MEAN)
    call = lambda library: library.microbatch(
        lambda x: (x.sum(0), x.mean(0)), 0, 2, kinds(library)
    )(jnp.zeros((0, 3)))
    with pytest.raises((ValueError, ZeroDivisionError, TypeError)):
        call(theirs)
    assert_same_tree(to_numpy(call(ours)), (np.zeros(3), np.zeros(3)))


def shows_early_stop(ours, theirs):
    x = jnp.arange(4.0)
    total = lambda library: float(library.microbatch(jnp.sum, 0, 2, num_real_microbatches=5)(x))
    assert total(theirs) != 6.0
    assert total(ours) == 6.0


def shows_complex(ours, theirs):
    x = jnp.array([1j, 2.0, 3.0, 4.0])
    call = lambda library: library.microbatch(jnp.mean, 0, 2, library.AccumulationType.MEAN)(x)
    with pytest.raises(ValueError):
        call(theirs)
    assert complex(call(ours)) == (9 + 1j) / 4


def shows_weights(ours, theirs):
    x, mask = jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0])
    mean = ours.microbatch(
        lambda x, mask: x.sum(),
        (0, 1),
        1,
        ours.AccumulationType.MEAN,
        weight_fn=lambda x, m: m.sum(),
    )
    assert float(mean(x, mask)) == 2.0


def shows_mesh(ours, theirs):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(16.0).reshape(8, 2), jax.P("data"))
        total = lambda library: library.microbatch(lambda x: x.sum(0), 0, 4)(x)
        with pytest.raises(Exception, match="sharding"):
            total(theirs)
        assert total(ours).tolist() == [56.0, 64.0]


def shows_negative_axes(ours, theirs):
    batch = (jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0))
    call = lambda library: library.microbatch(lambda b: (b[0] * b[1]).sum(), 0, 1, in_axes=-1)(
        batch
    )
    with pytest.raises((TypeError, ValueError)):
        call(theirs)
    assert float(call(ours)) == float((batch[0] * batch[1]).sum())


def shows_names(ours, theirs):
    call = lambda library: library.microbatch(lambda x: x.sum(), (), 2, argnames="x")(
        jnp.arange(4.0)
    )
    with pytest.raises(KeyError):
        call(theirs)
    assert float(call(ours)) == 6.0


SHOWN = {
    "float16, bfloat16 SUM, MEAN": shows_half,
    "microbatch_size 0, negative, bool, float, not an int": shows_sizes,
    "no batch argument, scalar leaf, bad argnum": shows_arguments,
    "zero rows": shows_zero_rows,
    "num_real_microbatches > n": shows_early_stop,
    "complex MEAN": shows_complex,
    "MEAN with `weight_fn`": shows_weights,
    "explicit mesh on JAX ≥ 0.10 with optax 0.2.8": shows_mesh,
    "negative in_axes": shows_negative_axes,
    "batch argument in argnames passed by position": shows_names,
}


@pytest.mark.parametrize("row", differences())
def test_each_difference_of_the_table_is_one(row):
    SHOWN[row](ours, theirs)


def test_the_table_has_all_differences():
    assert set(differences()) == set(SHOWN)


def test_accumulators_of_optax_are_accepted():
    largest = theirs.Accumulator(
        init=lambda spec: jnp.full(spec.shape, -jnp.inf),
        update=lambda carry, value, index: jnp.maximum(carry, value),
        finalize=lambda carry: carry,
        aggregate=lambda stacked: stacked.max(0),
    )
    x = jnp.arange(6.0)
    for kinds in ((theirs.AccumulationType.SUM, largest), (ours.AccumulationType.SUM, largest)):
        total, top = ours.microbatch(lambda x: (x.sum(), x.max()), 0, 2, kinds)(x)
        assert (float(total), float(top)) == (15.0, 5.0)


PROGRAM = """
import jax
import jax.numpy as jnp


def loss(params, features, targets):
    return 0.5 * jnp.mean((features @ params - targets) ** 2)


def program(microbatching):
    kinds = microbatching.AccumulationType
    params, features = jnp.array([0.5, -1.0]), jnp.arange(16.0).reshape(8, 2) / 8
    targets = jnp.arange(8.0)
    value, grad = microbatching.microbatch(
        jax.value_and_grad(loss),
        argnums=(1, 2),
        microbatch_size=2,
        accumulator=(kinds.MEAN, kinds.MEAN),
    )(params, features, targets)
    rows = microbatching.micro_vmap(jnp.cumsum, microbatch_size=4)(features)
    (clipped, moments), aux = microbatching.micro_grad(
        loss,
        batch_argnums=(1, 2),
        microbatch_size=4,
        accumulator=(kinds.SUM, kinds.MEAN),
        transform_fn=lambda g: (g / jnp.maximum(1, jnp.linalg.norm(g)), g**2),
        metrics_fn=jnp.linalg.norm,
    )(params, features, targets)
    pieces = microbatching.reshape_batch_axis({"x": features}, 2)

    @jax.jit
    def early(steps):
        return microbatching.microbatch(jnp.sum, 0, 2, num_real_microbatches=steps)(targets)

    return value, grad, rows, clipped, moments, aux.values, aux.metrics, pieces, early(3)
"""


def test_a_program_written_for_optax_runs_unchanged():
    namespace = {}
    exec(PROGRAM, namespace)
    program = namespace["program"]
    actual, expected = to_numpy(program(ours)), to_numpy(program(theirs))
    assert_same_tree(actual, expected, units_of_rounding=8)


def test_the_published_tests_of_optax_pass_here():
    spec = importlib.util.find_spec("optax.microbatching._microbatching_test")
    if spec is None or spec.origin is None:
        pytest.skip("this build of optax comes without its tests")
    source = Path(spec.origin).read_text()
    there, here = "import optax.microbatching._microbatching as", "import microbatch.jax as"
    assert there in source
    module = types.ModuleType("optax_tests_of_microbatching")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source.replace(there, here), spec.origin, "exec"), module.__dict__)
        suite = unittest.defaultTestLoader.loadTestsFromModule(module)
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    finally:
        del sys.modules[module.__name__]
    problems = [text for _, text in (*result.failures, *result.errors)]
    assert result.testsRun > 30
    assert not problems, "\n".join(problems)
