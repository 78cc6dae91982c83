"""How much memory there is: budgets in words, the host's limits, and bytes for people to read."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microbatch._errors import BudgetError

DEFAULT_FRACTION = 0.9

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_WAYS = 'Give bytes (8_000_000_000), a size ("12GiB", "500MB") or a share of the device ("80%").'


@dataclass(frozen=True)
class Budget:
    """A number of bytes that must not be exceeded, and where that number came from."""

    bytes: int
    origin: str

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes)} ({self.origin})"


def resolve_budget(
    memory_budget: int | str | None, total_bytes: int | None, device: str, where: str = "plan"
) -> Budget:
    """Turns what a user gave for `memory_budget` into bytes.

    Args:
      memory_budget: bytes, ``"12GiB"``, ``"80%"`` of `total_bytes`, or None for 0.9 of it.
      total_bytes: all of the device's memory, free or not, so that two runs choose alike; None where unknown.
      device: how the device is called in messages.
      where: the words that open a message.

    Raises:
      BudgetError: the budget cannot be read, is not positive, or needs a total that is unknown.

    >>> resolve_budget("2KiB", None, "cpu").bytes
    2048
    >>> resolve_budget("80%", 1000, "cpu")
    Budget(bytes=800, origin='80% of 1000 B on cpu')
    """
    if memory_budget is None or (isinstance(memory_budget, str) and "%" in memory_budget):
        share = DEFAULT_FRACTION if memory_budget is None else _share(memory_budget, where)
        if total_bytes is None:
            raise BudgetError(
                f"{where}: the total memory of {device} is unknown, so memory_budget={memory_budget!r} "
                f'has no meaning there.\nGive a number: memory_budget="12GiB".'
            )
        origin = f"{share:.0%} of {format_bytes(total_bytes)} on {device}"
        return Budget(int(share * total_bytes), origin)
    check_budget(memory_budget, where)
    budget = memory_budget if isinstance(memory_budget, int) else _size(memory_budget, where)
    if budget <= 0:
        raise BudgetError(f"{where}: memory_budget={memory_budget!r} is not positive.\n{_WAYS}")
    return Budget(budget, "given")


def check_budget(memory_budget: Any, where: str) -> None:
    """Refuses what is no number of bytes, no text and not None."""
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, (int, str, type(None))):
        raise BudgetError(
            f"{where}: memory_budget={memory_budget!r} is a {type(memory_budget).__name__}.\n{_WAYS}"
        )


def refuse_unused(memory_budget: int | str | None, where: str) -> None:
    """Refuses a budget beside a size that is given: it would have no effect."""
    if memory_budget is not None:
        raise BudgetError(
            f'{where}: memory_budget={memory_budget!r} is used with microbatch_size="auto" only.\n'
            'Use microbatch_size="auto", or leave memory_budget out.'
        )


def host_memory_bytes() -> int | None:
    """Physical memory or the control group's limit, whichever is smaller; None where neither is known."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        physical = None
    known = [n for n in (physical, control_group_bytes()) if n is not None and n > 0]
    return min(known, default=None)


def control_group_bytes(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The smallest memory limit among this process's control groups (version 1 and 2) and their parents."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, which is not visible: its parents up to the root still are.
        place = top / group.lstrip("/")
        limits += [
            _limit(folder / file)
            for folder in (place, *place.parents)
            if top in (folder, *folder.parents)
        ]
    return min((n for n in limits if n is not None), default=None)


def format_bytes(count: float) -> str:
    """Bytes in the largest binary unit that keeps the number above one.

    >>> format_bytes(1536), format_bytes(12), format_bytes(7.5 * 2**30)
    ('1.5 KiB', '12 B', '7.5 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{_digits(size)} {unit}"
        size /= 1024
    return f"{_digits(size)} TiB"


def _digits(size: float) -> str:
    return f"{size:.0f}" if abs(size) >= 100 else f"{size:.1f}"


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    # Version 1 writes "no limit" as a number near 2**63.
    return int(text) if text.isdigit() and int(text) < 2**60 else None


def _share(text: str, where: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not found or not 0 < float(found[1]) <= 100:
        raise BudgetError(
            f"{where}: memory_budget={text!r} is not a share between 0% and 100%.\n{_WAYS}"
        )
    return float(found[1]) / 100


def _size(text: str, where: str) -> int:
    found = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([kmgt]?i?b)\s*", text.lower())
    if not found or found[2] not in _UNITS:
        raise BudgetError(f"{where}: memory_budget={text!r} cannot be read.\n{_WAYS}")
    return int(float(found[1].replace("_", "")) * _UNITS[found[2]])
