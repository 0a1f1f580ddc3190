"""RMSNorm in Triton gives what torch gives."""

import pytest
import torch

from parallel_llama.ops import TorchOps

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda_ops import CUDAOps

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
# The interpreter cuts off bits where it makes a bfloat16, and a norm makes two.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(ours, expected):
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(0, 96), (1, 1), (5, 130), (2, 3, 48)], ids=str)
def test_rms_norm(device, dtype, offset, shape):
    x = (30 * torch.randn(shape, device=device)).to(dtype)
    weight = torch.randn(shape[-1], device=device).to(dtype)
    ours = CUDAOps().rms_norm(x, weight, 1e-5, offset)
    check(ours, TorchOps().rms_norm(x, weight, 1e-5, offset))


@DTYPES
def test_heads_are_normed_where_they_lie_and_nothing_else_is(device, dtype):
    around = torch.full((3, 9, 40), 7.0, device=device).to(dtype)
    heads = around[:, 2:6]
    heads.normal_()
    weight = torch.randn(40, device=device).to(dtype)
    expected = TorchOps().rms_norm(heads, weight, 1e-5)
    CUDAOps().rms_norm_(heads, weight, 1e-5)
    check(heads, expected)
    assert (around[:, :2] == 7).all() and (around[:, 6:] == 7).all()


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("n_rows", [0, 1, 4])
def test_a_sum_is_kept_and_normed(device, dtype, offset, n_rows):
    """Both are columns of more."""
    around = torch.full((2, n_rows, 110), 7.0, device=device).to(dtype)
    x, y = around[:, :, 5:-5]
    x.normal_()
    y.normal_()
    weight, old_y, expected_sum = torch.randn(100, device=device).to(dtype), y.clone(), x.clone()
    expected = TorchOps().add_rms_norm(expected_sum, y, weight, 1e-5, offset)
    ours = CUDAOps().add_rms_norm(x, y, weight, 1e-5, offset)
    check(x, expected_sum)
    check(ours, expected)
    assert torch.equal(y, old_y)
    assert (around[:, :, :5] == 7).all() and (around[:, :, -5:] == 7).all()


@pytest.mark.filterwarnings("ignore:.*encountered in multiply")
def test_a_row_that_is_too_large_to_be_normed_becomes_nan(device):
    x = torch.randn(3, 96, device=device)
    x[1, 7] = 1e38
    y = CUDAOps().rms_norm(x, torch.ones(96, device=device), 1e-5)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def test_nothing_is_launched_for_tensors_without_memory():
    x = torch.empty(3, 96, device="meta")
    assert CUDAOps().rms_norm(x, x[0], 1e-5).shape == (3, 96)
