"""One reduction per call over many devices, and rows that stay where they are: read from the compiled program."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from microbatch._errors import AccumulatorError, MicrobatchError, MicrobatchSizeError
from microbatch.jax import AccumulationType, Accumulator, Carry, micro_grad, microbatch

MEAN, SUM, CONCAT = AccumulationType.MEAN, AccumulationType.SUM, AccumulationType.CONCAT
SHARDS, ROWS, SIZE = 8, 64, 16
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")

pytestmark = pytest.mark.skipif(
    jax.device_count() < SHARDS, reason="needs 8 devices, which tests/conftest.py forces on a CPU"
)


def mesh_of(kind, shape=(SHARDS,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


AUTO, EXPLICIT = mesh_of(AxisType.Auto), mesh_of(AxisType.Explicit)


def put(tree, mesh, spec=P()):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def collectives(fun, *args):
    """How often each collective is in the compiled program: in its loops, and outside."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    counts = {"loop": {}, "outside": {}}
    for part in re.split(r"\n(?=\S)", text):
        place = counts["outside" if part.startswith("ENTRY") else "loop"]
        for name in re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", part):
            place[name] = place.get(name, 0) + 1
    return counts


ONCE = {"loop": {}, "outside": {"all-reduce": 1}}


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "w": jax.random.normal(keys[0], (12, 16)) / 4,
        "b": jax.random.normal(keys[1], (16,)),
        "scale": jnp.full((16,), 0.9, jnp.float32),
        "v": jax.random.normal(keys[2], (16, 8)) / 4,
    }


def batch(rows=ROWS):
    keys = jax.random.split(jax.random.key(1), 2)
    return jax.random.normal(keys[0], (rows, 12)), jax.random.normal(keys[1], (rows, 8))


def network(params, x):
    hidden = jax.nn.gelu(x @ params["w"] + params["b"])
    hidden = (hidden - hidden.mean(-1, keepdims=True)) * params["scale"]
    return hidden @ params["v"]


def loss(params, x, y):
    return jnp.mean((network(params, x) - y) ** 2) + 1e-2 * jnp.sum(params["w"] ** 2)


def assert_close(got, want, tolerance=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), tolerance, tolerance)


def ways(**options):
    """The three ways to a value and its gradient."""
    return {
        "inside": microbatch(jax.value_and_grad(loss), (1, 2), SIZE, MEAN, **options),
        "in_forward": jax.value_and_grad(microbatch(loss, (1, 2), SIZE, MEAN, **options)),
        "recompute": jax.value_and_grad(
            microbatch(loss, (1, 2), SIZE, MEAN, differentiate="recompute", **options)
        ),
    }


WAYS = ["inside", "in_forward", "recompute"]


@pytest.mark.parametrize("way", WAYS)
def test_S2_automatic_mesh_one_all_reduce_per_call_outside_the_loop(way):
    fun = ways(mesh=AUTO, batch_spec=P("data"))[way]
    args = put(params(), AUTO), *put(batch(), AUTO, P("data"))
    assert collectives(fun, *args) == ONCE
    assert_close(jax.jit(fun)(*args), jax.value_and_grad(loss)(params(), *batch()))


@pytest.mark.parametrize("way", WAYS)
def test_S2_explicit_mesh_one_all_reduce_per_call_without_an_argument(way):
    with jax.set_mesh(EXPLICIT):
        args = put(params(), EXPLICIT), *put(batch(), EXPLICIT, P("data"))
        assert collectives(ways()[way], *args) == ONCE
        assert_close(jax.jit(ways()[way])(*args), jax.value_and_grad(loss)(params(), *batch()))


