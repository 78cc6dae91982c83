"""Where factors could go wrong although entries would not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives

from microbatch.jax._factored import _control, evaluate, explain
from microbatch.jax._factored._algebra import power_of_two
from microbatch.jax._factored._makers import could_make  # noqa: F401 (registers the makers)
from microbatch.jax._factored._registry import MAKERS, RULES

from .models import MODELS, TOKENS, WIDTH, Model
from .running import assert_same_tree, clip, per_example, run, squared_norm

ENGINES = ["vmap", "factored", "auto"]


def linear(tokens: int = 1, dtype=jnp.float32, scale: float = 1.0) -> Model:
    """A loss whose gradient of `w` is ``sum_t x[t] y[t]^T``, so that both factors are the data."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * scale, dtype)
    loss = lambda p, x, y: jnp.sum((x @ p["w"]) * y)
    return Model(loss, {"w": jnp.zeros((6, 5), dtype)}, (draw(4, tokens, 6), draw(4, tokens, 5)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_row_of_weight_zero_contributes_exactly_nothing(engine, bad, side):
    model = linear(tokens=3)
    batch = list(model.batch)
    batch[side] = batch[side].at[1].set(bad)
    weight = jnp.array([1.0, 0.0, 2.0, 1.0])
    one = per_example(model, lambda g: (clip(g), jax.tree.map(jnp.square, g)))
    got = run(engine, model._replace(batch=tuple(batch)), one, weight=weight)
    clean = run("vmap", model, one, weight=weight)
    assert_same_tree(got[0], clean[0], 1e-5)
    assert np.all(np.isfinite(got[1][0]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_guard_masks_both_factors(engine, bad):
    model = linear(tokens=3)
    poisoned = tuple(x.at[2].set(bad) for x in model.batch)

    def skip(g):
        ok = jnp.isfinite(squared_norm(g))
        return jax.tree.map(lambda leaf: jnp.where(ok, leaf, 0.0), g)

    one = per_example(model, skip, squared_norm)
    got = run(engine, model._replace(batch=poisoned), one)[0]
    want = run("vmap", model, one, weight=jnp.array([1.0, 1.0, 0.0, 1.0]))[0]
    assert_same_tree(got, want, 1e-5)


@pytest.mark.parametrize("tokens", [1, 3])
def test_cleaned_entries_are_those_of_vmap(tokens):
    model = linear(tokens)
    x, y = model.batch
    x = x.at[0, 0, 2].set(np.nan).at[1, -1, 3].set(np.inf)
    y = y.at[1, 0, 1].set(-np.inf).at[3, -1, 4].set(np.nan)
    to_zero = lambda leaf: jnp.nan_to_num(leaf, nan=0.0, posinf=0.0, neginf=0.0)
    one = per_example(model, lambda g: clip(jax.tree.map(to_zero, g)))
    dirty = model._replace(batch=(x, y))
    vmap, factored = run("vmap", dirty, one), run("factored", dirty, one)
    assert np.all(np.isfinite(vmap[0]["w"]))
    assert_same_tree(factored[0], vmap[0], 1e-5)


def test_nan_of_a_row_that_counts_is_not_hidden():
    model = linear(3)
    dirty = model._replace(batch=(model.batch[0].at[1, 0, 0].set(np.nan), model.batch[1]))
    assert np.any(np.isnan(run("factored", dirty, per_example(dirty, clip))[0]["w"]))


def cancelling(engine, norms="gram"):
    """Tokens ``(a, g)`` and ``(a + tiny, -g)``: the gradient is ``-tiny g^T``, a thousandth of its parts."""
    rng = np.random.default_rng(3)
    a, g = rng.normal(size=(4, 1, 6)), rng.normal(size=(4, 1, 5))
    tiny = 1e-3 * rng.normal(size=(4, 1, 6))
    x = jnp.asarray(np.concatenate([a, a + tiny], 1), jnp.float32)
    y = jnp.asarray(np.concatenate([g, -g], 1), jnp.float32)
    model = linear(2)._replace(batch=(x, y))
    exact = np.einsum("btm,btn->bmn", np.float64(x), np.float64(y))
    norms = run(engine, model, per_example(model, lambda g: 0.0, squared_norm), norms=norms)[1][1]
    parts = np.sum(np.linalg.norm(x, axis=2) * np.linalg.norm(y, axis=2), 1) ** 2
    return np.asarray(norms), np.sum(exact**2, (1, 2)), parts


def test_gram_norms_of_cancelling_tokens_are_not_negative_and_near_in_their_own_scale():
    got, exact, parts = cancelling("factored")
    assert np.all(got >= 0)
    assert np.max(np.abs(got - exact) / parts) < 1e-5


def test_safe_norms_lose_no_digits_where_gram_norms_do():
    got, exact, _ = cancelling("factored", norms="safe")
    np.testing.assert_allclose(got, exact, rtol=1e-3)
    gram, _, _ = cancelling("factored")
    assert np.max(np.abs(gram / exact - 1)) > 1e-2


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("left, right", [(1e25, 1e-25), (1e-30, 1e28)])
def test_factors_out_of_range_have_a_norm_in_range(tokens, left, right):
    model = linear(tokens)
    x, y = model.batch
    scaled = model._replace(batch=(x * left, y * right))
    one = per_example(model, lambda g: 0.0, squared_norm)
    want = run("vmap", scaled, one)[1][1]
    got = run("factored", scaled, one)[1][1]
    assert np.all(want > 0)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def scaled_down(grad):
    """To a largest entry of 1, found without squares that leave the range."""
    largest = max(jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(grad))
    return jax.tree.map(lambda leaf: leaf * (1 / largest), grad)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "left, right", [(1e12, 1e12), (1e20, 1), (1, 1e20), (1, 1e-20), (1e30, 1), (1, 1e-25)]
)
def test_moments_after_scaling_are_in_range_where_those_before_are_not(tokens, left, right):
    """Powers and norms of a gradient that was too large, or too small, for them."""
    model = linear(tokens)
    x, y = model.batch
    scaled = model._replace(batch=(x * left, y * right))

    def moments(grad):
        unit = scaled_down(grad)
        powers = [jax.tree.map(lambda leaf, n=n: leaf**n, unit) for n in (2, 3, 5)]
        return powers, jax.tree.map(jnp.square, unit)

    one = per_example(scaled, moments, lambda grad: squared_norm(scaled_down(grad)))
    (got, (_, norm)), (want, (_, wanted)) = (run(e, scaled, one) for e in ("factored", "vmap"))
    assert np.all(np.isfinite(wanted)) and np.all(wanted > 0)
    assert_same_tree(got, want, 1e-4)
    np.testing.assert_allclose(norm, wanted, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3])
def test_one_exploding_gradient_that_is_clipped_spoils_no_moment(tokens):
    """The square of its norm overflows, its scale is 0, and 0 × inf is not 0."""
    model = linear(tokens)
    x, y = model.batch
    scaled = model._replace(batch=(x.at[1].multiply(1e21), y))
    one = per_example(
        scaled,
        lambda grad: (jax.tree.map(jnp.square, clip(grad)), clip(grad)),
        lambda grad: squared_norm(clip(grad)),
    )
    (got, (_, norms)), (want, (_, wanted)) = (run(e, scaled, one) for e in ("factored", "vmap"))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(want))
    assert_same_tree(got, want, 1e-4)
    np.testing.assert_allclose(norms, wanted, rtol=1e-4)
    assert norms[1] == 0


def test_powers_of_two_are_exact():
    """Which `exp2` is not where a compiler makes it of `exp`."""
    exponents = np.arange(-126, 128)
    np.testing.assert_array_equal(
        power_of_two(exponents, np.float32), np.ldexp(np.float32(1), exponents)
    )


def test_float16_factors_do_not_underflow():
    model = linear(3, jnp.float16, scale=1e-2)
    wide = lambda g: squared_norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), g))
    got = run("factored", model, per_example(model, lambda g: 0.0, wide))[1][1]
    x, y = (np.float64(a) for a in model.batch)
    want = np.sum(np.einsum("btm,btn->bmn", x, y) ** 2, (1, 2))
    np.testing.assert_allclose(got, want, rtol=1e-2)


