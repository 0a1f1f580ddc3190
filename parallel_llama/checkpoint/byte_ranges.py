"""Reading exact byte ranges of a file into tensors.

Plain reads and no memory map: what a rank reads is then what it owns, a file that shrinks while
it is read is an error and not a dead process, and only the result takes memory.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from parallel_llama.errors import DamagedWeights
from parallel_llama.families.weights import Param


def as_block(param: Param, rows: range) -> tuple[int, range, range]:
    """Where a slice of a parameter lies in its matrix: the matrix's columns, and rows x columns.

    A vector is a matrix of one row, so that it is cut along its columns.

    >>> as_block(Param("a", (4, 6), None, 1), range(2, 5)), as_block(Param("b", (6,)), range(2, 5))
    ((6, range(0, 4), range(2, 5)), (6, range(0, 1), range(2, 5)))
    """
    if len(param.shape) == 1:
        return param.shape[0], range(1), rows
    n_rows, n_columns = param.shape
    return (
        (n_columns, rows, range(n_columns)) if param.dim == 0 else (n_columns, range(n_rows), rows)
    )


def sliced_shape(param: Param, rows: range) -> tuple[int, ...]:
    """The shape of `rows` of a parameter along its `dim`."""
    return (*param.shape[: param.dim], len(rows), *param.shape[param.dim + 1 :])


Empty = Callable[[int], Tensor]


def new_memory(n_bytes: int) -> Tensor:
    """Bytes of any value, uint8 [n_bytes]."""
    return torch.empty(n_bytes, dtype=torch.uint8)


class ByteRanges:
    """One open file, read at any offset, into the memory that `empty` gives."""

    def __init__(self, path: Path, empty: Empty = new_memory) -> None:
        self.path, self._empty = path, empty
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def values(self, offset: int, dtype: torch.dtype, param: Param, rows: range) -> Tensor:
        """A slice of a whole parameter that lies row by row at `offset`, in its stored dtype."""
        n_columns, row_range, columns = as_block(param, rows)
        width = dtype.itemsize
        byte_columns = range(columns.start * width, columns.stop * width)
        data = self.matrix(offset, n_columns * width, row_range, byte_columns)
        return data.view(-1).view(dtype).view(sliced_shape(param, rows))

    def matrix(self, offset: int, row_bytes: int, rows: range, columns: range) -> Tensor:
        """The given rows and byte columns of a matrix that lies row by row at `offset`.

        Returns: uint8 [len(rows), len(columns)], contiguous.

        Raises: DamagedWeights if the file ends before, or cannot be read there.
        """
        out = self._empty(len(rows) * len(columns)).view(len(rows), len(columns))
        if out.numel() == 0:
            return out
        start = offset + rows.start * row_bytes + columns.start
        buffer = out.view(-1).numpy().data
        if len(columns) == row_bytes:
            self._fill(buffer, start)
        else:
            # One read a row: a vectored read cannot leave out the bytes between.
            for row in range(len(rows)):
                piece = buffer[row * len(columns) : (row + 1) * len(columns)]
                self._fill(piece, start + row * row_bytes)
        return out

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