@pytest.mark.parametrize("way", WAYS)
def test_S2_inside_a_shard_map_of_the_users_one_all_reduce_per_call(way):
    def whole(params, x, y):
        return lax.pmean(loss(params, x, y), "data")

    options = {"differentiate": "recompute"} if way == "recompute" else {}
    small = microbatch(whole, (1, 2), SIZE // SHARDS, MEAN, **options)
    inside = microbatch(jax.value_and_grad(whole), (1, 2), SIZE // SHARDS, MEAN)
    fun = inside if way == "inside" else jax.value_and_grad(small)
    specs = (P(), P("data"), P("data"))
    fun = jax.shard_map(fun, mesh=AUTO, in_specs=specs, out_specs=P())
    args = put(params(), AUTO), *put(batch(), AUTO, P("data"))
    assert collectives(fun, *args) == ONCE
    assert_close(jax.jit(fun)(*args), jax.value_and_grad(loss)(params(), *batch()))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("shape", [(1,), (4,), (1, 8), (2, 1)], ids=str)
@pytest.mark.parametrize("way", ["in_forward", "recompute"])
def test_S2_the_count_of_messages_does_not_depend_on_that_of_devices(way, shape, kind):
    """Also on axes of one device, over which nothing is to be sent."""
    names = ("data", "model" if shape == (1, 8) else "pod")[: len(shape)]
    spec = P("data") if "pod" not in names else P(names)
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)
    options = {"mesh": mesh, "batch_spec": spec} if kind is AxisType.Auto else {}
    fun = ways(**options)[way]
    with jax.set_mesh(mesh):
        args = put(params(), mesh), *put(batch(), mesh, spec)
        alone = shape in ((1,), (1, 8))
        assert collectives(fun, *args) == ({"loop": {}, "outside": {}} if alone else ONCE)
        assert_close(jax.jit(fun)(*args), jax.value_and_grad(loss)(params(), *batch()))


def test_a_users_loss_that_differs_between_devices_is_differentiated_through():
    small = microbatch(loss, (1, 2), SIZE // SHARDS, MEAN)
    local = lambda *args: lax.pmean(small(*args), "data")
    specs = (P(), P("data"), P("data"))
    args = put(params(), AUTO), *put(batch(), AUTO, P("data"))
    inner = jax.shard_map(jax.value_and_grad(local), mesh=AUTO, in_specs=specs, out_specs=P())
    outer = jax.value_and_grad(jax.shard_map(local, mesh=AUTO, in_specs=specs, out_specs=P()))
    for fun in (inner, outer):
        assert collectives(fun, *args) == ONCE
        assert_close(jax.jit(fun)(*args), jax.value_and_grad(loss)(params(), *batch()))


def test_the_test_can_fail_a_plain_loop_reduces_in_every_microbatch():
    def plain(params, x, y):
        view = lambda a: a.reshape(SIZE, -1, *a.shape[1:])

        def step(i, total):
            rows = [lax.dynamic_index_in_dim(view(a), i, 1, keepdims=False) for a in (x, y)]
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *rows))

        return lax.fori_loop(0, ROWS // SIZE, step, jax.tree.map(jnp.zeros_like, params))

    args = put(params(), AUTO), *put(batch(), AUTO, P("data"))
    assert collectives(plain, *args)["loop"]


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_S1_rows_stay_where_they_are(mesh):
    fun = lambda x: x * 2 + 1
    options = {"mesh": mesh} if mesh is AUTO else {}
    with jax.set_mesh(mesh):
        rows = put(jnp.arange(32.0), mesh, P("data"))
        small = microbatch(fun, 0, 8, CONCAT, **options)
        assert collectives(small, rows) == {"loop": {}, "outside": {}}
        out = jax.jit(small)(rows)
    assert_close(out, jnp.arange(32.0) * 2 + 1)
    assert {shard.data.shape for shard in out.addressable_shards} == {(4,)}


def test_S1_four_shards_of_eight_rows_in_two_microbatches():
    mesh = mesh_of(AxisType.Auto, (4, 2), ("data", "model"))
    rows = put(jnp.arange(8.0), mesh, P("data"))
    small = microbatch(lambda x: jnp.sum(x**2), 0, 4, SUM, mesh=mesh, batch_spec=P("data"))
    assert collectives(small, rows) == ONCE
    assert float(jax.jit(small)(rows)) == 140.0


MAX, MIN = AccumulationType.MAX, AccumulationType.MIN
RUNNING_MEAN, LAST = AccumulationType.RUNNING_MEAN, AccumulationType.LAST
KINDS = {"mean": RUNNING_MEAN, "max": MAX, "min": MIN, "sum": SUM, "rows": CONCAT, "count": SUM}


def statistics(params, x, y):
    errors = (network(params, x) - y) ** 2
    return {
        "mean": jnp.mean(errors),
        "max": errors.max(0),
        "min": errors.min(),
        "sum": errors.sum(0),
        "rows": errors.mean(1),
        "count": (x > 0).sum(0),
    }


def scalar(fun):
    """All floating statistics in one number, each to another power."""

    def total(*args):
        found = fun(*args)
        return sum(
            (found[name] ** power).sum()
            for power, name in enumerate(("mean", "max", "min", "sum", "rows"), 1)
        )

    return total


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("reduce", ["once", "each"])
def test_every_kind_and_its_derivative_equals_one_device(mesh, reduce):
    options = {"mesh": mesh} if mesh is AUTO else {}
    small = microbatch(statistics, (1, 2), SIZE, KINDS, reduce=reduce, **options)
    with jax.set_mesh(mesh):
        args = put(params(), mesh), *put(batch(), mesh, P("data"))
        out = jax.jit(small)(*args)
        gradients = jax.jit(jax.grad(scalar(small), (0, 1)))(*args)
    assert_close(out, statistics(params(), *batch()), 1e-5)
    assert_close(gradients, jax.grad(scalar(statistics), (0, 1))(params(), *batch()), 1e-4)
    assert len(out["rows"].sharding.device_set) == SHARDS
    assert out["rows"].sharding.shard_shape((ROWS,)) == (ROWS // SHARDS,)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("differentiate", ["in_forward", "recompute"])
def test_gradients_of_rows_equal_one_device(mesh, differentiate):
    options = {"mesh": mesh} if mesh is AUTO else {}
    small = microbatch(loss, (1, 2), SIZE, MEAN, differentiate=differentiate, **options)
    with jax.set_mesh(mesh):
        args = put(params(), mesh), *put(batch(), mesh, P("data"))
        out = jax.jit(jax.grad(small, (1, 2)))(*args)
    for got, want in zip(out, jax.grad(loss, (1, 2))(params(), *batch()), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, 1e-4, 1e-8)
        assert got.sharding.shard_shape(got.shape)[0] == ROWS // SHARDS


@pytest.mark.parametrize("count", [0, 2, 99])
def test_an_early_stop_equals_one_device(count):
    def stopped(mesh, count, *args):
        options = {"num_real_microbatches": count, "mesh": mesh}
        return microbatch(statistics, (1, 2), SIZE, KINDS, **options)(*args)

    args = put(params(), AUTO), *put(batch(), AUTO, P("data"))
    out = jax.jit(lambda *args: stopped(AUTO, *args))(jnp.int32(count), *args)
    assert_close(out, stopped(None, count, params(), *batch()), 1e-5)


def masked_loss(params, x, y, mask):
    errors = ((network(params, x) - y) ** 2).mean(1)
    return jnp.sum(errors * mask) / jnp.sum(mask)


@pytest.mark.parametrize("reduce", ["once", "each"])
@pytest.mark.parametrize("way", WAYS)
def test_N1_N4_weights_differ_between_devices_and_a_device_without_any_adds_nothing(way, reduce):
    x, y = batch()
    mask = (jax.random.uniform(jax.random.key(3), (ROWS,)) > 0.6).astype(jnp.float32)
    mask = mask.at[:8].set(0).at[16:24].set(0)
    options = {"weight_fn": lambda params, x, y, mask: mask.sum(), "mesh": AUTO, "reduce": reduce}
    if way == "recompute":
        options["differentiate"] = "recompute"
    small = microbatch(masked_loss, (1, 2, 3), SIZE, MEAN, **options)
    inside = microbatch(jax.value_and_grad(masked_loss), (1, 2, 3), SIZE, MEAN, **options)
    fun = inside if way == "inside" else jax.value_and_grad(small)
    args = put(params(), AUTO), *put((x.at[:8].set(jnp.nan), y, mask), AUTO, P("data"))
    out = jax.jit(fun)(*args)
    assert_close(out, jax.value_and_grad(masked_loss)(params(), x, y, mask))
    if reduce == "once" and way != "recompute":
        assert collectives(fun, *args) == ONCE


def test_N1_weights_on_an_explicit_mesh_are_summed_once():
    x, y = batch()
    mask = (jax.random.uniform(jax.random.key(3), (ROWS,)) > 0.6).astype(jnp.float32)
    weight_fn = lambda params, x, y, mask: mask.sum()
    small = microbatch(masked_loss, (1, 2, 3), SIZE, MEAN, weight_fn=weight_fn)
    with jax.set_mesh(EXPLICIT):
        args = put(params(), EXPLICIT), *put((x, y, mask), EXPLICIT, P("data"))
        out = jax.jit(jax.value_and_grad(small))(*args)
        only_weights = jax.jit(lambda *args: small(*args)).lower(*args).compile().as_text()
    assert_close(out, jax.value_and_grad(masked_loss)(params(), x, y, mask))
    assert re.search(rf"f32\[{ROWS // SIZE}\]\S* all-reduce", only_weights)


def convolved(params, x, y):
    dims = ("NHWC", "HWIO", "NHWC")
    hidden = lax.conv_general_dilated(x, params["k"], (1, 1), "SAME", dimension_numbers=dims)
    hidden = lax.conv_general_dilated(
        jax.nn.relu(hidden), params["l"], (1, 1), "SAME", dimension_numbers=dims
    )
    hidden = lax.reduce_window(
        hidden, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ).reshape(x.shape[0], -1)
    return jnp.mean((hidden @ params["d"] - y) ** 2)


def layered(params, x, y):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    out, _ = lax.scan(layer, x, params["stack"])
    out, _ = lax.scan(lambda x, _: (jnp.tanh(x @ params["again"]), None), out, None, length=2)
    return jnp.mean((out - y) ** 2)


def looked_up(params, x, y):
    rows = P("data", None, None) if jax.typeof(x).sharding.mesh.are_all_axes_explicit else None
    hidden = params["table"].at[x].get(out_sharding=rows) if rows else params["table"][x]
    return jnp.mean((jnp.tanh(hidden) @ params["table"].T).mean(1) - y) * 1.0


def models():
    key = lambda i: jax.random.key(i)
    normal = lambda i, *shape: jax.random.normal(key(i), shape) / 4
    return {
        "convolutions": (
            convolved,
            {"k": normal(0, 3, 3, 2, 4), "l": normal(1, 3, 3, 4, 4), "d": normal(2, 36, 5)},
            (normal(3, ROWS, 6, 6, 2), normal(4, ROWS, 5)),
        ),
        "layers": (
            layered,
            {"stack": normal(0, 3, 8, 8), "again": normal(1, 8, 8)},
            (normal(2, ROWS, 8), normal(3, ROWS, 8)),
        ),
        "look-ups": (
            looked_up,
            {"table": normal(0, 12, 6)},
            (jax.random.randint(key(1), (ROWS, 4), 0, 12), normal(2, ROWS, 12)),
        ),
    }


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("model", ["convolutions", "layers", "look-ups"])
def test_S2_whole_models_reduce_once(model, mesh):
    fun, weights, rows = models()[model]
    options = {"mesh": mesh} if mesh is AUTO else {}
    step = jax.value_and_grad(microbatch(fun, (1, 2), SIZE, MEAN, **options))
    with jax.set_mesh(mesh):
        args = put(weights, mesh), *put(rows, mesh, P("data"))
        assert collectives(step, *args) == ONCE
        out = jax.jit(step)(*args)
    assert_close(out, jax.value_and_grad(fun)(weights, *rows))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_S3_parameters_over_a_model_axis_keep_their_sharding(kind):
    mesh = mesh_of(kind, (4, 2), ("data", "model"))

    def split_loss(params, x, y):
        hidden = jax.nn.gelu(x @ params["w"] + params["b"])
        if kind is AxisType.Explicit:
            out = jnp.matmul(hidden, params["v"], out_sharding=P("data", None))
        else:
            hidden = lax.with_sharding_constraint(hidden, P(None, "model"))
            out = hidden @ params["v"]
        return jnp.mean((out - y) ** 2)

    def whole_loss(params, x, y):
        return jnp.mean((jax.nn.gelu(x @ params["w"] + params["b"]) @ params["v"] - y) ** 2)

    options = {"mesh": mesh, "batch_spec": P("data")} if kind is AxisType.Auto else {}
    fun = jax.value_and_grad(microbatch(split_loss, (1, 2), SIZE, MEAN, **options))
    specs = {"w": P(None, "model"), "b": P("model"), "v": P("model")}
    given = {name: params()[name] for name in specs}
    with jax.set_mesh(mesh):
        placed = {name: put(given[name], mesh, spec) for name, spec in specs.items()}
        args = placed, *put(batch(), mesh, P("data"))
        text = jax.jit(fun).lower(*args).compile().as_text()
        value, gradients = jax.jit(fun)(*args)
    assert_close((value, gradients), jax.value_and_grad(whole_loss)(given, *batch()))
    # The accumulators in the loop are halves.
    loops = [line for line in text.splitlines() if " while(" in line]
    assert any("f32[12,8]" in line for line in loops)
    assert not any("f32[12,16]" in line for line in loops)


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_S3_parameters_over_the_data_axis_on_an_explicit_mesh(reduce):
    def gathering(params, x, y):
        whole = {k: jax.reshard(a, P(*(None,) * a.ndim)) for k, a in params.items()}
        return loss(whole, x, y)

    specs = {"w": P(None, "data"), "b": P("data"), "scale": P(), "v": P("data")}
    fun = jax.value_and_grad(microbatch(gathering, (1, 2), SIZE, MEAN, reduce=reduce))
    with jax.set_mesh(EXPLICIT):
        placed = {name: put(a, EXPLICIT, specs[name]) for name, a in params().items()}
        args = placed, *put(batch(), EXPLICIT, P("data"))
        counts = collectives(fun, *args)
        out = jax.jit(fun)(*args)
        types = {name: jax.typeof(a) for name, a in out[1].items()}
        assert types == {name: jax.typeof(a) for name, a in placed.items()}
    assert_close(out, jax.value_and_grad(loss)(params(), *batch()))
    assert bool(counts["loop"]) == (reduce == "each")


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_S3_accumulators_on_an_automatic_mesh(reduce):
    fun = jax.value_and_grad(microbatch(loss, (1, 2), SIZE, MEAN, mesh=AUTO, reduce=reduce))
    args = put(params(), AUTO), *put(batch(), AUTO, P("data"))
    counts = collectives(fun, *args)
    text = jax.jit(fun).lower(*args).compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    assert_close(jax.jit(fun)(*args), jax.value_and_grad(loss)(params(), *batch()))
    if reduce == "once":
        assert counts == ONCE
    else:
        assert set(counts["loop"]) == {"reduce-scatter"}
        # v is [16, 8]: two of its rows on each device.
        assert any("f32[2,8]" in line for line in loops)


def test_S3_once_scatters_onto_parameters_that_are_known_to_be_sharded():
    fun = jax.value_and_grad(microbatch(loss, (1, 2), SIZE, MEAN, mesh=AUTO))
    placed = put(params(), AUTO)
    placed["v"] = put(params()["v"], AUTO, P("data"))
    value, gradients = fun(placed, *put(batch(), AUTO, P("data")))
    assert gradients["v"].sharding.spec == P("data")
    assert_close((value, gradients), jax.value_and_grad(loss)(params(), *batch()))


def test_sums_that_are_multiplied_are_not_put_off():
    def squared(w, x):
        mean = jnp.mean(x @ w)
        return mean * mean + mean * jnp.mean(x) + mean * jnp.sum(w)

    def resharded(w, x):
        if not jax.typeof(x).sharding.mesh.are_all_axes_explicit:
            return jnp.dot(x.sum(0), w) / x.shape[0]
        over = lambda a: jax.reshard(a, P("data"))
        return jnp.dot(over(x.sum(0)), over(w), out_sharding=P()) / x.shape[0]

    w, x = jnp.linspace(-1.0, 1.0, 16), jax.random.normal(jax.random.key(0), (ROWS, 16))
    for fun in (squared, resharded):
        single = jax.value_and_grad(microbatch(fun, 1, SIZE, MEAN))
        with jax.set_mesh(EXPLICIT):
            args = put(w, EXPLICIT), put(x, EXPLICIT, P("data"))
            assert_close(jax.jit(single)(*args), single(w, x))


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_mapped_and_differentiated_twice_over_devices(mesh):
    options = {"mesh": mesh} if mesh is AUTO else {}

    def bent(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    w, x = jnp.linspace(-1.0, 1.0, 12), batch()[0]
    small = microbatch(bent, 1, SIZE, MEAN, **options)
    with jax.set_mesh(mesh):
        args = put(w, mesh), put(x, mesh, P("data"))
        twice = jax.jit(jax.hessian(small))(*args)
        scales = put(jnp.arange(3.0), mesh)
        mapped = jax.jit(jax.vmap(lambda s, w, x: jax.grad(small)(s * w, x), (0, None, None)))
        mapped = mapped(scales, *args)
    assert_close(twice, jax.hessian(bent)(w, x))
    assert_close(mapped, jnp.stack([jax.grad(bent)(s * w, x) for s in range(3)]))


@pytest.mark.parametrize("way", ["explicit mesh", "shard_map"])
def test_rows_of_a_mapped_loop_are_differentiated_over_devices(way):
    """What lies over devices is part of the cotangent's type, also below a vmap."""
    encode = lambda w, x: jnp.tanh(x * w)
    x = jnp.linspace(-1, 1, ROWS * 2).reshape(ROWS, 2)
    models = jnp.array([[1.0, 0.5], [2.0, -1.0], [0.3, 0.1]])

    def gradient(fun, x):
        of_models = lambda models: jnp.sum(jax.vmap(lambda w: fun(w, x))(models) ** 2)
        return jax.grad(of_models)

    expected = gradient(encode, x)(models)
    if way == "explicit mesh":
        small = microbatch(encode, 1, SIZE, CONCAT)
        with jax.set_mesh(EXPLICIT):
            found = jax.jit(gradient(small, put(x, EXPLICIT, P("data"))))(put(models, EXPLICIT))
    else:
        small = microbatch(encode, 1, SIZE // SHARDS, CONCAT)
        local = lambda models, x: gradient(small, x)(models)
        mapped = jax.shard_map(local, mesh=AUTO, in_specs=(P(), P("data")), out_specs=P())
        found = jax.jit(mapped)(models, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_low_precisions_are_summed_over_devices_in_float32():
    # 257 on seven devices, 260 on the last: 2059, which is 2064 in bfloat16. A device's 257 is 256 there, which
    # would end at 2048.
    ones = np.arange(264)[None] < np.array([257] * 7 + [260])[:, None]
    rows = put(jnp.asarray(ones.reshape(-1), jnp.bfloat16), AUTO, P("data"))
    for reduce in ("once", "each"):
        total = jax.jit(microbatch(jnp.sum, 0, 8, SUM, mesh=AUTO, reduce=reduce))(rows)
        assert total.dtype == jnp.bfloat16 and float(total) == 2064.0


def test_closures_and_calls_outside_of_jit():
    scale = put(jnp.float32(3.0), AUTO)
    small = microbatch(lambda x: jnp.mean(scale * x), 0, SIZE, MEAN, mesh=AUTO)
    assert float(small(put(jnp.arange(64.0), AUTO, P("data")))) == 94.5
    outer = jax.grad(lambda s: microbatch(lambda x: jnp.mean(s * x), 0, 8, MEAN, mesh=AUTO)(x))
    x = put(jnp.arange(64.0), AUTO, P("data"))
    assert float(outer(put(jnp.float32(2.0), AUTO))) == 31.5
    with jax.set_mesh(EXPLICIT):
        x = put(jnp.arange(64.0), EXPLICIT, P("data"))
        small = microbatch(lambda s, x: jnp.mean(s * x), 1, SIZE, MEAN)
        value, gradient = jax.value_and_grad(small)(put(jnp.float32(2.0), EXPLICIT), x)
        assert (float(value), float(gradient)) == (63.0, 31.5)


def test_keys_draw_other_numbers_on_every_device():
    def drawn(key, x):
        return x * 0 + jax.random.normal(key, x.shape)

    small = microbatch(drawn, 1, SIZE, CONCAT, key_argnums=0, mesh=AUTO)
    out = jax.jit(small)(put(jax.random.key(0), AUTO), put(jnp.zeros(ROWS), AUTO, P("data")))
    assert len(np.unique(np.asarray(out))) == ROWS


def message(call, kind):
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def row_sum(x):
    return jnp.sum(x, 0)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_S4_a_size_that_is_not_a_multiple_of_the_shards(mesh):
    options = {"mesh": mesh} if mesh is AUTO else {}
    with jax.set_mesh(mesh):
        x = put(jnp.zeros((ROWS, 2)), mesh, P("data"))
        text = message(lambda: microbatch(row_sum, 0, 4, **options)(x), MicrobatchSizeError)
    assert text == (
        "microbatch(row_sum): x along axis 0 has 64 rows in 8 shards, and microbatch_size=4 is not "
        "a multiple of 8.\n"
        "Use 8, so that every device has equally many rows of each microbatch."
    )


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_S4_a_size_larger_than_the_batch_is_the_whole_batch(mesh):
    options = {"mesh": mesh} if mesh is AUTO else {}
    with jax.set_mesh(mesh):
        x = put(jnp.ones((ROWS, 2)), mesh, P("data"))
        allowed = microbatch(row_sum, 0, 100, remainder="allow", **options)
        assert allowed(x).tolist() == [64.0, 64.0]
        text = message(lambda: microbatch(row_sum, 0, 100, **options)(x), MicrobatchSizeError)
    assert "64 rows" in text and "microbatch_size=100" in text


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_S4_a_tail_of_a_sharded_batch_is_refused_with_advice_to_pad(mesh):
    options = {"mesh": mesh} if mesh is AUTO else {}
    with jax.set_mesh(mesh):
        x = put(jnp.zeros((40, 2)), mesh, P("data"))
        small = microbatch(row_sum, 0, 16, remainder="allow", **options)
        text = message(lambda: small(x), MicrobatchSizeError)
    assert text == (
        "microbatch(row_sum): x along axis 0 has 40 rows in 8 shards, and the last microbatch "
        "would have 8 of them, all in the last shards.\n"
        "Pad the batch to 48 rows with rows of weight 0 (weight_fn)."
    )


def test_S4_a_batch_that_the_shards_do_not_divide():
    text = message(
        lambda: microbatch(row_sum, 0, 6, mesh=AUTO)(jnp.zeros((12, 2))), MicrobatchSizeError
    )
    assert text == (
        "microbatch(row_sum): x along axis 0 has 12 rows in 8 shards, and 8 does not divide 12.\n"
        "Pad the batch to 16 rows with rows of weight 0 (weight_fn)."
    )


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_contiguous_order_would_move_rows_and_is_refused(mesh):
    options = {"mesh": mesh} if mesh is AUTO else {}
    with jax.set_mesh(mesh):
        x = put(jnp.zeros((ROWS, 2)), mesh, P("data"))
        small = microbatch(row_sum, 0, SIZE, order="contiguous", **options)
        assert 'Use order="strided"' in message(lambda: small(x), MicrobatchError)


@pytest.mark.parametrize(
    ("accumulator", "fun"),
    [
        (LAST, row_sum),
        (Accumulator(lambda s: 0.0, lambda c, v, i: c + v, lambda c: c), jnp.sum),
        (CONCAT, jnp.sum),
        ((Carry(0), SUM), lambda s, x: (s + x.sum(), x.sum())),
    ],
    ids=["last", "custom", "scalar rows", "carry"],
)
def test_what_has_no_meaning_in_parts_is_refused(accumulator, fun):
    x = put(jnp.ones((ROWS,)), AUTO, P("data"))
    is_carry = isinstance(accumulator, tuple)
    small = microbatch(fun, int(is_carry), SIZE, accumulator, mesh=AUTO)
    args = (jnp.zeros(()), x) if is_carry else (x,)
    assert "shard" in message(lambda: small(*args), AccumulatorError)


def test_custom_accumulators_and_carries_work_on_an_explicit_mesh():
    decayed = Accumulator(lambda s: jnp.zeros(s.shape), lambda c, v, i: c / 2 + v, lambda c: c)
    fun = lambda state, x: (state + x.sum(), x.sum(), x.mean())
    small = microbatch(fun, 1, SIZE, (Carry(0), decayed, LAST))
    x = jnp.arange(float(ROWS))
    with jax.set_mesh(EXPLICIT):
        out = jax.jit(small)(put(jnp.zeros(()), EXPLICIT), put(x, EXPLICIT, P("data")))
    assert_close(out, small(jnp.zeros(()), x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": AUTO, "batch_spec": P("model")}, "Use one of 'data'"),
        ({"mesh": AUTO, "batch_spec": P("data", "data")}, "Name the mesh axes of the rows alone"),
        ({"mesh": AUTO, "batch_spec": P()}, "Name the mesh axes of the rows alone"),
        ({"mesh": mesh_of(AxisType.Auto, (4, 2), ("a", "b"))}, "batch_spec=P('a')"),
        ({"mesh": "data"}, "jax.make_mesh"),
        ({"batch_spec": P("data")}, "jax.set_mesh(mesh)"),
        ({"mesh": AUTO, "reduce": "twice"}, "Use one of 'once', 'each'"),
    ],
)
def test_meshes_that_are_refused(options, words):
    x = jnp.zeros((ROWS, 2))
    assert words in message(lambda: microbatch(row_sum, 0, SIZE, **options)(x), MicrobatchError)


def test_the_mesh_of_the_context():
    x = put(jnp.ones((ROWS, 2)), AUTO, P("data"))
    with jax.set_mesh(AUTO):
        small = microbatch(row_sum, 0, SIZE, batch_spec="data")
        assert collectives(small, x) == ONCE
        assert small(x).tolist() == [64.0, 64.0]


def test_S5_versions_are_not_compared_as_strings():
    """A string comparison has "0.10" before "0.7"; features are looked for, never versions."""
    import pathlib

    import microbatch.jax

    sources = pathlib.Path(microbatch.jax.__file__).parent.rglob("*.py")
    assert not [path.name for path in sources if "__version__" in path.read_text()]


@pytest.mark.parametrize("engine", ["factored", "vmap"])
def test_examples_gradients_keep_the_sharding_of_their_parameters(engine):
    mesh = mesh_of(AxisType.Explicit, (4, 2), ("data", "model"))
    one_loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    w, x = params()["w"], batch()[0]
    transform = lambda gradient: (gradient, gradient**2)
    fun = micro_grad(one_loss, microbatch_size=SIZE, transform_fn=transform, engine=engine)
    each = jax.vmap(jax.grad(lambda w, x: one_loss(w, x[None])), (None, 0))(w, x)
    with jax.set_mesh(mesh):
        sums = jax.jit(fun)(put(w, mesh, P(None, "model")), put(x, mesh, P("data")))[0]
    assert_close(sums, (each.sum(0), (each**2).sum(0)))
