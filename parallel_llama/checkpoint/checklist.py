"""Meta's checklist.chk: the MD5 sums that its downloads came with, one `sum  name` a line."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from parallel_llama.checkpoint.manifest import hash_file
from parallel_llama.checkpoint.whole_files import Report
from parallel_llama.errors import CheckpointError
from parallel_llama.files.bounded_files import is_file, read_bytes
from parallel_llama.files.model_files import lies_within

CHECKLISTS = ("checklist.chk", "tokenizer_checklist.chk")
MAX_CHECKLIST_BYTES = 1 << 20

_LINE = re.compile(r"([0-9a-fA-F]{32}) [ *]([^/\\\0]+)")


def read_checklist(path: Path) -> dict[str, str]:
    """The MD5 sum of each file of the folder that the list names.

    Raises: CheckpointError for anything but such a list of plain names.
    """
    text = read_bytes(path, MAX_CHECKLIST_BYTES).decode("utf-8", "replace")
    sums = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None or match[2] in (".", ".."):
            raise CheckpointError(f"{path}, line {number}: not an MD5 sum and a plain file name")
        sums[match[2]] = match[1].lower()
    return sums


def check_files(path: Path, on_bytes: Callable[[int], None], report: Report) -> None:
    """Report every file of the list that is missing or damaged.

    An MD5 sum is a check against damage only, since it can be forged.

    Raises: CheckpointError as in `read_checklist`.
    """
    folder = path.parent
    for name, expected in read_checklist(path).items():
        file = folder / name
        with report.noting(file):
            if not lies_within(folder, name) or not is_file(file):
                raise CheckpointError(f"{file}: missing; {path.name} lists it")
            if hash_file(file, on_bytes, hasher=hashlib.md5(usedforsecurity=False)) != expected:
                raise CheckpointError(f"{file}: damaged, its MD5 sum is not that of {path.name}")
            report.hashed += 1
