"""A file that is written around the page cache where its file system can.

What is written once and not read soon costs the page cache more time than the disk: every page is
allocated, copied into and written back. Direct writes need whole blocks from aligned memory, so
what surrounds those goes through the cache; the kernel keeps both coherent.
"""

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch

BLOCK_BYTES = 4096
STAGED_BYTES = 4 << 20

# What file systems and devices say that cannot write directly, or not at this place.
_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class Staging:
    """Aligned memory from which files are written, used by one thread again and again."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, STAGED_BYTES)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def aligned(self, data: memoryview) -> memoryview:
        """The first bytes of some data in aligned memory, which is valid until the next call."""
        tensor = torch.frombuffer(data, dtype=torch.uint8)[:STAGED_BYTES]
        if tensor.data_ptr() % BLOCK_BYTES == 0:
            return data[:STAGED_BYTES]
        self._tensor[: len(tensor)] = tensor
        return memoryview(self._memory)[: len(tensor)]


class DirectFile:
    """A file that is there at its full size, opened to write pieces of it anywhere."""

    def __init__(self, path: Path, staging: Staging) -> None:
        self._staging = staging
        self._buffered = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct = -1
        with suppress(AttributeError, OSError):  # not every system or file system knows of it
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of it; on the disk for good only after `sync`."""
        start = min(-offset % BLOCK_BYTES, len(data))
        stop = max(start, len(data) - (offset + len(data)) % BLOCK_BYTES)
        self._write_buffered(data[:start], offset)
        done = start + self._write_direct(data[start:stop], offset + start)
        self._write_buffered(data[done:], offset + done)

    def sync(self) -> None:
        """Bring what was written, either way, to the disk."""
        os.fdatasync(self._buffered)

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct >= 0:
            os.close(self._direct)

    def _write_direct(self, blocks: memoryview, offset: int) -> int:
        """Write whole blocks; returns how many bytes, less than all where that cannot be done."""
        done = 0
        try:
            while done < len(blocks) and self._direct >= 0:
                data = self._staging.aligned(blocks[done:])
                done += os.pwrite(self._direct, data, offset + done)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            os.close(self._direct)
            self._direct = -1
        return done

    def _write_buffered(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):  # a call writes at most 2 GiB
            done += os.pwrite(self._buffered, data[done:], offset + done)
