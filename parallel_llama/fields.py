"""Typed reads from the keys and values of a configuration file.

A missing key, a value of the wrong type and a key that nobody knows are refused by name, with the
nearest known key. It does not know what the keys mean.
"""

import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from parallel_llama.bounded_files import read_bytes
from parallel_llama.errors import CheckpointError, UsageError

MAX_CONFIG_BYTES = 16 << 20
MAX_INTEGER = 2**63 - 1  # arithmetic with floats cannot overflow below it


class Fields:
    """The fields of one file; a null counts as a key that is not there.

    Raises: UsageError from every read of a required key that is missing, or of a wrong type.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{key}={shown(value)} is not a whole number")
        if abs(value) > MAX_INTEGER:
            raise UsageError(f"{key}={shown(value)} is beyond any size; at most {MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{key}={shown(value)} is not a number")
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
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"{key}={shown(value)} is neither true nor false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise UsageError(f"{key}={shown(value)} is not a string")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """The object under a key; empty where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise UsageError(f"{key}={shown(value)} is not an object")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty where the key is missing."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{key}={shown(value)} is not a list of strings")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """One number or a list of them; empty where the key is missing."""
        if not self.has(key):
            return ()
        value = self.values[key]
        items = value if isinstance(value, list) else [value]
        return tuple(Fields({key: item}).integer(key) for item in items)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse the keys of settings that are understood and not supported, saying why."""
        for key, reason in reasons.items():
            if self.has(key):
                raise UsageError(f"has {key!r}: {reason}")

    def require_known(self, known: Collection[str]) -> None:
        """Refuse the first key that is not known, naming the known key nearest to it."""
        for key in self.values:
            if key not in known:
                raise UsageError(f"unknown key {shown(key)}{did_you_mean(key, known)}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise UsageError(f"lacks the key {key!r}{did_you_mean(key, self.values)}")
        return default


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The end of an error about an unknown word: its nearest known one, or nothing.

    >>> did_you_mean("n_kv_head", ["n_heads", "n_kv_heads"])
    "; did you mean 'n_kv_heads'?"
    """
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(word: str, known: Collection[str], alike: float = 0.6) -> str | None:
    """The known word that is most like another, None if none is `alike` (difflib's ratio)."""
    near = difflib.get_close_matches(word[:200], known, 1, alike)
    return near[0] if near else None


def listed(names: Iterable[str]) -> str:
    """Up to five names, and how many more there are."""
    every = list(names)
    more = f" ... and {len(every) - 5} more" if len(every) > 5 else ""
    return ", ".join(name[:200] for name in every[:5]) + more


def shown(value: object) -> str:
    """A value as an error quotes it: cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"  # printing one beyond 4300 digits raises
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)}>"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises: CheckpointError if the file cannot be read, is larger than `max_bytes`, is not JSON or
    not an object, or gives a key twice.
    """
    data = read_bytes(path, max_bytes)
    try:
        value = json.loads(data, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(repeated)} appears twice")
    return value
