"""Hashes of files and of weights' units, taken from the data as it is written."""

from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from parallel_llama.checkpoint.manifest import feed, hash_file


class FileHash:
    """A running hash of a file, as long as what is written comes in the order of the file.

    What lies between two writes is read back: headers, and what an earlier run wrote. A file that
    is written out of order is read as a whole at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hasher = blake3(max_threads=blake3.AUTO)
        self._position = 0
        self._is_in_order = True

    def add(self, offset: int, data: memoryview) -> None:
        """Take in what is written at an offset of the file."""
        self._is_in_order = self._is_in_order and offset >= self._position
        if self._is_in_order:
            self._read_up_to(offset)
            self._hasher.update(data)
            self._position += len(data)

    def finish(self, n_bytes: int) -> str:
        """The hash of the whole file, all of which must be written."""
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
    """The hash of each unit of a weight, from its bytes in the order of the file.

    So any rank's share can be checked by itself.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = iter(sizes)
        self._left = next(self._sizes, 0)
        self._hasher = blake3()
        self.hashes: list[str] = []

    def add(self, data: memoryview) -> None:
        """The next bytes, which may end anywhere; those behind the last unit are of none."""
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
