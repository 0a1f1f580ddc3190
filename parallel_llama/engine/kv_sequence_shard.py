"""The shard of the KV cache that a rank keeps with kv_split=sequence, and what queries see in it.

Blocks are dealt to the ranks round robin, by their numbers in the pool. So schedulers and block
tables do not change. A rank's cache has its shard of the blocks, and one spare block into which it
writes the tokens of other ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_llama.model.kv_cache import Blocks


@dataclass(frozen=True)
class CachePart:
    """The blocks that this rank keeps: those whose number modulo `n_parts` is `number`."""

    number: int
    n_parts: int
    block_size: int

    def n_blocks(self, n_blocks: int) -> int:
        """Blocks of this rank's cache for a pool of `n_blocks`; the last one is the spare block."""
        return -(-n_blocks // self.n_parts) + 1

    def slots_of(self, blocks: Blocks, positions: range, spare: int) -> list[int]:
        """The slots of positions of a sequence; `spare` for positions that other ranks keep."""
        slots = []
        for position in positions:
            number, within = divmod(position, self.block_size)
            local = self._local(blocks[number])
            slots.append(spare if local is None else local * self.block_size + within)
        return slots

    def kept(self, blocks: Blocks, positions: range) -> tuple[list[range], list[slice]]:
        """The given positions that this rank keeps, and their slots, as ranges."""
        held, slots = [], []
        for part in _by_block(positions, self.block_size):
            number, within = divmod(part.start, self.block_size)
            local = self._local(blocks[number])
            if local is not None:
                start = local * self.block_size + within
                held.append(part)
                slots.append(slice(start, start + len(part)))
        return held, slots

    def _local(self, block: int) -> int | None:
        own, number = divmod(block, self.n_parts)
        return own if number == self.number else None


def mask_of(
    queries: range, keys: list[range], window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask that is added to the queries' scores, for keys at any positions.

    Shapes: [len(queries), number of keys], 0 where the key is visible and -inf elsewhere.
    """
    at = torch.cat([torch.arange(part.start, part.stop, device=device) for part in keys])
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    hidden = at > query
    if window is not None:
        hidden |= at <= query - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _by_block(positions: range, block_size: int) -> Iterator[range]:
    """Split positions at block boundaries.

    >>> list(_by_block(range(3, 9), 4))
    [range(3, 4), range(4, 8), range(8, 9)]
    """
    start = positions.start
    while start < positions.stop:
        stop = min((start // block_size + 1) * block_size, positions.stop)
        yield range(start, stop)
        start = stop
