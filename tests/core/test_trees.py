"""Trees without a framework, against JAX's."""

from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microbatch import MicrobatchError
from microbatch._trees import (
    leaves_with_paths,
    map_leaves,
    map_prefix,
    map_subtrees,
    structure_words,
)

Point = namedtuple("Point", ["x", "y"])
TREES = st.recursive(
    st.integers(0, 9) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=6,
)


@given(TREES)
def test_leaves_are_those_of_jax(tree):
    """JAX sorts the keys of a dict; their order here is the dict's own."""
    assert sorted(leaf for _, leaf in leaves_with_paths(tree)) == sorted(jax.tree.leaves(tree))


@given(TREES)
def test_a_path_leads_to_its_leaf(tree):
    for path, leaf in leaves_with_paths(tree, "tree"):
        assert eval(path, {"tree": tree}) == leaf


@given(TREES)
def test_mapping_keeps_the_structure_and_composes(tree):
    double = map_leaves(lambda leaf: leaf * 2, tree)
    assert double == jax.tree.map(lambda leaf: leaf * 2, tree)
    assert structure_words(double) == structure_words(tree)
    assert map_leaves(lambda a, b: a + b, tree, double) == map_leaves(lambda a: a * 3, tree)


@given(TREES)
def test_a_single_entry_is_a_prefix_of_every_tree(tree):
    assert map_prefix(lambda entry, leaf: (entry, leaf), 7, tree) == map_leaves(
        lambda x: (7, x), tree
    )
    assert map_subtrees(lambda entry, path, part: part, 7, tree) == tree


@given(TREES)
def test_every_tree_is_its_own_prefix(tree):
    assert map_prefix(lambda a, b: a - b, tree, tree) == map_leaves(lambda _: 0, tree)


@pytest.mark.parametrize(
    ("prefix", "tree"),
    [
        ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, (1,)),
        ((1, 2), 5),
        ([1, [2]], [1, 2]),
        ((1,), None),
    ],
)
def test_what_is_no_prefix_is_refused(prefix, tree):
    with pytest.raises(MicrobatchError):
        map_prefix(lambda a, b: b, prefix, tree)
    with pytest.raises(MicrobatchError):
        map_subtrees(lambda entry, path, part: part, prefix, tree)


def test_the_types_of_containers_are_kept():
    tree = OrderedDict(b=Point(1, [2]), a=(None, 3))
    mapped = map_leaves(str, tree)
    assert type(mapped) is OrderedDict and list(mapped) == ["b", "a"]
    assert mapped["b"] == Point("1", ["2"]) and isinstance(mapped["b"], Point)
    assert structure_words(tree) == "{'b': Point(*, [*]), 'a': (None, *)}"


def test_an_accumulator_that_is_a_named_tuple_is_one_entry():
    entry = Point("x", "y")
    found = map_subtrees(
        lambda e, path, part: (e, path, part),
        (entry, 2),
        (5, [6]),
        "output",
        is_prefix_leaf=lambda value: isinstance(value, Point),
    )
    assert found == ((entry, "output[0]", 5), (2, "output[1]", [6]))


def test_containers_with_constructors_and_state_of_their_own():
    class Tagged(dict):
        def __init__(self, x, *, tag):
            super().__init__(x=x)
            self.tag = tag

    class Wrapped(UserDict):
        def __init__(self, data, *, tag):
            super().__init__(data)
            self.tag = tag

    class Pair(list):
        def __init__(self, a, b):
            super().__init__([a, b])

    class Twice(Point):
        def __new__(cls, x):
            return super().__new__(cls, x, x)

    for tree in (Tagged(1, tag="t"), Wrapped({"x": 1}, tag="t")):
        doubled = map_leaves(lambda leaf: 2 * leaf, tree)
        assert type(doubled) is type(tree) and dict(doubled) == {"x": 2} and doubled.tag == "t"
        assert dict(tree) == {"x": 1}
    assert map_leaves(lambda leaf: 2 * leaf, Pair(1, 2)) == [2, 4]
    doubled = map_leaves(lambda leaf: 2 * leaf, Twice(1))
    assert type(doubled) is Twice and doubled == (2, 2)
    assert map_leaves(lambda leaf: 2 * leaf, MappingProxyType({"x": 1})) == {"x": 2}
