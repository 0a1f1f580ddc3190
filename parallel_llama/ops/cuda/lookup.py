"""The rows of a weight for some tokens, in one launch; torch takes eight."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch

_SIZE = 1024


def lookup(tokens: Tensor, weight: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    """The rows of tokens from `first` on that the weight has; zeros for all others.

    Shapes: tokens [T] int64, weight [n, dim] -> [T, dim].
    """
    assert tokens.is_contiguous() and weight.stride(1) == 1
    (n_rows, dim), n = weight.shape, len(tokens)
    rows = weight.new_empty(n, dim, dtype=dtype)
    grid = (triton.cdiv(dim, _SIZE), n)
    launch(_lookup, grid, tokens, weight, rows, first, n_rows, weight.stride(0), dim, SIZE=_SIZE)
    return rows


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _lookup(tokens, weight, rows, first, n_rows, stride, dim, SIZE: tl.constexpr):
    place = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    own = tl.load(tokens + place) - first
    n_own = tl.where((own >= 0) & (own < n_rows), dim, 0)
    row = tl.load(weight + own * stride + columns, columns < n_own, 0)
    tl.store(rows + place * dim + columns, row.to(rows.dtype.element_ty), columns < dim)
