"""Rotary embeddings and the storing of keys and values in the cache, in one launch.

A program has one head of one token: it rotates a query in place, or stores a rotated key or a value
in its slot, packed as in `ops.kv_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.dtypes import KV_SCALE_BYTES
from parallel_llama.ops import kv_rows
from parallel_llama.ops.cuda.e4m3 import to_e4m3
from parallel_llama.ops.cuda.launch import await_inputs, launch, tile


def can_store(head_dim: int, cache_dtype: torch.dtype) -> bool:
    """Whether the kernel can write rows of a cache: their scales must be aligned as float32."""
    return cache_dtype not in kv_rows.LARGEST or head_dim % KV_SCALE_BYTES == 0


def rotate_and_store(
    qkv: Tensor, rotations: Tensor | None, slots: Tensor, k: Tensor, v: Tensor
) -> None:
    """`TorchOps.rotate_and_store`, rotations in complex64. Source: RoFormer, arXiv 2104.09864."""
    n, n_heads, head_dim = qkv.shape
    n_kv_heads = len(k)
    rotates = rotations is not None
    real = qkv if rotations is None else torch.view_as_real(rotations)  # read only if it rotates
    assert qkv.stride(2) == 1 and slots.is_contiguous()
    assert not rotates or real.stride(-2) == 2
    assert k.stride() == v.stride() and k.stride(2) == 1 and can_store(head_dim, k.dtype)
    largest = kv_rows.LARGEST.get(k.dtype, 0.0)
    (k, k_scales), (v, v_scales) = _parts_of(k), _parts_of(v)
    strides = (*qkv.stride()[:2], real.stride(0), *k.stride()[:2])
    launch(
        _rotate_and_store, (n_heads, n), qkv, real, slots, k, v, k_scales, v_scales,
        n_heads - 2 * n_kv_heads, n_kv_heads, head_dim, *strides,
        ROTATES=rotates, LARGEST=largest, SIZE=tile(head_dim // 2), num_warps=1,
    )  # fmt: skip


def _parts_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """A cache as the dtype of its stored numbers, and as the dtype of its scales."""
    if cache.dtype not in kv_rows.LARGEST:
        return cache, cache
    return cache.view(torch.uint8), cache.view(torch.float32)


@triton.jit(do_not_specialize_on_alignment=["slots", "rotations"])
def _rotate_and_store(
    qkv, rotations, slots, k, v, k_scales, v_scales,
    n_queries, n_kv_heads, head_dim,
    token_stride, head_stride, rotation_stride, kv_stride, slot_stride,
    ROTATES: tl.constexpr, LARGEST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pairs = tl.arange(0, SIZE)
    numbers = pairs[:, None] * 2 + tl.arange(0, 2)[None, :]  # [pairs, 2]
    is_there = numbers < head_dim
    own = qkv + token * token_stride + head * head_stride + numbers
    x = tl.load(own, is_there, 0)
    if ROTATES and head < n_queries + n_kv_heads:
        rotation = tl.load(rotations + token * rotation_stride + numbers, is_there, 0)
        x = _rotated(x.to(tl.float32), rotation).to(qkv.dtype.element_ty)
    if head < n_queries:
        if ROTATES:
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
def _rotated(x, rotation):
    """The complex product of pairs. Shapes: [pairs, 2] each."""
    even, odd = tl.split(x)
    cos, sin = tl.split(rotation)
    return tl.join(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit
def _store(cache, scales, at, numbers, x, is_there, head_dim, LARGEST: tl.constexpr):
    """Store a row that begins at `at` of the cache."""
    if LARGEST == 0:
        tl.store(cache + at + numbers, x.to(cache.dtype.element_ty), is_there)
    else:
        wide = x.to(tl.float32)
        # NaN if a number is not finite, which makes the whole row NaN.
        largest = tl.max(tl.abs(wide)) + tl.sum(wide * 0)
        scale = tl.div_rn(largest, LARGEST)
        scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
        kept = tl.div_rn(wide, tl.zeros_like(wide) + scale)
        tl.store(cache + at + numbers, _byte(kept, LARGEST), is_there)
        tl.store(scales + (at + head_dim) // 4, scale)


@triton.jit
def _byte(x, LARGEST: tl.constexpr):
    """Numbers up to LARGEST as the bytes of int8 or float8_e4m3fn."""
    if LARGEST == 127:
        # Adding and subtracting 1.5 * 2 ** 23 rounds to the nearest even integer.
        return ((x + 12582912.0) - 12582912.0).to(tl.int32).to(tl.uint8)
    return to_e4m3(x)
