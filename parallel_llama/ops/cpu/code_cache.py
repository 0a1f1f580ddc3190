"""Machine code that was made before, kept in the user's cache folder.

What is found there runs, so only what this user alone can have written is taken: a folder and a
file of theirs that nobody else may write. A file also says the digest of its key and of itself; one
that is damaged, cut short or called by another's name is made anew. Without such a folder
everything works, and code is made every time.

Source: XDG base directory specification.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_DIGEST_BYTES = 32
_MAX_BYTES = 1 << 20  # of one kernel, which has some 10 KB
_MAX_FILES = 256


def machine_code(key: str, make: Callable[[], bytes]) -> bytes:
    """The code for a key, from the cache or made; the key says all that the code depends on."""
    folder, name = _folder(), hashlib.sha256(key.encode()).hexdigest()
    if folder is None:
        return make()
    path = folder / f"{name}.o"
    code = _read(path, name)
    if code is None:
        code = make()
        with suppress(OSError):  # a full disk costs the next start some time
            _write(path, _digest(name, code) + code)
    return code


def _folder() -> Path | None:
    """The cache folder, made where it is not there; None where it is not this user's alone."""
    with suppress(OSError, RuntimeError):  # who has no home folder has no cache
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        if not base.is_absolute():  # as the specification has it
            return None
        folder = base / "parallel_llama" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder.lstat(), stat.S_IFDIR):
            return folder
    return None


def _is_ours(status: os.stat_result, kind: int) -> bool:
    mode = status.st_mode
    others_write = mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(mode) == kind and status.st_uid == os.geteuid() and not others_write


def _read(path: Path, name: str) -> bytes | None:
    """The code in a file; None where there is none that can be trusted."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not _is_ours(os.fstat(descriptor), stat.S_IFREG):
                return None
            content = file.read(_MAX_BYTES)
        code = content[_DIGEST_BYTES:]
        if content[:_DIGEST_BYTES] == _digest(name, code):
            return code
    return None


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + code).digest()


def _write(path: Path, content: bytes) -> None:
    """Put a whole file in its place; the oldest ones make room."""
    held = sorted(path.parent.glob("*.o"), key=lambda each: each.lstat().st_mtime)
    for old in held[: max(0, len(held) + 1 - _MAX_FILES)]:
        old.unlink(missing_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # nobody else may read or write it
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
