"""Products on the CPU's matrix tiles (AMX), skipped on machines without them."""

import subprocess
import sys

import pytest
import torch

from parallel_llama.ops import cpu_ops
from parallel_llama.ops.cpu import gemm_amx
from parallel_llama.ops.cpu.gemm_amx import GemmAMXKernel, tiles_are_allowed
from parallel_llama.ops.cpu.jit import openmp
from parallel_llama.ops.cpu_ops import CPUOps

has_tiles = pytest.mark.skipif(
    openmp() is None or not tiles_are_allowed(), reason="this CPU has no tiles (AMX)"
)
SHAPES = [(1, 32, 32), (31, 64, 33), (33, 96, 100), (200, 576, 64), (70, 160, 47)]


@pytest.fixture(scope="module")
def kernel():
    return GemmAMXKernel()


@has_tiles
def test_product_is_accurate_to_1e_5(kernel):
    for n, k, m in SHAPES:
        x, weight = torch.randn(n, k), torch.randn(m, k).to(torch.bfloat16)
        exact = x.double() @ weight.double().T
        error = (kernel(x, weight) - exact).abs().max()
        assert error < 1e-5 * exact.abs().max()


@has_tiles
def test_both_bfloat16_parts_of_an_input_are_multiplied(kernel):
    """1 + 2^-10 has more bits than one bfloat16."""
    x, weight = torch.full((33, 32), 1 + 2.0**-10), torch.ones(32, 32, dtype=torch.bfloat16)
    assert torch.equal(kernel(x, weight), torch.full((33, 32), 32 + 2.0**-5))


@has_tiles
def test_row_is_bitwise_equal_in_any_batch_and_for_any_thread_count(kernel):
    x, weight = torch.randn(450, 96), torch.randn(100, 96).to(torch.bfloat16)
    alone = torch.cat([kernel(row[None], weight) for row in x[:5]])
    before = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            for n in (5, 37, 450):
                assert torch.equal(kernel(x[:n], weight)[:5], alone)
    finally:
        torch.set_num_threads(before)


@has_tiles
def test_product_of_views_does_not_read_neighbouring_values(kernel):
    around = torch.full((40, 80), torch.nan)
    x = around[1:38, 4:68].normal_()
    weight = torch.randn(35, 64).to(torch.bfloat16)
    assert torch.equal(kernel(x, weight), kernel(x.contiguous(), weight))


@has_tiles
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7F800000])
def test_nan_or_inf_input_affects_only_its_own_row(kernel, bits):
    x, weight = torch.randn(35, 64), torch.randn(40, 64).to(torch.bfloat16)
    x.view(torch.int32)[7, 3] = bits
    y = kernel(x, weight)
    assert not y[7].isfinite().any()
    assert y[:7].isfinite().all() and y[8:].isfinite().all()


@has_tiles
def test_speed_measurement_leaves_rng_state_unchanged():
    before = torch.get_rng_state()
    gemm_amx.make_gemm_amx.__wrapped__()
    assert torch.equal(torch.get_rng_state(), before)


@has_tiles
def test_linear_is_correct_whether_or_not_shapes_fill_tiles(monkeypatch):
    monkeypatch.setattr(cpu_ops, "make_gemm_amx", GemmAMXKernel)
    ops = CPUOps(torch.float32, 32, {1})
    for k, m in [(33, 64), (64, 31), (64, 64)]:
        x, weight = torch.randn(40, k), torch.randn(m, k).to(torch.bfloat16)
        bias = torch.randn(m)
        expected = x @ weight.float().T + bias
        torch.testing.assert_close(ops.linear(x, weight, bias), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("answer", "is_allowed"), [(0, True), (1, False), (-1, False)])
def test_tiles_are_disallowed_if_the_permission_request_fails(monkeypatch, answer, is_allowed):
    """On a CPU with tiles, whatever CPU runs the test."""

    class System:
        @staticmethod
        def syscall(*_):
            return answer

    features = {"amx-tile": True, "amx-bf16": True}
    monkeypatch.setattr(gemm_amx.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(gemm_amx.llvm, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(gemm_amx.ctypes, "CDLL", lambda _: System)
    assert tiles_are_allowed.__wrapped__() is is_allowed


@pytest.mark.slow
@has_tiles
def test_amx_kernel_requests_tile_permission_itself():
    """Without permission, the first tile instruction kills the process."""
    program = (
        "import torch\n"
        "from parallel_llama.ops.cpu.gemm_amx import GemmAMXKernel\n"
        "y = GemmAMXKernel()(torch.ones(33, 32), torch.ones(32, 32, dtype=torch.bfloat16))\n"
        "assert (y == 32).all()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)