@pytest.mark.parametrize("engine", ENGINES)
def test_float16_sums_are_finite_where_a_bound_on_their_tokens_is_not(engine):
    signs = jnp.where(jnp.arange(64) % 2, 1, -1)[:, None]
    a, g = (
        (100 * signs * jnp.ones((2, 64, 4))).astype(jnp.float16),
        jnp.ones((2, 64, 3), jnp.float16),
    )
    is_finite = lambda a, g: jnp.all(jnp.isfinite(a.T @ (100 * g)))
    assert evaluate(is_finite, (a, g), engine=engine).tolist() == [True, True]


@pytest.mark.parametrize("engine", ENGINES)
def test_powers_of_float16_factors_stay_in_range(engine):
    a, g = jnp.full((2, 1, 4), 128, jnp.float16), jnp.full((2, 1, 3), 2.0**-7, jnp.float16)
    powers = evaluate(lambda a, g: (a.T @ g) ** 4, (a, g), engine=engine, aggregate="sum")
    np.testing.assert_array_equal(powers, 2)


def test_C16_tied_weights_have_their_cross_terms():
    model = MODELS["tied embeddings"]()
    one = per_example(model, lambda g: 0.0, lambda g: squared_norm(g["emb"]))
    assert_same_tree(run("factored", model, one), run("vmap", model, one), 1e-5)
    told = explain(
        one,
        (model.params, *model.batch),
        (None, 0, 0),
        aggregate=("sum", "stack"),
        engine="factored",
    )
    statistics = {s for row in told.rows for s in row.statistics}
    assert ("dot", "Gram") in statistics


