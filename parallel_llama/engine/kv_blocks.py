"""Block tables, and the rules by which sequences hold blocks in one KV group.

A KV group is the layers that share a block table.

Full-attention layers keep the keys and values of every token. In sliding-window layers a block is
reused for later tokens once all its tokens are out of the window, so that a long sequence cycles
through the same blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from parallel_llama.engine.block_pool import BlockPool
from parallel_llama.memory import blocks_held

# Maximum tokens of a forward pass, by kind of device: enough to make prefill compute-bound, and few
# enough that decoding sequences and Ctrl-C do not wait long.
STEP_TOKENS: Mapping[str, int] = {"cpu": 512, "cuda": 4096}


@dataclass(eq=False)
class BlockTable:
    """The blocks that a sequence holds in one KV group, in order.

    The first `n_sink_blocks` blocks hold attention sinks and are never dropped; the next
    `n_dropped` blocks are out of the window and no longer held.
    """

    blocks: list[int] = field(default_factory=list)
    n_dropped: int = 0
    n_sink_blocks: int = 0

    @property
    def first(self) -> int:
        """The index of the first block that may be dropped."""
        return self.n_sink_blocks + self.n_dropped

    @property
    def stop(self) -> int:
        """The number of blocks that are held or dropped."""
        return self.n_dropped + len(self.blocks)

    @overload
    def __getitem__(self, number: int) -> int: ...

    @overload
    def __getitem__(self, number: slice) -> list[int]: ...

    def __getitem__(self, number: int | slice) -> int | list[int]:
        """The block at this index, or a slice of blocks, which must all be held."""
        if isinstance(number, slice):
            first, stop, step = number.indices(self.stop)
            n_missing = 0 if stop <= self.n_sink_blocks else self.n_dropped
            assert step == 1 and (first >= self.first or not n_missing)
            return self.blocks[first - n_missing : stop - n_missing]
        if number < self.n_sink_blocks:
            return self.blocks[number]
        assert number >= self.first
        return self.blocks[number - self.n_dropped]


class KVGroupBlocks:
    """The pool of one KV group, and the rules for the tables of its sequences.

    Args:
        window: the number of keys that a token sees, including its own; None for full attention.
        step_tokens: maximum tokens of a sequence in one step. A step needs the blocks of these
            tokens and of the window before them.
        n_sinks: the number of first tokens of a sequence that are always visible.
    """

    def __init__(
        self, pool: BlockPool, window: int | None, step_tokens: int, n_sinks: int = 0
    ) -> None:
        self.pool, self.window, self.step_tokens, self.n_sinks = pool, window, step_tokens, n_sinks

    def n_blocks(self, n_tokens: int) -> int:
        """The number of blocks for `n_tokens` tokens; the last may be partly full."""
        return -(-n_tokens // self.pool.block_size)

    def n_held(self, n_tokens: int) -> int:
        """The maximum number of blocks that a sequence of `n_tokens` holds at once."""
        size, window = self.pool.block_size, self.window
        return blocks_held(n_tokens, size, window, self.step_tokens, self.n_sinks)

    def first_visible(self, start: int) -> int:
        """The index of the first block in the window of a token at position `start`."""
        if self.window is None:
            return 0
        return max(start - self.window + 1, 0) // self.pool.block_size

    def cached_prefix(self, keys: Sequence[bytes]) -> int:
        """The length, in blocks, of the longest cached prefix that a sequence can start with."""
        if self.window is None:
            return len(self.pool.lookup(keys))
        n_blocks, block = len(keys), len(keys) - 1
        # A missing block rules out every prefix whose window contains it.
        while block >= self.first_visible(n_blocks * self.pool.block_size):
            if not self.pool.lookup(keys[block : block + 1]):
                n_blocks = block
            block -= 1
        n_sink_blocks = min(self.n_blocks(self.n_sinks), n_blocks)
        return n_blocks if len(self.pool.lookup(keys[:n_sink_blocks])) == n_sink_blocks else 0

    def prefix(self, keys: Sequence[bytes]) -> BlockTable:
        """The table of a sequence with this cached prefix; its blocks are not acquired yet."""
        n_sink_blocks = self.n_blocks(self.n_sinks)
        first = max(self.first_visible(len(keys) * self.pool.block_size), n_sink_blocks)
        prefix_keys = [*keys[:n_sink_blocks], *keys[first:]]
        blocks = [block for key in prefix_keys for block in self.pool.lookup([key])]
        assert len(blocks) == len(prefix_keys)
        return BlockTable(blocks, max(len(keys) - len(prefix_keys), 0), n_sink_blocks)

    def n_blocks_to_start(self, table: BlockTable, n_tokens: int) -> int:
        """The number of new blocks that a sequence of `n_tokens` with this cached prefix needs."""
        n_held = min(self.n_blocks(n_tokens) - table.n_dropped, self.n_held(n_tokens))
        return max(n_held - len(table.blocks), 0)

    def start(self, table: BlockTable, n_tokens: int, max_tokens: int) -> None:
        """Allocate `n_blocks_to_start` blocks; the sequence may grow to `max_tokens`."""
        self._take(table, self.n_blocks_to_start(table, n_tokens), max_tokens)

    def blocks_needed(self, table: BlockTable, start: int, stop: int) -> int:
        """The number of blocks that the pool must supply for the tokens from `start` to `stop`."""
        n_new = self.n_blocks(stop) - table.stop
        if n_new <= 0:
            return 0
        n_reusable = min(max(self.first_visible(start) - table.first, 0), n_new)
        reusable = table.blocks[table.n_sink_blocks :][:n_reusable]
        return n_new - sum(self.pool.is_sole(block) for block in reusable)

    def reach(self, table: BlockTable, start: int, stop: int) -> int:
        """The largest end, up to `stop`, for which blocks can be allocated from `start` on."""
        while self.blocks_needed(table, start, stop) > self.pool.n_allocatable():
            stop = (self.n_blocks(stop) - 1) * self.pool.block_size
        return stop

    def extend(self, table: BlockTable, start: int, stop: int, max_tokens: int) -> None:
        """Allocate blocks for tokens `start` to `stop`; the sequence may grow to `max_tokens`.

        Raises: OutOfBlocks.
        """
        first_visible = self.first_visible(start)
        n_new = self.n_blocks(stop) - table.stop
        while n_new > 0 and table.first < first_visible:
            block = table.blocks.pop(table.n_sink_blocks)
            table.n_dropped += 1
            if self.pool.is_sole(block):
                self.pool.forget(block)
                table.blocks.append(block)
            else:
                self.pool.release([block])
                self._take(table, 1, max_tokens)
            n_new -= 1
        if n_new > 0:
            self._take(table, n_new, max_tokens)

    def release(self, table: BlockTable) -> None:
        """Release all blocks of a table, which must not be used again."""
        self.pool.release(table.blocks)

    def _take(self, table: BlockTable, n: int, max_tokens: int) -> None:
        room = self.n_held(max_tokens) - len(table.blocks)
        after = table.blocks[-1] if table.blocks else None
        table.blocks += self.pool.take(n, after, room)
