"""Weights in huge pages, to avoid TLB misses when every weight is read once per step.

If the system has no free huge pages, the weights are in normal pages.

Source: Linux's admin guide, "Transparent Hugepage Support".
"""

import mmap
from collections.abc import Collection, Iterable
from contextlib import suppress

import torch
from torch import Tensor

from parallel_llama.ops.formats import Weight

_LINE_BYTES = 64  # of a CPU cache, the alignment of weights


class HugePages:
    """One region of CPU memory, into which weights are moved one after another.

    Args:
        values: The empty weights; their sizes are reserved. Loaded weights may be smaller: unused
            pages take no memory.

    Raises: OSError if the process may not reserve so many addresses.
    """

    def __init__(self, values: Collection[Tensor]) -> None:
        self._map = _huge_pages(sum(_rounded(empty.nbytes) for empty in values))
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._n_used = 0

    def move(self, weights: Iterable[Weight]) -> range:
        """Move some loaded weights into the region. Returns: the byte range of the moved weights.

        Weights that share memory still share it afterwards. Weights that are in the region already
        are not moved.
        """
        first, weights = self._n_used, list(weights)
        for weight in weights:
            n_bytes = weight.unstored_bytes
            if n_bytes:
                weight.store(self._memory[self._n_used : self._n_used + n_bytes])
                self._n_used += _rounded(n_bytes)
        by_storage: dict[int, list[Weight]] = {}
        region = self._memory.untyped_storage().data_ptr()
        for weight in weights:
            start = weight.values.untyped_storage().data_ptr()
            if weight.values.numel() and start != region:
                by_storage.setdefault(start, []).append(weight)
        for sharers in by_storage.values():
            old = sharers[0].values.untyped_storage()
            new = self._memory[self._n_used : self._n_used + old.nbytes()]
            new.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
            for weight in sharers:
                values = weight.values
                whole = new.view(values.dtype)
                offset = whole.storage_offset() + values.storage_offset()
                weight.values = whole.as_strided(values.shape, values.stride(), offset)
            self._n_used += _rounded(old.nbytes())
        return range(first, self._n_used)

    def release(self, span: range) -> None:
        """Return all whole pages of a byte range to the system; their contents are lost."""
        start, stop = -(-span.start // mmap.PAGESIZE), span.stop // mmap.PAGESIZE
        if start < stop:
            size = mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start * size, (stop - start) * size)


def _rounded(n_bytes: int) -> int:
    return -(-n_bytes // _LINE_BYTES) * _LINE_BYTES


def huge_pages(n_bytes: int) -> Tensor:
    """New memory, in huge pages if the system has them. Shapes: [n_bytes] uint8."""
    return torch.frombuffer(_huge_pages(n_bytes), dtype=torch.uint8)


def _huge_pages(n_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, max(n_bytes, 1), flags=flags)
    with suppress(OSError):  # a kernel without CONFIG_TRANSPARENT_HUGEPAGE, such as a real-time one
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