def test_a_custom_derivative_is_kept_in_a_transform():
    """`relu` has derivative 0 at 0; the maximum that it is made of would have one half."""

    @jax.custom_jvp
    def norm_or_zero(w):
        return jnp.sqrt(jnp.sum(w**2))

    @norm_or_zero.defjvp
    def rule(primals, tangents):
        return norm_or_zero(*primals), jnp.sum(tangents[0]) * 7.0

    model = linear(1)
    zeros = tuple(jnp.zeros_like(x) for x in model.batch)

    def total(shift, engine):
        def transform(g):
            return jax.nn.relu(shift + squared_norm(g)), jax.nn.relu(g["w"] * shift).sum()

        out = evaluate(
            per_example(model, transform),
            (model.params, *zeros),
            (None, 0, 0),
            aggregate=("sum", "stack"),
            engine=engine,
        )
        return out[0][0] + out[0][1]

    assert [float(jax.grad(total)(0.0, engine)) for engine in ENGINES] == [0.0, 0.0, 0.0]


def test_an_opened_custom_function_gives_the_same_value():
    @jax.custom_vjp
    def energy(w):
        return jnp.sum(w * w)

    energy.defvjp(lambda w: (energy(w), w), lambda w, ct: (2 * ct * w,))
    model = linear(3)
    one = per_example(model, lambda g: energy(g["w"]))
    assert_same_tree(run("factored", model, one), run("vmap", model, one), 1e-5)
    told = explain(one, (model.params, *model.batch), (None, 0, 0), aggregate="sum")
    assert not [row for row in told.rows if row.forced_by]


def test_cond_and_while_make_their_inputs_dense_and_are_right():
    model = linear(3)

    def transform(g):
        halved = jax.lax.while_loop(lambda w: jnp.sum(w**2) > 1, lambda w: w / 2, g["w"])
        return jax.lax.cond(halved[0, 0] > 0, jnp.sin, jnp.cos, halved)

    one = per_example(model, transform)
    assert_same_tree(run("factored", model, one), run("vmap", model, one), 1e-5)


def test_the_state_of_a_scan_over_gradients_is_right():
    model = MODELS["stacked layers"]()

    def transform(g):
        def step(total, layer):
            return total + squared_norm(layer), jax.tree.map(lambda x: x * 0.5, layer)

        total, halves = jax.lax.scan(step, 0.0, g["layers"])
        return total, halves

    one = per_example(model, transform)
    assert_same_tree(run("factored", model, one), run("vmap", model, one), 1e-5)


