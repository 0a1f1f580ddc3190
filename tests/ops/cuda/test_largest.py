"""The largest number of a row in Triton is torch's, nan included."""

import pytest
import torch

from parallel_llama.ops import TorchOps

pytest.importorskip("triton", reason="kernels for CUDA devices need triton")

from parallel_llama.ops.cuda_ops import CUDAOps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_rows", [0, 1, 5])
@pytest.mark.parametrize("n_columns", [0, 1, 101, 4097, 20_000])
def test_the_first_of_the_largest(device, dtype, n_rows, n_columns):
    """Numbers that come many times, in some columns of more."""
    around = torch.randint(-40, 40, (n_rows, n_columns + 9), device=device).to(dtype)
    around[:, :4], around[:, -5:] = 99, 99
    x = around[:, 4:-5]
    assert CUDAOps().largest(x, 9).tolist() == TorchOps().largest(x, 9).tolist()


def test_the_largest_tells_of_what_is_no_number(device):
    x = torch.zeros(6, 9000, device=device)
    x[0], x[1, 60], x[2, 3], x[3, 100] = -torch.inf, torch.nan, torch.inf, -torch.inf
    x[4, 2], x[4, 8090], x[4, 5000] = torch.inf, torch.nan, torch.nan
    x[5] = torch.nan
    values, places = CUDAOps().largest(x, 9).T.tolist()
    assert [str(value) for value in values] == ["-inf", "nan", "inf", "0.0", "nan", "nan"]
    assert places == [9, 69, 12, 9, 5009, 9]
