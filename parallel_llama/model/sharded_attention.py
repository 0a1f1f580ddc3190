"""Attention over a KV cache that is sharded by token.

With more ranks than KV heads, several ranks would hold the same keys and values. Instead, each rank
holds all KV heads for some of the tokens. Every rank computes attention of the queries of all ranks
over its own tokens, and the partial results are merged by their log-sum-exps, which is exact:

    softmax([s1, s2]) [v1, v2] = (exp(l1) o1 + exp(l2) o2) / (exp(l1) + exp(l2))

where o is the result over the keys of one rank and l the log-sum-exp of their scores s. With exact
sums, there is a partial result for every 128 consecutive keys instead, and these results are merged
in order of position.

Source: online softmax, arXiv 1805.02867; across devices, Ring Attention, arXiv 2310.01889.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.ops import CPUOps, HeadMap, PartTile, QueryTile, TorchOps
from parallel_llama.ops.torch_ops import merge_lse
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import MAX_GATHERED_ROWS, Shard


def attend_to_all_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[QueryTile],
    heads: HeadMap,
    shard: Shard,
    ops: TorchOps,
    comm: Communicator,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of this rank's queries over the keys of all ranks.

    Shapes: q [T, H, D] local; k, v [K, n_slots, W] local; sinks [H] local, in at least float32; the
        result [T, H, D] local.
    Collective: an all_gather of the queries, and one for each MAX_GATHERED_ROWS rows of the partial
        results.
    """
    q = _gather_queries(q, shard.peers, comm)  # [T, n_heads, D] replicated
    wide = torch.promote_types(q.dtype, torch.float32)  # for the log-sum-exps
    partial = torch.zeros((*q.shape[:2], q.shape[2] + 1), dtype=wide, device=q.device)
    partial[..., -1] = -torch.inf
    for tile in tiles:
        for q_heads, kv_heads in heads.runs:
            o, lse = ops.partial_attention(q[tile.rows, q_heads], k[kv_heads], v[kv_heads], tile)
            partial[tile.rows, q_heads, :-1], partial[tile.rows, q_heads, -1] = o, lse
    # [size, T, H, D + 1] local
    parts = partial.new_empty(len(shard.peers), len(q), shard.n_local_heads, partial.shape[2])
    for first in range(0, len(q), MAX_GATHERED_ROWS):
        rows = slice(first, first + MAX_GATHERED_ROWS)
        gathered = comm.all_gather(partial[rows])  # [size, t, n_heads, D + 1] replicated
        parts[:, rows] = gathered[:, :, shard.heads.start : shard.heads.stop]
    if sinks is not None:  # a part with a value vector of zeros
        sink_part = torch.zeros_like(parts[:1])
        sink_part[..., -1] = sinks
        parts = torch.cat((parts, sink_part))
    return merge_lse(parts).to(q.dtype)


def attend_in_order(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[PartTile],
    heads: HeadMap,
    shard: Shard,
    ops: CPUOps,
    comm: Communicator,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend_to_all_parts` with the bits of attention on one rank.

    Ranks exchange a result for every 128 keys of a query, and merge these results by position.

    Shapes: as in `attend_to_all_parts`.
    Collective: an all_gather of the queries, and one for each tile.
    """
    all_q = _gather_queries(q, shard.peers, comm)  # [T, n_heads, D] replicated
    out, head_dim = q.new_empty(q.shape), q.shape[2]
    local_heads = slice(shard.heads.start, shard.heads.stop)
    for tile in tiles:
        partial = torch.cat(ops.part_attention(all_q, k, v, tile, heads), -1)
        # [size * max_parts, H, D + 2] local
        parts = comm.all_gather(partial).flatten(0, 1)[:, local_heads]
        results, partials = parts[..., :head_dim], parts[..., head_dim:]
        out[tile.rows] = ops.merge_parts(results, partials, tile, sinks)
    return out


def _gather_queries(q: Tensor, peers: Sequence[range], comm: Communicator) -> Tensor:
    """The queries of all ranks, by head. Shapes: [T, H, D] local -> [T, n_heads, D] replicated.

    Collective: one all_gather.
    """
    max_heads = max(map(len, peers))
    padded = q.new_zeros(len(q), max_heads, q.shape[2])  # padded for ranks with fewer heads
    padded[:, : q.shape[1]] = q
    gathered = comm.all_gather(padded)
    return torch.cat(
        [part[:, : len(heads)] for part, heads in zip(gathered, peers, strict=True)], 1
    )
