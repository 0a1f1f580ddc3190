"""Which operators a model is given."""

from collections.abc import Collection
from importlib.util import find_spec

import torch

from parallel_llama.dtypes import GroupFormat
from parallel_llama.ops.cpu.jit import computes
from parallel_llama.ops.cpu_ops import CPUOps
from parallel_llama.ops.scores import PLAIN, Scores
from parallel_llama.ops.torch_ops import TorchOps

# Those that kernels in Triton compute in.
_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_ops(
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    groups: Collection[int],
    scores: Scores = PLAIN,
    cache_dtype: torch.dtype | None = None,
    matrices: Collection[torch.dtype | GroupFormat] = (),
) -> TorchOps:
    """The fastest operators for a model of this kind, whose KV cache has that dtype or its own.

    `matrices` are the forms in which it keeps matrices, beside its dtype.
    """
    if computes(dtype, device):
        return CPUOps(dtype, head_dim, groups, scores, cache_dtype, matrices)
    if device.type == "cuda" and dtype in _CUDA_DTYPES and find_spec("triton") is not None:
        from parallel_llama.ops.cuda_ops import CUDAOps

        return CUDAOps(scores)
    return TorchOps(scores)
