"""Grouped-query attention of this rank's heads over packed sequences.

Each chunk of a sequence attends to its own past in the KV cache and to nothing else, so a request's
result does not depend on the rest of the batch. The runs of the plan say which query heads share
which KV heads.

Source: Llama 2, arXiv 2307.09288; grouped queries, arXiv 2305.13245.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.families.model_args import ModelArgs, kv_groups
from parallel_llama.model.batch import Batch, KVGroupBatch, SinkTile
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.layers import (
    Backend,
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    concat_outputs,
)
from parallel_llama.model.sharded_attention import attend_to_all_parts, merge_lse
from parallel_llama.ops import TorchOps
from parallel_llama.ops.torch_ops import rotate_
from parallel_llama.plan import HeadRun, Shard


class Attention:
    """One attention block: wq, wk, wv by columns, wo by rows.

    `fuse` concatenates wq, wk and wv once they are loaded; a call needs that.

    Shapes: x [T, dim] replicated; the result [T, dim] replicated.
    Collective: the all_reduce of wo; two all_gathers more if the cache is sharded by token.
    """

    def __init__(self, args: ModelArgs, shard: Shard, layer: int, backend: Backend) -> None:
        self.shard, self.comm, self.ops = shard, backend.comm, backend.ops
        # The KV group of the layer, and the layer's number in it.
        self.kv_group, self.layer = next(
            (number, kv_group.layers.index(layer))
            for number, kv_group in enumerate(kv_groups(args))
            if layer in kv_group.layers
        )
        self.head_dim, self.n_local_heads = args.head_dim, shard.n_local_heads
        self.n_local_kv_heads = shard.n_local_kv_heads
        q_rows = range(shard.n_local_heads * args.head_dim)
        kv_rows = range(shard.n_local_kv_heads * args.head_dim)
        self.wq, self.wk, self.wv = (
            ColumnParallelLinear(args.dim, rows, backend, bias=args.attention_bias)
            for rows in (q_rows, kv_rows, kv_rows)
        )
        self.wo = RowParallelLinear(q_rows, args.dim, backend, bias=args.has_wo_bias)
        self.q_norm, self.k_norm = (
            RMSNorm(args.head_dim, args.norm_eps, backend, args.norm_offset)
            if args.qk_norm
            else None
            for _ in range(2)
        )

    def fuse(self) -> None:
        self.wqkv = concat_outputs(self.wq, self.wk, self.wv)

    def __call__(
        self, x: Tensor, batch: Batch, caches: Sequence[KVCache], rows: Tensor | None
    ) -> Tensor:
        return self.wo(self.heads(x, batch, caches, rows))

    def heads(
        self, x: Tensor, batch: Batch, caches: Sequence[KVCache], rows: Tensor | None
    ) -> Tensor:
        """The output of the heads, before wo. Shapes: [T, dim] replicated -> [T, H * D] local."""
        own, cache = batch.kv_groups[self.kv_group], caches[self.kv_group]
        qkv = self.wqkv(x).view(len(x), -1, self.head_dim)  # [T, H + 2 K, D] local
        if self.q_norm is not None and self.k_norm is not None:
            n_rotated = self.n_local_heads + self.n_local_kv_heads
            self.q_norm.in_place(qkv[:, : self.n_local_heads])
            self.k_norm.in_place(qkv[:, self.n_local_heads : n_rotated])
        self.ops.rotate_and_store(qkv, own.rotations, own.slots, *cache.layer(self.layer))
        q = qkv[:, : self.n_local_heads]
        if self.shard.peers:
            o = attend_to_all_parts(q, self.layer, own, self.shard, self.ops, self.comm)
        else:
            o = attend(q, self.layer, own, cache, self.shard.runs, self.ops)  # [T, H * D] local
        return o if rows is None else o[rows]


def attend(
    q: Tensor,
    layer: int,
    batch: KVGroupBatch,
    cache: KVCache,
    runs: Sequence[HeadRun],
    ops: TorchOps,
) -> Tensor:
    """Softmax attention of every query over its own keys.

    Paged queries take one call, all others one call per run of heads: 5 query heads on 2 KV heads
    are two runs, 3 + 2.

    Shapes: q [T, H, D] local; the result [T, H * D] local.
    """
    o = q.new_empty(q.shape)
    k, v = cache.layer(layer)
    for queries in batch.paged:
        ops.paged_attention(q, k, v, queries, cache.heads, o)
    for number, run in enumerate(runs):
        heads = slice(run.heads.start, run.heads.stop)
        own = slice(run.kv_heads.start, run.kv_heads.stop)
        if batch.decode is not None:
            ops.decode_attention(q[:, heads], k[own], v[own], batch.decode, o[:, heads])
        for chunk in batch.chunks:
            ops.chunk_attention(q[:, heads], k[own], v[own], chunk, o[:, heads])
        for far in batch.sink_tiles:
            o[far.window.queries, heads] = _with_sinks(
                q[far.window.queries, heads], far, number, layer, ops
            )
    return o.flatten(1)


def _with_sinks(q: Tensor, tile: SinkTile, number: int, layer: int, ops: TorchOps) -> Tensor:
    """Attention to the window and to the attention sinks. Shapes: q [T, H, D] -> [T, H, D]."""
    turned = q.clone()
    rotate_(turned, tile.back_rotations)
    parts = [
        torch.cat((o, lse[..., None].to(o.dtype)), -1)
        for o, lse in (
            ops.partial_attention(queries, *seen.pasts[number].layer(layer), seen.mask)
            for queries, seen in ((q, tile.window), (turned, tile.sinks))
        )
    ]
    return merge_lse(torch.stack(parts))
