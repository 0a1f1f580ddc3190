"""Weights in memory with huge pages, so that reading them all is not a search for their addresses.

Decoding reads every weight once a step; with pages of 4 KiB the processor looks up an address for
each of them, and waits. Where a system has no huge pages to give, it gives small ones.

Source: Linux's admin guide, "Transparent Hugepage Support".
"""

import mmap
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from parallel_llama.ops.formats import Weight

_LINE_BYTES = 64  # of a cache: where a weight begins


class HugePages:
    """One stretch of the CPU's memory with room for some weights, which move there end to end.

    `values` are the weights' before they are filled: their sizes count. What is not used, since
    they come in fewer bits, costs nothing.
    """

    def __init__(self, values: Collection[Tensor]) -> None:
        self._memory = huge_pages(sum(_rounded(each.nbytes) for each in values))
        self._n_used = 0

    def move(self, weights: Iterable[Weight]) -> None:
        """Move weights here that are there by now, so that none is held twice for long.

        Weights that share memory go on sharing it, and those that are here already stay.
        """
        owners: dict[int, list[Weight]] = {}
        here = self._memory.untyped_storage().data_ptr()
        for weight in weights:
            start = weight.values.untyped_storage().data_ptr()
            if weight.values.numel() and start != here:
                owners.setdefault(start, []).append(weight)
        for sharing in owners.values():
            old = sharing[0].values.untyped_storage()
            new = self._memory[self._n_used : self._n_used + old.nbytes()]
            new.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
            for weight in sharing:
                values = weight.values
                whole = new.view(values.dtype)
                offset = whole.storage_offset() + values.storage_offset()
                weight.values = whole.as_strided(values.shape, values.stride(), offset)
            self._n_used += _rounded(old.nbytes())


def _rounded(n_bytes: int) -> int:
    return -(-n_bytes // _LINE_BYTES) * _LINE_BYTES


def huge_pages(n_bytes: int) -> Tensor:
    """Fresh memory, in huge pages where the system has them. Shapes: [n_bytes] uint8."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, max(n_bytes, 1), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
