"""The paged KV cache: keys and values of this rank's KV heads, in blocks.

A slot holds one token, a block is `block_size` consecutive slots, and a sequence's block table
lists its blocks in order. Layers that attend to the same keys form a KV group, with a cache and
block tables of its own. This module holds the tensors; the scheduler allocates the blocks,
identically on every rank.
"""

from collections.abc import Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from parallel_llama.dtypes import KVFormat
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.ops import HeadMap
from parallel_llama.ops.formats import kv_dtype
from parallel_llama.plan import Shard


class Blocks(Protocol):
    """A block table: maps a block's number in the sequence to its number in the cache."""

    @overload
    def __getitem__(self, number: int, /) -> int: ...

    @overload
    def __getitem__(self, number: slice, /) -> Sequence[int]: ...


class KVCache:
    """Keys and values of the layers of one KV group.

    Args:
        n_layers: The number of layers of the group on this rank; they are numbered from 0 here.
        block_size: Slots per block.

    Shapes: `k` and `v` are [n_layers, K, n_blocks * block_size, W] local, rows as in `ops.kv_rows`;
    keys are rotated and in the interleaved order of `rope`.
    """

    def __init__(
        self,
        args: ModelArgs,
        shard: Shard,
        n_layers: int,
        n_blocks: int,
        block_size: int,
        *,
        form: KVFormat,
        device: torch.device,
    ) -> None:
        self.n_blocks, self.block_size, self.n_slots = n_blocks, block_size, n_blocks * block_size
        self.heads = HeadMap.of(shard.runs, device)
        n_kv = shard.n_local_kv_heads
        dtype = kv_dtype(form)
        width = form.n_bytes(args.head_dim) // dtype.itemsize
        shape = (n_layers, 2, n_kv, n_blocks * block_size, width)
        self._kv = torch.empty(shape, dtype=dtype, device=device)
        self.k, self.v = self._kv.unbind(1)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer in all slots. Shapes: each [K, n_slots, W] local."""
        return self.k[layer], self.v[layer]

    def as_bytes(self) -> Tensor:
        """All keys and values. Shapes: [n_layers * 2 * K, n_slots, bytes of a row] uint8."""
        return self._kv.view(torch.uint8).flatten(0, 2)
