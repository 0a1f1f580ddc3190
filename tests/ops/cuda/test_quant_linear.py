"""Products with quantised matrices in Triton: correct, and independent of the batch."""

import pytest
import torch
from quant_samples import (
    BLOCKS,
    FP8,
    INT4_MIN,
    INT8,
    INTEGER_FORMS,
    INTEGERS,
    a_matrix,
    every_float,
    factors_of,
    integers,
)

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda import quant_linear as kernels
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.ops.quant import PanelShape, QuantMatrix, quant_gemm
from parallel_llama.ops.quant import quantise_inputs as rounded_by_torch
from parallel_llama.parallel.cuda_graphs import require_capturable

SOME = pytest.mark.parametrize("form", [INT8, INT4_MIN, BLOCKS["Q6_K"]], ids=lambda f: f.name)
PARTS = pytest.mark.parametrize("n_parts", [1, 2])
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}  # of fp8 sums; the result is rounded


def cut_into(monkeypatch, n_parts):
    monkeypatch.setattr(kernels, "parts_of", lambda *_: n_parts)


def multiplied(x, weight):
    """The product, written into a view of some columns."""
    ops = CUDAOps()
    shape = PanelShape(weight.form, weight.shape[1], ops.panel_rows, weight.n_before)
    whole = torch.full((len(x), weight.shape[0] + 7), 5.0, dtype=x.dtype, device=x.device)
    ops.quant_gemm(x, shape.pack(weight), shape, whole[:, 3:-4])
    assert (whole[:, :3] == 5).all() and (whole[:, -4:] == 5).all()
    return whole[:, 3:-4]


