"""Gated activations in Triton give what torch gives."""

import pytest
import torch

from parallel_llama.ops import TorchOps

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda_ops import CUDAOps

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ACTIVATIONS = {
    "silu": lambda ops, x: ops.silu_and_mul(x),
    "gelu": lambda ops, x: ops.gelu_and_mul(x, is_tanh=False),
    "gelu_tanh": lambda ops, x: ops.gelu_and_mul(x, is_tanh=True),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(0, 58), (1, 2), (3, 58), (2, 2200)], ids=str)
def test_gated_activations(device, dtype, name, shape):
    x = (4 * torch.randn(shape, device=device)).to(dtype)
    x.view(-1)[:3] = torch.tensor([300.0, -300.0, 0.0])[: x.numel()]
    expected = ACTIVATIONS[name](TorchOps(), x.clone())
    ours = ACTIVATIONS[name](CUDAOps(), x)
    assert ours.dtype == dtype and ours.is_contiguous()
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
