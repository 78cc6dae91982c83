"""What one microbatch's output looks like, and how the results of its parts make the whole output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microbatch._accumulation import AccumulationType, Carry
from microbatch._errors import AccumulatorError
from microbatch._outputs import Part, Structure, parts_of
from microbatch._trees import leaves_with_paths, map_leaves
from microbatch.torch._internals import is_transformed
from microbatch.torch._tensors import as_tensor, spec_of


@dataclass(frozen=True)
class Layout:
    """What one microbatch's output looks like, without its memory: `parts` hold shapes, dtypes and devices."""

    where: str
    accumulator: Any
    structure: Structure
    parts: list[Part]
    numbers: tuple[type | None, ...]
    """For each leaf the Python type of a number, or None for a tensor."""

    @classmethod
    def of(cls, where: str, accumulator: Any, output: Any) -> "Layout":
        """The layout of `output`; an accumulator that is not its prefix is refused."""
        found = parts_of(where, accumulator, output)
        numbers = []
        for part in found:
            for path, leaf in leaves_with_paths(part.value, part.path):
                numbers.append(_number_type(where, path, leaf))
        specs = [
            Part(entry, path, map_leaves(lambda leaf: spec_of(as_tensor(leaf)), value))
            for entry, path, value in found
        ]
        structure = Structure.of(where, accumulator, output, found)
        return cls(where, accumulator, structure, specs, tuple(numbers))

    @property
    def template(self) -> Any:
        """The structure of the output."""
        return self.structure.skeleton

    def flatten(self, output: Any) -> list[Any]:
        """The values of the parts: a tensor where a part is one leaf, a tree where it is a subtree."""
        return [
            value if isinstance(part.accumulator, Carry) else map_leaves(as_tensor, value)
            for part, value in zip(self.parts, self.structure.values(output), strict=True)
        ]

    def assemble(self, results: Sequence[Any]) -> Any:
        """The whole output from the parts' results, numbers as numbers again."""
        numbers = iter(self.numbers)
        restored = []
        for part, result in zip(self.parts, results, strict=True):
            kinds = [next(numbers) for _ in leaves_with_paths(part.value)]
            stays = not isinstance(part.accumulator, AccumulationType) or (
                part.accumulator is AccumulationType.CONCAT
            )
            number = None if stays else kinds[0]
            restored.append(result if number is None else _as_number(result, number))
        return self.structure.whole(restored)


def _number_type(where: str, path: str, leaf: Any) -> type | None:
    if isinstance(leaf, torch.Tensor):
        return None
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)
    raise AccumulatorError(
        f"{where}: {path} is a {type(leaf).__name__}, which cannot be accumulated.\n"
        "Return tensors or numbers."
    )


def _as_number(result: torch.Tensor, number: type) -> Any:
    return result if is_transformed(result) else number(result.item())