@INTEGER_FORMS
def test_product_with_unit_scales_is_the_exact_integer(device, form):
    """Inputs with a largest value of 127 in every group are quantised exactly."""
    ones = torch.ones(9, -(-3 // form.n_shared), dtype=torch.float16)
    mins = -5 * ones if form.has_min else None
    weight = QuantMatrix(form, integers(form, 9, 96), ones, mins, factors_of(form, 9, 96))
    x = integers(INT8, 3, 96)
    x[:, ::32] = 127
    exact = x.long() @ weight.values().long().T
    ours = multiplied(x.float().to(device), weight.to(device))
    assert torch.equal(ours.long().cpu(), exact)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_fp8_number_is_decoded_exactly(device, dtype):
    weight, x = every_float().to(device), torch.eye(32, dtype=dtype, device=device)
    expected = weight.values().T.to(dtype)
    assert len(expected.unique()) == 253  # 0 has two encodings
    assert torch.equal(multiplied(x, weight), expected)


@SOME
def test_integer_product_matches_torch_for_any_shape(device, form):
    """Groups of one block, and of two blocks."""
    for n, k, m in [(0, 32, 3), (3, 96, 65), (15, 64, 5), (5, 64, 0), (2, 0, 3)]:
        x = torch.randn(n, k, device=device)
        weight = a_matrix(form, m, k, n_before=n + k // 32).to(device)
        longest = weight.values().norm(dim=1).max().item() if m else 0
        atol = 1e-5 * x.norm(dim=1).max().item() * longest if n else 0
        expected = quant_gemm(x, weight)
        torch.testing.assert_close(multiplied(x, weight), expected, rtol=0, atol=atol)


@PARTS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fp8_product_matches_float64_for_any_shape(monkeypatch, device, dtype, n_parts):
    cut_into(monkeypatch, n_parts)
    for n, k, m in [(0, 32, 3), (3, 96, 65), (17, 64, 5), (70, 32, 2), (5, 64, 0), (2, 0, 3)]:
        x = torch.randn(n, 2 * k, device=device).to(dtype)[:, k:]  # a view of some columns
        weight = a_matrix(FP8, m, k).to(device)
        exact = x.double() @ weight.values().double().T
        sizes = x.double().norm(dim=1)[:, None] * weight.values().double().norm(dim=1)
        assert ((multiplied(x, weight) - exact).abs() <= TOLERANCE[dtype] * sizes).all()


@PARTS
@pytest.mark.parametrize("form", [FP8, INT8, INT4_MIN, BLOCKS["Q6_K"]], ids=lambda f: f.name)
def test_a_product_does_not_depend_on_the_batch(device, monkeypatch, form, n_parts):
    cut_into(monkeypatch, n_parts)
    x, weight = torch.randn(16, 96, device=device), a_matrix(form, 5, 96).to(device)
    together = multiplied(x, weight)
    for n in (1, 2, 9):
        assert torch.equal(multiplied(x[-n:], weight), together[-n:])


def test_one_row_and_several_rows_are_summed_in_the_same_order(device):
    """150 groups are more than a program adds in parallel lanes."""
    x, weight = torch.randn(3, 32 * 150, device=device), a_matrix(INT4_MIN, 3, 32 * 150).to(device)
    assert torch.equal(multiplied(x[:1], weight), multiplied(x, weight)[:1])


def test_many_rows_use_the_dequantised_matrix(device):
    """Every format, blocks that begin within the matrix's first block, and NaN of fp8."""
    for form in (*INTEGERS, FP8):
        weight = a_matrix(form, 5, 96, n_before=3).to(device)
        x = torch.randn(17, 96, device=device)
        torch.testing.assert_close(multiplied(x, weight), x @ weight.values().T)
    bits = torch.arange(256, dtype=torch.uint8).view(torch.int8).reshape(8, 32)
    ones = torch.ones(8, 1, dtype=torch.float16)
    weight = QuantMatrix(FP8, bits, ones)
    shape = PanelShape(FP8, 32, CUDAOps.panel_rows)
    found = kernels.dequantised(shape.pack(weight).to(device), shape, torch.float32)
    assert torch.equal(found.cpu().nan_to_num(7), weight.values().nan_to_num(7))


@INTEGER_FORMS
def test_a_product_and_a_lookup_can_be_captured_in_a_graph(form):
    """Regression: `repeat_interleave` waited, so quantised models were decoded without graphs."""
    ops, shape = CUDAOps(), PanelShape(form, 256, CUDAOps.panel_rows)
    panels = torch.empty(9, shape.n_bytes, dtype=torch.uint8, device="meta")
    x, y = torch.empty(2, 256, device="meta"), torch.empty(2, 9, device="meta")
    tokens = torch.empty(2, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        require_capturable(lambda: ops.quant_gemm(x, panels, shape, y))
        require_capturable(lambda: ops.quant_embedding(tokens, panels, shape, 9, 0))


def test_inputs_and_results_may_be_in_half_precision(device):
    x, weight = torch.randn(2, 64, device=device).half(), a_matrix(INT8, 9, 64).to(device)
    expected = quant_gemm(x, weight)
    torch.testing.assert_close(multiplied(x, weight), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("form", [FP8, INT4_MIN], ids=lambda f: f.name)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_nan_or_inf_input_affects_only_its_own_row(device, wrong, form):
    x, weight = torch.randn(3, 64, device=device), a_matrix(form, 20, 64).to(device)
    x[1, 40] = wrong
    result = multiplied(x, weight)
    assert not result[1].isfinite().any() and result[[0, 2]].isfinite().all()


def test_inputs_are_rounded_alike_by_kernels_and_torch(device):
    sizes = torch.tensor([1e-38, 1e-31, 1e-20, 1.0, 1e30], device=device)
    x = torch.randn(5, 320, device=device) * sizes[:, None]
    for form in INTEGERS:
        ours = kernels._rounded(x, form)
        rounded, scales = rounded_by_torch(x)
        assert torch.equal(ours[0], rounded.flatten(1)) and torch.equal(ours[1], scales)
        sums = rounded.float().reshape(5, -1, 32 // form.n_parts).sum(-1)
        assert torch.equal(ours[2], sums)
