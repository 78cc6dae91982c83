"""Where a microbatch starts and ends: integers only, no arrays."""

from dataclasses import dataclass
from typing import Literal

from microbatch._errors import MicrobatchSizeError

Order = Literal["strided", "contiguous"]
Remainder = Literal["error", "allow"]
Auto = Literal["auto"]


@dataclass(frozen=True)
class Split:
    """`batch_size` rows as `full` microbatches of `microbatch_size` rows and a tail of `tail` rows.

    Strided: microbatch i holds rows i, i + n, … of the first n·m rows. Contiguous: rows i·m … i·m + m − 1. The tail is
    always the last rows and the last microbatch.

    >>> split = Split(batch_size=10, microbatch_size=3, order="strided")
    >>> [list(range(10))[split.rows(i)] for i in range(split.num_microbatches)]
    [[0, 3, 6], [1, 4, 7], [2, 5, 8], [9]]
    """

    batch_size: int
    microbatch_size: int
    order: Order = "contiguous"

    @property
    def full(self) -> int:
        """How many microbatches have `microbatch_size` rows."""
        return self.batch_size // self.microbatch_size

    @property
    def tail(self) -> int:
        """Rows of the last, smaller microbatch; 0 where there is none."""
        return self.batch_size % self.microbatch_size

    @property
    def num_microbatches(self) -> int:
        """The full ones and the tail."""
        return self.full + (self.tail > 0)

    def size(self, index: int) -> int:
        """Rows of microbatch `index`."""
        return self.microbatch_size if index < self.full else self.tail

    def rows(self, index: int) -> slice:
        """Which rows of the batch microbatch `index` holds."""
        in_full = self.full * self.microbatch_size
        if index >= self.full:
            return slice(in_full, self.batch_size)
        if self.order == "strided":
            return slice(index, in_full, self.full)
        return slice(index * self.microbatch_size, (index + 1) * self.microbatch_size)


def make_split(
    batch_size: int,
    microbatch_size: int | None,
    num_microbatches: int | None = None,
    *,
    order: Order = "contiguous",
    remainder: Remainder = "error",
    subject: str = "the batch",
) -> Split:
    """The split of `batch_size` rows, or a `MicrobatchSizeError` that names the sizes that would do.

    Args:
      batch_size: rows in the batch, 0 included.
      microbatch_size: rows in a microbatch; None where `num_microbatches` is given.
      num_microbatches: at most so many microbatches, of ⌈batch_size / num_microbatches⌉ rows.
      order: which rows a microbatch holds, see `Split`.
      remainder: "error" refuses a tail, "allow" makes it the last microbatch.
      subject: what has the rows, as `batch_size_of` says it: ``"batch['x'] along axis 0"``.
    """
    name, along, axis = subject.partition(" along ")
    rows = f"{name} has {batch_size} row{'s' * (batch_size != 1)}{along}{axis}"
    if microbatch_size is None:
        if num_microbatches is None:
            raise MicrobatchSizeError("give microbatch_size or num_microbatches.")
        if remainder == "error" and batch_size % num_microbatches:
            counts = _nearest_divisors(batch_size, num_microbatches)
            raise MicrobatchSizeError(
                f"{rows}, not divisible by num_microbatches={num_microbatches}.\n"
                f'Use {counts}, or remainder="allow" for a last microbatch of fewer rows.'
            )
        return Split(batch_size, max(1, -(-batch_size // num_microbatches)), order)
    split = Split(batch_size, microbatch_size, order)
    if remainder == "error" and split.tail:
        sizes = _nearest_divisors(batch_size, microbatch_size)
        tail = f"{split.tail} row{'s' * (split.tail != 1)}"
        raise MicrobatchSizeError(
            f"{rows}, not divisible by microbatch_size={microbatch_size}.\n"
            f'Use {sizes}, or remainder="allow" for a last microbatch of {tail}.'
        )
    return split


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest_divisors(number: int, wanted: int, most: int = 4) -> str:
    """The divisors nearest to `wanted`, in words."""
    nearest = sorted(sorted(divisors(number), key=lambda d: (abs(d - wanted), d))[:most])
    *first, last = map(str, nearest)
    return f"{', '.join(first)} or {last}" if first else last
