"""What can be refused before anything runs, and how it is said.

Every function takes `where`, the words that open the message: ``"microbatch(loss)"``.
"""

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from microbatch._errors import BatchError, MicrobatchError, MicrobatchSizeError


class Slot(NamedTuple):
    """Where one batch argument is in a call: an index into args, or a name into kwargs."""

    key: int | str
    name: str


class Leaf(NamedTuple):
    """One array of the batch arguments: its path for messages, its shape and its batch axis (may be negative)."""

    path: str
    shape: tuple[int, ...] | None
    axis: int


def name_of(fun: Callable[..., Any]) -> str:
    """What to call `fun` in a message, through partials and wrappers.

    >>> import functools
    >>> name_of(functools.partial(sorted, reverse=True))
    'sorted'
    """
    while hasattr(fun, "func"):
        fun = fun.func
    return getattr(fun, "__name__", None) or type(fun).__name__


def signature_of(fun: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of `fun`, or None for callables that have none (some builtins)."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None


def check_size(where: str, name: str, value: Any) -> int:
    """`value` as a positive int; floats, bools and strings are refused, whatever their value."""
    try:
        if isinstance(value, bool) or "bool" in type(value).__name__:
            raise TypeError
        size = operator.index(value)
    except TypeError:
        raise MicrobatchSizeError(
            f"{where}: {name}={value!r} is a {type(value).__name__}, not an integer.\n"
            f"Use a positive int, for example {name}=8."
        ) from None
    if size < 1:
        raise MicrobatchSizeError(f"{where}: {name}={size} is not positive.\nUse 1 or more.")
    return size


def check_norm(where: str, name: str, value: float) -> float:
    """`value` as a bound on a norm: a Python number that is not negative; infinity bounds nothing."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not value >= 0:
        raise MicrobatchError(
            f"{where}: {name}={value!r} is not a number that is at least 0.\nUse {where}(1.0)."
        )
    return float(value)


def check_weight(where: str, weight: float, index: int) -> float:
    """`weight`, which `weight_fn` returned for microbatch `index`, if it is finite and not negative."""
    if not (math.isfinite(weight) and weight >= 0):
        raise MicrobatchError(
            f"{where}: weight_fn returned {weight!r} for microbatch {index}.\n"
            "Return a finite number that is not negative: rows, valid tokens."
        )
    return weight


def check_choice(where: str, name: str, value: Any, choices: Sequence[Any]) -> Any:
    """`value` if it is one of `choices`."""
    if value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise MicrobatchError(f"{where}: {name}={value!r} is unknown.\nUse one of {allowed}.")
    return value


def check_function(where: str, name: str, value: Any) -> None:
    """Refuses what cannot be called."""
    if not callable(value):
        advice = {
            "fun": "Give a function.",
            "loss_fn": "Give the function itself, not what it returns.",
        }.get(name, "Give a function, or leave it out.")
        raise MicrobatchError(
            f"{where}: {name}={value!r} is a {type(value).__name__}, not a function.\n{advice}"
        )


def check_places(where: str, name: str, axes: Sequence[Any]) -> None:
    """Refuses entries of `name`, a tree with the axis of each output's examples, that are no integers."""
    for axis in axes:
        if isinstance(axis, bool) or not hasattr(axis, "__index__"):
            raise BatchError(
                f"{where}: {name} holds {axis!r}, not an integer.\n"
                f"Use {name}=0, or an integer for each part of the output."
            )


def check_place(where: str, name: str, axis: int, ndim: int) -> None:
    """Refuses an axis of the examples that an output with them, of `ndim` axes, does not have."""
    if not -ndim <= axis < ndim:
        raise BatchError(
            f"{where}: {name} puts the examples on axis {axis}, and the output with them has {ndim} "
            f"ax{'i' if ndim == 1 else 'e'}s.\nUse {-ndim} to {ndim - 1}."
        )


def as_argnums(where: str, argnums: Any, name: str = "argnums") -> tuple[int, ...]:
    """`argnums`, the argument `name`, as a tuple of ints."""
    items = tuple(argnums) if isinstance(argnums, Iterable) else (argnums,)
    for item in items:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            advice = (
                "Name batch arguments by position, or use argnames."
                if name == "argnums"
                else "Name arguments by position."
            )
            raise BatchError(
                f"{where}: {name}={argnums!r} is not an integer or a sequence of integers.\n{advice}"
            )
    return tuple(operator.index(item) for item in items)


def as_positions(where: str, name: str, numbers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`numbers`, the argument `name`, from 0, each an argument that a call with `count` passes by position."""
    for number in numbers:
        if not -count <= number < count:
            raise BatchError(
                f"{where}: {name} names argument {number}, and the call has {count} positional "
                f"argument{'s' * (count != 1)}.\n"
                "Pass it by position, and give its number."
            )
    return tuple(number % count for number in numbers)


def as_argnames(where: str, argnames: Any) -> tuple[str, ...]:
    """`argnames` as a tuple of strings."""
    items = tuple(argnames) if isinstance(argnames, Iterable) else (argnames,)
    items = (argnames,) if isinstance(argnames, str) else items
    for item in items:
        if not isinstance(item, str):
            raise BatchError(f"{where}: argnames={argnames!r} holds {item!r}.\nUse strings.")
    return items


def check_declared(
    where: str,
    signature: inspect.Signature | None,
    argnums: tuple[int, ...],
    argnames: tuple[str, ...],
) -> None:
    """Refuses batch arguments that no call of the function could have."""
    if not argnums and not argnames:
        raise BatchError(
            f"{where}: no batch argument.\nName at least one by position in argnums or by name in argnames."
        )
    if signature is None:
        return
    positional, open_ended = _positional(signature)
    takes = f"{where.partition('(')[2].rstrip(')') or 'the function'}{signature_words(signature)}"
    for number in argnums:
        if not open_ended and not -len(positional) <= number < len(positional):
            raise BatchError(
                f"{where}: argnums holds {number}, but {takes} has {len(positional)} positional "
                f"parameter{'s' * (len(positional) != 1)}.\n"
                f"Use {_range_words(len(positional))}."
            )
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    for name in argnames:
        named = kinds.get(name) in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        if not named and inspect.Parameter.VAR_KEYWORD not in kinds.values():
            raise BatchError(
                f"{where}: argnames holds {name!r}, but {takes} has no such parameter.\n"
                f"Use one of {', '.join(map(repr, kinds))}."
            )


def locate(
    where: str,
    signature: inspect.Signature | None,
    argnums: tuple[int, ...],
    argnames: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Slot, ...]:
    """Where each batch argument is in this call; declared by position or by name, passed by position or by name.

    Negative numbers count from the end of the positional parameters that this call gives.
    """
    parameters = [] if signature is None else [p.name for p in _positional(signature)[0]]

    def label(index: int) -> str:
        return parameters[index] if index < len(parameters) else f"args[{index}]"

    given: list[Slot] = [Slot(i, label(i)) for i in range(len(args))]
    given += [Slot(name, name) for name in parameters[len(args) :] if name in kwargs]

    def by_number(number: int) -> Slot:
        if number < 0:
            if -number <= len(given):
                return given[number]
        elif number < len(args):
            return given[number]
        elif number < len(parameters) and parameters[number] in kwargs:
            return Slot(parameters[number], parameters[number])
        wanted = parameters[number] if 0 <= number < len(parameters) else None
        what = f"{wanted!r} (argnums {number})" if wanted else f"argnums {number}"
        raise BatchError(
            f"{where}: batch argument {what} was not given; the call has {_call_words(args, kwargs)}.\n"
            "Pass it, or take it out of the batch arguments."
        )

    def by_name(name: str) -> Slot:
        if name in kwargs:
            return Slot(name, name)
        if name in parameters and parameters.index(name) < len(args):
            return Slot(parameters.index(name), name)
        raise BatchError(
            f"{where}: batch argument {name!r} was not given; the call has {_call_words(args, kwargs)}.\n"
            "Pass it, or take it out of the batch arguments."
        )

    slots = (*map(by_number, argnums), *map(by_name, argnames))
    repeated = [slot.name for i, slot in enumerate(slots) if slot.key in {s.key for s in slots[:i]}]
    if repeated:
        raise BatchError(
            f"{where}: batch argument {repeated[0]!r} is named twice.\n"
            "Name it once, in argnums or in argnames."
        )
    return slots


def per_argument(where: str, name: str, value: Any, slots: Sequence[Slot]) -> tuple[Any, ...]:
    """One entry of `value` per batch argument; a single int stands for all."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return (value,) * len(slots)
    if len(value) != len(slots):
        names = ", ".join(slot.name for slot in slots)
        raise BatchError(
            f"{where}: {name}={value!r} has {len(value)} entries for {len(slots)} batch "
            f"argument{'s' * (len(slots) != 1)} ({names}).\n"
            "Give one integer for all, or one per batch argument: argnums first, then argnames."
        )
    return tuple(value)


def batch_size_of(where: str, leaves: Sequence[Leaf], option: str = "in_axes") -> tuple[int, str]:
    """The common number of rows, and the first leaf in words; unequal or missing rows are refused with their paths."""
    if not leaves:
        raise BatchError(
            f"{where}: the batch arguments hold no array.\n"
            "Name arguments that have rows in argnums or argnames."
        )
    for leaf in leaves:
        if leaf.shape is None:
            raise BatchError(
                f"{where}: {leaf.path} is not an array.\n"
                "Batch arguments hold arrays alone; pass other values as arguments of their own."
            )
        if isinstance(leaf.axis, bool) or not hasattr(leaf.axis, "__index__"):
            raise BatchError(
                f"{where}: {leaf.path} has {leaf.axis!r} for its axis of rows.\nUse an integer."
            )
        if not -len(leaf.shape) <= leaf.axis < len(leaf.shape):
            shape = "a scalar" if leaf.shape == () else f"of shape {leaf.shape}"
            raise BatchError(
                f"{where}: {leaf.path} is {shape} and has no axis {leaf.axis} to split.\n"
                "Pass it as an argument of its own that is not a batch argument, or give it rows."
            )
    sizes = [leaf.shape[leaf.axis] for leaf in leaves if leaf.shape is not None]
    if len(set(sizes)) > 1:
        rows = "\n".join(
            f"  {leaf.path}: {size} along axis {leaf.axis} of shape {leaf.shape}"
            for leaf, size in zip(leaves, sizes, strict=True)
        )
        raise BatchError(
            f"{where}: batch arguments need equally many rows, and these have different numbers:\n{rows}\n"
            f"Give them the same number of rows, or name each one's axis in {option}."
        )
    return sizes[0], f"{leaves[0].path} along axis {leaves[0].axis}"


def signature_words(signature: inspect.Signature) -> str:
    """The signature without annotations and defaults' values: ``(params, x, *, scale)``."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _positional(signature: inspect.Signature) -> tuple[list[inspect.Parameter], bool]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values()
    open_ended = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    return [p for p in parameters if p.kind in kinds], open_ended


def _call_words(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    words = [f"{len(args)} positional argument{'s' * (len(args) != 1)}"]
    if kwargs:
        words.append(f"the keywords {', '.join(map(repr, kwargs))}")
    return " and ".join(words)


def _range_words(count: int) -> str:
    if count == 0:
        return "argnames"
    return "0" if count == 1 else f"0 to {count - 1}, or negative numbers from the end"
