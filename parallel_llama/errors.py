"""The errors that a person can cause or has to hear of, and nothing else.

The command line turns what is found before any weight is read, `UsageError` and `CheckpointError`,
into exit code 2, and the others, which only the work itself meets, into exit code 1. Every message
names the value, the limit and the remedy.
"""


class UsageError(ValueError):
    """What was asked for cannot be done; found before any work starts."""


class ContextExceeded(UsageError):
    """A prompt and its completion together do not fit into the model's context."""


class CheckpointError(ValueError):
    """A model's files are missing, damaged or disagree with each other; their headers show it."""


class UnreadableFile(CheckpointError):
    """The system does not let a file or folder be read, so nothing is known of what it holds."""


class DamagedWeights(CheckpointError):
    """The weights themselves are damaged, or end early: only reading them showed it."""


class WriteError(OSError):
    """What is being written cannot be: the disk is full, or fails."""


class OutOfMemory(MemoryError):
    """Memory that the work needs cannot be had."""


class NumericalError(ArithmeticError):
    """The model's numbers are no numbers any more: logits hold nan or infinity."""
