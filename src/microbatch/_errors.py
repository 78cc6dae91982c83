"""What goes wrong, as types: every one is a `ValueError` whose message names the argument and ends with the fix."""


class MicrobatchError(ValueError):
    """An input that cannot give the whole batch's answer."""


class BatchError(MicrobatchError):
    """The batch arguments: none, unknown, without rows, or with unequal rows."""


class MicrobatchSizeError(MicrobatchError):
    """A microbatch size that is not a positive integer, or that does not fit the batch."""


class AccumulatorError(MicrobatchError):
    """An accumulator that is unknown, does not fit the output, or cannot take its dtype."""


class EmptyStream(MicrobatchError):
    """A stream, or a batch, without rows where the accumulator has no value for that."""


class CheckpointError(MicrobatchError):
    """A checkpoint that belongs to another function, tree, dtype or microbatch size."""


class BudgetError(MicrobatchError):
    """A memory budget that cannot be read, or memory that is unknown, or nothing that fits."""


class PlanError(MicrobatchError):
    """A function whose memory cannot be predicted without running it; the message says which operation stopped it."""


class DifferentError(MicrobatchError):
    """Microbatching changes the numbers of this function beyond rounding."""


class RowMixingError(MicrobatchError):
    """A module whose output for one row depends on the other rows, or that changes state as it runs."""


class HookError(MicrobatchError):
    """A hook, or an optimizer in backward, that would act once per microbatch."""


class GraphError(MicrobatchError):
    """A tensor computed before the call whose graph every microbatch would go through, or a loss without a graph."""


class DistributedError(MicrobatchError):
    """Processes, or the wrappers between them, that cannot give one process's answer."""


class OutOfMemory(MicrobatchError, MemoryError):
    """A microbatch that did not fit; the message has the sizes and the next size to try."""
