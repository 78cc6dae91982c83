"""What counts as an accumulator, and the algebra of the kinds over any array functions."""

import enum
import fractions
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch import AccumulationType, Accumulator, AccumulatorError, Carry
from microbatch._accumulation import accumulates_wider, as_accumulator, leaf_rule
from microbatch._outputs import assemble, canonical, parts_of

MEAN, SUM, RUNNING_MEAN, CONCAT, MAX, MIN, LAST = AccumulationType


class Exact:
    """The array functions of the kinds on fractions: no rounding, so the laws are equalities."""

    zeros = staticmethod(lambda spec, dtype: fractions.Fraction(0))
    lowest = staticmethod(lambda spec: fractions.Fraction(-(10**9)))
    highest = staticmethod(lambda spec: fractions.Fraction(10**9))
    add = staticmethod(lambda carry, x, weight: carry + x * (1 if weight is None else weight))
    divide = staticmethod(lambda carry, total: carry / total if total else carry)
    maximum, minimum = staticmethod(max), staticmethod(min)
    replace = staticmethod(lambda carry, x: x)

    @staticmethod
    def blend(carry, x, weight, total):
        weight = 1 if weight is None else weight
        return carry + (x - carry) * fractions.Fraction(weight, total + weight)


def folded(kind, values, weights):
    rule, total = leaf_rule(kind, Exact()), 0
    carry = rule.init(None, None)
    for value, weight in zip(values, weights, strict=True):
        carry = rule.update(carry, value, weight, total)
        total += weight
    return rule.finalize(carry, total)


PAIRS = st.lists(st.tuples(st.fractions(-9, 9, max_denominator=7), st.integers(1, 5)), min_size=1)


@given(PAIRS)
def test_each_kind_is_its_definition(pairs):
    values, weights = zip(*pairs, strict=True)
    mean = sum(v * w for v, w in pairs) / sum(weights)
    assert folded(SUM, values, weights) == sum(values)
    assert folded(MEAN, values, weights) == mean
    assert folded(RUNNING_MEAN, values, weights) == mean
    assert folded(MAX, values, weights) == max(values)
    assert folded(MIN, values, weights) == min(values)
    assert folded(LAST, values, weights) == values[-1]


@given(PAIRS, st.randoms())
def test_the_order_of_the_microbatches_does_not_matter(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    for kind in (SUM, MEAN, RUNNING_MEAN, MAX, MIN):
        of = lambda these, kind=kind: folded(kind, *zip(*these, strict=True))
        assert of(pairs) == of(shuffled)


def test_nothing_at_all_is_zero():
    assert [folded(kind, (), ()) for kind in (SUM, MEAN, RUNNING_MEAN, LAST)] == [0, 0, 0, 0]


def test_kinds_of_another_library_are_known_by_name():
    other = enum.Enum("Other", ["SUM", "RUNNING_MEAN", "MEDIAN"])
    assert as_accumulator(other.SUM) is SUM
    assert as_accumulator(other.RUNNING_MEAN) is RUNNING_MEAN
    with pytest.raises(AccumulatorError, match="MEDIAN"):
        as_accumulator(other.MEDIAN)


def test_objects_with_the_four_attributes_are_accumulators():
    functions = {name: lambda *_: name for name in ("init", "update", "finalize", "aggregate")}
    own = as_accumulator(SimpleNamespace(**functions))
    assert isinstance(own, Accumulator)
    assert own.init is functions["init"]
    assert as_accumulator(SimpleNamespace(init=len)) is None
    assert as_accumulator("SUM") is None


@pytest.mark.parametrize(
    ("update", "takes"),
    [
        (lambda carry, x, i: carry, False),
        (lambda carry, x, i, weight: carry, True),
        (lambda carry, x, i, *, weight=1: carry, True),
        (max, False),
    ],
)
def test_an_accumulator_says_whether_it_takes_a_weight(update, takes):
    assert Accumulator(lambda s: s, update, lambda c: c).takes_weight is takes


def test_parts_and_assembly_are_inverse():
    accumulator = canonical("f", {"a": (SUM, Carry(1)), "b": MEAN, "n": None})
    output = {"a": ([1, {"x": 2}], {"state": 3}), "b": (4, None), "n": None}
    parts = parts_of("f", accumulator, output)
    assert [(part.path, part.value) for part in parts] == [
        ("output['a'][0][0]", 1),
        ("output['a'][0][1]['x']", 2),
        ("output['a'][1]", {"state": 3}),
        ("output['b'][0]", 4),
    ]
    assert assemble(accumulator, output, [part.value for part in parts]) == output


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        ("float16", True),
        ("bfloat16", True),
        ("float8_e4m3fn", True),
        ("float32", False),
        ("int8", False),
    ],
)
def test_which_dtypes_are_held_wider(name, wider):
    assert accumulates_wider(name) is wider
