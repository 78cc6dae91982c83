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
