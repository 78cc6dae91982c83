"""Peak temporary memory, as the compiler states it: one microbatch and one accumulator, also when differentiated."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from microbatch import AccumulationType as Kind
from microbatch.jax import microbatch

ROWS, SIZE, WIDTH, LAYERS = 2048, 64, 64, 4
COUNT = ROWS // SIZE
W = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
BATCH_BYTES = ROWS * WIDTH * 4
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4


def loss(w, x, y):
    for layer in w:
        x = jax.nn.gelu(x @ layer)
    return jnp.mean((x - y) ** 2)


def by_hand(w, x, y):
    cut = lambda a: a.reshape(COUNT, SIZE, WIDTH)
    add = lambda total, g: jax.tree.map(jnp.add, total, g)
    step = lambda total, rows: (add(total, jax.value_and_grad(loss)(w, *rows)), None)
    zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, w))
    total, _ = lax.scan(step, zero, (cut(x), cut(y)))
    return jax.tree.map(lambda a: a / COUNT, total)


def temporaries(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def mean_of(fun, size=SIZE, **options):
    return microbatch(fun, (1, 2), size, Kind.MEAN, **options)


HAND = temporaries(by_hand, W, X, X)


@pytest.mark.parametrize("order", ["strided", "contiguous"])
def test_M1_one_microbatch_and_one_accumulator(order):
    """As the scan by hand, so neither order copies the batch, and no first evaluation makes the accumulator."""
    used = temporaries(mean_of(jax.value_and_grad(loss), order=order), W, X, X)
    assert used <= 1.01 * HAND


@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_M5_the_gradient_of_the_microbatched_function(mode):
    used = temporaries(jax.value_and_grad(mean_of(loss, differentiate=mode)), W, X, X)
    assert used <= 1.05 * HAND


def test_the_established_library_copies_the_batch_and_stores_the_residuals():
    """The two figures that this library is measured against, so that the tests above can fail."""
    mean = optax.microbatching.AccumulationType.MEAN
    there = optax.microbatching.microbatch(jax.value_and_grad(loss), (1, 2), SIZE, mean)
    assert temporaries(there, W, X, X) >= HAND + 2 * BATCH_BYTES
    stored = jax.value_and_grad(mean_of(loss, differentiate="store"))
    assert temporaries(stored, W, X, X) > 5 * HAND


@pytest.mark.parametrize("order", ["strided", "contiguous"])
def test_a_tail_copies_no_batch(order):
    size = 60
    step = mean_of(jax.value_and_grad(loss), size, order=order, remainder="allow")
    assert temporaries(step, W, X, X) <= HAND + 2 * PARAMETER_BYTES + BATCH_BYTES // 4


@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_gradients_of_the_rows_are_written_in_place(mode, order):
    """They are an output. Strided and in forward, they are scaled by the cotangent into another array of their size."""
    step = jax.grad(mean_of(loss, differentiate=mode, order=order), 1)
    scaled_apart = BATCH_BYTES if (mode, order) == ("in_forward", "strided") else 0
    assert temporaries(step, W, X, X) <= HAND + scaled_apart


def test_weights_and_a_traced_count_add_nothing():
    weighted = mean_of(jax.value_and_grad(loss), weight_fn=lambda w, x, y: jnp.sum(y[:, 0]))
    assert temporaries(weighted, W, X, X) <= 1.05 * HAND
    stopped = lambda w, x, y, k: mean_of(jax.value_and_grad(loss), num_real_microbatches=k)(w, x, y)
    assert temporaries(stopped, W, X, X, jax.ShapeDtypeStruct((), jnp.int32)) <= 1.05 * HAND


def test_M2_M4_temporaries_fall_or_stay_as_microbatches_grow_in_number():
    used = [
        temporaries(mean_of(jax.value_and_grad(loss), ROWS // n), W, X, X) for n in (1, 2, 8, 32)
    ]
    assert used[1] <= used[0] + PARAMETER_BYTES
    assert used[1] >= used[2] >= used[3]


def test_M6_N10_one_microbatch_is_the_function_itself():
    assert temporaries(mean_of(jax.value_and_grad(loss), ROWS), W, X, X) == temporaries(
        jax.value_and_grad(loss), W, X, X
    )
    same = mean_of(loss, ROWS)
    args = jax.tree.map(lambda s: jnp.ones(s.shape), (W, X, X))
    program = lambda fun: str(jax.make_jaxpr(fun)(*args))
    assert program(same) == program(loss)


def test_concatenated_features_cost_one_microbatch_of_residuals():
    """Contrastive learning: the encoder's residuals are one microbatch's, whatever the batch."""

    def encode(w, x):
        for layer in w:
            x = jax.nn.gelu(x @ layer)
        return x

    objective = lambda encode: lambda w, x: jnp.mean(encode(w, x).sum(0) ** 2)
    whole = temporaries(jax.value_and_grad(objective(encode)), W, X)
    small = temporaries(
        jax.value_and_grad(objective(microbatch(encode, 1, SIZE, Kind.CONCAT))), W, X
    )
    # Rows of features and of their cotangents are what is left.
    assert small <= HAND + 2 * BATCH_BYTES + BATCH_BYTES // 4 < whole / 2


@pytest.mark.parametrize("way", ["inside", "around"])
def test_C9_tracing_many_leaves_costs_what_tracing_the_function_costs(way):
    """Counted in equations, not in seconds: a few per leaf are added, however many leaves there are."""
    many = lambda w, x: sum(jnp.sin(leaf) for leaf in w) * jnp.mean(x)
    small = {
        "inside": microbatch(jax.value_and_grad(many), 1, 2, Kind.MEAN),
        "around": jax.value_and_grad(microbatch(many, 1, 2, Kind.MEAN)),
    }[way]

    def equations(fun, leaves):
        args = [jnp.ones(())] * leaves, jnp.ones(8)
        return str(jax.make_jaxpr(lambda *a: fun(*a))(*args)).count(" = ")

    whole = [equations(jax.value_and_grad(many), n) for n in (100, 200, 400)]
    mine = [equations(small, n) for n in (100, 200, 400)]
    assert mine[2] < 2.5 * whole[2]
    assert mine[2] - mine[1] == 2 * (mine[1] - mine[0])


@pytest.mark.parametrize("way", ["inside", "around"])
def test_the_program_does_not_grow_with_the_number_of_microbatches(way):
    fun = {
        "inside": lambda size: mean_of(jax.value_and_grad(loss), size),
        "around": lambda size: jax.value_and_grad(mean_of(loss, size)),
    }[way]
    equations = lambda count: str(jax.make_jaxpr(fun(ROWS // count))(W, X, X)).count(" = ")
    assert equations(2) == equations(16) == equations(128)


def test_compiles_once_for_any_traced_count():
    traces = []

    @jax.jit
    def step(w, x, k):
        traces.append(None)
        return microbatch(lambda w, x: jnp.sum(x * w), 1, 2, num_real_microbatches=k)(w, x)

    totals = [float(step(2.0, jnp.ones(8), k)) for k in range(6)]
    assert totals == [0.0, 4.0, 8.0, 12.0, 16.0, 16.0]
    assert len(traces) == 1
