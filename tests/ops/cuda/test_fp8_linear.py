"""Products with fp8 matrices in Triton: those of float64, and independent of the batch."""

import pytest
import torch
from group_samples import FP8, a_matrix, every_float

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda import quant_linear as kernels
from parallel_llama.ops.cuda_ops import CUDAOps
from parallel_llama.ops.groups import PanelShape, quantise

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}  # of what is summed; the result is rounded
PARTS = pytest.mark.parametrize("n_parts", [1, 2])


def cut_into(monkeypatch, n_parts):
    monkeypatch.setattr(kernels, "parts_of", lambda *_: n_parts)


def multiplied(x, weight):
    """Into a view of some columns."""
    ops = CUDAOps()
    shape = PanelShape(FP8, weight.shape[1], ops.panel_rows)
    whole = torch.full((len(x), weight.shape[0] + 7), 5.0, dtype=x.dtype, device=x.device)
    ops.group_linear(x, shape.pack(weight), shape, whole[:, 3:-4])
    assert (whole[:, :3] == 5).all() and (whole[:, -4:] == 5).all()
    return whole[:, 3:-4]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_number_is_decoded_exactly(device, dtype):
    weight, x = every_float().to(device), torch.eye(32, dtype=dtype, device=device)
    expected = weight.values().T.to(dtype)
    assert len(expected.unique()) == 253  # 0 has two
    assert torch.equal(multiplied(x, weight), expected)


@PARTS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_product_is_that_of_float64_for_any_shape(monkeypatch, device, dtype, n_parts):
    cut_into(monkeypatch, n_parts)
    for n, k, m in [(0, 32, 3), (3, 96, 65), (17, 64, 5), (70, 32, 2), (5, 64, 0), (2, 0, 3)]:
        x = torch.randn(n, 2 * k, device=device).to(dtype)[:, k:]  # a view of some columns
        weight = a_matrix(FP8, m, k).to(device)
        exact = x.double() @ weight.values().double().T
        sizes = x.double().norm(dim=1)[:, None] * weight.values().double().norm(dim=1)
        assert ((multiplied(x, weight) - exact).abs() <= TOLERANCE[dtype] * sizes).all()


@PARTS
def test_up_to_16_rows_are_multiplied_as_each_would_be_alone(monkeypatch, device, n_parts):
    cut_into(monkeypatch, n_parts)
    x = torch.randn(16, 96, device=device)
    weight = quantise(torch.randn(5, 96), FP8).to(device)
    together = multiplied(x, weight)
    for n in (1, 2, 9):
        assert torch.equal(multiplied(x[16 - n :], weight), together[16 - n :])


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_number_that_is_none_spoils_its_own_row_alone(device, wrong):
    x, weight = torch.randn(3, 64, device=device), a_matrix(FP8, 20, 64).to(device)
    x[1, 40] = wrong
    result = multiplied(x, weight)
    assert not result[1].isfinite().any() and result[[0, 2]].isfinite().all()
