"""A file that is written with O_DIRECT where the file system supports it.

For data that is not read again soon, the page cache takes more time than the disk: every page is
allocated, copied into and written back. Direct writes need whole blocks in aligned memory, so
partial blocks are written through the page cache; the kernel keeps both coherent.
"""

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch

BLOCK_BYTES = 4096
STAGED_BYTES = 4 << 20

# Errors of file systems and devices without support for direct writes, or not at this offset.
_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class Staging:
    """Aligned memory that files are written from, reused by one thread."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, STAGED_BYTES)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def aligned(self, data: memoryview) -> memoryview:
        """The first bytes of the data in aligned memory, valid until the next call."""
        tensor = torch.frombuffer(data, dtype=torch.uint8)[:STAGED_BYTES]
        if tensor.data_ptr() % BLOCK_BYTES == 0:
            return data[:STAGED_BYTES]
        self._tensor[: len(tensor)] = tensor
        return memoryview(self._memory)[: len(tensor)]


class DirectFile:
    """A file of final size, opened to write at any offset."""

    def __init__(self, path: Path, staging: Staging) -> None:
        self._staging = staging
        self._buffered = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct = -1
        with suppress(OSError):  # not supported by every file system
            self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all data; durable only after `sync`."""
        start = min(-offset % BLOCK_BYTES, len(data))
        stop = max(start, len(data) - (offset + len(data)) % BLOCK_BYTES)
        self._write_buffered(data[:start], offset)
        done = start + self._write_direct(data[start:stop], offset + start)
        self._write_buffered(data[done:], offset + done)

    def sync(self) -> None:
        """Flush all writes to the disk."""
        os.fdatasync(self._buffered)

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct >= 0:
            os.close(self._direct)

    def _write_direct(self, blocks: memoryview, offset: int) -> int:
        """Write whole blocks; returns the bytes written, fewer if O_DIRECT is not supported."""
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
