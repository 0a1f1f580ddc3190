"""Reading keys and values from the KV cache, in the row layout of `ops.kv_rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.dtypes import KV_SCALE_BYTES
from parallel_llama.ops.cuda.e4m3 import from_e4m3_or_nan

_SCALE_BYTES = tl.constexpr(KV_SCALE_BYTES)


def as_stored(cache: Tensor) -> Tensor:
    """A cache as kernels read it: fp8 as bytes, since not every GPU has the type."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def slots_of(blocks, keys, is_there, BLOCK: tl.constexpr):
    """The slots of keys that are numbered from the first key of the first block."""
    number = tl.load(blocks + keys // BLOCK, is_there, 0).to(tl.int64)
    return number * BLOCK + keys % BLOCK


@triton.jit
def read(cache, slots, is_there, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr):
    """The rows of one KV head in some slots, [n, SIZE], padded with zeros.

    Masked slots are not read, since they may hold anything.
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
