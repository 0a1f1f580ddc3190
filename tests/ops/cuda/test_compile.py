"""Kernels become code for every architecture, and what they compute with stays in registers."""

import pytest
import torch
from group_samples import BLOCKS, INT4_MIN, INT8
from triton_compile import TARGETS, compiled

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.ops.groups import PanelShape

HALF = torch.bfloat16


def launches():
    ops = CUDAOps()
    for dim in (80, 4096, 16384):
        x = torch.empty(2, dim, dtype=HALF)
        ops.rms_norm(x, x[0], 1e-5)
        ops.add_rms_norm(x, x, x[0], 1e-5)
    ops.rms_norm_(torch.empty(2, 3, 128, dtype=HALF), x[0, :128], 1e-5, 1.0)
    ops.silu_and_mul(x)
    ops.gelu_and_mul(x, is_tanh=True)
    ops.gelu_and_mul(x, is_tanh=False)
    ops.lookup(torch.empty(2, dtype=torch.int64), x, 0)
    ops.largest(torch.empty(2, 128256))
    for cache in (HALF, torch.int8, torch.float8_e4m3fn):
        for head_dim in (80, 128):
            k, v = torch.empty(2, 8, 64, head_dim + 4 * (cache != HALF), dtype=cache)
            turns = torch.empty(2, 1, head_dim // 2, dtype=torch.complex64)
            slots = torch.empty(2, dtype=torch.int64)
            ops.rotate_and_store(torch.empty(2, 48, head_dim, dtype=HALF), turns, slots, k, v)
    for dtype in (HALF, torch.float32):
        for n_inputs, n_outputs in ((4096, 4096), (4096, 28672)):
            ops.linear(
                torch.empty(1, n_inputs, dtype=dtype), torch.empty(n_outputs, n_inputs, dtype=dtype)
            )
    for form in (INT8, INT4_MIN, BLOCKS["Q2_K"]):
        for n in (1, 100):
            shape = PanelShape(form, 4096, ops.panel_rows)
            panels = torch.empty(4096, shape.n_bytes, dtype=torch.uint8)
            x, y = torch.empty(2, n, 4096, dtype=HALF)
            ops.group_linear(x, panels, shape, y)


def test_nothing_is_spilled():
    kernels = compiled(__file__, "launches")
    assert {kernel.target for kernel in kernels} == set(TARGETS)
    assert not [kernel for kernel in kernels if kernel.stack_bytes]
