"""The hashes of files that are being written, taken from the data as it passes."""

from pathlib import Path

from blake3 import blake3

from parallel_llama.checkpoint.layout import TargetFile
from parallel_llama.checkpoint.manifest import hash_file

_BUFFER_BYTES = 8 << 20


class FileDigests:
    """A running hash of each file, as long as what is written comes in the order of the file.

    What lies between two writes is read back: headers, and what an earlier run wrote. A file that
    is written out of order is read as a whole at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, blake3] = {}
        self._positions: dict[str, int] = {}
        self._out_of_order: set[str] = set()

    def add(self, name: str, offset: int, data: memoryview) -> None:
        """Take in what is written at an offset of a file."""
        if offset < self._positions.get(name, 0):
            self._out_of_order.add(name)
        if name in self._out_of_order:
            return
        self._read_up_to(name, offset)
        self._update(name, data)

    def finish(self, file: TargetFile) -> str:
        """The hash of a whole file, all of which must be written."""
        if file.name in self._out_of_order:
            return hash_file(self._folder / file.name)
        self._read_up_to(file.name, file.n_bytes)
        return self._running[file.name].hexdigest()

    def _update(self, name: str, data: memoryview) -> None:
        hasher = self._running.setdefault(name, blake3(max_threads=blake3.AUTO))
        hasher.update(data)
        self._positions[name] = self._positions.get(name, 0) + len(data)

    def _read_up_to(self, name: str, offset: int) -> None:
        position = self._positions.get(name, 0)
        if position == offset:
            return
        with (self._folder / name).open("rb", buffering=0) as file:
            file.seek(position)
            while position < offset:
                data = file.read(min(_BUFFER_BYTES, offset - position))
                if not data:
                    raise OSError(f"{self._folder / name}: ends at byte {position}")
                self._update(name, memoryview(data))
                position += len(data)
