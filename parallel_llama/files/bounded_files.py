"""Files of anybody: the one place where the file system is asked about them.

What it does not let us see is an error, and never the answer that nothing is there. Only regular
files are opened: reading a pipe, a device or a socket could wait for ever. Contents are read with a
bound on their size.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from parallel_llama.errors import CheckpointError, UnreadableFile, UsageError

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,6})")


def is_there(path: Path) -> bool:
    """Whether a path leads to anything, links followed.

    Raises: UnreadableFile if the system does not say: no permission, a loop of links. So do all
    functions here.
    """
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def has_short_name(path: Path) -> bool:
    """Whether something could lie at a path, as far as the length of its name goes."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def names_in(folder: Path) -> list[str]:
    """The names of what lies in a folder, in order."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from error


def expanded(path: str) -> Path:
    """The path with a leading ~ or ~user replaced, as far as there is such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def resolved(path: Path) -> Path:
    """The path with all links followed."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise _unreadable(path, error) from error


def open_descriptor(path: Path) -> int:
    """The descriptor of a regular file, opened for reading; child processes do not inherit it.

    Raises: UnreadableFile also for anything but a regular file, without waiting for it.
    """
    # What was opened is checked, for the path may lead elsewhere by now; without O_NONBLOCK the
    # opening itself would wait until somebody writes to the pipe.
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
    """A regular file, opened to read its bytes."""
    return os.fdopen(open_descriptor(path), "rb")


def is_input(path: Path) -> bool:
    """Whether `open_input` opens what is at a path."""
    return is_file(path) or (_own_descriptor(path) is not None and is_there(path))


def open_input(path: Path) -> BufferedReader:
    """A file that the command line names: a regular one, or a descriptor this process has open.

    The latter, /dev/stdin or /dev/fd/N, may be a pipe, as in the shell's <(...).
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
    """A block that reads an open file; what the system refuses there is a CheckpointError."""
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
    """What is left in an open file; `path` is for the errors, which are those of `read_bytes`."""
    with reading(path):
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the most that is read")
    return data


def read_private(path: Path, max_bytes: int) -> bytes:
    """The content of a file that others must not see.

    Raises: UsageError for a file of this user that others can read, as ssh does; CheckpointError
    like `read_bytes`.
    """
    with open_input(path) as file:
        data, status = read_bounded(file, path, max_bytes), os.fstat(file.fileno())
    if status.st_uid == os.geteuid() and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"{path} has the mode {stat.filemode(status.st_mode)}, so that others can read it; "
            f"run: chmod 600 {path}"
        )
    return data


def _mode(path: Path) -> int:
    """The kind and permissions of what a path leads to; 0 where there is nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return 0
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # then nothing can have it
            return 0
        raise _unreadable(path, error) from error


def _own_descriptor(path: Path) -> int | None:
    """The number of the descriptor that a path stands for; None for all other paths."""
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
