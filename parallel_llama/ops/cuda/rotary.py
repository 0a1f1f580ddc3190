"""Rotary embeddings and the storing of keys and values in the cache, in one launch.

A program has one head of one token: it normalises and rotates a query, or stores a normalised and
rotated key or a value in its slot, packed as in `ops.kv_rows`. Queries stay in place, unless qkv is
a `PartSums`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.dtypes import KV_SCALE_BYTES
from parallel_llama.ops import kv_rows
from parallel_llama.ops.attention import HeadNorms
from parallel_llama.ops.cuda.e4m3 import to_e4m3
from parallel_llama.ops.cuda.elementwise import normalised
from parallel_llama.ops.cuda.launch import await_inputs, launch, tile
from parallel_llama.ops.cuda.linear import load_row, source_of
from parallel_llama.ops.part_sums import Product

_LEAST_SCALE = tl.constexpr(kv_rows.LEAST_SCALE)


def can_store(head_dim: int, cache_dtype: torch.dtype) -> bool:
    """Whether the kernel can write rows of a cache: their scales must be aligned as float32."""
    return cache_dtype not in kv_rows.LARGEST or head_dim % KV_SCALE_BYTES == 0


def rotate_and_store(
    qkv: Product,
    rotations: Tensor | None,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`TorchOps.rotate_and_store`, rotations in complex64. Source: RoFormer, arXiv 2104.09864."""
    (values, bias, stride, n_parts), (n, n_heads, head_dim) = source_of(qkv), qkv.shape
    n_kv_heads = len(k)
    n_queries = n_heads - 2 * n_kv_heads
    if isinstance(qkv, Tensor):
        q = qkv[:, :n_queries]
    else:
        q = values.new_empty(n, n_queries, head_dim, dtype=qkv.dtype)
    rotates = rotations is not None
    real = q if rotations is None else torch.view_as_real(rotations)  # read only if it rotates
    assert values.stride(-1) == 1 and slots.is_contiguous()
    assert not rotates or real.stride(-2) == 2
    assert k.stride() == v.stride() and k.stride(2) == 1 and can_store(head_dim, k.dtype)
    largest = kv_rows.LARGEST.get(k.dtype, 0.0)
    (k, k_scales), (v, v_scales) = _parts_of(k), _parts_of(v)
    weights = (None, None) if norms is None else (norms.q, norms.k)
    eps, offset = (0.0, 0.0) if norms is None else (norms.eps, norms.offset)
    strides = (stride, values.stride(-2), *q.stride()[:2], real.stride(0), *k.stride()[:2])
    launch(
        _rotate_and_store, (n_heads, n), values, bias, *weights, q, real, slots, k, v,
        k_scales, v_scales, n, n_queries, n_kv_heads, head_dim, eps, *strides, OFFSET=offset,
        ROTATES=rotates, LARGEST=largest, N_PARTS=n_parts, SIZE=tile(head_dim // 2), num_warps=1,
    )  # fmt: skip
    return q


def _parts_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """A cache as the dtype of its stored numbers, and as the dtype of its scales."""
    if cache.dtype not in kv_rows.LARGEST:
        return cache, cache
    return cache.view(torch.uint8), cache.view(torch.float32)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["slots", "rotations"])
def _rotate_and_store(
    qkv, bias, q_weight, k_weight, q, rotations, slots, k, v, k_scales, v_scales,
    n, n_queries, n_kv_heads, head_dim, eps,
    token_stride, head_stride, q_stride, q_head_stride, rotation_stride, kv_stride, slot_stride,
    OFFSET: tl.constexpr, ROTATES: tl.constexpr, LARGEST: tl.constexpr, N_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pairs = tl.arange(0, SIZE)
    numbers = pairs[:, None] * 2 + tl.arange(0, 2)[None, :]  # [pairs, 2]
    is_there = numbers < head_dim
    dtype: tl.constexpr = q.dtype.element_ty
    columns = head * head_stride + numbers
    x = load_row(qkv, bias, token, n, token_stride, columns, is_there, N_PARTS, dtype)
    if q_weight is not None:
        if head < n_queries:
            x = normalised(x, q_weight + numbers, is_there, head_dim, eps, OFFSET, dtype)
        elif head < n_queries + n_kv_heads:
            x = normalised(x, k_weight + numbers, is_there, head_dim, eps, OFFSET, dtype)
    if ROTATES and head < n_queries + n_kv_heads:
        rotation = tl.load(rotations + token * rotation_stride + numbers, is_there, 0)
        x = _rotated(x, rotation)
    x = x.to(dtype)
    if head < n_queries:
        if ROTATES or N_PARTS or q_weight is not None:
            tl.store(q + token * q_stride + head * q_head_stride + numbers, x, is_there)
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
        scale = tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)
        kept = tl.div_rn(wide, tl.zeros_like(wide) + scale)
        tl.store(cache + at + numbers, _byte(kept, LARGEST), is_there)
        tl.store(scales + (at + head_dim) // 4, scale)


@triton.jit
def _byte(x, LARGEST: tl.constexpr):
    """Numbers up to LARGEST as the bytes of int8 or float8_e4m3fn."""
    if LARGEST == 127:
        # Adding and subtracting 1.5 * 2 ** 23 rounds to nearest, ties to even.
        return ((x + 12582912.0) - 12582912.0).to(tl.int32).to(tl.uint8)
    return to_e4m3(x)
