"""Launching a kernel on torch's tensors, and sizes of tiles."""

from typing import Any

import triton
from torch import Tensor


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None, **constants: Any
) -> None:
    """Launch a kernel on the current device, which must be the device of the tensors.

    Does nothing if the first tensor is on the meta device, so that a step can run without a GPU, or
    if the grid is empty.

    Multiply-adds are not fused, because a fused multiply-add rounds once instead of twice: the
    compiler would fuse only in some kernels and tile sizes, and its default differs between
    versions of Triton. Matrix instructions are not affected.
    """
    first = next(each for each in arguments if isinstance(each, Tensor))
    if not first.is_meta and all(grid):
        kernel[grid](*arguments, enable_fp_fusion=False, **constants)


def tile(n: int) -> int:
    """The smallest power of two that is not below n."""
    size: int = triton.next_power_of_2(max(n, 1))
    return size


def warps(n: int) -> int:
    """The number of warps for a tile of n numbers: 8 numbers per thread, from 1 to 16 warps."""
    return min(max(tile(n) // 256, 1), 16)
