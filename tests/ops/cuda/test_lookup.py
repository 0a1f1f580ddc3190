"""A lookup in Triton gives what torch gives."""

import pytest
import torch

from parallel_llama.ops import TorchOps

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda_ops import CUDAOps


@pytest.mark.parametrize("tokens", [[], [7], [9, 2, 28, 27, 7, 0, 2**40, -(2**40)]], ids=len)
@pytest.mark.parametrize("n_rows", [0, 21])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, None], ids=str)
def test_lookup(device, tokens, n_rows, stored, dtype):
    """The weight has the tokens from 7 on, in some columns of more; the others are zeros."""
    weight = torch.randn(n_rows, 1111, device=device).to(stored)[:, 3:-5]
    places = torch.tensor(tokens, dtype=torch.int64, device=device)
    expected = TorchOps().lookup(places, weight, 7, dtype)
    assert torch.equal(CUDAOps().lookup(places, weight, 7, dtype), expected)
