"""Where a fold over a stream was when it was last saved: arrays, numbers and a position in one file.

Framework-free: NumPy arrays in, NumPy arrays out. The file is a safetensors file whose metadata says what it belongs to.
A front uses it as the program::

    checkpoint = Checkpoint(path, where, identity)     # identity: what the state belongs to, as words
    saved = checkpoint.load()                          # None, or a Progress; a foreign file is refused
    for position, microbatch in enumerate(stream):
        if saved and position < saved.position:
            continue
        ...
        if checkpoint.due:
            checkpoint.save(lambda: Progress(position + 1, numbers, arrays))
    checkpoint.remove()
"""

import functools
import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np

from microbatch._checks import name_of
from microbatch._errors import CheckpointError

_FORMAT = "microbatch stream 1"


class Progress(NamedTuple):
    """What has been folded so far.

    Attributes:
      position: how many elements of the stream are in the state.
      numbers: small facts that JSON holds exactly (the total weight, rows, a dtype's name).
      arrays: the state, under names of the front's choice.
    """

    position: int
    numbers: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class Checkpoint:
    """The file at `path` for the fold that `identity` describes.

    Args:
      path: a file; its folder exists.
      where: the words that open a message, ``"accumulate(loss)"``.
      identity: what the state belongs to: aspect to words. A file that differs in one of them is refused.
      time_share: saving takes at most this share of the time, except for the first save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        where: str,
        identity: Mapping[str, str],
        time_share: float = 0.05,
    ) -> None:
        self.path = Path(path)
        self._where = where
        self._identity = dict(identity)
        self._time_share = time_share
        self._wait_until = -np.inf

    def load(self) -> Progress | None:
        """What was saved, or None where there is no file."""
        if not self.path.exists():
            return None
        metadata, arrays = _read(self.path, self._where)
        saved = json.loads(metadata["identity"])
        for aspect in {**saved, **self._identity}:
            self.check(aspect, saved.get(aspect), self._identity.get(aspect))
        return Progress(int(metadata["position"]), json.loads(metadata["numbers"]), arrays)

    def check(self, aspect: str, saved: Any, now: Any) -> None:
        """Refuses the file where `aspect` was something else when it was saved."""
        if saved != now:
            raise CheckpointError(
                f"{self._where}: {self.path} is a checkpoint of another {aspect}.\n"
                f"  saved: {saved}\n"
                f"  now:   {now}\n"
                "Go on with what it was made with, or delete the file to start anew."
            )

    @property
    def due(self) -> bool:
        """Whether saving now would not slow the fold down."""
        return time.monotonic() >= self._wait_until

    def save(self, progress: Callable[[], Progress]) -> None:
        """Replaces the file in one step, and sets when the next is due by the time that took, `progress` included."""
        start = time.monotonic()
        _write(self.path, self._where, self._identity, progress())
        end = time.monotonic()
        self._wait_until = end + (end - start) / self._time_share

    def remove(self) -> None:
        """Deletes the file: what is finished is not taken up again. So is what a killed process left half-written."""
        self.path.unlink(missing_ok=True)
        _beside(self.path).unlink(missing_ok=True)


def function_words(fun: Callable[..., Any], seen: set[int] | None = None) -> str:
    """`fun` as words that change when its program does: its name, and a digest of its code and of what it holds.

    Of what a partial, a closure and defaults hold, numbers, strings and NumPy arrays count; the rest is not looked into.
    Functions in `seen`, by their ids, are not looked into again: they may hold themselves.
    """
    words: list[str] = []
    seen = set() if seen is None else seen
    seen.add(id(fun))
    held_words = functools.partial(_held_words, seen=seen)
    inner = fun
    while isinstance(inner, functools.partial):
        words.append(held_words([*inner.args, *sorted(inner.keywords.items())]))
        inner = inner.func
    inner = inspect.unwrap(inner)
    code = getattr(inner if hasattr(inner, "__code__") else type(inner).__call__, "__code__", None)
    module = getattr(fun, "__module__", None) or type(fun).__module__
    name = getattr(fun, "__qualname__", None) or name_of(fun)
    if isinstance(code, CodeType):
        words.append(_code_words(code))
        words.append(held_words(getattr(inner, "__defaults__", None) or ()))
        words.append(held_words(sorted((getattr(inner, "__kwdefaults__", None) or {}).items())))
        words.append(held_words(_contents(inner)))
    if not words:
        return f"{module}.{name}"
    return f"{module}.{name} ({hashlib.sha256(repr(words).encode()).hexdigest()[:12]})"


def _contents(fun: Callable[..., Any]) -> list[Any]:
    """What the closure of `fun` holds, but for names that are not bound yet."""
    cells = getattr(fun, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != CellType()]


def _held_words(values: Sequence[Any], seen: set[int]) -> str:
    """Values that do not change while a function runs, by what they are; others by their places alone."""
    words = []
    for value in values:
        if isinstance(value, tuple):
            words.append(_held_words(value, seen))
        elif isinstance(value, np.ndarray | np.generic):
            words.append(leaves_digest([("", value)]))
        elif isinstance(value, FunctionType | functools.partial):
            words.append("" if id(value) in seen else function_words(value, seen))
        else:
            known = isinstance(value, bool | int | float | complex | str | bytes | None)
            words.append(repr(value) if known else "")
    return repr(words)


def leaves_words(leaves: Sequence[tuple[str, Any]]) -> str:
    """Paths, dtypes and shapes: ``"x: float32[4, 3], y: int64[4]"``; a leaf without a shape by its type."""

    def words(leaf: Any) -> str:
        if not hasattr(leaf, "shape"):
            return type(leaf).__name__
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"

    return ", ".join(f"{path}: {words(leaf)}" for path, leaf in leaves) or "nothing"


def leaves_digest(leaves: Sequence[tuple[str, Any]]) -> str:
    """`leaves_words` and a digest of the values: NumPy arrays by their bytes, numbers and strings as written."""
    digest = hashlib.sha256()
    for path, leaf in leaves:
        digest.update(path.encode())
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
            digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        elif isinstance(leaf, bool | int | float | complex | str | bytes | None):
            digest.update(repr(leaf).encode())
    return f"{leaves_words(leaves)} ({digest.hexdigest()[:12]})"


def _code_words(code: CodeType) -> str:
    constants = [
        _code_words(value)
        if isinstance(value, CodeType)
        else repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        for value in code.co_consts
    ]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, constants))


def _safetensors(where: str) -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            f"{where}: checkpoint= needs safetensors.\n"
            "Install it with: pip install 'microbatch[checkpoint]'"
        ) from error
    return safetensors


def _write(path: Path, where: str, identity: Mapping[str, str], progress: Progress) -> None:
    stored = {name: _as_native(where, name, array) for name, array in progress.arrays.items()}
    metadata = {
        "format": _FORMAT,
        "identity": json.dumps(identity),
        "position": str(progress.position),
        "numbers": json.dumps(progress.numbers),
        "dtypes": json.dumps(
            {n: [_dtype_word(a.dtype), list(a.shape)] for n, a in progress.arrays.items()}
        ),
    }
    content = _safetensors(where).numpy.save(stored, metadata=metadata)
    # Written beside, flushed and renamed: a reader, or a restart, finds the old file or the new one, never half of one.
    beside = _beside(path)
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Where a file is written before it is renamed; one name, so that what a killed process left is overwritten."""
    return path.with_name(f"{path.name}.part")


