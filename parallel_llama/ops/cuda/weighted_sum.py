"""What each token gets from its experts, in one launch; torch takes two for each of them."""

import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.cuda.launch import launch

_SIZE = 1024


def weighted_sum(parts: Tensor, shares: Tensor) -> Tensor:
    """`TorchOps.weighted_sum`, part after part. Shapes: [T * n, dim], [T, n] -> [T, dim]."""
    (n, n_parts), dim = shares.shape, parts.shape[1]
    assert parts.is_contiguous() and shares.is_contiguous() and len(parts) == n * n_parts
    y = parts.new_empty(n, dim)
    grid = (triton.cdiv(dim, _SIZE), n)
    launch(_weighted, grid, parts, shares, y, dim, N_PARTS=n_parts, SIZE=_SIZE)
    return y


@triton.jit
def _weighted(parts, shares, y, dim, N_PARTS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for part in tl.static_range(N_PARTS):
        at = row * N_PARTS + part
        own = tl.load(parts + at * dim + columns, columns < dim, 0).to(tl.float32)
        total += own * tl.load(shares + at)
    tl.store(y + row * dim + columns, total.to(y.dtype.element_ty), columns < dim)
