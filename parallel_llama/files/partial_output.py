"""Output that --resume goes on with: one writer at a time, whole lines, files that are replaced.

Whatever ends a writer, what it wrote before can be trusted.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel_llama.files.bounded_files import open_file


def take_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed or the process ends; False if another one has it.

    Raises: OSError on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their ends, but for a last one that its writer did not finish."""
    with open_file(path) as file:
        yield from (line for line in file if line.endswith(b"\n"))


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key in which two runs differ."""
    return next((key for key in {**before, **now} if before.get(key) != now.get(key)), None)


def replace_file(path: Path, growing: Path, data: bytes) -> None:
    """Write a file by way of another one beside it: after a crash it is whole, or as before."""
    with growing.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    growing.replace(path)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
