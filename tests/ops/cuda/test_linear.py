"""Products of a few rows in Triton: correct, and independent of the batch."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda import linear as kernels
from parallel_llama.ops.cuda_ops import CUDAOps

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter has no bfloat16 products


def cut_into(monkeypatch, n_parts):
    monkeypatch.setattr(kernels, "parts_of", lambda *_: n_parts)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n_parts", "has_bias"), [(1, True), (3, False), (3, True)])
@pytest.mark.parametrize(
    "shape", [(1, 300, 70), (3, 129, 1), (16, 37, 65), (0, 37, 5), (3, 0, 5), (2, 5, 0)], ids=str
)
def test_linear(device, monkeypatch, dtype, n_parts, has_bias, shape):
    """Inputs and weights are views of some columns; the other columns are NaN."""
    cut_into(monkeypatch, n_parts)
    n, n_inputs, n_outputs = shape
    x, weight = (
        torch.full((m, n_inputs + 8), torch.nan, device=device).to(dtype)[:, 3:-5].normal_()
        for m in (n, n_outputs)
    )
    bias = torch.randn(n_outputs, device=device).to(dtype) if has_bias else None
    ours = CUDAOps().linear(x, weight, bias)
    assert ours.shape == (n, n_outputs) and ours.dtype == dtype
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    scale = n_inputs**0.5
    torch.testing.assert_close(
        ours.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n_parts", [1, 2])
def test_a_product_does_not_depend_on_the_batch(device, monkeypatch, dtype, n_parts):
    cut_into(monkeypatch, n_parts)
    x = torch.randn(16, 200, device=device).to(dtype)
    weight = torch.randn(20, 200, device=device).to(dtype)
    ops = CUDAOps()
    alone = torch.cat([ops.linear(row[None], weight) for row in x])
    for n in range(1, 17):
        assert torch.equal(ops.linear(x[:n], weight), alone[:n])


def test_weights_may_have_fewer_bits_than_inputs(device):
    x, weight = torch.randn(2, 50, device=device), torch.randn(9, 50, device=device).half()
    torch.testing.assert_close(CUDAOps().linear(x, weight), x @ weight.float().T)


def test_more_than_16_rows_are_bitwise_equal_to_torch(device):
    x, weight = torch.randn(17, 50, device=device), torch.randn(9, 50, device=device)
    assert torch.equal(CUDAOps().linear(x, weight), torch.nn.functional.linear(x, weight))


def test_matrices_with_few_outputs_are_split_along_inputs():
    """The weights of a layer of Llama 3 8B."""
    assert [kernels.parts_of(n // 64, 4096) for n in (4096, 6144, 28672, 128256)] == [4, 3, 1, 1]
    assert kernels.parts_of(64, 14336) == 4
    assert kernels.parts_of(1, 100) == kernels.parts_of(0, 4096) - 7 == 1
