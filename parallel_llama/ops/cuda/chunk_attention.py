"""Prefill attention: consecutive queries of a sequence over keys in blocks.

A row is a pair of a query and one of the query heads of a KV head. Rows are ordered by query, so
that uneven head counts waste no row. A program takes a tile of rows and iterates over the keys that
its queries attend to.

Source: FlashAttention 2, arXiv 2307.08691; grouped queries, arXiv 2305.13245.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_llama.ops.attention import NO_WINDOW, HeadMap, PagedQueries, Scores
from parallel_llama.ops.cuda.kv_rows import as_stored, read, slots_of
from parallel_llama.ops.cuda.launch import await_inputs, launch, tile
from parallel_llama.ops.cuda.softmax import add_keys, factors, nothing, results


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: PagedQueries,
    heads: HeadMap,
    out: Tensor,
    scores: Scores,
    sinks: Tensor | None = None,
) -> None:
    """`TorchOps.attention` for ranges of any length.

    Shapes: q, out [T, H, D], contiguous in [H, D]; k, v [K, n_slots, W]; sinks [H].
    """
    assert (sinks is not None) == scores.has_sinks
    head_dim, size = q.shape[2], tile(max(q.shape[2], 16))
    assert q.stride()[1:] == out.stride()[1:] == (head_dim, 1)
    k, v = as_stored(k), as_stored(v)
    rows, n_keys = _tile(size, q.element_size(), k.dtype != q.dtype)
    n_tiles = -(-queries.max_queries * heads.max_heads_per_kv // rows)
    factor, cap = factors(scores, head_dim)
    launch(
        _attention, (len(queries.rows), len(k), n_tiles),
        q, k, v, out, q if sinks is None else sinks, queries.rows, queries.blocks, heads.bounds,
        q.stride(0), k.stride(0), v.stride(0), out.stride(0),
        queries.window or NO_WINDOW, factor, cap,
        CAPPED=scores.soft_cap is not None, HAS_SINKS=scores.has_sinks,
        BLOCK=queries.block_size, ROWS=rows, TILE=n_keys,
        HEAD_DIM=head_dim, SIZE=size, num_warps=8, num_stages=3,
    )  # fmt: skip


def _tile(size: int, itemsize: int, is_packed: bool) -> tuple[int, int]:
    """Rows and keys per tile, as many as fit into registers."""
    if itemsize == 4:
        return 32, 32 if size <= 128 else 16
    if size <= 128:
        return (64, 32) if is_packed else (128, 64)
    return (32, 32) if is_packed else (64, 32)


# `rows` and `blocks` start anywhere in a buffer; alignment must not cause recompilation.
@triton.jit(do_not_specialize_on_alignment=["rows", "blocks"])
def _attention(
    q, k, v, out, sinks, rows, blocks, bounds,
    q_stride, k_stride, v_stride, out_stride, window, factor, cap,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    own, kv_head = rows + tl.program_id(0) * 5, tl.program_id(1).to(tl.int64)
    n_queries, start, first_key = tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
    row, blocks = tl.load(own).to(tl.int64), blocks + tl.load(own + 4)
    first_head = tl.load(bounds + kv_head)
    n_heads = tl.load(bounds + kv_head + 1) - first_head
    # The last tiles first, since they have the most keys.
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS
    if first >= n_queries * n_heads:
        return
    pairs = first + tl.arange(0, ROWS)
    query, heads = pairs // n_heads, first_head + pairs % n_heads
    columns = tl.arange(0, SIZE)
    is_own = (query < n_queries)[:, None] & (columns < HEAD_DIM)[None, :]
    q += (row + query)[:, None] * q_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    own_q = tl.load(q, is_own, 0)
    k, v = k + kv_head * k_stride, v + kv_head * v_stride
    top, total, sums = nothing(ROWS, SIZE)
    positions = start + query
    oldest = positions - window  # the last key outside of the window
    begin = tl.maximum(start + first // n_heads - window + 1, first_key)
    end = start + tl.minimum((first + ROWS - 1) // n_heads + 1, n_queries)
    for base in range(begin, end, TILE):
        keys = base + tl.arange(0, TILE)
        is_there = keys < end
        is_visible = (keys[None, :] > oldest[:, None]) & (keys[None, :] <= positions[:, None])
        slots = slots_of(blocks, keys - first_key, is_there, BLOCK)
        own_k = read(k, slots, is_there, q.dtype.element_ty, HEAD_DIM, SIZE)
        own_v = read(v, slots, is_there, q.dtype.element_ty, HEAD_DIM, SIZE)
        top, total, sums = add_keys(
            top, total, sums, own_q, own_k, own_v, is_visible, factor, cap, CAPPED
        )
    out += (row + query)[:, None] * out_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    result = results(top, total, sums, sinks, heads, query < n_queries, HAS_SINKS)
    tl.store(out, result.to(out.dtype.element_ty), is_own)
