"""Recognising that memory ran out, and saying what would fit."""

import re

import torch

from microbatch._errors import OutOfMemory
from microbatch._splitting import divisors

# The libraries below PyTorch report it in their own words, and not by type.
_MESSAGES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input",
    "can't allocate memory",
    "cannot allocate memory",
    "RESOURCE_EXHAUSTED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, by its type or by a known message.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(m.lower() in text for m in _MESSAGES)


def out_of_memory(
    where: str,
    words: str,
    *,
    microbatch_size: int | None,
    batch_size: int,
    index: int,
    device: torch.device,
    predicted: int | None,
    grads: str,
    distributed: bool,
) -> OutOfMemory:
    """The error to raise, outside of the ``except`` block so that it keeps nothing of the attempt alive.

    Args:
      where: the words that open the message.
      words: the message of the error that was caught.
      microbatch_size: rows in a microbatch; None for microbatches that came ready.
      batch_size: rows in the batch.
      index: the microbatch that failed.
      device: where memory ran out.
      predicted: the peak that shapes predict for this size, in bytes; None where that is unknown.
      grads: what has become of the gradients.
      distributed: whether other processes wait for this one.
    """
    asked = bytes_asked(words)
    available = available_bytes(device)
    amounts = [] if asked is None else [f"it asked for {mebibytes(asked)}"]
    if predicted is not None:
        amounts.append(f"a peak of {mebibytes(predicted)} is predicted, parameters included")
    if available is not None:
        amounts.append(f"{mebibytes(available)} are available on {device}")
    detail = f"; {', '.join(amounts)}" if amounts else ""
    rows = (
        ""
        if microbatch_size is None
        else f" of {microbatch_size} row{'s' * (microbatch_size != 1)}"
    )
    if microbatch_size is None:
        advice = "Use smaller batches, or cut them further with backward(..., microbatch_size=1)"
    elif microbatch_size > 1:
        smaller = [d for d in divisors(batch_size) if d <= microbatch_size // 2]
        advice = f"Use microbatch_size={max(smaller, default=1)}"
    else:
        advice = "One row does not fit: checkpoint activations, or use a smaller model or a lower precision"
    if distributed:
        advice += ", and restart all processes: the others wait for this one"
    return OutOfMemory(
        f"{where}: out of memory in microbatch {index}{rows}{detail}. {grads}\n{advice}."
    )


def bytes_asked(words: str) -> int | None:
    """How many bytes the failed allocation wanted, as the allocator's message has it.

    >>> bytes_asked("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")
    1610612736
    >>> bytes_asked("you tried to allocate 4096 bytes. Error code 12")
    4096
    """
    match = re.search(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", words, re.IGNORECASE)
    if match is None:
        return None
    powers = {"bytes": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4}
    return int(float(match[1]) * 1024 ** powers[match[2].lower()])


def available_bytes(device: torch.device) -> int | None:
    """Free bytes on the device now; None where it cannot be asked."""
    if device.type == "cuda":
        # What the allocator holds and does not use is free for this process.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def mebibytes(count: int) -> str:
    """Bytes in words.

    >>> mebibytes(3 * 2**20)
    '3.0 MiB'
    """
    return f"{count / 2**20:,.1f} MiB"
