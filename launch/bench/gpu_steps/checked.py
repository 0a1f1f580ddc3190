"""Checks and figures of one kernel."""

import torch
from torch import Tensor

from launch.bench.gpu_steps import Row, Setting, Wrong
from launch.bench.gpu_steps.clock import Seconds, measured

CACHED = 256 << 20  # bytes, more than the L2 cache of any GPU

# Relative to the largest expected number.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dtypes(setting: Setting) -> tuple[torch.dtype, ...]:
    """The dtypes of the kernels; a rehearsal takes one, because tests/ops/cuda covers all."""
    every = torch.float32, torch.float16, torch.bfloat16
    return every[: setting.pick(3, 1)]


def normal(size: tuple[int, ...], dtype: torch.dtype, setting: Setting) -> Tensor:
    return torch.randn(size, device=setting.device).to(dtype)


def hold(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Raises: Wrong if an error exceeds the tolerance of the dtype."""
    error = (ours.double() - expected.double()).abs().max()
    most = _TOLERANCE[dtype] * max(float(expected.double().abs().max()), 1e-9)
    if not error <= most:
        raise Wrong(f"off by {error:.3g}; the tolerance of {dtype_name(dtype)} is {most:.3g}")


def alike(together: Tensor, alone: Tensor) -> None:
    if not torch.equal(together, alone):
        raise Wrong("a row in a batch differs from the same row alone")


def moved(name: str, n_bytes: int, seconds: Seconds, setting: Setting, target: str = "") -> Row:
    row = setting.moved(Row(name, target=target), n_bytes, seconds.median)
    return measured(row, seconds, lambda s: n_bytes / s / 1e9, "GB/s")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
