"""Meta's checklist.chk: the MD5 sums that its downloads came with, one `sum  name` a line."""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from parallel_llama.bounded_files import open_file, read_bytes
from parallel_llama.errors import CheckpointError

CHECKLISTS = ("checklist.chk", "tokenizer_checklist.chk")
MAX_CHECKLIST_BYTES = 1 << 20

_LINE = re.compile(r"([0-9a-fA-F]{32}) [ *]([^/\\\0]+)")
_BUFFER_BYTES = 8 << 20


def read_checklist(path: Path) -> dict[str, str]:
    """The MD5 sum of each file of the folder that the list names.

    Raises: CheckpointError for anything but such a list of plain names.
    """
    data = read_bytes(path, MAX_CHECKLIST_BYTES)
    return dict(_entries(path, data.decode("utf-8", "replace")))


def _entries(path: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None or match[2] in (".", ".."):
            raise CheckpointError(f"{path}, line {number}: not an MD5 sum and a plain file name")
        yield match[2], match[1].lower()


def md5_of(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """The MD5 sum of a file: against damage only, since it can be forged.

    Raises: CheckpointError if it cannot be read.
    """
    sums = hashlib.md5(usedforsecurity=False)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with open_file(path) as file:
        try:
            while count := file.readinto(buffer):
                sums.update(buffer[:count])
                on_bytes(count)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return sums.hexdigest()