def test_shared_weights_over_time_become_tokens_only_if_they_are_only_added_to():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    x = draw(4, TOKENS, WIDTH)

    def fun(w, x):
        def step(carry, row):
            added, decayed = carry
            product = jnp.outer(row, row) @ w
            outer = jnp.einsum("i,j->ij", row, jnp.sin(row))
            return (added + outer, 0.9 * decayed + outer), product.sum()

        start = jnp.zeros((WIDTH, WIDTH))
        (added, decayed), sums = jax.lax.scan(step, (start, start), x)
        return added, decayed, jnp.sum(added**2), sums

    args, aggregate = (draw(WIDTH, WIDTH), x), ("sum", "sum", "stack", "stack")
    results = [
        evaluate(fun, args, (None, 0), aggregate=aggregate, engine=engine) for engine in ENGINES
    ]
    assert_same_tree(results[1], results[0], 1e-5)
    assert_same_tree(results[2], results[0], 1e-5)


def test_memory_in_a_loop_is_that_of_a_plain_gradient():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 16, jnp.float32)
    params = [draw(128, 128) for _ in range(4)]
    batch = draw(4, 64, 128), draw(4, 64, 128)

    def loss(p, x, y):
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    one = per_example(Model(loss, params, batch), clip, squared_norm)
    clipped = lambda p, *b: evaluate(one, (p, *b), (None, 0, 0), aggregate=("sum", "stack"))[0]

    def temporaries(step):
        def looped(p, x, y):
            add = lambda total, rows: (jax.tree.map(jnp.add, total, step(p, *rows)), None)
            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), (x, y))[0]

        return jax.jit(looped).lower(params, *batch).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(clipped) <= 1.5 * temporaries(jax.grad(loss))
    by_vmap = lambda p, *b: evaluate(
        one, (p, *b), (None, 0, 0), aggregate=("sum", "stack"), engine="vmap"
    )[0]
    assert temporaries(by_vmap) > 10 * temporaries(clipped)


def test_every_rule_is_of_a_primitive_that_exists():
    """Fails when JAX renames a primitive, whose rule would silently no longer be used."""
    known = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    for fun in (
        lambda x: jnp.stack([x, x]),
        jnp.unstack,
        jax.lax.optimization_barrier,
        lambda x: jax.lax.split(x, (1, 1)),
        lambda x: jnp.concatenate([x, x]),
    ):
        known |= {eqn.primitive.name for eqn in jax.make_jaxpr(fun)(jnp.ones((2, 2))).eqns}
    written = {*RULES, *MAKERS, *_control.CALLS}
    assert written - known == set()


def test_effects_of_equations_whose_results_nobody_uses_happen(capfd):
    def fun(x):
        jax.debug.print("saw {}", x)
        return jnp.sum(jnp.outer(x, x) ** 2)

    evaluate(fun, (jnp.arange(6.0).reshape(2, 3),))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("saw") == 2


def test_a_name_to_sum_over_runs_under_vmap():
    from functools import partial

    fun = lambda x: x / jax.lax.psum(x, "rows")
    named = partial(jax.vmap, axis_name="rows")
    np.testing.assert_allclose(evaluate(fun, (jnp.array([1.0, 3.0]),), vmap_fn=named), [0.25, 0.75])


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_can_be_differentiated(engine):
    model = linear(3)

    def total(x):
        one = per_example(model, lambda g: clip(g, 2.0))
        out = evaluate(
            one, (model.params, x, model.batch[1]), (None, 0, 0), aggregate="sum", engine=engine
        )
        return jnp.sum(jnp.sin(out[0]["w"]))

    want = jax.grad(lambda x: jnp.sum(jnp.sin(_clipped_by_hand(x, model.batch[1], 2.0))))
    x = model.batch[0]
    np.testing.assert_allclose(jax.grad(total)(x), want(x), rtol=1e-4, atol=1e-5)


def _clipped_by_hand(x, y, bound):
    gradients = jnp.einsum("btm,btn->bmn", x, y)
    norms = jnp.sqrt(jnp.sum(gradients**2, (1, 2)))
    return jnp.einsum("b,bmn->mn", jnp.minimum(1, bound / norms), gradients)
