"""Writing tensors into a layout's files: the data, its hashes, and the journal behind the disk."""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from parallel_llama.checkpoint.file_digests import FileDigests
from parallel_llama.checkpoint.layout import Layout
from parallel_llama.checkpoint.manifest import TensorEntry, hash_bytes, hash_file, tensor_bytes
from parallel_llama.checkpoint.native_layout import NativeLayout
from parallel_llama.checkpoint.partial_folder import PartialFolder
from parallel_llama.checkpoint.read_ahead import Canonical
from parallel_llama.errors import UsageError

# The journal follows what is on the disk after every so many bytes, or open files: the most that a
# kill costs.
FLUSH_BYTES = 128 << 20
MAX_OPEN_FILES = 256


@dataclass(frozen=True)
class Written:
    """What the manifest says of a tensor that is written; a line of the journal."""

    name: str
    entry: TensorEntry
    source: str | None
    units: list[str]

    def to_line(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> "Written":
        """Raises: UsageError for a line of another version."""
        try:
            return msgspec.convert(line, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"the journal is damaged ({error}); remove its folder") from error


class TensorWriter:
    """Writes tensors one after the other; `on_bytes` is told of every piece.

    Data is waited for in a thread of its own: only what the disk has comes into the journal.
    """

    def __init__(
        self, layout: Layout, partial: PartialFolder, on_bytes: Callable[[int], None]
    ) -> None:
        self._layout, self._partial, self._on_bytes = layout, partial, on_bytes
        # The records of Meta's zip files get their checksums last, so those are read again.
        self._digests = None if layout.kind == "meta" else FileDigests(partial.files)
        self._open: dict[str, int] = {}
        self._unflushed: list[Written] = []
        self._unflushed_bytes = 0
        self._hashing_thread = ThreadPoolExecutor(1)
        self._flushing_thread = ThreadPoolExecutor(1)
        self._flushing: Future[None] | None = None

    def write(self, tensors: Iterable[Canonical]) -> list[Written]:
        """All of them, in order, to the disk."""
        written = []
        for tensor in tensors:
            written.append(self._write_one(tensor))
            del tensor  # before the next is read
        self._flush()
        self._wait()
        return written

    def close(self) -> None:
        """Let go of files and thread, whatever came of them."""
        self._hashing_thread.shutdown()
        self._flushing_thread.shutdown()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}

    def file_hashes(self) -> dict[str, str]:
        """The hash of each weight file; only when every tensor is written and `finish` has run."""
        if self._digests is None:
            return {f.name: hash_file(self._partial.files / f.name) for f in self._layout.files}
        return {file.name: self._digests.finish(file) for file in self._layout.files}

    def _write_one(self, tensor: Canonical) -> Written:
        units = UnitHashes(_unit_bytes(self._layout, tensor))
        for name, offset, part in self._layout.parts(tensor.param, tensor.value):
            data = tensor_bytes(part)
            # Hashed while it is written; both let go of it before the next part is made.
            hashing = self._hashing_thread.submit(self._hash, name, offset, data, units)
            write_at(self._descriptor(name), data, offset)
            hashing.result()
            self._unflushed_bytes += len(data)
            self._on_bytes(len(data))
        written = Written(tensor.param.name, tensor.entry, tensor.source, units.hashes)
        self._unflushed.append(written)
        if self._unflushed_bytes >= FLUSH_BYTES or len(self._open) >= MAX_OPEN_FILES:
            self._flush()
        return written

    def _hash(self, name: str, offset: int, data: memoryview, units: "UnitHashes") -> None:
        if self._digests is not None:
            self._digests.add(name, offset, data)
        units.add(data)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._partial.files / name, os.O_WRONLY | os.O_CLOEXEC)
        return self._open[name]

    def _flush(self) -> None:
        """Hand what is written to the disk; waits for what was handed over before."""
        self._wait()
        batch, descriptors = self._unflushed, list(self._open.values())
        self._unflushed, self._unflushed_bytes, self._open = [], 0, {}
        self._flushing = self._flushing_thread.submit(self._sync, descriptors, batch)

    def _wait(self) -> None:
        if self._flushing is not None:
            self._flushing.result()

    def _sync(self, descriptors: list[int], batch: list[Written]) -> None:
        try:
            for descriptor in descriptors:
                os.fdatasync(descriptor)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._partial.record(written.to_line() for written in batch)


class UnitHashes:
    """The hash of each unit of a weight, from its bytes in the order of the file."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = iter(sizes)
        self._size = next(self._sizes, 0)
        self.hashes: list[str] = []

    def add(self, data: memoryview) -> None:
        """Parts end where units do, so that none is ever copied together."""
        start = 0
        while self._size and start + self._size <= len(data):
            self.hashes.append(hash_bytes(data[start : start + self._size]))
            start += self._size
            self._size = next(self._sizes, 0)
        assert start == len(data) or not self._size


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of it; one call writes at most 2 GiB."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _unit_bytes(layout: Layout, tensor: Canonical) -> list[int]:
    return layout.unit_bytes(tensor.param) if isinstance(layout, NativeLayout) else []
