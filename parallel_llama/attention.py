"""Grouped-query attention of this rank's heads over packed sequences.

A batch holds pieces of sequences end to end, [T, ...] without padding. Each piece attends to its
own past in the KV cache and to nothing else, so a request's result does not depend on its
neighbours. It does not know which heads are whose: the plan's runs say which query heads share
which KV heads.

Source: Llama 2, arXiv 2307.09288; grouped queries, arXiv 2305.13245.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_llama.cache import KVCache, Past
from parallel_llama.config import ModelArgs
from parallel_llama.kernels import SingleQueries, computes, make_attention, make_rotary
from parallel_llama.layers import ColumnParallelLinear, RowParallelLinear, end_to_end
from parallel_llama.parallel import Communicator
from parallel_llama.plan import Run, Share
from parallel_llama.rope import interleaved, rotate_


@dataclass(frozen=True)
class Window:
    """What consecutive queries of one sequence see: their rows of the batch, and their past.

    Shapes: `queries` is a slice of the batch's T tokens; `pasts`, one per run of heads, hold the
    sequence from its first token to the last query's; `mask` is [len(queries), S], 0 where a query
    may look and -inf elsewhere, or None where the causal mask is whole (a prompt from its start) or
    hides nothing (one token).
    """

    queries: slice
    pasts: tuple[Past, ...]
    mask: Tensor | None


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass, sequences end to end.

    Each token is in one of the `windows`, or is one of the `singles`: what it sees is there.

    Shapes: tokens [T] int64, slots [T] int64, rotations [T, 1, head_dim / 2] complex, rows [n]
    int64 (those whose result is wanted, None for all); all replicated.
    """

    tokens: Tensor
    slots: Tensor
    rotations: Tensor
    windows: tuple[Window, ...]
    singles: SingleQueries | None
    rows: Tensor | None


class Attention(nn.Module):
    """One attention block: wq, wk, wv by columns, wo by rows.

    `pack` lays wq, wk and wv end to end once they are filled; `forward` needs it done.

    Shapes: x [T, dim] replicated; the result [T, dim] replicated.
    Collective: the all_reduce of wo.
    """

    def __init__(
        self,
        args: ModelArgs,
        share: Share,
        layer: int,
        comm: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layer, self.runs = layer, share.runs
        self.head_dim, self.n_local_heads = args.head_dim, share.n_local_heads
        q_rows = range(share.n_local_heads * args.head_dim)
        kv_rows = range(share.n_local_kv_heads * args.head_dim)
        bias = args.attention_bias
        self.wq = ColumnParallelLinear(args.dim, q_rows, bias=bias, dtype=dtype, device=device)
        self.wk = ColumnParallelLinear(args.dim, kv_rows, bias=bias, dtype=dtype, device=device)
        self.wv = ColumnParallelLinear(args.dim, kv_rows, bias=bias, dtype=dtype, device=device)
        self.wo = RowParallelLinear(q_rows, args.dim, comm, bias=bias, dtype=dtype, device=device)

    def pack(self) -> None:
        for layer in (self.wq, self.wk):
            for name, value in layer.named_parameters():
                value = nn.Parameter(interleaved(value, self.head_dim), requires_grad=False)
                setattr(layer, name, value)
        self.wqkv = end_to_end(self.wq, self.wk, self.wv)

    def forward(self, x: Tensor, batch: Batch, cache: KVCache, rows: Tensor | None) -> Tensor:
        qkv = self.wqkv(x).view(len(x), -1, self.head_dim)  # [T, H + 2 K, D] local
        rotate_and_store(qkv, self.layer, batch, cache)
        o = attend(qkv[:, : self.n_local_heads], self.layer, batch, cache, self.runs)  # [T, H * D]
        return self.wo(o if rows is None else o[rows])  # type: ignore[no-any-return]


def rotate_and_store(qkv: Tensor, layer: int, batch: Batch, cache: KVCache) -> None:
    """Rotate the queries in place, and put rotated keys, and values, in their slots of the cache.

    Shapes: qkv [T, H + 2 K, D] local.
    """
    n_kv_heads = cache.k.shape[1]
    n_rotated = qkv.shape[1] - n_kv_heads
    if n_rotated and computes(qkv.dtype, qkv.device):
        store = make_rotary(qkv.dtype, qkv.shape[2])
        store(qkv, batch.rotations, batch.slots, *cache.layer(layer, range(n_kv_heads)))
        return
    rotate_(qkv[:, :n_rotated], batch.rotations)
    cache.write(layer, batch.slots, qkv[:, n_rotated - n_kv_heads :])


def attend(q: Tensor, layer: int, batch: Batch, cache: KVCache, runs: Sequence[Run]) -> Tensor:
    """Softmax attention of every query over its own keys, run by run of equal groups.

    A rank with 5 query heads over 2 KV heads is two runs, 3 + 2.

    Shapes: q [T, H, D] local; the result [T, H * D] local.
    """
    o = q.new_empty(q.shape)
    for number, run in enumerate(runs):
        heads = slice(run.heads.start, run.heads.stop)
        if batch.singles is not None:
            kernel = make_attention(q.dtype, q.shape[2], len(run.heads) // len(run.kv_heads))
            kernel(q[:, heads], *cache.layer(layer, run.kv_heads), batch.singles, o[:, heads])
        for window in batch.windows:
            k, v = window.pasts[number].layer(layer)
            o[window.queries, heads] = _grouped(q[window.queries, heads], k, v, window.mask)
    return o.flatten(1)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of equal groups of query heads.

    Shapes: q [T, K * G, D]; k, v [1, K, S, D]; the result [T, K * G, D].

    No key or value is repeated, as torch's own grouped attention does on the CPU.
    """
    n_rows, n_kv_heads = len(q), k.shape[1]
    if n_rows == 1:
        # The heads of a group are the rows of one call, so each key is read once.
        o = F.scaled_dot_product_attention(q.view(1, n_kv_heads, -1, q.shape[2]), k, v)
        return o.flatten(1, 2)
    q = q.view(n_rows, n_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # [K, G, T, D]
    n_group = q.shape[1]
    o = F.scaled_dot_product_attention(
        q,
        k.transpose(0, 1).expand(-1, n_group, -1, -1),
        v.transpose(0, 1).expand(-1, n_group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return o.permute(2, 0, 1, 3).flatten(1, 2)
