"""Grouped-query attention of this rank's heads over packed sequences.

A batch holds pieces of sequences end to end, [T, ...] without padding. Each piece attends to its
own span of the KV cache and to nothing else, so a request's result does not depend on its
neighbours. It does not know which heads are whose: the plan's runs say which query heads share
which KV heads.

Source: Llama 2, arXiv 2307.09288; grouped queries, arXiv 2305.13245.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_llama.cache import KVCache
from parallel_llama.config import ModelArgs
from parallel_llama.layers import ColumnParallelLinear, RowParallelLinear, end_to_end
from parallel_llama.parallel import Communicator
from parallel_llama.plan import Run, Share
from parallel_llama.rope import apply_rotary


@dataclass(frozen=True)
class Window:
    """What the queries of one piece see: its rows of the batch, and its slots of the cache.

    Shapes: `queries` is a slice of the batch's T tokens; `keys` a slice of cache slots, from the
    sequence's first token to the piece's last; `mask` is [len(queries), len(keys)] bool, True
    where a query may look, or None where the causal mask is whole (a prompt from its start) or
    hides nothing (one token).
    """

    queries: slice
    keys: slice
    mask: Tensor | None


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass, sequences end to end.

    Shapes: tokens [T] int64, slots [T] int64, rotary [2, T, 1, head_dim]; all replicated.
    """

    tokens: Tensor
    slots: Tensor
    rotary: Tensor
    windows: tuple[Window, ...]


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
        self.n_turned = share.n_local_heads + share.n_local_kv_heads

    def pack(self) -> None:
        self.wqkv = end_to_end(self.wq, self.wk, self.wv)

    def forward(self, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim))  # [T, H + 2 K, D] local
        qk = apply_rotary(qkv[:, : self.n_turned], batch.rotary)
        q, k = qk[:, : self.n_local_heads], qk[:, self.n_local_heads :]  # [T, H, D], [T, K, D]
        v = qkv[:, self.n_turned :]  # [T, K, D] local
        cache.write(self.layer, batch.slots, k, v)
        o = attend(q, cache.k[self.layer], cache.v[self.layer], batch.windows, self.runs)
        return self.wo(o.flatten(1))  # type: ignore[no-any-return]


def attend(
    q: Tensor, k: Tensor, v: Tensor, windows: Sequence[Window], runs: Sequence[Run]
) -> Tensor:
    """Softmax attention of every piece over its own keys, one call per run of equal groups.

    torch's grouped attention wants the same number of query heads on every KV head; a rank with 5
    query heads over 2 KV heads is two runs, 3 + 2. No key or value is repeated or copied.

    Shapes: q [T, H, D] local; k, v [K, n_slots, D] local; the result [T, H, D] local.
    """
    pieces = []
    for window in windows:
        q_piece = q[window.queries].transpose(0, 1)  # [H, T of the piece, D]
        k_piece, v_piece = k[:, window.keys], v[:, window.keys]  # [K, S, D]
        whole = window.mask is None and q_piece.shape[1] > 1
        o = [
            F.scaled_dot_product_attention(
                q_piece[None, run.heads.start : run.heads.stop],
                k_piece[None, run.kv_heads.start : run.kv_heads.stop],
                v_piece[None, run.kv_heads.start : run.kv_heads.stop],
                attn_mask=window.mask,
                is_causal=whole,
                enable_gqa=True,
            )[0]
            for run in runs
        ]
        pieces.append((o[0] if len(o) == 1 else torch.cat(o)).transpose(0, 1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
