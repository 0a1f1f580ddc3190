"""Tells what is at an untrusted path, and opens files safely.

A path that the system refuses to show is an error, never treated as missing. Only regular files are
opened, because reading a pipe, a device or a socket could block forever; `open_input` also takes an
open descriptor. Reads have a maximum size.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from parallel_llama.errors import CheckpointError, UnreadableFile, UsageError

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,6})")


def is_there(path: Path) -> bool:
    """Whether a path exists, following links.

    Raises: UnreadableFile, as most functions here do, if the system cannot say (no permission, a
    loop of links).
    """
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    """Whether a path is a regular file, following links."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def has_short_name(path: Path) -> bool:
    """Whether the name of a path is short enough for the file system."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def names_in(folder: Path) -> list[str]:
    """The names of a folder's entries, sorted."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from error


def expanded(path: str) -> Path:
    """The path with a leading ~ or ~user expanded, if that user exists."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def resolved(path: Path) -> Path:
    """The path with all links resolved."""
    try:
        return path.resolve()
    # RuntimeError: a loop of links, before Python 3.13. ValueError: a NUL in the path.
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error


def open_descriptor(path: Path) -> int:
    """A descriptor of a regular file, opened for reading, that child processes do not inherit.

    Raises: UnreadableFile also for anything but a regular file, without blocking.
    """
    # The type is checked on the descriptor, because the path may change after a check. Without
    # O_NONBLOCK, opening a pipe would block until somebody writes to it.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise _unreadable(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise UnreadableFile(f"{str(path)[:500]}: cannot be read: {_kind(mode)}, not a regular file")


def open_file(path: Path) -> BufferedReader:
    """Opens a regular file for reading bytes."""
    return os.fdopen(open_descriptor(path), "rb")


def is_input(path: Path) -> bool:
    """Whether `open_input` can open a path."""
    return is_file(path) or (_own_descriptor(path) is not None and is_there(path))


def open_input(path: Path) -> BufferedReader:
    """Opens a path of the command line: a regular file, or an open descriptor of this process.

    A descriptor (/dev/stdin or /dev/fd/N) may be a pipe, as in the shell's <(...).
    """
    descriptor = _own_descriptor(path)
    if descriptor is None:
        return open_file(path)
    try:
        return os.fdopen(os.dup(descriptor), "rb")
    except OSError as error:
        raise _unreadable(path, error) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError in a block that reads an open file into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file.

    Raises: CheckpointError if it cannot be read or is larger than `max_bytes`.
    """
    with open_file(path) as file:
        return read_bounded(file, path, max_bytes)


def read_bounded(file: BufferedReader, path: Path, max_bytes: int) -> bytes:
    """The rest of an open file. Errors are those of `read_bytes`, and name `path`."""
    with reading(path):
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the maximum")
    return data


def read_again(path: Path, max_bytes: int) -> bytes:
    """The content of a path of the command line, which ranks that parse the same line also read.

    A pipe can be read only once; an unnamed file with its content replaces the descriptor.

    Raises: CheckpointError as `read_bytes`.
    """
    descriptor = _own_descriptor(path)
    if descriptor is not None and not is_file(path):
        with open_input(path) as pipe:
            data = read_bounded(pipe, path, max_bytes)
        with os.fdopen(os.memfd_create("input"), "wb") as copy:
            copy.write(data)
            copy.flush()
            os.dup2(copy.fileno(), descriptor)
    return read_bytes(path, max_bytes)


def copy_in_memory(path: Path) -> int:
    """A descriptor of an unnamed file in memory that has the content of a file.

    Raises: CheckpointError if the file cannot be read, or memory is short.
    """
    descriptor = os.memfd_create("copy")
    try:
        with open_file(path) as file, reading(path), os.fdopen(os.dup(descriptor), "wb") as copy:
            shutil.copyfileobj(file, copy)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_private(path: Path, max_bytes: int) -> bytes:
    """The content of a file with a secret.

    Raises: UsageError if the file belongs to this user and others can read it (ssh's rule);
    CheckpointError as `read_bytes`.
    """
    with open_input(path) as file:
        data, status = read_bounded(file, path, max_bytes), os.fstat(file.fileno())
    if status.st_uid == os.geteuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"{path} has the mode {stat.filemode(status.st_mode)}, so others can read it; "
            f"run: chmod 600 {path}"
        )
    return data


def _mode(path: Path) -> int:
    """The type and permissions of a path, following links; 0 if it does not exist."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return 0
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # no file can have this name
            return 0
        raise _unreadable(path, error) from error


def _own_descriptor(path: Path) -> int | None:
    """The descriptor that a path such as /dev/fd/3 names; None for other paths."""
    if str(path) == "/dev/stdin":
        return 0
    match = _DESCRIPTOR.fullmatch(str(path))
    return None if match is None else int(match[1])


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    return "a folder" if stat.S_ISDIR(mode) else "a device"


def _unreadable(path: Path, error: Exception) -> UnreadableFile:
    reason = getattr(error, "strerror", None) or error
    return UnreadableFile(f"{str(path)[:500]}: cannot be read: {reason}")
