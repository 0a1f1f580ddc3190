"""The one way from torch to a kernel."""

from typing import Any

import triton
from torch import Tensor


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None, **constants: Any
) -> None:
    """Start a kernel on the current device, which has to be that of the tensors.

    Nothing is done where the first tensor is on the meta device, so that a whole step can be
    followed without a card, nor where the grid is empty.
    """
    first = next(each for each in arguments if isinstance(each, Tensor))
    if not first.is_meta and all(grid):
        kernel[grid](*arguments, **constants)


def tile(n: int) -> int:
    """The size of a tile that n numbers fit in."""
    size: int = triton.next_power_of_2(max(n, 1))
    return size


def warps(n: int) -> int:
    """How many warps share a tile of so many numbers: 8 numbers a thread, where that many fit."""
    return min(max(tile(n) // 256, 1), 16)
