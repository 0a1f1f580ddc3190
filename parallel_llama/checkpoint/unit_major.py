"""Unit-major order: how a native folder stores the weights that ranks cut by columns.

All columns of unit 0 come first, row by row, then those of unit 1; a last unit may be short. So
any range of units is one range of bytes, whoever owns it:

    row-major   a0 a1 | b0 b1 | c0        unit-major   a0 a1 a2 a3 | b0 b1 b2 b3 | c0 c1
                a2 a3 | b2 b3 | c1
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of one block of units on the way out: large writes, and memory that is used again.
BLOCK_BYTES = 8 << 20


def unit_major_blocks(value: Tensor, unit: int) -> Iterator[Tensor]:
    """A matrix in unit-major order, some units at a time, each block as one row."""
    n_rows, n_columns = value.shape
    step = max(1, BLOCK_BYTES // max(1, n_rows * unit * value.itemsize)) * unit
    whole = n_columns // unit * unit
    for start in range(0, whole, step):
        block = value[:, start : min(start + step, whole)].view(n_rows, -1, unit)
        yield block.transpose(0, 1).reshape(-1)
    if whole < n_columns:
        yield value[:, whole:].reshape(-1)


def from_unit_major(data: Tensor, n_rows: int, unit: int) -> Tensor:
    """The matrix of some units that lie behind each other, row by row; a new tensor.

    Shapes: data [n_rows * n_columns]; only the last unit may be short.
    """
    n_columns = data.numel() // n_rows
    whole = n_columns // unit * unit
    out = torch.empty((n_rows, n_columns), dtype=data.dtype)
    units = data[: whole * n_rows].view(-1, n_rows, unit)
    out[:, :whole].view(n_rows, -1, unit).copy_(units.transpose(0, 1))
    out[:, whole:] = data[whole * n_rows :].view(n_rows, n_columns - whole)
    return out
