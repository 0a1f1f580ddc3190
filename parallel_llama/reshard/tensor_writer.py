"""Writes tensors into the files of a layout, hashes them, and records them in the journal."""

import errno
import mmap
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3

from parallel_llama.checkpoint.canonical import CanonicalTensor, Piece
from parallel_llama.checkpoint.manifest import TensorEntry, feed, hash_file, tensor_bytes
from parallel_llama.checkpoint.prefetch import prefetch, started_thread
from parallel_llama.errors import UsageError
from parallel_llama.reshard.layout import Layout
from parallel_llama.reshard.target_folder import PartialFolder

BLOCK_BYTES = 4096
STAGED_BYTES = 4 << 20

# The errors of a direct write that is not supported, in general or at its offset.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


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
    """A file of final size, opened to write at any offset, with O_DIRECT where it is supported.

    For data that is not read again soon, the page cache takes more time than the disk: every page
    is allocated, copied into and written back. Direct writes need whole blocks in aligned memory,
    so partial blocks are written through the page cache; the kernel keeps both coherent.
    """

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
        """Write whole blocks. Returns: the bytes written, fewer if O_DIRECT is not supported."""
        done = 0
        try:
            while done < len(blocks) and self._direct >= 0:
                data = self._staging.aligned(blocks[done:])
                done += os.pwrite(self._direct, data, offset + done)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.close(self._direct)
            self._direct = -1
        return done

    def _write_buffered(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):  # a call writes at most 2 GiB
            done += os.pwrite(self._buffered, data[done:], offset + done)


# Once this many bytes are not flushed, or this many files are open, the data is flushed in the
# background after the current tensor, and then recorded in the journal. A kill loses at most two
# such batches.
FLUSH_BYTES = 128 << 20
MAX_OPEN_FILES = 256

# The number of pieces, or of parts of files, that may wait in the queue of each thread.
N_PREFETCHED = 3

Pieces = Generator[tuple[CanonicalTensor, Piece], None, None]


@dataclass(frozen=True)
class Part:
    """A part of a tensor at an offset of a file."""

    tensor: CanonicalTensor
    file: str
    offset: int
    data: memoryview


@dataclass(frozen=True)
class Written:
    """A line of the journal: a written tensor, as the manifest describes it.

    Args:
        source: the hash before conversion to another dtype; None without conversion.
        units: the hashes of the units of each stored tensor.
        n_bytes: the number of written bytes. Parts of a tensor that are written more than once
            count each time.
    """

    name: str
    entry: TensorEntry
    source: str | None
    units: dict[str, list[str]]
    n_bytes: int

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> "Written":
        """Raises: UsageError for a line of another version."""
        try:
            return msgspec.convert(line, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"the journal is damaged ({error}); remove its folder") from error


class FileHash:
    """The hash of a file, computed while the file is written.

    Bytes between two writes (headers, and the output of an earlier run) are read back. A file that
    is written out of order is read as a whole at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hasher = blake3(max_threads=blake3.AUTO)
        self._position = 0
        self._is_in_order = True

    def add(self, offset: int, data: memoryview) -> None:
        """Hash the data that is written at an offset of the file."""
        self._is_in_order = self._is_in_order and offset >= self._position
        if self._is_in_order:
            self._read_up_to(offset)
            self._hasher.update(data)
            self._position += len(data)

    def finish(self, n_bytes: int) -> str:
        """The hash of the whole file, after its last byte was written."""
        if not self._is_in_order:
            return hash_file(self._path)
        self._read_up_to(n_bytes)
        return self._hasher.hexdigest()

    def _read_up_to(self, offset: int) -> None:
        if self._position == offset:
            return
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._position)
            self._position += feed(self._hasher, file, offset - self._position)
        if self._position < offset:
            raise OSError(f"{self._path}: ends at byte {self._position}")


class UnitHashes:
    """The hash of each unit of a weight, given their `sizes` in bytes, in the order of the file.

    With these hashes the shard of any rank can be checked alone.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = iter(sizes)
        self._left = next(self._sizes, 0)
        self._hasher = blake3()
        self.hashes: list[str] = []

    def add(self, data: memoryview) -> None:
        """Hash the next bytes, of any length; bytes after the last unit are ignored."""
        start = 0
        while self._left and start < len(data):
            taken = data[start : start + self._left]
            self._hasher.update(taken)
            start += len(taken)
            self._left -= len(taken)
            if not self._left:
                self.hashes.append(self._hasher.hexdigest())
                self._hasher = blake3()
                self._left = next(self._sizes, 0)


