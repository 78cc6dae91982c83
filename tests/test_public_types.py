"""Public names are fully typed: every parameter and result, every method and property."""

import importlib
import inspect

import pytest

PUBLIC = ("microbatch", "microbatch.numpy", "microbatch.jax", "microbatch.torch")


def untyped(value, name):
    """The parameters and results of a function or class that have no annotation."""
    if inspect.isclass(value):
        own = {k: v for k, v in vars(value).items() if not k.startswith("_") or k == "__init__"}
        functions = {k: getattr(v, "fget", None) or v for k, v in own.items()}
        written = {k: f for k, f in functions.items() if inspect.isfunction(f) and _by_hand(f)}
        return [gap for k, f in written.items() for gap in untyped(f, f"{name}.{k}")]
    if not inspect.isfunction(value):
        return []
    signature = inspect.signature(value)
    gaps = [
        f"{name}({parameter.name})"
        for parameter in signature.parameters.values()
        if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls")
    ]
    constructor = name.endswith("__init__")
    return gaps + [name] * (signature.return_annotation is signature.empty and not constructor)


def _by_hand(function):
    """Whether it was written in a file, not made by `dataclass` or `enum`."""
    return "microbatch" in function.__code__.co_filename


@pytest.mark.parametrize("place", PUBLIC)
def test_public_names_are_typed(place):
    module = importlib.import_module(place)
    gaps = [gap for name in module.__all__ for gap in untyped(getattr(module, name), name)]
    assert gaps == []


@pytest.mark.parametrize("place", PUBLIC)
def test_public_names_have_a_docstring(place):
    module = importlib.import_module(place)
    assert [name for name in module.__all__ if not inspect.getdoc(getattr(module, name))] == []


def test_this_check_can_fail():
    def function(typed: int, bare) -> int: ...
    def silent(typed: int): ...

    assert untyped(function, "function") == ["function(bare)"]
    assert untyped(silent, "silent") == ["silent"]
