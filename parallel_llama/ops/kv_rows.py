"""The rows of the KV cache, and how they are packed, stored, read and unpacked, in torch.

A row holds the key or value of one head and one token: D numbers of the cache's dtype, followed by
a float32 scale if that dtype is int8 or fp8.
"""

import torch
from torch import Tensor

from parallel_llama.dtypes import KV_SCALE_BYTES

# The absolute value to which a row's largest number is scaled, by dtype.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Above zero, so that a row of zeros can be divided by its scale.
LEAST_SCALE = torch.finfo(torch.float32).tiny


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of the cache's dtype per row."""
    return head_dim + KV_SCALE_BYTES if dtype in LARGEST else head_dim


def pack(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as rows of a cache; with a scale, a row with an infinity or NaN becomes NaN.

    Shapes: [..., D] -> [..., row_width].
    """
    if dtype not in LARGEST:
        return x.to(dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.abs().amax(-1, keepdim=True)
    # A NaN or infinite scale makes the whole row NaN.
    scale = (largest / LARGEST[dtype]).to(torch.float32).clamp(min=LEAST_SCALE)
    numbers = wide / scale
    if dtype == torch.int8:
        numbers.round_()
    return torch.cat((_bytes(numbers.to(dtype)), _bytes(scale)), -1).view(dtype)


def unpack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The keys or values of some rows, in a dtype to compute in.

    Shapes: [..., row_width] -> [..., D].
    """
    if rows.dtype not in LARGEST:
        return rows.to(dtype)
    numbers, last = rows[..., :-KV_SCALE_BYTES], rows[..., -KV_SCALE_BYTES:]
    # A copy, since a view as float32 needs contiguous bytes.
    scale = _bytes(last).clone(memory_format=torch.contiguous_format).view(torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    return numbers.to(wide).mul_(scale).to(dtype)


def store(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Store keys or values in their slots.

    Shapes: x [T, K, D]; slots [T]; cache [K, n_slots, row_width].
    """
    rows = pack(x.transpose(0, 1), cache.dtype)
    if cache.dtype in LARGEST:  # torch cannot index all of these dtypes
        rows, cache = _bytes(rows), _bytes(cache)
    cache.index_copy_(1, slots, rows)


def take(cache: Tensor, slots: Tensor) -> Tensor:
    """The rows of some slots. Shapes: [K, n_slots, W], [S] -> [K, S, W]."""
    if cache.dtype not in LARGEST:
        return cache[:, slots]
    return _bytes(cache)[:, slots].view(cache.dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
