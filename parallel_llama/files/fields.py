"""Typed reads from the keys and values of a configuration file.

A missing key, a value of the wrong type and a key that nobody knows are refused by name, with the
nearest known key. It does not know what the keys mean.
"""

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

from parallel_llama import errors
from parallel_llama.errors import UsageError

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
        value: int = self._typed(key, default, int, "not a whole number")
        if abs(value) > MAX_INTEGER:
            raise UsageError(f"{key}={shown(value)} is beyond any size; at most {MAX_INTEGER}")
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
        """The object under a key; empty where there is none."""
        value: dict[str, Any] = self._typed(key, {}, dict, "not an object")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty where the key is missing."""
        value: list[str] = self._typed(key, [], list, what := "not a list of strings")
        if not all(isinstance(item, str) for item in value):
            raise UsageError(f"{key}={shown(value)} is {what}")
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

    def _typed(self, key: str, default: Any, kind: type | UnionType, fault: str) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise UsageError(f"lacks the key {key!r}{did_you_mean(key, self.values)}")
        # To Python a bool is a whole number as well.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{key}={shown(value)} is {fault}")
        return value


@contextmanager
def naming(path: Path, kind: type[Exception] = UsageError) -> Iterator[None]:
    """Adds the path of the file to a UsageError raised in the block, as an error of this kind."""
    try:
        yield
    except UsageError as error:
        raise kind(f"{path}: {error}") from error


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


def shown(value: object) -> str:
    """A value as an error quotes it: of a list or an object only how much it holds."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)}>"
    return errors.shown(value, 80)
