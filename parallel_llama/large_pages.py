"""Weights in memory with large pages, so that reading them all is not a search for their addresses.

Decoding reads every weight once a step; with pages of 4 KiB the processor looks up an address for
each of them, and waits. Where a system has no large pages to give, it gives small ones.

Source: Linux's admin guide, "Transparent Hugepage Support".
"""

import mmap
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

_LINE_BYTES = 64  # of a cache: where a weight begins


class LargePages:
    """One stretch of the CPU's memory with room for some weights, which move there end to end."""

    def __init__(self, parameters: Collection[nn.Parameter]) -> None:
        self._memory = _large_pages(sum(_rounded(each.nbytes) for each in parameters))
        self._n_used = 0

    def move(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move weights here that are there by now, so that none is held twice for long.

        Parameters that share memory go on sharing it.
        """
        owners: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.numel():
                owners.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        for sharing in owners.values():
            old = sharing[0].untyped_storage()
            new = self._memory[self._n_used : self._n_used + old.nbytes()]
            new.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
            for parameter in sharing:
                whole = new.view(parameter.dtype)
                parameter.data = whole.as_strided(
                    parameter.shape,
                    parameter.stride(),
                    whole.storage_offset() + parameter.storage_offset(),
                )
            self._n_used += _rounded(old.nbytes())


def _rounded(n_bytes: int) -> int:
    return -(-n_bytes // _LINE_BYTES) * _LINE_BYTES


def _large_pages(n_bytes: int) -> Tensor:
    """Fresh memory. Shapes: [n_bytes] uint8."""
    memory = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
