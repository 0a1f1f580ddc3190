"""Untrusted JSON: malformed, too large or deeply nested text is refused with a clear error."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel_llama.errors import CheckpointError, shown
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
        raise ValueError(f"the key {shown(repeated, 80)} appears twice")
    return value
