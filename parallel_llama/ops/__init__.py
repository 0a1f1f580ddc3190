"""The operators of the model: in torch, and faster ones for devices that have kernels.

A model gets one set of operators when it is loaded and calls them as `ops.rms_norm(..)`, whatever
its device. `TorchOps` runs everywhere and is the reference for all other sets.
"""

from collections.abc import Collection

import torch

from parallel_llama.dtypes import QuantFormat
from parallel_llama.ops.attention import (
    PLAIN,
    HeadMap,
    HeadNorms,
    PagedPlan,
    PagedQueries,
    Plan,
    Queries,
    QueryRange,
    QueryTile,
    Scores,
    SinkPlan,
)
from parallel_llama.ops.cpu.attention_plan import DecodeRoom, PartTile, part_tiles
from parallel_llama.ops.cpu.jit import computes
from parallel_llama.ops.cpu.low_rank import AdapterAddresses, AdapterRoom
from parallel_llama.ops.cpu.replay import NotRecorded, Recording
from parallel_llama.ops.cpu_ops import CPUOps
from parallel_llama.ops.dispatch import Dispatch
from parallel_llama.ops.gumbel import SamplingKeys
from parallel_llama.ops.torch_ops import TorchOps
from parallel_llama.ops.triton_toolchain import why_unusable

__all__ = [
    "AdapterAddresses",
    "AdapterRoom",
    "CPUOps",
    "DecodeRoom",
    "Dispatch",
    "HeadMap",
    "HeadNorms",
    "NotRecorded",
    "PagedPlan",
    "PagedQueries",
    "PartTile",
    "Plan",
    "Queries",
    "QueryRange",
    "QueryTile",
    "Recording",
    "SamplingKeys",
    "Scores",
    "SinkPlan",
    "TorchOps",
    "choose_ops",
    "part_tiles",
]

_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # supported by the Triton kernels


def choose_ops(
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    heads_per_kv: Collection[int],
    scores: Scores = PLAIN,
    cache_dtype: torch.dtype | None = None,
    matrices: Collection[torch.dtype | QuantFormat] = (),
    *,
    exact: bool = False,
) -> TorchOps:
    """The fastest operators for a model.

    Args:
        dtype: The dtype that the model computes in.
        device: The device of its weights.
        head_dim: The size of a head.
        heads_per_kv: The numbers of query heads that share a KV head.
        scores: The score function of its attention.
        cache_dtype: The dtype of its KV cache; None for `dtype`.
        matrices: Dtypes and formats of its matrices other than `dtype`.
        exact: Whether the rows that an operator returns must have the same bits for any number of
            rows and in every process; used only on a CPU.
    """
    if computes(dtype, device):
        return CPUOps(dtype, head_dim, heads_per_kv, scores, cache_dtype, matrices, exact=exact)
    if device.type == "cuda" and dtype in _CUDA_DTYPES and why_unusable() is None:
        from parallel_llama.ops.cuda_ops import CUDAOps

        return CUDAOps(scores)
    return TorchOps(scores)
