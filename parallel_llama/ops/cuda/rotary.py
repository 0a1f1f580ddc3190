"""Rotary embeddings, and the way of keys and values into the cache, in one launch.

A program has one head of one token: it turns a query in place, and packs a key, turned, or a value
as `kv_rows` does, into its slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.dtypes import KV_SCALE_BYTES
from parallel_llama.ops import kv_rows
from parallel_llama.ops.cuda.e4m3 import to_e4m3
from parallel_llama.ops.cuda.launch import launch, tile


def can_store(head_dim: int, cache_dtype: torch.dtype) -> bool:
    """Whether rows of a cache are written here: their scales lie where a float32 may lie."""
    return cache_dtype not in kv_rows.LARGEST or head_dim % KV_SCALE_BYTES == 0


def rotate_and_store(qkv: Tensor, rotations: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Rotate the queries in place; put rotated keys, and values, in their slots of the cache.

    Shapes: qkv [T, H + 2 K, D], heads in interleaved order; rotations [T, 1, D / 2] complex64;
    slots [T]; k, v [K, n_slots, W], rows as in `kv_rows`.
    Source: RoFormer, arXiv 2104.09864.
    """
    n, n_heads, head_dim = qkv.shape
    n_kv_heads = len(k)
    turns = torch.view_as_real(rotations)
    assert qkv.stride(2) == 1 and turns.stride(-2) == 2 and slots.is_contiguous()
    assert k.stride() == v.stride() and k.stride(2) == 1 and can_store(head_dim, k.dtype)
    largest = kv_rows.LARGEST.get(k.dtype, 0.0)
    (k, k_scales), (v, v_scales) = _parts_of(k), _parts_of(v)
    strides = (*qkv.stride()[:2], turns.stride(0), *k.stride()[:2])
    launch(
        _rotate_and_store, (n_heads, n), qkv, turns, slots, k, v, k_scales, v_scales,
        n_heads - 2 * n_kv_heads, n_kv_heads, head_dim, *strides,
        LARGEST=largest, SIZE=tile(head_dim // 2), num_warps=1,
    )  # fmt: skip


def _parts_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """A cache as what its numbers are stored as, and the same memory as scales lie in it."""
    if cache.dtype not in kv_rows.LARGEST:
        return cache, cache
    return cache.view(torch.uint8), cache.view(torch.float32)


@triton.jit(do_not_specialize_on_alignment=["slots", "turns"])
def _rotate_and_store(
    qkv, turns, slots, k, v, k_scales, v_scales,
    n_queries, n_kv_heads, head_dim, token_stride, head_stride, turn_stride, kv_stride, slot_stride,
    LARGEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pairs = tl.arange(0, SIZE)
    numbers = pairs[:, None] * 2 + tl.arange(0, 2)[None, :]  # [pairs, 2]
    is_there = numbers < head_dim
    own = qkv + token * token_stride + head * head_stride + numbers
    x = tl.load(own, is_there, 0)
    if head < n_queries + n_kv_heads:
        turn = tl.load(turns + token * turn_stride + numbers, is_there, 0)
        x = _turned(x.to(tl.float32), turn).to(qkv.dtype.element_ty)
    if head < n_queries:
        tl.store(own, x, is_there)
    else:
        slot = tl.load(slots + token)
        at = slot * slot_stride
        if head < n_queries + n_kv_heads:
            at += (head - n_queries).to(tl.int64) * kv_stride
            _store(k, k_scales, at, numbers, x, is_there, head_dim, LARGEST)
        else:
            at += (head - n_queries - n_kv_heads).to(tl.int64) * kv_stride
            _store(v, v_scales, at, numbers, x, is_there, head_dim, LARGEST)


@triton.jit
def _turned(x, turn):
    """Pairs multiplied as complex numbers. Shapes: [pairs, 2] each."""
    even, odd = tl.split(x)
    cos, sin = tl.split(turn)
    return tl.join(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit
def _store(cache, scales, at, numbers, x, is_there, head_dim, LARGEST: tl.constexpr):
    """Put a row that begins at `at` into the cache."""
    if LARGEST == 0:
        tl.store(cache + at + numbers, x.to(cache.dtype.element_ty), is_there)
    else:
        wide = x.to(tl.float32)
        # nan where a number is no finite one, which makes nan of all that it is multiplied by.
        largest = tl.max(tl.abs(wide)) + tl.sum(wide * 0)
        scale = tl.div_rn(largest, LARGEST)
        scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
        kept = tl.div_rn(wide, tl.zeros_like(wide) + scale)
        tl.store(cache + at + numbers, _byte(kept, LARGEST), is_there)
        tl.store(scales + (at + head_dim) // 4, scale)


@triton.jit
def _byte(x, LARGEST: tl.constexpr):
    """Numbers of no more than LARGEST as int8, or as float8_e4m3fn, in bytes."""
    if LARGEST == 127:
        # Added to it, a number leaves its nearest integer in the last bits; of two the even one.
        return ((x + 12582912.0) - 12582912.0).to(tl.int32).to(tl.uint8)
    return to_e4m3(x)
