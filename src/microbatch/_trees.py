"""Trees of dicts, lists, tuples, named tuples and None, without a framework."""

import copy
import itertools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from microbatch._errors import MicrobatchError


def leaves_with_paths(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves in order, each with its path in Python's notation; None is an empty tree.

    >>> leaves_with_paths({"a": 1, "b": (2, None)}, "batch")
    [("batch['a']", 1), ("batch['b'][0]", 2)]
    """
    children = _children(tree)
    if children is None:
        return [(path, tree)]
    return [leaf for key, child in children for leaf in leaves_with_paths(child, path + key)]


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`tree` with ``fn(leaf, *leaves of rest)`` in place of each leaf.

    >>> map_leaves(lambda a, b: a + b, [1, {"x": 2}], [10, {"x": 20}])
    [11, {'x': 22}]
    """
    children = _children(tree)
    if children is None:
        return fn(tree, *rest)
    others = [_matching(tree, other) for other in rest]
    mapped = [
        map_leaves(fn, child, *more) for (_, child), *more in zip(children, *others, strict=True)
    ]
    return _rebuild(tree, mapped)


def map_numbered_leaves(fn: Callable[[int, Any], Any], tree: Any) -> Any:
    """`tree` with ``fn(number, leaf)`` in place of each leaf; they are numbered in order, from 0.

    >>> map_numbered_leaves(lambda number, leaf: (number, leaf), ["a", {"x": "b"}])
    [(0, 'a'), {'x': (1, 'b')}]
    """
    numbers = itertools.count()
    return map_leaves(lambda leaf: fn(next(numbers), leaf), tree)


def map_prefix(
    fn: Callable[..., Any],
    prefix: Any,
    tree: Any,
    *rest: Any,
    is_prefix_leaf: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """`tree` with ``fn(entry of prefix, leaf, *leaves of rest)``; an entry of `prefix` stands for a whole subtree.

    >>> map_prefix(lambda sign, leaf: sign * leaf, (1, -1), (5, {"x": 2, "y": 3}))
    (5, {'x': -2, 'y': -3})
    """
    children = _children(tree)
    spread = is_prefix_leaf(prefix) or _children(prefix) is None
    if children is None:
        if not spread:
            raise MicrobatchError(f"{structure_words(prefix)} stands where there is a single value")
        return fn(prefix, tree, *rest)
    others = [_matching(tree, other) for other in rest]
    prefixes = [prefix] * len(children) if spread else _matching(tree, prefix)
    mapped = [
        map_prefix(fn, entry, child, *more, is_prefix_leaf=is_prefix_leaf)
        for entry, (_, child), *more in zip(prefixes, children, *others, strict=True)
    ]
    return _rebuild(tree, mapped)


def map_subtrees(
    fn: Callable[[Any, str, Any], Any],
    prefix: Any,
    tree: Any,
    path: str = "",
    *,
    is_prefix_leaf: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """`tree` with ``fn(entry, path, subtree)`` in place of the subtree that each entry of `prefix` stands for.

    >>> map_subtrees(lambda name, path, part: (name, path, part), ("a", "b"), (5, {"x": 2}))
    (('a', '[0]', 5), ('b', '[1]', {'x': 2}))
    """
    if is_prefix_leaf(prefix) or _children(prefix) is None:
        return fn(prefix, path, tree)
    children = _children(tree)
    if children is None:
        raise MicrobatchError(f"{structure_words(prefix)} stands where there is a single value")
    entries = _matching(tree, prefix)
    mapped = [
        map_subtrees(fn, entry, child, path + step, is_prefix_leaf=is_prefix_leaf)
        for entry, (step, child) in zip(entries, children, strict=True)
    ]
    return _rebuild(tree, mapped)


def structure_words(tree: Any) -> str:
    """The tree with ``*`` for each leaf: ``(*, {'x': *})``."""
    children = _children(tree)
    if children is None:
        return "*"
    if tree is None:
        return "None"
    if _is_mapping(tree):
        return "{" + ", ".join(f"{k!r}: {structure_words(v)}" for k, v in tree.items()) + "}"
    inside = ", ".join(structure_words(child) for _, child in children)
    if isinstance(tree, list):
        return f"[{inside}]"
    name = type(tree).__name__ if hasattr(tree, "_fields") else ""
    return f"{name}({inside}{',' * (len(children) == 1)})"


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """(path step, child) pairs, or None for a leaf."""
    if tree is None:
        return []
    if _is_mapping(tree):
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", child) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, list | tuple):
        return [(f"[{i}]", child) for i, child in enumerate(tree)]
    return None


def _is_mapping(tree: Any) -> bool:
    # Asked of every leaf: the abstract class answers ten times more slowly than these two.
    return isinstance(tree, dict) or (hasattr(tree, "keys") and isinstance(tree, Mapping))


def _matching(tree: Any, other: Any) -> list[Any]:
    """The children of `other` in the order of those of `tree`; refused unless they correspond one to one."""
    children, others = _children(tree), _children(other)
    alike = (
        others is not None
        and _is_mapping(other) == _is_mapping(tree)
        and {key for key, _ in children or ()} == {key for key, _ in others}
    )
    if not alike:
        raise MicrobatchError(f"{structure_words(other)} does not match {structure_words(tree)}")
    by_key = dict(others or ())
    return [by_key[key] for key, _ in children or ()]


def _rebuild(tree: Any, children: list[Any]) -> Any:
    if tree is None:
        return None
    if _is_mapping(tree):
        return _rebuild_mapping(tree, dict(zip(tree, children, strict=True)))
    if hasattr(tree, "_fields"):
        return type(tree)._make(children)
    if isinstance(tree, list) and type(tree) is not list:
        rebuilt = copy.copy(tree)
        rebuilt[:] = children
        return rebuilt
    return type(tree)(children)


def _rebuild_mapping(tree: Any, items: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return items
    if not isinstance(tree, MutableMapping):
        return type(tree)(items)
    # A copy keeps what a subclass holds beside its items, and needs nothing of its constructor.
    rebuilt = copy.copy(tree)
    for key, value in items.items():
        rebuilt[key] = value
    return rebuilt
