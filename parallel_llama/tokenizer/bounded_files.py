"""Tokenizer files read with a bound on their size."""

import json
from pathlib import Path
from typing import Any

from parallel_llama.bounded_files import is_there, read_bytes
from parallel_llama.errors import CheckpointError

MAX_TOKENIZER_BYTES = 64 << 20  # the largest in use hold about 35 MB
MAX_MODEL_BYTES = 16 << 20  # of a tokenizer.model; the largest in use hold about 5 MB
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_PIECES = 1 << 20


def read_text(path: Path, max_bytes: int) -> str:
    """The content of a UTF-8 file, bounded as in `read_bytes`."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text at byte {error.start}") from error


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not is_there(path):
        return {}
    try:
        value = json.loads(read_text(path, max_bytes))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