def _read(path: Path, where: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    safetensors = _safetensors(where)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{where}: {path} is not a checkpoint ({error}).\nDelete the file to start anew."
        ) from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(
            f"{where}: {path} is not a checkpoint of `accumulate`, or one of another version.\n"
            "Name another file, or delete it to start anew."
        )
    dtypes = json.loads(metadata["dtypes"])
    return metadata, {
        name: array.reshape(-1).view(np.dtype(dtypes[name][0])).reshape(dtypes[name][1])
        for name, array in stored.items()
    }


def _dtype_word(dtype: np.dtype) -> str:
    """What `np.dtype` reads back; dtypes of other packages (bfloat16) are known by their names."""
    return dtype.name if dtype.kind == "V" else dtype.newbyteorder("=").str


def _as_native(where: str, name: str, array: np.ndarray) -> np.ndarray:
    """`array` as safetensors has it; other dtypes as their bytes."""
    if array.dtype.hasobject:
        raise CheckpointError(
            f"{where}: {name} holds Python objects, which a checkpoint cannot.\n"
            "Return arrays or numbers, or leave checkpoint= out."
        )
    native = array.dtype.newbyteorder("=")
    contiguous = np.ascontiguousarray(array, native).reshape(array.shape)
    if native.kind in "fiub" and native.itemsize <= 8:
        return contiguous
    return contiguous.reshape(-1).view(np.uint8)
