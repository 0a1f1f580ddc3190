"""The errors that a user can cause or needs to see, and how their messages show values.

The command line exits with code 2 for `UsageError` and `CheckpointError`, and with code 1 for
`DamagedWeights` and all other errors. Messages state the value, the limit and the remedy, if there
are any.
"""

import unicodedata
from collections.abc import Iterable

# Messages quote files and requests. Long messages are cut in the middle, to keep the remedy.
MAX_MESSAGE_CHARS = 2000

# Unicode categories: Cc control, Cf format (such as right-to-left overrides), Cs surrogates, Zl and
# Zp line and paragraph separators, which some terminals obey.
_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Not escaped, although their categories are unsafe. Joiners are needed for emoji and scripts such
# as Persian, and are harmless.
_SAFE = "\n\t\u200c\u200d"


class _BoundedError(ValueError):
    """An error whose message has at most MAX_MESSAGE_CHARS characters."""

    def __init__(self, message: str) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            half = MAX_MESSAGE_CHARS // 2 - 3
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)


class UsageError(_BoundedError):
    """The request is invalid or not supported."""


class ContextExceeded(UsageError):
    """A prompt and its completion exceed the model's context, or the KV cache."""


class CheckpointError(_BoundedError):
    """Files of a model are missing, damaged or contradictory."""


class UnreadableFile(CheckpointError):
    """The system refuses to read a file or folder, so its content is unknown."""


class DamagedWeights(CheckpointError):
    """The weights are damaged or truncated; found only by reading them."""


class WriteError(OSError):
    """Writing failed because the disk is full or faulty."""


class OutOfMemory(MemoryError):
    """Memory could not be allocated."""


class NumericalError(ArithmeticError):
    """The model produced NaN or Inf."""


# The message of a rank that sampled different tokens from rank 0.
DISAGREE = "the ranks disagree"

# The remedy in the message of a rank whose memory has changed: its tokens may be wrong.
TEST_MEMORY = "test that host's memory and processor before it serves again"


def shown(value: object, limit: int = 60) -> str:
    """The repr of a value, shortened to `limit` characters."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"  # Python cannot print more than 4300 digits
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def quoted(text: str, limit: int = 60) -> str:
    """A user's text in quotes, cut to `limit` characters; all but printable ASCII is escaped."""
    return ascii(text) if len(text) <= limit else ascii(text[:limit]) + "..."


def printable(text: str, limit: int) -> str:
    """Text of another process, with ? for control characters, shortened to `limit` characters."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:limit])
    return shown if len(text) <= limit else f"{shown}..."


def escaped(text: str) -> str:
    """Text with its control characters escaped, so that it cannot control a terminal.

    >>> escaped("a\\tb\\x1b[2J")
    'a\\tb\\\\x1b[2J'
    """
    return "".join(
        char
        if char in _SAFE or unicodedata.category(char) not in _UNSAFE
        else char.encode("unicode_escape").decode()
        for char in text
    )


def kind_of(value: object) -> str:
    """The type of a value, such as 'a list' or 'an int'."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def listed(names: Iterable[str], limit: int = 10) -> str:
    """The first `limit` names, and the number of further names."""
    all_names = list(names)
    suffix = f" ... and {len(all_names) - limit} more" if len(all_names) > limit else ""
    return ", ".join(name[:200] for name in all_names[:limit]) + suffix


def named_ranks(ranks: Iterable[int], of: int | None = None) -> str:
    """'rank 1', 'ranks 1, 2', or 'rank 1 of 3' for a number of ranks; with '...' after eight."""
    numbers = sorted(ranks)
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) != 1)} {listed}" + ("" if of is None else f" of {of}")


def ranks_do(ranks: Iterable[int], singular: str, plural: str, of: int | None = None) -> str:
    """Ranks as the subject of a sentence: 'rank 1 is', or 'ranks 1, 2 of 3 are'."""
    numbers = sorted(ranks)
    return f"{named_ranks(numbers, of)} {singular if len(numbers) == 1 else plural}"
