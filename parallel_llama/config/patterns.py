"""Compiles regular expressions from configuration files, within bounds on the time of a match.

A pattern is matched with the name of every matrix. With repeated groups the time can be exponential
in the length of the name; with n repetitions it can grow with the n-th power of the length.
"""

import re
from collections.abc import Iterator

from parallel_llama.errors import UsageError
from parallel_llama.files.fields import shown

_MAX_PATTERN_CHARS = 1000
_MAX_REPETITIONS = 4


def compiled_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled pattern.

    Raises: UsageError for a pattern that is not valid, or that might run for long.
    """
    if (
        len(pattern) > _MAX_PATTERN_CHARS
        or len(repetitions := [*_repetitions(pattern)]) > _MAX_REPETITIONS
        or any(before == ")" for before in repetitions)
        or re.search(r"\(\?[^:=!<]|\\[1-9]", pattern)
    ):
        raise UsageError(
            f"the pattern {shown(pattern)} is not supported: it may have at most "
            f"{_MAX_PATTERN_CHARS} characters and {_MAX_REPETITIONS} repetitions, and no repeated "
            "groups, named groups, inline flags or back references; name the modules instead"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"the pattern {shown(pattern)} is not valid: {error}") from error


def repeats(pattern: str) -> bool:
    """Whether a pattern has a quantifier."""
    return any(_repetitions(pattern))


def _repetitions(pattern: str) -> Iterator[str]:
    """The character before each quantifier of a pattern; "x" for an escaped character."""
    plain = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\(\?", "(", plain)  # not a quantifier
    for match in re.finditer(r"(.)(?:[*+?]|\{\d*,?\d*\})", plain, re.DOTALL):
        yield match[1]
