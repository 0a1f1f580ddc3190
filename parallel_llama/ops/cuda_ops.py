"""The operators on a CUDA device: kernels of our own, and torch's where these are as good."""

import torch
from torch import Tensor

from parallel_llama.ops.cuda.norm import rms_norm
from parallel_llama.ops.torch_ops import TorchOps


class CUDAOps(TorchOps):
    """For a model in float32, bfloat16 or float16; sums are in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty_like(rows)
        rms_norm(rows, weight, eps, offset, y)
        return y.view(x.shape)

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        rms_norm(x, weight, eps, offset, x)
