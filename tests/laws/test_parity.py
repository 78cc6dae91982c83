"""The same word means the same thing in each front: signatures, with exactly the exceptions of the contract."""

import importlib
import inspect

import pytest

from microbatch import MicrobatchError
from tests.laws.fronts import FRONTS

RENAMED = {"torch": {"in_dims": "in_axes"}}
OWN = {
    "microbatch": {
        "numpy": {"out"},
        "jax": {
            "key_argnums",
            "differentiate",
            "checkpoint_policy",
            "mesh",
            "batch_spec",
            "reduce",
        },
        "torch": {"differentiate", "checkpoint_policy", "rng", "allow_row_mixing"},
    },
}
AUTOMATIC = {"memory_budget"}
SHARED = {
    "microbatch": (
        "fun",
        "argnums",
        "microbatch_size",
        "accumulator",
        "argnames",
        "in_axes",
        "num_real_microbatches",
        "num_microbatches",
        "order",
        "remainder",
        "weight_fn",
        "accumulator_dtype",
    ),
    "reshape_batch_axis": ("tree", "microbatch_size", "axis"),
    "accumulate": ("fun", "accumulator", "weight_fn", "accumulator_dtype"),
    "gradient_accumulation": ("micro_batches_grads", "accumulation_steps"),
}
DEFAULT_ORDER = {"numpy": "contiguous", "jax": "strided", "torch": "contiguous"}


def parameters(front, name):
    found = inspect.signature(getattr(front.module, name)).parameters.values()
    renamed = RENAMED.get(front.name, {})
    return [p.replace(name=renamed.get(p.name, p.name)) for p in found]


@pytest.mark.parametrize("name", SHARED)
def test_every_front_has_the_same_parameters(front, name):
    own = OWN.get(name, {}).get(front.name, set()) | AUTOMATIC
    names = [p.name for p in parameters(front, name)]
    assert tuple(n for n in names if n not in own) == SHARED[name]


@pytest.mark.parametrize("name", SHARED)
def test_kinds_and_defaults_are_the_same(front, name):
    expected = {p.name: p for p in parameters(FRONTS["numpy"](), name)}
    for parameter in parameters(front, name):
        if parameter.name in SHARED[name] and parameter.name != "order":
            like = expected[parameter.name]
            assert (parameter.kind, parameter.default) == (like.kind, like.default), parameter.name


def test_the_order_is_the_fronts_own(front):
    order = {p.name: p.default for p in parameters(front, "microbatch")}["order"]
    assert order == DEFAULT_ORDER[front.name]


def test_a_stream_takes_the_same_keywords(front):
    accumulated = front.module.accumulate(lambda x: x)
    names = {p.name for p in inspect.signature(accumulated).parameters.values()}
    assert names == {"args", "microbatches", "checkpoint", "out"}


def test_the_accumulators_are_the_same_objects(front):
    import microbatch

    for name in ("AccumulationType", "Accumulator", "Carry"):
        assert getattr(front.module, name) is getattr(microbatch, name)


def test_all_that_is_public_is_documented(front):
    for name in front.module.__all__:
        assert inspect.getdoc(getattr(front.module, name)), name


class Stop(Exception):
    """Raised in the place of `microbatch`, with what it was called with."""


PLANNED = ("fun", "argnums", "microbatch_size", "num_microbatches", "accumulator", "memory_budget")


@pytest.mark.parametrize(("name", "module"), [("plan", "_planning"), ("verify", "_verification")])
def test_plan_and_verify_hand_every_option_to_microbatch(front, name, module, monkeypatch):
    """Which refuses what it does not have; a size is theirs to find, or to be told."""
    if front.name == "numpy":
        pytest.skip("nothing to plan or to verify")
    transformation, size = (
        getattr(front.module, name),
        {"plan": {}, "verify": {"microbatch_size": 2}},
    )
    options = [p.name for p in inspect.signature(front.module.microbatch).parameters.values()]

    def stop(fun, argnums, microbatch_size, accumulator, **options):
        raise Stop(options)

    where = importlib.import_module(f"{front.module.__name__}.{module}")
    with monkeypatch.context() as patched:
        patched.setattr(where, "microbatch", stop)
        for option in (o for o in options if o not in PLANNED):
            value = "allow" if option == "remainder" else object()
            with pytest.raises(Stop) as caught:
                transformation(sum, 0, **size[name], **{option: value})
            assert caught.value.args[0][option] is value
    with pytest.raises(TypeError, match="'banana'"):
        transformation(sum, 0, **size[name], banana=1)


@pytest.mark.parametrize("option", ["microbatch_size", "num_microbatches"])
def test_a_plan_is_not_told_the_size_that_it_finds(front, option):
    if front.name == "numpy":
        pytest.skip("nothing to plan")
    with pytest.raises(MicrobatchError, match=f"{option} is given, and a plan finds it"):
        front.module.plan(sum, 0, **{option: 2})
