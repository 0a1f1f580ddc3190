"""Grouped-query attention of this rank's heads over packed sequences.

A chunk of a sequence attends to the keys of its own sequence only, so a request's result does not
depend on the rest of the batch.

Source: Llama 2, arXiv 2307.09288; grouped queries, arXiv 2305.13245.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.families.model_args import ModelArgs, kv_groups
from parallel_llama.model.batch import Batch
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.model.layers import (
    Backend,
    ColumnParallelLinear,
    HeadLayerNorm,
    RMSNorm,
    RowCut,
    RowParallelLinear,
    concat_outputs,
)
from parallel_llama.model.sharded_attention import attend_in_order, attend_to_all_parts
from parallel_llama.ops import CPUOps, HeadNorms
from parallel_llama.ops.part_sums import Product
from parallel_llama.plan import Shard, counted_kv_heads

_HeadNorm = RMSNorm | HeadLayerNorm


class Attention:
    """The attention of one layer: wq, wk, wv by columns, wo by rows.

    `fuse` concatenates the loaded wq, wk and wv; it must run before a call.

    Shapes: x [T, dim] replicated; the result [T, dim] replicated, or [n, dim] with `rows`.
    Collective: as wo; with `qk_norm_across_heads` one all_reduce before it. If the cache is sharded
        by token, also two all_gathers; with exact sums instead an all_gather of the queries, and
        one for each tile.
    """

    def __init__(self, args: ModelArgs, shard: Shard, layer: int, backend: Backend) -> None:
        self.shard, self.comm, self.ops = shard, backend.comm, backend.ops
        # The KV group of the layer, and the layer's index in this rank's cache of the group.
        self.kv_group, self.layer = next(
            (number, shard.layers_of(kv_group).index(layer))
            for number, kv_group in enumerate(kv_groups(args))
            if layer in kv_group.layers
        )
        self.is_rotated = layer not in args.unrotated_layers
        self.unit_eps = args.norm_eps if args.qk_unit_norm and self.is_rotated else None
        self.scales_queries = args.scales_all_queries or not self.is_rotated
        self.head_dim, self.n_local_heads = args.head_dim, shard.n_local_heads
        self.n_local_kv_heads = shard.n_local_kv_heads
        q_rows = range(shard.n_local_heads * args.head_dim)
        kv_rows = range(shard.n_local_kv_heads * args.head_dim)
        self.wq, self.wk, self.wv = (
            ColumnParallelLinear(args.dim, rows, backend, bias=args.attention_bias)
            for rows in (q_rows, kv_rows, kv_rows)
        )
        self.wo = RowParallelLinear(
            RowCut.of_heads(shard, args.head_dim), args.dim, backend, bias=args.has_wo_bias
        )
        self.sinks = (
            backend.empty_weight(shard.n_local_heads, dtype=backend.wide_dtype)
            if args.sink_logits
            else None
        )
        self.n_heads, self.n_kv_heads = args.n_heads, args.n_kv_heads
        self.is_normed_across_heads = args.qk_norm_across_heads
        self.wide_dtype = backend.wide_dtype
        self.q_norm, self.k_norm = (
            _head_norm(args, len(rows), backend) if args.qk_norm else None
            for rows in (q_rows, kv_rows)
        )

    def fuse(self) -> None:
        self.wqkv = concat_outputs(self.wq, self.wk, self.wv)

    def __call__(
        self, x: Tensor, batch: Batch, caches: Sequence[KVCache], rows: Tensor | None
    ) -> Product:
        adapters = batch.adapters if rows is None else batch.adapters_of_rows
        return self.wo.product(self.heads(x, batch, caches, rows), adapters)

    def heads(
        self, x: Tensor, batch: Batch, caches: Sequence[KVCache], rows: Tensor | None
    ) -> Tensor:
        """The output of the heads, before wo; with `rows`, of these rows only.

        Shapes: [T, dim] replicated -> [T, H * D] local, or with `rows` [n, H * D] local.
        """
        group, cache = batch.kv_groups[self.kv_group], caches[self.kv_group]
        # [T, H + 2 K, D] local
        qkv = self.wqkv.product(x, batch.adapters).view(len(x), -1, self.head_dim)
        n_qk_heads = self.n_local_heads + self.n_local_kv_heads
        norms = self._head_norms()
        if norms is None and self.q_norm is not None and self.k_norm is not None:
            qkv = self.ops.whole(qkv)
            q = qkv[:, : self.n_local_heads]  # [T, H, D] local
            k = qkv[:, self.n_local_heads : n_qk_heads]  # [T, K, D] local
            if isinstance(self.q_norm, HeadLayerNorm) and isinstance(self.k_norm, HeadLayerNorm):
                self.q_norm.in_place(q)
                self.k_norm.in_place(k)
            else:
                self._norm_across_heads(q, self.q_norm, k, self.k_norm)
        if self.unit_eps is not None:
            # Before rotation, which does not change the norm.
            qkv = self.ops.whole(qkv)
            self.ops.unit_norm_(qkv[:, :n_qk_heads], self.unit_eps)
        k, v = cache.layer(self.layer)  # each [K, n_slots, W] local
        rotations = group.rotations if self.is_rotated else None
        # [T, H, D] local
        q = self.ops.rotate_and_store(qkv, rotations, group.slots, k, v, norms)
        if self.scales_queries and batch.query_scales is not None:
            self.ops.scale_rows_(q, batch.query_scales)
        sinks = None if self.sinks is None else self.sinks.values  # [H] local
        if group.part_tiles:
            assert isinstance(self.ops, CPUOps)
            o = attend_in_order(
                q, k, v, group.part_tiles, cache.heads, self.shard, self.ops, self.comm, sinks
            )
        elif self.shard.peers:
            o = attend_to_all_parts(
                q, k, v, group.tiles, cache.heads, self.shard, self.ops, self.comm, sinks
            )
        else:
            o = q.new_empty(q.shape)  # [T, H, D] local
            if group.plan is not None:
                self.ops.attention(q, k, v, group.plan, cache.heads, o, sinks)
            for tile in group.sink_tiles:
                rotated = _rotated(q[tile.plan.rows], tile.back_rotations)
                self.ops.sink_attention(q, rotated, k, v, tile.plan, cache.heads, o)
        o = o.flatten(1)  # [T, H * D] local
        return o if rows is None else o[rows]

    def _head_norms(self) -> HeadNorms | None:
        """The RMSNorms of single heads, if the model has them."""
        q, k = self.q_norm, self.k_norm
        if self.is_normed_across_heads or not (isinstance(q, RMSNorm) and isinstance(k, RMSNorm)):
            return None
        return HeadNorms(q.weight.values, k.weight.values, q.eps, q.offset)

    def _norm_across_heads(
        self, q: Tensor, q_norm: _HeadNorm, k: Tensor, k_norm: _HeadNorm
    ) -> None:
        """Normalises the queries, and separately the keys, over the heads of all ranks, in place.

        The result does not depend on the number of ranks: exactly one rank computes the sum of
        squares of each head, and every rank adds the sums of all heads in the same order.

        Shapes: q [T, H, D] local; k [T, K, D] local.
        Collective: one all_reduce of [T, n_heads + n_kv_heads].
        """
        heads, kv_heads = self.shard.heads, self.shard.kv_heads
        n_heads, n_all = self.n_heads, self.n_heads + self.n_kv_heads
        squares = q.new_empty((len(q), n_all), dtype=self.wide_dtype)  # partial after the two calls
        self.ops.head_squares_(q, squares, range(n_heads), heads.start)
        # A KV head that several ranks hold is counted by one of these ranks.
        counted = counted_kv_heads(heads, n_heads // self.n_kv_heads)
        k_counted = k[:, counted.start - kv_heads.start : counted.stop - kv_heads.start]
        self.ops.head_squares_(k_counted, squares, range(n_heads, n_all), n_heads + counted.start)
        squares = self.ops.all_reduce(squares, self.comm)  # [T, n_heads + n_kv_heads] replicated
        for x, columns, norm in ((q, range(n_heads), q_norm), (k, range(n_heads, n_all), k_norm)):
            self.ops.norm_heads_(x, squares, columns, norm.weight.values, norm.eps)


def _head_norm(args: ModelArgs, size: int, backend: Backend) -> _HeadNorm:
    """A new norm of queries or keys; all heads of this rank together have `size` values."""
    if args.qk_layer_norm:
        return HeadLayerNorm(size, args.norm_eps, backend)
    n_weights = size if args.qk_norm_across_heads else args.head_dim
    return RMSNorm(n_weights, args.norm_eps, backend, args.norm_offset)


def _rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotates the rows of x, each with the same bits whatever the number of rows and heads.

    The complex products are computed from real tensors, because torch may round those of complex
    tensors differently in a vector loop and in its scalar tail.

    Shapes: x [T, H, D], heads in interleaved order; rotations [T, 1, D / 2] complex.
    """
    pairs = x.to(rotations.dtype.to_real()).view(*x.shape[:-1], -1, 2)
    (a, b), (cos, sin) = pairs.unbind(-1), torch.view_as_real(rotations).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
