"""Output that --resume continues: a lock for one writer, complete lines, and atomic replacement.

Output stays valid however its writer ends.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel_llama.files.bounded_files import open_file


def take_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed or the process ends; False if it is already locked.

    The file must be open for writing, because NFS has no exclusive locks of other files.

    Raises: OSError on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_lock_if_supported(descriptor: int) -> bool:
    """As `take_lock`, but a file system without locks counts as locked by this process."""
    try:
        return take_lock(descriptor)
    except OSError:
        return True


def is_locked(descriptor: int) -> bool:
    """Whether another process has locked an open file with `take_lock`.

    Raises: OSError on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their newlines, without an incomplete last line."""
    with open_file(path) as file:
        yield from (line for line in file if line.endswith(b"\n"))


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key with different values in two runs, or None."""
    return next((key for key in {**before, **now} if before.get(key) != now.get(key)), None)


def growing_file(path: Path) -> Path:
    """The temporary file that `replace_file` renames to `path`."""
    return path.with_name(f"{path.name}.part")


def replace_file(path: Path, temporary: Path, data: bytes) -> None:
    """Write `temporary` and rename it to `path`, which after a crash is complete or unchanged."""
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
