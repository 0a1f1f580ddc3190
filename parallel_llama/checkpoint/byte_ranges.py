"""Reads byte ranges of a file into tensors.

Files are read, not memory-mapped: a rank then reads only its own bytes, a file that shrinks raises
an error instead of killing the process, and only the result takes memory.
"""

import math
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parallel_llama.errors import DamagedWeights
from parallel_llama.families.stored_slices import StoredSlice
from parallel_llama.families.weights import Param
from parallel_llama.files.bounded_files import open_descriptor


@dataclass(frozen=True)
class MatrixBlock:
    """A block of a matrix that has `n_columns`: a range of rows and a range of columns."""

    n_columns: int
    rows: range
    columns: range


def as_blocks(param: Param, stored_slice: StoredSlice, rows: range) -> list[MatrixBlock]:
    """The blocks of the stored tensor that hold a slice of a parameter, in order.

    A stored vector counts as a matrix of one row, so it is cut along its columns. An empty slice of
    a matrix has blocks without rows, or without columns.

    >>> stored_slice = StoredSlice("ab", (6, 5), first=2, run=4, step=6)
    >>> as_blocks(Param("b", (4, 5), None, 1), stored_slice, range(2, 5))
    [MatrixBlock(n_columns=5, rows=range(2, 6), columns=range(2, 5))]
    """
    n_columns = stored_slice.shape[-1]
    if len(param.shape) == 1:
        return [MatrixBlock(n_columns, range(1), run) for run in stored_slice.runs(rows)]
    row_range, columns = (
        (rows, range(n_columns)) if param.dim == 0 else (range(param.shape[0]), rows)
    )
    runs = list(stored_slice.runs(row_range)) or [range(0)]
    return [MatrixBlock(n_columns, run, columns) for run in runs]


def sliced_shape(param: Param, rows: range) -> tuple[int, ...]:
    """The shape of a slice of a parameter, `rows` along its `dim`."""
    return (*param.shape[: param.dim], len(rows), *param.shape[param.dim + 1 :])


Empty = Callable[[int], Tensor]


def new_memory(n_bytes: int) -> Tensor:
    """An uninitialised tensor. Shapes: uint8 [n_bytes]."""
    return torch.empty(n_bytes, dtype=torch.uint8)


class ReusedMemory:
    """Allocates tensors, reusing the memory of freed tensors of the same size.

    The system zeroes each new page at its first touch, which takes longer than reading a cached
    file into it. The memory is released with the last tensor and this object. Any thread may
    allocate and free tensors.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def empty(self, n_bytes: int) -> Tensor:
        """An uninitialised, page-aligned tensor. Shapes: uint8 [n_bytes]."""
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        free = self._free[n_bytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The tensor keeps this array alive, so the memory is free once the array is finalised.
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, free.append, memory).atexit = False
        return torch.from_numpy(array)


class ByteRanges:
    """An open file that is read at any offset, into tensors allocated by `empty`.

    The file is also closed when this object is garbage-collected.
    """

    def __init__(self, path: Path, empty: Empty = new_memory) -> None:
        self.path, self._empty = path, empty
        self._fd = open_descriptor(path)
        self._close = weakref.finalize(self, os.close, self._fd)

    def close(self) -> None:
        self._close()
        self._fd = -1

    def values(
        self, offset: int, dtype: torch.dtype, param: Param, stored_slice: StoredSlice, rows: range
    ) -> Tensor:
        """A slice of a parameter that is stored row-major at `offset`, in its stored dtype."""
        shape, width = sliced_shape(param, rows), dtype.itemsize
        out = self._empty(math.prod(shape) * width)
        buffer = out.numpy().data
        for block in as_blocks(param, stored_slice, rows):
            columns = range(block.columns.start * width, block.columns.stop * width)
            n_bytes = len(block.rows) * len(columns)
            self._read(buffer[:n_bytes], offset, block.n_columns * width, block.rows, columns)
            buffer = buffer[n_bytes:]
        return out.view(dtype).view(shape)

    def block(
        self, offset: int, dtype: torch.dtype, n_columns: int, rows: range, columns: range
    ) -> Tensor:
        """The given rows and columns of a matrix that is stored row-major at `offset`.

        Raises: as `matrix`.
        """
        width = dtype.itemsize
        byte_columns = range(columns.start * width, columns.stop * width)
        data = self.matrix(offset, n_columns * width, rows, byte_columns)
        return data.view(-1).view(dtype).view(len(rows), len(columns))

    def matrix(self, offset: int, row_bytes: int, rows: range, columns: range) -> Tensor:
        """The given rows and byte columns of a matrix that is stored row-major at `offset`.

        Returns: uint8 [len(rows), len(columns)], contiguous.

        Raises: DamagedWeights if the file is too short or cannot be read.
        """
        out = self._empty(len(rows) * len(columns))
        self._read(out.numpy().data, offset, row_bytes, rows, columns)
        return out.view(len(rows), len(columns))

    def _read(
        self, buffer: memoryview, offset: int, row_bytes: int, rows: range, columns: range
    ) -> None:
        if not buffer:
            return
        start = offset + rows.start * row_bytes + columns.start
        if len(columns) == row_bytes:
            self._fill(buffer, start)
        else:
            # One read per row, because a vectored read cannot skip the bytes between rows.
            for row in range(len(rows)):
                piece = buffer[row * len(columns) : (row + 1) * len(columns)]
                self._fill(piece, start + row * row_bytes)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):  # a read returns at most 2 GiB
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise DamagedWeights(f"{self.path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise DamagedWeights(
                    f"{self.path}: ends at byte {offset + done} inside a tensor; "
                    "the file changed while it was read"
                )
            done += count
