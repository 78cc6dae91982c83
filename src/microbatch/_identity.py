"""A hashable key of a function that is the same when a program defines the same function again, as every step does.

A function is its code and what the code can see: closure, defaults and globals, arrays by shape. A size that was found
for one is right for another with an equal key.
"""

import dataclasses
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_DEPTH = 4
_SMALL = 64
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
_BUILTIN = (types.BuiltinFunctionType, types.CodeType)


def function_key(
    fun: Callable[..., Any], describe: Callable[[Any], Hashable | None] = lambda value: None
) -> Hashable:
    """The key of `fun`; `describe` gives a front's own objects a key, or None.

    >>> make = lambda scale: lambda x: scale * x
    >>> function_key(make(2.0)) == function_key(make(2.0)), function_key(make(2.0)) == function_key(make(3.0))
    (True, False)
    """
    return _key(fun, describe, _DEPTH)


class Recent(Generic[T]):
    """The last `most` values by key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`, made where there is none."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return self._values[key]


def _key(value: Any, describe: Callable[[Any], Hashable | None], depth: int) -> Hashable:
    again = functools.partial(_key, describe=describe, depth=depth - 1)
    described = describe(value)
    if described is not None:
        return described
    if isinstance(value, _PLAIN + _BUILTIN):
        return (type(value).__name__, value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return ("array", tuple(value.shape), str(value.dtype))
    if depth < 0:
        return _identity(value)
    if isinstance(value, functools.partial):
        return (
            "partial",
            again(value.func),
            tuple(map(again, value.args)),
            tuple((name, again(item)) for name, item in value.keywords.items()),
        )
    if isinstance(value, types.MethodType):
        return ("method", again(value.__func__), again(value.__self__))
    if isinstance(value, types.FunctionType):
        return (
            "function",
            value.__code__,
            tuple(map(again, value.__defaults__ or ())),
            again(value.__kwdefaults__ or {}),
            tuple(again(_content(cell)) for cell in value.__closure__ or ()),
            tuple(
                (name, again(value.__globals__[name]))
                for name in value.__code__.co_names
                if name in value.__globals__
            ),
        )
    if isinstance(value, list | tuple) and len(value) <= _SMALL:
        return (type(value).__name__, tuple(map(again, value)))
    if isinstance(value, Mapping) and len(value) <= _SMALL:
        return (
            type(value).__name__,
            tuple((again(name), again(item)) for name, item in value.items()),
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return (type(value), tuple(again(getattr(value, field.name)) for field in fields))
    return _identity(value)


class _Same:
    """Equal only to itself: the key of what can be neither described nor referred to weakly."""


def _identity(value: Any) -> Hashable:
    # An id alone could be that of a later object; a weak reference to a dead one equals nothing else.
    try:
        reference = weakref.ref(value)
        hash(reference)
        return ("object", id(value), reference)
    except TypeError:
        return _Same()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None
