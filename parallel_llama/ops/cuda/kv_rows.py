"""Keys and values where they lie in the KV cache, in the rows that `ops.kv_rows` describes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.dtypes import KV_SCALE_BYTES
from parallel_llama.ops.cuda.e4m3 import from_e4m3_or_nan

_SCALE_BYTES = tl.constexpr(KV_SCALE_BYTES)


def as_stored(cache: Tensor) -> Tensor:
    """A cache that kernels can read: fp8 as its bytes, since not every GPU has that type."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def slots_of(blocks, keys, is_there, BLOCK: tl.constexpr):
    """Where some keys lie, numbered from the first one of the first of these blocks."""
    number = tl.load(blocks + keys // BLOCK, is_there, 0).to(tl.int64)
    return number * BLOCK + keys % BLOCK


@triton.jit
def read(cache, slots, is_there, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr):
    """What one KV head keeps in some slots, [n, SIZE]; zeros where nothing is, and past the head.

    Nothing is read of a slot that is not there: it may hold anything.
    """
    columns = tl.arange(0, SIZE)
    mask = is_there[:, None] & (columns < HEAD_DIM)[None, :]
    if cache.dtype.element_ty != tl.int8 and cache.dtype.element_ty != tl.uint8:
        return tl.load(cache + slots[:, None] * HEAD_DIM + columns[None, :], mask, 0).to(DTYPE)
    rows = cache + slots * (HEAD_DIM + _SCALE_BYTES)
    numbers = tl.load(rows[:, None] + columns[None, :], mask, 0)
    scales = tl.load((rows + HEAD_DIM).to(tl.pointer_type(tl.float32)), is_there, 0)
    is_float = cache.dtype.element_ty == tl.uint8
    wide = from_e4m3_or_nan(numbers) if is_float else numbers.to(tl.float32)
    return (wide * scales[:, None]).to(DTYPE)
