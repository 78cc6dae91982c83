"""Convolutions in the loop are put into canonical order: the same values, and the compiler's fast path on a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from microbatch import AccumulationType as Kind
from microbatch.jax import microbatch
from microbatch.jax._convolutions import canonical_convolutions, has_convolution

CANONICAL = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
SHUFFLED = {1: ("NCW", "OIW", "CNW"), 2: ("CNHW", "IHWO", "HNWC"), 3: ("NCDHW", "OIDHW", "DNHWC")}

PER_AXIS = ("window_strides", "rhs_dilation", "lhs_dilation")


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def shape_for(spec, sizes):
    return tuple(sizes[letter] for letter in spec)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": 1, "padding": "SAME"},
        {"window_strides": 2, "padding": "VALID"},
        {"window_strides": 1, "padding": "VALID", "rhs_dilation": 2},
        {"window_strides": 1, "padding": [(1, 2)], "lhs_dilation": 2},
        {"window_strides": 1, "padding": "SAME", "feature_group_count": 2},
        {"window_strides": 1, "padding": "SAME", "batch_group_count": 2},
    ],
    ids=["same", "strided", "dilated", "transposed", "groups", "batch groups"],
)
def test_canonical_order_gives_the_same_values(rank, options):
    lhs_spec, rhs_spec, _ = numbers = SHUFFLED[rank]
    groups = options.get("feature_group_count", 1)
    sizes = {"N": 4, "C": 6, "D": 5, "H": 6, "W": 7}
    filters = {"I": 6 // groups, "O": 4, "D": 3, "H": 2, "W": 3}
    lhs, rhs = random(0, *shape_for(lhs_spec, sizes)), random(1, *shape_for(rhs_spec, filters))
    if isinstance(options["padding"], list):
        options = options | {"padding": options["padding"] * rank}
    options = {key: (value,) * rank if key in PER_AXIS else value for key, value in options.items()}

    def convolve(lhs, rhs):
        return lax.conv_general_dilated(lhs, rhs, dimension_numbers=numbers, **options)

    rewritten = canonical_convolutions(convolve)
    np.testing.assert_allclose(rewritten(lhs, rhs), convolve(lhs, rhs), rtol=2e-5, atol=2e-5)


def network(w, x):
    x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=CANONICAL[2])
    return jnp.mean(jax.nn.relu(x) ** 2)


def orders(fun, *args):
    """The dimension labels of every convolution in the compiled program."""
    return set(re.findall(r"dim_labels=(\S+?),", jax.jit(fun).lower(*args).compile().as_text()))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the slow path is the CPU compiler's")
@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_C17_every_convolution_of_a_compiled_loop_is_canonical(mode):
    w, x = random(0, 3, 3, 4, 8), random(1, 16, 8, 8, 4)
    gradient = jax.grad(microbatch(network, 1, 4, Kind.MEAN, differentiate=mode), (0, 1))
    assert orders(gradient, w, x) == {"b01f_01io->b01f"}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6),
        jax.jit(gradient)(w, x),
        jax.grad(network, (0, 1))(w, x),
    )


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the slow path is the CPU compiler's")
def test_the_compiler_still_needs_it():
    """Fails on the day the compiler puts convolutions in loops into canonical order; then `_convolutions` can go."""
    w, x = random(0, 3, 3, 4, 8), random(1, 16, 8, 8, 4)

    def by_hand(w, x):
        step = lambda total, x: (total + jax.grad(network)(w, x), None)
        return lax.scan(step, jnp.zeros_like(w), x.reshape(4, 4, 8, 8, 4))[0]

    assert orders(by_hand, w, x) > {"b01f_01io->b01f"}
    assert orders(jax.grad(network), w, x) == {"b01f_01io->b01f"}


def test_convolutions_inside_calls_loops_and_branches_are_found():
    w, x = random(0, 2, 3, 3, 4, 4), random(1, 8, 6, 6, 4)

    @jax.jit
    def layer(w, x):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=CANONICAL[2])

    def deep(w, x):
        body = jax.checkpoint(lambda h, w: (jnp.tanh(layer(w, h)), None))
        h = lax.scan(body, x, w)[0]
        return jnp.mean(lax.cond(h.sum() > 0, lambda h: layer(w[0], h), lambda h: h, h) ** 2)

    assert has_convolution(jax.make_jaxpr(deep)(w, x).jaxpr)
    gradient = jax.jit(jax.grad(microbatch(deep, 1, 4, Kind.SUM)))(w, x)
    by_loop = sum(jax.grad(deep)(w, x[i::2]) for i in range(2))
    np.testing.assert_allclose(gradient, by_loop, rtol=2e-4, atol=1e-6)
