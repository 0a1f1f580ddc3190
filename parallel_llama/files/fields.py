"""Untrusted JSON, and typed reads of the keys and values of a configuration file.

Malformed, too large or deeply nested JSON is refused with a clear error. Errors of the reads name a
missing key, a value of the wrong type or an unknown key, with the nearest known key.
"""

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

from parallel_llama import errors
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.files.bounded_files import read_bytes

MAX_CONFIG_BYTES = 16 << 20

_Hook = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def parse_json(text: str) -> Any:
    """A JSON value. Raises: ValueError with the position of an error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("not usable JSON: it is nested too deeply") from None


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises: CheckpointError if the file cannot be read, is larger than `max_bytes`, is not a JSON
    object, or repeats a key.
    """
    return json_object(path, read_bytes(path, max_bytes), without_repeats)


def json_object(path: Path, data: str | bytes, hook: _Hook | None = None) -> dict[str, Any]:
    """The object in the content of a file; `hook` makes mappings from pairs of keys and values.

    Raises: CheckpointError if the content is not a JSON object.
    """
    try:
        value = json.loads(data, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for json.loads. Raises: ValueError for a repeated key."""
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {shown(repeated)} appears twice")
    return value


MAX_INTEGER = 2**63 - 1  # smaller integers do not overflow as floats


class Fields:
    """The fields of one file; a null counts as a missing key.

    Raises: UsageError from each read, if a required key is missing or has the wrong type.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._typed(key, default, int, "not a whole number")
        if abs(value) > MAX_INTEGER:
            raise UsageError(f"{key}={shown(value)} is too large; at most {MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._typed(key, default, int | float, "not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise UsageError(f"{key}={shown(value)} is not a finite number")
        return number

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._typed(key, default, bool, "neither true nor false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value: str = self._typed(key, default, str, "not a string")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """The object under a key, or an empty one."""
        value: dict[str, Any] = self._typed(key, {}, dict, "not an object")
        return value

    def strings(self, key: str) -> list[str]:
        """The list of strings under a key, or an empty one."""
        value: list[str] = self._typed(key, [], list, what := "not a list of strings")
        if not all(isinstance(item, str) for item in value):
            raise UsageError(f"{key}={shown(value)} is {what}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """The integer or list of integers under a key; empty if the key is missing."""
        if not self.has(key):
            return ()
        value = self.values[key]
        items = value if isinstance(value, list) else [value]
        return tuple(Fields({key: item}).integer(key) for item in items)

    def numbers(self, key: str) -> tuple[float, ...]:
        """The list of numbers under a key; empty if the key is missing."""
        value: list[object] = self._typed(key, [], list, "not a list of numbers")
        return tuple(Fields({key: item}).number(key) for item in value)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse keys of unsupported settings, with the reason for each."""
        for key, reason in reasons.items():
            if self.has(key):
                raise UsageError(f"has {key!r}: {reason}")

    def require_known(self, known: Collection[str]) -> None:
        """Refuse the first unknown key, naming the nearest known one."""
        for key in self.values:
            if key not in known:
                raise UsageError(f"unknown key {shown(key)}{did_you_mean(key, known)}")

    def _typed(self, key: str, default: Any, kind: type | UnionType, fault: str) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise UsageError(f"lacks the key {key!r}{did_you_mean(key, self.values)}")
        # A bool is an int in Python.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{key}={shown(value)} is {fault}")
        return value


@contextmanager
def naming(path: Path, kind: type[Exception] = UsageError) -> Iterator[None]:
    """Raises a UsageError of the block as a `kind`, with the path before its message."""
    try:
        yield
    except UsageError as error:
        raise kind(f"{path}: {error}") from error


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The end of an error about an unknown word: the nearest known word, or an empty string.

    >>> did_you_mean("n_kv_head", ["n_heads", "n_kv_heads"])
    "; did you mean 'n_kv_heads'?"
    """
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(word: str, known: Collection[str], alike: float = 0.6) -> str | None:
    """The most similar known word, or None if no ratio of difflib reaches `alike`."""
    near = difflib.get_close_matches(word[:200], known, 1, alike)
    return near[0] if near else None


def shown(value: object) -> str:
    """A value as errors quote it; for a list or an object only its length."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)}>"
    return errors.shown(value, 80)
