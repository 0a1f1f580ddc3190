"""The operators on a CUDA device: kernels of our own where torch's take several launches, or read
more than they need.
"""

import torch
from torch import Tensor

from parallel_llama.ops.cuda.chunk_attention import chunk_attention
from parallel_llama.ops.cuda.decode_attention import decode_attention
from parallel_llama.ops.cuda.gate import gelu_and_mul, silu_and_mul
from parallel_llama.ops.cuda.group_linear import PANEL_ROWS, group_linear
from parallel_llama.ops.cuda.largest import largest
from parallel_llama.ops.cuda.linear import linear, takes
from parallel_llama.ops.cuda.lookup import lookup
from parallel_llama.ops.cuda.norm import add_rms_norm, rms_norm
from parallel_llama.ops.cuda.rotary import can_store, rotate_and_store
from parallel_llama.ops.groups import PanelShape
from parallel_llama.ops.paged_queries import HeadMap, PagedQueries
from parallel_llama.ops.torch_ops import TorchOps


class CUDAOps(TorchOps):
    """For a model in float32, bfloat16 or float16; sums are in float32."""

    panel_rows = PANEL_ROWS
    is_paged = True

    def lookup(
        self, tokens: Tensor, weight: Tensor, first: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        return lookup(tokens, weight, first, dtype or weight.dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As in torch. Up to 16 rows are multiplied as each would be alone, to the last bit.

        More go to cuBLAS, which chooses by their number how it sums: a row may differ in its last
        bits with the company that it has.
        """
        return linear(x, weight, bias) if takes(x, weight) else super().linear(x, weight, bias)

    def group_linear(self, x: Tensor, panels: Tensor, shape: PanelShape, out: Tensor) -> None:
        group_linear(x, panels, shape, out)

    def largest(self, x: Tensor, first: int = 0) -> Tensor:
        return largest(x, first) if x.shape[1] else super().largest(x, first)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty_like(rows)
        rms_norm(rows, weight, eps, offset, y)
        return y.view(x.shape)

    def rms_norm_(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        rms_norm(x, weight, eps, offset, x)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> Tensor:
        return add_rms_norm(x, y, weight, eps, offset)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)

    def gelu_and_mul(self, x: Tensor, *, is_tanh: bool) -> Tensor:
        return gelu_and_mul(x, is_tanh=is_tanh)

    def rotate_and_store(
        self, qkv: Tensor, rotations: Tensor, slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        if can_store(qkv.shape[2], k.dtype):
            rotate_and_store(qkv, rotations, slots, k, v)
        else:
            super().rotate_and_store(qkv, rotations, slots, k, v)

    def paged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, queries: PagedQueries, heads: HeadMap, out: Tensor
    ) -> None:
        """As in torch. Where all ranges are of one query, each gets to the last bit what it would
        get alone.
        """
        if not can_store(q.shape[2], k.dtype):
            super().paged_attention(q, k, v, queries, heads, out)
        elif queries.max_queries == 1:
            decode_attention(q, k, v, queries, heads, out, self._scores)
        else:
            chunk_attention(q, k, v, queries, heads, out, self._scores)
