"""Parsers of what a flag may be given: each turns a text into a value, or says what is allowed.

All of them raise ValueError, whose message goes on after the flag and the text. None reads a text
as Python.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel_llama.files.bounded_files import is_folder, is_input, is_there
from parallel_llama.files.fields import did_you_mean
from parallel_llama.files.json_text import parse_json
from parallel_llama.parallel.launch import MAX_RANKS

LARGEST = 2**63 - 1
_ORIGIN = re.compile(
    r"(?!http://.*:80$)(?!https://.*:443$)"
    r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?"
)
GIB = 1 << 30

# What stands for stdin in the place of a prompt or a file, as in other programs.
STDIN = "-"


def plain_text(text: str) -> str:
    """Any text that is UTF-8, the empty one included."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8 text; give it in a file instead") from None
    return text


def filled_text(text: str) -> str:
    """Text that is not empty."""
    if not text:
        raise ValueError("empty; give at least one character")
    return plain_text(text)


def origin(text: str) -> str:
    """A web page's origin as browsers send it, or * for all of them."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise ValueError(
            "not an origin; give SCHEME://HOST or SCHEME://HOST:PORT in lower case, without a path "
            "or a default port, or * for all"
        )
    return text


def whole(low: int, high: int = LARGEST) -> Callable[[str], int]:
    """Parser of a decimal integer in [low, high]."""
    allowed = f"a whole number from {low}" + (f" to {high}" if high < LARGEST else "")

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,19}", text) or not low <= int(text) <= high:
            raise ValueError(f"not {allowed}")
        return int(text)

    return parse


def number(low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """Parser of a finite number in [low, high], or (low, high] where it must lie above."""
    allowed = f"a number above {low:g}" if above else f"a number from {low:g}"
    if high < math.inf:
        allowed += f", at most {high:g}" if above else f" to {high:g}"

    def parse(text: str) -> float:
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
            raise ValueError(f"not {allowed}")
        value = float(text)
        if not math.isfinite(value) or value < low or value > high or (above and value == low):
            raise ValueError(f"not {allowed}")
        return value

    return parse


def byte_size(text: str) -> int:
    """Bytes, given as a number of them or in a unit: 2GB, 512MiB.

    >>> byte_size("2GB"), byte_size("0.5 KiB"), byte_size("4096")
    (2000000000, 512, 4096)
    """
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?(?:([KMGT]?)(I?)B)?", text.upper())
    n_bytes = 0
    if match and (match[2] or not match[3]):
        power = " KMGT".index(match[2] or " ")
        n_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if not 1 <= n_bytes <= LARGEST:
        raise ValueError("not a size such as 2GB, 512MiB or a number of bytes")
    return n_bytes


def one_of(*choices: str) -> Callable[[str], str]:
    """Parser of one of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"not one of {', '.join(choices)}{did_you_mean(text, choices)}")
        return text

    return parse


def memory_sizes(text: str) -> int | list[int]:
    """Bytes that every rank has, or what each has where several sizes or SIZExN are given.

    >>> memory_sizes("80") == 80 * GIB, memory_sizes("1KiB,2kBx2")
    (True, [1024, 2000, 2000])
    """
    pieces = text.lower().split(",")
    sizes: list[int] = []
    try:
        if len(pieces) == 1 and "x" not in pieces[0]:
            return _memory_size(pieces[0])
        for piece in pieces:
            size, times, count = piece.partition("x")
            sizes += [_memory_size(size)] * (whole(1, MAX_RANKS)(count.strip()) if times else 1)
            if len(sizes) > MAX_RANKS:
                raise ValueError
    except ValueError:
        raise ValueError(
            f"not sizes such as 80 (GiB), 24GB, 80,80,40 or 80x8, for at most {MAX_RANKS} ranks"
        ) from None
    return sizes


def _memory_size(text: str) -> int:
    """Bytes, given in GiB or in a unit."""
    text = text.strip()
    if text.endswith("b"):
        return byte_size(text)
    return int(number(1 / GIB, LARGEST / GIB)(text) * GIB)


def count_or_range(text: str) -> list[int]:
    """One count N as [N], or A-B as [A, B]."""
    match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
    bounds = [int(group) for group in match.groups() if group] if match else []
    if not bounds or not 1 <= bounds[0] <= bounds[-1] <= MAX_RANKS:
        raise ValueError(f"not a number of ranks from 1 to {MAX_RANKS}, or a range such as 1-16")
    return bounds


def rank_of(text: str) -> tuple[int, int]:
    """One rank of several as R/N.

    >>> rank_of("0/8")
    (0, 8)
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    rank, size = (int(group) for group in match.groups()) if match else (0, 0)
    if not rank < size <= MAX_RANKS:
        raise ValueError(
            f"not R/N, rank R of N such as 0/8; R is from 0 to N-1, N up to {MAX_RANKS}"
        )
    return rank, size


def input_file(text: str) -> str:
    """The path of a regular file, or of a pipe that the shell gives, /dev/fd/N."""
    path = Path(filled_text(text))
    if not is_there(path):
        raise ValueError("no such file")
    if is_folder(path):
        raise ValueError("a folder; give a file in it")
    if not is_input(path):
        raise ValueError("not a regular file; give one, or a pipe as <(command)")
    return text


def input_file_or_stdin(text: str) -> str:
    """The same, or - for stdin."""
    return text if text == STDIN else input_file(text)


def template_var(text: str) -> tuple[str, Any]:
    """A variable of a chat template as NAME=VALUE: JSON where it is any, else text.

    >>> template_var("enable_thinking=false"), template_var("date=1 May")
    (('enable_thinking', False), ('date', '1 May'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError("not NAME=VALUE, such as enable_thinking=false")
    try:
        return name, parse_json(value)
    except ValueError:
        return name, plain_text(value)
