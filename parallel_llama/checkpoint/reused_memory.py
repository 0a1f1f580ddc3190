"""Memory that is used again as soon as the last tensor in it is gone.

Memory from the system comes in pages that are zeroed one by one when they are first touched, which
takes longer than reading a cached file into them.
"""

import mmap
from collections import defaultdict
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class ReusedMemory:
    """Makes tensors, each in memory that an earlier one of the same size has left, if there is any.

    All of it is given back with the last tensor and this object. Any thread may ask for a tensor,
    and let go of one.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def empty(self, n_bytes: int) -> Tensor:
        """Bytes of any value that begin where a page does.

        Shapes: uint8 [n_bytes].
        """
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        free = self._free[n_bytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, n_bytes, flags=PRIVATE)
        # torch holds on to this very array as long as a tensor lies in it.
        array = np.frombuffer(memory, dtype=np.uint8)
        finalize(array, free.append, memory).atexit = False
        return torch.from_numpy(array)
