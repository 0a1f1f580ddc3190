"""The paged KV cache: keys and values of this rank's KV heads, in blocks.

A slot holds one token, a block is `block_size` consecutive slots, and a sequence's block table
lists its blocks in order. Layers that attend to the same keys form a KV group, with a cache and
block tables of its own. This module holds the tensors; the scheduler allocates the blocks, alike on
every rank.
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
        args: The model.
        shard: The shard of this rank.
        n_layers: The number of layers of the group; the first is layer 0.
        n_blocks: The number of blocks.
        block_size: Slots per block.
        form: The format of keys and values.
        device: The device of the cache.

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

    def past(self, kv_heads: range, slots: Sequence[slice]) -> "Past":
        """Keys and values of some heads in some slots, S in all; K = len(kv_heads)."""
        return Past(self._kv[:, :, kv_heads.start : kv_heads.stop], slots)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer in all slots. Shapes: each [K, n_slots, W] local."""
        return self.k[layer], self.v[layer]


class Past:
    """Keys and values of some heads of one sequence, in all layers, as views of the cache.

    All views are made at once, which is much faster than one by one for a short past.

    Shapes: kv [n_layers, 2, K, n_slots, W] local.
    """

    def __init__(self, kv: Tensor, slots: Sequence[slice]) -> None:
        flat = kv.flatten(0, 1).unsqueeze(1)  # [n_layers * 2, 1, K, n_slots, W]
        self._parts = [flat[:, :, :, own].unbind() for own in slots]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, copied unless their slots are one slice.

        Shapes: each [1, K, S, W].
        """
        k, v = ([part[at] for part in self._parts] for at in (2 * layer, 2 * layer + 1))
        if len(k) == 1:
            return k[0], v[0]
        return torch.cat(k, dim=2), torch.cat(v, dim=2)


def slots_of(blocks: Blocks, block_size: int, positions: range) -> list[int]:
    """The slots of some positions of a sequence.

    >>> slots_of([7, 2], 4, range(2, 6))
    [30, 31, 8, 9]
    """
    return [blocks[p // block_size] * block_size + p % block_size for p in positions]


def slices_of(blocks: Blocks, block_size: int, positions: range) -> tuple[slice, ...]:
    """The slots of some positions as slices; consecutive blocks are one slice.

    >>> slices_of([7, 8, 2], 4, range(1, 10))
    (slice(29, 36, None), slice(8, 10, None))
    """
    if not positions:
        return ()
    first, stop = positions.start // block_size, -(-positions.stop // block_size)
    runs: list[list[int]] = []  # of consecutive blocks: the first, and the last + 1
    for block in blocks[first:stop]:
        if runs and runs[-1][1] == block:
            runs[-1][1] += 1
        else:
            runs.append([block, block + 1])
    slices = [[end * block_size for end in run] for run in runs]
    slices[0][0] += positions.start - first * block_size
    slices[-1][1] -= stop * block_size - positions.stop
    return tuple(slice(*each) for each in slices)


def part_of(slices: Sequence[slice], part: range) -> tuple[slice, ...]:
    """The slots at some indices of the concatenated slices.

    >>> part_of((slice(28, 36), slice(8, 10)), range(6, 9))
    (slice(34, 36, None), slice(8, 9, None))
    """
    found = []
    first = 0
    for each in slices:
        start = each.start + max(part.start - first, 0)
        stop = min(each.stop, each.start + part.stop - first)
        if start < stop:
            found.append(slice(start, stop))
        first += each.stop - each.start
    return tuple(found)
