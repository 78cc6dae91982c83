"""The versions and the machine that a number was measured with."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from microbatch._memory import format_bytes, host_memory_bytes

_PACKAGES = ("microbatch", "jax", "jaxlib", "torch", "numpy", "optax")


def environment() -> tuple[tuple[str, str], ...]:
    """Pairs of a name and a value. Versions are read from the installed packages: nothing is imported."""
    memory = host_memory_bytes()
    pairs = [
        ("Python", platform.python_version()),
        *((name, version) for name in _PACKAGES if (version := _version(name))),
        ("System", f"{platform.system()} {platform.release()}"),
        ("Processor", _processor()),
        ("Cores", str(_cores())),
    ]
    if memory:
        pairs.append(("Memory", format_bytes(memory)))
    return tuple(pairs)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
