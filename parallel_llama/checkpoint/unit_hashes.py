"""The hashes of a weight's units: any rank's share can be checked by itself."""

from collections.abc import Iterable

from blake3 import blake3


class UnitHashes:
    """The hash of each unit of a weight, from its bytes in the order of the file."""

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
