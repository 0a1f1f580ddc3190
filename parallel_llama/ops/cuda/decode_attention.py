"""Decode attention: single queries over keys in blocks.

The keys of a query are cut into splits. The length of a split depends only on the model and on how
many keys the query has. Each program handles some splits for the query heads of a KV head, or for a
tile of these heads if there are many. The partial results are merged split by split, so a result
depends neither on the batch nor on the number of programs.

Source: FlashDecoding, https://pytorch.org/blog/flash-decoding; grouped queries, arXiv 2305.13245.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.attention import NO_WINDOW, HeadMap, PagedQueries, Scores
from parallel_llama.ops.cuda.kv_rows import as_stored, read, slots_of
from parallel_llama.ops.cuda.launch import await_inputs, launch, tile, warps
from parallel_llama.ops.cuda.softmax import add_keys, factors, merge_states, nothing, results

_PROGRAMS = 2048  # enough for any GPU; programs without work cost time as well
_ROOM_BYTES = 1 << 26  # the limit for partial results
_TILE_BYTES = 1 << 14  # of a tile of keys
_SUM_BYTES = 1 << 14  # of a tile of queries, limited by registers
_MAX_SPLITS = tl.constexpr(64)  # per query
_AT_ONCE = tl.constexpr(8)  # splits that are loaded together
# Numbers per split in addition to its sums: the largest score, the total, padding for alignment.
_BESIDE = tl.constexpr(4)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: PagedQueries,
    heads: HeadMap,
    out: Tensor,
    scores: Scores,
    n_programs: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """`TorchOps.attention` for ranges of at most one query.

    `n_programs` programs divide the splits of a query; by default enough programs to fill a GPU.

    Shapes: q, out [T, H, D], contiguous in [H, D]; k, v [K, n_slots, W]; sinks [H].
    """
    assert (sinks is not None) == scores.has_sinks
    own_sinks = q if sinks is None else sinks
    (_, n_heads, head_dim), n = q.shape, len(queries.rows)
    assert q.stride()[1:] == out.stride()[1:] == (head_dim, 1)
    k, v = as_stored(k), as_stored(v)
    is_packed = k.dtype != q.dtype
    group, n_keys, size = _tile(heads.max_heads_per_kv, head_dim, q.element_size(), is_packed)
    n_parts = -(-heads.max_heads_per_kv // group)
    room = (n, n_heads, _MAX_SPLITS.value, size + _BESIDE.value)
    if n_programs is None:
        n_programs = _programs(n * len(k) * n_parts, 4 * math.prod(room))
    found = q.new_empty(room if n_programs > 1 else (0,), dtype=torch.float32)
    factor, cap = factors(scores, head_dim)
    window = queries.window or NO_WINDOW
    splits = {"TILE": n_keys, "MIN_SPLIT": max(8 * group, 128)}
    numbers = {"HEAD_DIM": head_dim, "SIZE": size}
    is_wide = group * size * q.element_size() > _SUM_BYTES // 2 or is_packed
    launch(
        _decode, (n, len(k) * n_parts, n_programs),
        q, k, v, out, own_sinks, found, queries.rows, queries.blocks, heads.bounds,
        q.stride(0), k.stride(0), v.stride(0), out.stride(0),
        n_heads, n_parts, window, factor, cap,
        **splits, **numbers, GROUP=group, BLOCK=queries.block_size,
        CAPPED=scores.soft_cap is not None, HAS_SINKS=scores.has_sinks,
        num_warps=8 if is_wide else 4, num_stages=2 if is_packed else 3,
    )  # fmt: skip
    if n_programs > 1:
        launch(
            _combine, (n, n_heads),
            found, out, own_sinks, queries.rows, out.stride(0), n_heads, window,
            **splits, **numbers, HAS_SINKS=scores.has_sinks, num_warps=warps(size),
        )  # fmt: skip


def _tile(widest: int, head_dim: int, itemsize: int, is_packed: bool) -> tuple[int, int, int]:
    """Heads, keys and numbers per tile, as many as fit into registers.

    They depend only on the model, since they determine the order of sums.
    """
    size = tile(max(head_dim, 16))
    group = min(tile(max(widest, 16)), max(_SUM_BYTES // (size * itemsize), 16))
    n_keys = _TILE_BYTES // (size * itemsize * (2 if is_packed else 1))
    return group, max(min(n_keys, _SUM_BYTES // (2 * group * itemsize), 128), 16), size


def _programs(n_pairs: int, n_bytes: int) -> int:
    """Programs per pair of a query and a tile of the query heads of a KV head.

    With few pairs, enough to fill a GPU. With so many pairs that partial results would take too
    much memory, one program, which needs neither partial results nor a merge.
    """
    if n_bytes > _ROOM_BYTES:
        return 1
    most: int = _MAX_SPLITS.value
    return min(max(_PROGRAMS // max(n_pairs, 1), 1), most)


@triton.jit
def _seen(rows, at, window, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """The index of a range's first key in its blocks, its number of keys, and a split's length."""
    own = rows + at * 5
    position, first_key = tl.load(own + 2), tl.load(own + 3)
    first = tl.maximum(first_key, position - window + 1)
    n_keys = (position + 1 - first) * tl.load(own + 1)
    length = tl.maximum(tl.cdiv(n_keys, _MAX_SPLITS * TILE) * TILE, MIN_SPLIT)
    return first - first_key, n_keys, length


# `rows` and `blocks` start anywhere in a buffer; alignment must not cause recompilation.
@triton.jit(do_not_specialize_on_alignment=["rows", "blocks"])
def _decode(
    q, k, v, out, sinks, found, rows, blocks, bounds,
    q_stride, k_stride, v_stride, out_stride, n_heads, n_parts, window, factor, cap,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    at, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64) // n_parts
    first, n_keys, length = _seen(rows, at, window, TILE, MIN_SPLIT)
    if tl.program_id(2) * length >= n_keys:
        return
    row, blocks = tl.load(rows + at * 5).to(tl.int64), blocks + tl.load(rows + at * 5 + 4)
    part = tl.program_id(1) % n_parts * GROUP  # the first of this program's query heads
    heads = tl.load(bounds + kv_head) + part + tl.arange(0, GROUP)
    columns = tl.arange(0, SIZE)
    is_head = heads < tl.load(bounds + kv_head + 1)
    is_own = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + columns[None, :]
    own_q = tl.load(q + row * q_stride + places, is_own, 0)
    k, v = k + kv_head * k_stride, v + kv_head * v_stride
    found += (at.to(tl.int64) * n_heads + heads) * (_MAX_SPLITS * (SIZE + _BESIDE))
    # The same code for any number of programs, so that rounding is equal.
    is_alone = tl.num_programs(2) == 1
    top, total, sums = nothing(GROUP, SIZE)
    for start in range(tl.program_id(2) * length, n_keys, tl.num_programs(2) * length):
        stop = tl.minimum(start + length, n_keys)
        own_top, own_total, own_sums = nothing(GROUP, SIZE)
        for base in range(start, stop, TILE):
            keys = base + tl.arange(0, TILE)
            is_there = keys < stop
            slots = slots_of(blocks, first + keys, is_there, BLOCK)
            own_k = read(k, slots, is_there, q.dtype.element_ty, HEAD_DIM, SIZE)
            own_v = read(v, slots, is_there, q.dtype.element_ty, HEAD_DIM, SIZE)
            own_top, own_total, own_sums = add_keys(
                own_top, own_total, own_sums, own_q, own_k, own_v, is_there[None, :],
                factor, cap, CAPPED,
            )  # fmt: skip
        if is_alone:
            top, total, sums = merge_states(top, total, sums, own_top, own_total, own_sums)
        else:
            split = found + start // length * (SIZE + _BESIDE)
            tl.store(split[:, None] + columns[None, :], own_sums, is_own)
            tl.store(split + SIZE, own_top, is_head)
            tl.store(split + SIZE + 1, own_total, is_head)
    if is_alone:
        result = results(top, total, sums, sinks, heads, is_head, HAS_SINKS)
        tl.store(out + row * out_stride + places, result.to(out.dtype.element_ty), is_own)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _combine(
    found, out, sinks, rows, out_stride, n_heads, window,
    TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    await_inputs()
    at, head = tl.program_id(0), tl.program_id(1)
    _, n_keys, length = _seen(rows, at, window, TILE, MIN_SPLIT)
    if n_keys == 0:
        return
    columns = tl.arange(0, SIZE)
    found += (at.to(tl.int64) * n_heads + head) * (_MAX_SPLITS * (SIZE + _BESIDE))
    n_splits = tl.cdiv(n_keys, length)
    top, total, sums = -float("inf"), 0.0, tl.zeros([SIZE], tl.float32)
    for base in range(0, n_splits, _AT_ONCE):
        for each in tl.static_range(_AT_ONCE):
            is_there = base + each < n_splits
            split = found + (base + each) * (SIZE + _BESIDE)
            n_columns = tl.where(is_there, HEAD_DIM, 0)
            own_sums = tl.load(split + columns, columns < n_columns, 0)
            own_top = tl.load(split + SIZE, is_there, -float("inf"))
            own_total = tl.load(split + SIZE + 1, is_there, 0)
            top, total, sums = merge_states(top, total, sums, own_top, own_total, own_sums)
    row = tl.load(rows + at * 5).to(tl.int64)
    result = results(top, total, sums, sinks, head, True, HAS_SINKS).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + head * HEAD_DIM + columns, result, columns < HEAD_DIM)
