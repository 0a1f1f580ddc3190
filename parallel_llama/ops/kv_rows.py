"""How keys and values lie in the KV cache, and the way in and out of it, in torch.

A row is what is kept of one head and one token: in a plain cache its D numbers; in one of int8 or
fp8 D numbers of one byte and, in the last four bytes, the float32 by which they are multiplied. The
dtype of a cache says which it is.
"""

import torch
from torch import Tensor

from parallel_llama.dtypes import KV_SCALE_BYTES

# The largest number of those that are kept with a scale: the largest of a row becomes this.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Not zero, so that a row of zeros can be divided by its scale.
LEAST_SCALE = torch.finfo(torch.float32).tiny


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """How many numbers of a cache's dtype a row takes."""
    return head_dim + KV_SCALE_BYTES if dtype in LARGEST else head_dim


def pack(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as rows of a cache; those with an infinity or nan among them are nan there.

    Shapes: [..., D] -> [..., row_width].
    """
    if dtype not in LARGEST:
        return x.to(dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.abs().amax(-1, keepdim=True)
    # nan or infinite where a number is, which makes nan of all numbers that it is multiplied by.
    scale = (largest / LARGEST[dtype]).to(torch.float32).clamp(min=LEAST_SCALE)
    numbers = wide / scale
    if dtype == torch.int8:
        numbers.round_()
    return torch.cat((_bytes(numbers.to(dtype)), _bytes(scale)), -1).view(dtype)


def unpack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as they were kept, in a dtype to compute in.

    Shapes: [..., row_width] -> [..., D].
    """
    if rows.dtype not in LARGEST:
        return rows.to(dtype)
    numbers, last = rows[..., :-KV_SCALE_BYTES], rows[..., -KV_SCALE_BYTES:]
    # A copy, for four bytes in the middle of others are no float32.
    scale = _bytes(last).clone(memory_format=torch.contiguous_format).view(torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    return numbers.to(wide).mul_(scale).to(dtype)


def store(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Put keys or values into their slots.

    Shapes: x [T, K, D]; slots [T]; cache [K, n_slots, row_width].
    """
    rows = pack(x.transpose(0, 1), cache.dtype)
    if cache.dtype in LARGEST:  # which torch cannot index
        rows, cache = _bytes(rows), _bytes(cache)
    cache.index_copy_(1, slots, rows)


def take(cache: Tensor, slots: Tensor) -> Tensor:
    """The rows in some slots. Shapes: [K, n_slots, W], [S] -> [K, S, W]."""
    if cache.dtype not in LARGEST:
        return cache[:, slots]
    return _bytes(cache)[:, slots].view(cache.dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
