"""Kernels compile for every architecture without register spills, and wait for their inputs."""

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
from quant_samples import BLOCKS, FP8, INT4_MIN, INT8
from triton_compile import TARGETS, compiled

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops import HeadNorms, cuda
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.ops.filters import Filters
from parallel_llama.ops.gumbel import SamplingKeys
from parallel_llama.ops.part_sums import PartSums
from parallel_llama.ops.quant import PanelShape

HALF = torch.bfloat16


def launches():
    ops = CUDAOps()
    for n in (1, 7, 16):
        for dim in (80, 4096, 16384):
            x = torch.empty(n, dim, dtype=HALF)
            ops.rms_norm(x, x[0], 1e-5)
            ops.add_rms_norm(x, x, x[0], 1e-5)
            ops.add_rms_norm(x, PartSums(torch.empty(4, n, dim), None, HALF), x[0], 1e-5)
        ops.add_rms_norm(x, x, x[0], 1e-5, 1.0, x[0])
        gates = PartSums(torch.empty(8, n, 3584), None, HALF)
        ops.silu_and_mul(gates)
        qkv = PartSums(torch.empty(3, n, 48 * 128), x[0, : 48 * 128], HALF).view(n, 48, 128)
        ops.rms_norm_(torch.empty(n, 32, 128, dtype=HALF), x[0, :128], 1e-5, 1.0)
        ops.silu_and_mul(x)
        ops.gelu_and_mul(x, is_tanh=True)
        ops.gelu_and_mul(x, is_tanh=False)
        ops.clamped_swiglu(x, 1.702, 7.0)
        ops.lookup(torch.empty(n + 1, dtype=torch.int64)[1:], torch.empty(101, 80), 0)
        keys = torch.empty(n + 1, dtype=torch.int64)[n % 2 :]
        logits, sampling_keys = torch.empty(n, 128256), SamplingKeys(keys, keys.view(torch.float64))
        ops.draw(logits, sampling_keys)
        for tp_size in (1, 8):
            found = ops.candidates(logits, sampling_keys.temperatures, 64)
            filters = Filters(
                sampling_keys, keys, sampling_keys.temperatures, sampling_keys.temperatures
            )
            ops.draw_filtered(found.repeat(tp_size, 1, 1), filters, 128256)
        for cache in (HALF, torch.int8, torch.float8_e4m3fn):
            k, v = torch.empty(2, 8, 64, 128 + 4 * (cache != HALF), dtype=cache)
            turns = torch.empty(n, 1, 64, dtype=torch.complex64)
            slots = torch.empty(n + 1, dtype=torch.int64)[1:]
            ops.rotate_and_store(torch.empty(n, 48, 128, dtype=HALF), turns, slots, k, v)
            norms = HeadNorms(x[0, :128], x[0, :128], 1e-6, 0.0)
            ops.rotate_and_store(qkv, turns, slots, k, v, norms)
        for dtype in (HALF, torch.float32):
            x = torch.empty(n, 4096, dtype=dtype)
            for n_outputs in (4096, 28672):
                ops.linear(x, torch.empty(n_outputs, 4096, dtype=dtype))
            mixture(ops, x)
    for form, dtype in (
        *((form, HALF) for form in (INT8, INT4_MIN, BLOCKS["Q2_K"], FP8)),
        (FP8, torch.float32),
    ):
        for n in (1, 7, 16, 17, 100, 160):
            shape = PanelShape(form, 4096, ops.panel_rows)
            panels = torch.empty(4096, shape.n_bytes, dtype=torch.uint8)
            x, y = torch.empty(2, n, 4096, dtype=dtype)
            ops.quant_gemm(x, panels, shape, y)


def mixture(ops, x):
    """The operators of a layer with 16 of Mixtral's experts."""
    routing_weights, experts = ops.route(x, torch.empty(16, 4096, dtype=x.dtype), 2, normed=True)
    to_experts, back = ops.expert_dispatch(experts, range(16))
    h = ops.routed_linear(x, [torch.empty(28672, 4096, dtype=x.dtype)] * 16, to_experts)
    down = [torch.empty(4096, 14336, dtype=x.dtype)] * 16
    y = ops.weighted_sum(ops.routed_product(ops.silu_and_mul(h), down, back), routing_weights)
    ops.add_gated_(y, x, torch.empty(len(x), 1, dtype=x.dtype))
    bias = torch.empty(16, dtype=torch.float32)
    ops.route(x, torch.empty(16, 4096, dtype=x.dtype), 4, bias, normed=True)
    ops.add_expert_bias_(h, torch.empty(16, 28672, dtype=x.dtype), to_experts)


# Compilations of each kernel; the number of rows makes no difference.
COUNTS = {
    "_norm": 4,
    "_add_norm": 7,
    "_gate": 6,
    "_add_expert_bias": 2,
    "_add_gated": 2,
    "_lookup": 1,
    "_of_parts": 1,
    "_of_rows": 1,
    "_top_k_of_parts": 1,
    "_merge": 1,
    "_candidates": 1,
    "_draw_filtered": 2,
    "_rotate_and_store": 6,
    "_product": 3 + 3 * 2,  # one row, or more
    "_fp8_product": 2,
    "_dequantise": 5,
    "_sum": 2,
    "_round": 2,
    "_route": 4,
    "_expert_dispatch": 1,
    "_routed": 3,
    "_weighted": 2,
}


@pytest.mark.slow
def test_kernels_neither_spill_nor_recompile_per_row_count():
    kernels = compiled(__file__, "launches")
    assert not [kernel for kernel in kernels if kernel.stack_bytes]
    # By default the compiler fused multiply-adds in some tile sizes, so rows differed in bits.
    assert not [kernel for kernel in kernels if kernel.is_fused]
    # The first of each kernel is compiled for every architecture.
    more = len(TARGETS) - 1
    assert Counter(each.kernel for each in kernels) == {k: n + more for k, n in COUNTS.items()}


def test_every_kernel_first_waits_for_the_kernel_before_it():
    """From sm_90 on, launches do not wait; without await_inputs() kernels would read old values."""
    found = set()
    for file in Path(cuda.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "launch":
                kernel = functions[ast.unparse(call.args[0])]
                body = kernel.body[1:] if ast.get_docstring(kernel) else kernel.body
                assert ast.unparse(body[0]) == "await_inputs()", f"{file.name}: {kernel.name}"
                found.add(kernel.name)
    assert found == {*COUNTS, "_decode", "_combine", "_attention"}
