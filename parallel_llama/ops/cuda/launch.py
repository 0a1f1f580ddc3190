"""Launching a kernel on torch's tensors, and sizes of tiles.

From sm_90 on, a kernel starts while the kernel before it is still ending, and then waits for that
kernel's results (programmatic dependent launch). Otherwise a GPU would be idle for about a
microsecond between two kernels.

Source: CUDA C++ Programming Guide, programmatic dependent launch; PTX ISA, griddepcontrol.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None, **constants: Any
) -> None:
    """Launch a kernel on the current device, which must be the device of the tensors.

    Does nothing if the first tensor is on the meta device, so that a step can run without a GPU, or
    if the grid is empty.

    Multiply-adds are not fused. A fused multiply-add rounds once instead of twice, and the compiler
    would fuse only in some kernels and tile sizes, so that equal computations would get different
    bits. Its default also differs between versions of Triton. Matrix instructions are not affected.
    """
    first = next(each for each in arguments if isinstance(each, Tensor))
    if not first.is_meta and all(grid):
        if first.is_cuda and _starts_early(first.device):
            constants["launch_pdl"] = True
        kernel[grid](*arguments, enable_fp_fusion=False, **constants)


@triton.jit
def await_inputs():
    """The first statement of every kernel: waits until the kernel before has ended.

    Allows the next kernel to start, which then waits for this one in the same way.
    """
    if tl.target_info.cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@cache
def _starts_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def tile(n: int) -> int:
    """The smallest power of two that is not below n."""
    size: int = triton.next_power_of_2(max(n, 1))
    return size


def warps(n: int) -> int:
    """The number of warps for a tile of n numbers: 8 numbers per thread, from 1 to 16 warps."""
    return min(max(tile(n) // 256, 1), 16)