class TensorWriter:
    """Writes tensors one after another, with a pipeline of threads.

    Reading, laying out, hashing and writing have a thread each. Another thread flushes files to the
    disk and then records their tensors in the journal. `on_bytes` is called with the size of each
    written part.
    """

    def __init__(
        self, layout: Layout, partial: PartialFolder, on_bytes: Callable[[int], None]
    ) -> None:
        self._layout, self._partial, self._on_bytes = layout, partial, on_bytes
        self._hashes = {file.name: FileHash(partial.files / file.name) for file in layout.files}
        self._staging = Staging()
        self._open: dict[str, DirectFile] = {}
        self._unflushed: list[Written] = []
        self._unflushed_bytes = 0
        self._flushing_thread = started_thread()
        self._flushing: Future[None] | None = None

    def write(self, pieces: Pieces) -> list[Written]:
        """Write all tensors in order, and flush them to the disk."""
        written = []
        with closing(prefetch(self._hashed(self._laid_out(pieces)), N_PREFETCHED)) as parts:
            for part in parts:
                if isinstance(part, Part):
                    self._write(part)
                else:
                    written.append(part)
                    self._unflushed.append(part)
                    is_due = self._unflushed_bytes >= FLUSH_BYTES
                    if is_due or len(self._open) >= MAX_OPEN_FILES:
                        self._flush()
        self._flush()
        self._wait()
        return written

    def close(self) -> None:
        """Stop the flushing thread and close the files, also after an error."""
        self._flushing_thread.shutdown()
        for file in self._open.values():
            file.close()
        self._open = {}

    def file_hashes(self) -> dict[str, str]:
        """The hash of each file, after every tensor was written and `Layout.finish` was called."""
        return {f.name: self._hashes[f.name].finish(f.n_bytes) for f in self._layout.files}

    def _laid_out(self, pieces: Pieces) -> Generator[Part, None, None]:
        """The parts of every tensor."""
        with closing(prefetch(pieces, N_PREFETCHED)) as read:
            for tensor, group in groupby(read, itemgetter(0)):
                values = (value for _, value in group)
                for file, offset, value in self._layout.parts(tensor.param, values):
                    yield Part(tensor, file, offset, tensor_bytes(value))

    def _hashed(self, parts: Generator[Part, None, None]) -> Generator[Part | Written, None, None]:
        """Yields the parts, and a `Written` after the parts of each tensor."""
        with closing(prefetch(parts, N_PREFETCHED)) as laid_out:
            for tensor, group in groupby(laid_out, attrgetter("tensor")):
                sizes = self._layout.unit_bytes(tensor.param)
                units, n_bytes = UnitHashes(chain.from_iterable(sizes.values())), 0
                for part in group:
                    self._hashes[part.file].add(part.offset, part.data)
                    units.add(part.data)
                    n_bytes += len(part.data)
                    yield part
                hashes = iter(units.hashes)
                by_name = {
                    name: list(islice(hashes, len(unit_sizes)))
                    for name, unit_sizes in sizes.items()
                }
                yield Written(tensor.param.name, tensor.entry, tensor.source, by_name, n_bytes)

    def _write(self, part: Part) -> None:
        if part.file not in self._open:
            self._open[part.file] = DirectFile(self._partial.files / part.file, self._staging)
        self._open[part.file].write(part.data, part.offset)
        self._unflushed_bytes += len(part.data)
        self._on_bytes(len(part.data))

    def _flush(self) -> None:
        """Start flushing the written data to the disk, after the previous flush has finished."""
        self._wait()
        batch, files = self._unflushed, list(self._open.values())
        self._unflushed, self._unflushed_bytes, self._open = [], 0, {}
        self._flushing = self._flushing_thread.submit(self._sync, files, batch)

    def _wait(self) -> None:
        if self._flushing is not None:
            self._flushing.result()

    def _sync(self, files: list[DirectFile], batch: list[Written]) -> None:
        try:
            for file in files:
                file.sync()
        finally:
            for file in files:
                file.close()
        self._partial.record(msgspec.to_builtins(batch))
