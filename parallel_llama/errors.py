"""The errors that a person can cause or has to hear of, and how their messages show values.

The command line turns what is found before any weight is read, `UsageError` and `CheckpointError`,
into exit code 2, and the others, which only the work itself meets, into exit code 1. Every message
names the value, the limit and the remedy.
"""

from collections.abc import Iterable

# Messages quote files and requests; what is longer is cut in the middle, so that the remedy stays.
MAX_MESSAGE_CHARS = 2000


class _BoundedError(ValueError):
    """An error whose message has at most MAX_MESSAGE_CHARS characters."""

    def __init__(self, message: str) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            half = MAX_MESSAGE_CHARS // 2 - 3
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)


class UsageError(_BoundedError):
    """What was asked for cannot be done; found before any work starts."""


class ContextExceeded(UsageError):
    """A prompt and its completion together do not fit into the model's context."""


class CheckpointError(_BoundedError):
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


# What a rank says that has drawn other tokens than rank 0.
DISAGREE = "the ranks disagree"


def shown(value: object, limit: int = 60) -> str:
    """A value as an error shows it, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"  # printing one beyond 4300 digits raises
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def quoted(text: str, limit: int = 60) -> str:
    """A person's text in a message: quoted, without control characters, cut where it is long."""
    return ascii(text) if len(text) <= limit else ascii(text[:limit]) + "..."


def printable(text: str, limit: int) -> str:
    """Text of another process in a message: control characters as ?, cut where it is long."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:limit])
    return shown if len(text) <= limit else f"{shown}..."


def listed(names: Iterable[str], limit: int = 10) -> str:
    """The first few names, and how many more there are."""
    every = list(names)
    more = f" ... and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(name[:200] for name in every[:limit]) + more


def listed_ranks(ranks: Iterable[int]) -> str:
    """Some numbers of ranks: '1, 2', and '...' beyond eight."""
    numbers = sorted(ranks)
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
