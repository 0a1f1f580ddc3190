"""The blocks of one KV group (layers that share a block table), and how sequences hold them.

Full-attention layers keep the keys and values of every token. In sliding-window layers a block is
reused for later tokens once all its tokens are out of the window, so that a long sequence cycles
through the same blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from parallel_llama.engine.block_pool import BlockPool
from parallel_llama.memory import blocks_held

# Most tokens of one forward pass, by kind of device: enough to make prefill compute-bound, and few
# enough that decoding sequences and Ctrl-C do not wait long.
STEP_TOKENS: Mapping[str, int] = {"cpu": 512, "cuda": 4096}


@dataclass(eq=False)
class BlockTable:
    """The blocks that a sequence holds in one KV group, in order.

    The first `n_kept` blocks hold attention sinks and stay; the next `n_given_up` blocks are no
    longer held.
    """

    blocks: list[int] = field(default_factory=list)
    n_given_up: int = 0
    n_kept: int = 0

    @property
    def first(self) -> int:
        """The number of the first block that may be given up."""
        return self.n_kept + self.n_given_up

    @property
    def stop(self) -> int:
        """The number of blocks that are held or given up."""
        return self.n_given_up + len(self.blocks)

    @overload
    def __getitem__(self, number: int) -> int: ...

    @overload
    def __getitem__(self, number: slice) -> list[int]: ...

    def __getitem__(self, number: int | slice) -> int | list[int]:
        """The block of this number, or a slice of blocks; all must be held."""
        if isinstance(number, slice):
            first, stop, step = number.indices(self.stop)
            n_missing = 0 if stop <= self.n_kept else self.n_given_up
            assert step == 1 and (first >= self.first or not n_missing)
            return self.blocks[first - n_missing : stop - n_missing]
        if number < self.n_kept:
            return self.blocks[number]
        assert number >= self.first
        return self.blocks[number - self.n_given_up]


class KVGroupBlocks:
    """The pool of one KV group, and the rules for the tables of its sequences.

    `window` is the number of keys that a token sees, its own included; None for all. A step runs at
    most `step_tokens` tokens of a sequence and needs their blocks and the window's. The first
    `n_sinks` tokens of a sequence are always visible.
    """

    def __init__(
        self, pool: BlockPool, window: int | None, step_tokens: int, n_sinks: int = 0
    ) -> None:
        self.pool, self.window, self.step_tokens, self.n_sinks = pool, window, step_tokens, n_sinks

    def n_blocks(self, n_tokens: int) -> int:
        """The number of blocks for `n_tokens` tokens; the last may be partly full."""
        return -(-n_tokens // self.pool.block_size)

    def n_held(self, n_tokens: int) -> int:
        """The most blocks that a sequence of `n_tokens` holds at once."""
        size, window = self.pool.block_size, self.window
        return blocks_held(n_tokens, size, window, self.step_tokens, self.n_sinks)

    def first_seen(self, start: int) -> int:
        """The number of the first block in the window of a token at this position."""
        if self.window is None:
            return 0
        return max(start - self.window + 1, 0) // self.pool.block_size

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        """The length, in blocks, of the longest cached prefix that a sequence can start with."""
        if self.window is None:
            return len(self.pool.lookup(keys))
        n, at = len(keys), len(keys) - 1
        # A missing block rules out every prefix whose window contains it.
        while at >= self.first_seen(n * self.pool.block_size):
            if not self.pool.lookup(keys[at : at + 1]):
                n = at
            at -= 1
        n_kept = min(self.n_blocks(self.n_sinks), n)
        return n if len(self.pool.lookup(keys[:n_kept])) == n_kept else 0

    def prefix(self, keys: Sequence[bytes]) -> BlockTable:
        """The table of a sequence with this cached prefix; its blocks are not acquired yet."""
        n_kept = self.n_blocks(self.n_sinks)
        first = max(self.first_seen(len(keys) * self.pool.block_size), n_kept)
        wanted = [*keys[:n_kept], *keys[first:]]
        blocks = [block for key in wanted for block in self.pool.lookup([key])]
        assert len(blocks) == len(wanted)
        return BlockTable(blocks, max(len(keys) - len(wanted), 0), n_kept)

    def n_for_start(self, table: BlockTable, n_tokens: int) -> int:
        """The number of new blocks for a sequence of `n_tokens` known tokens and this prefix."""
        n_held = min(self.n_blocks(n_tokens) - table.n_given_up, self.n_held(n_tokens))
        return max(n_held - len(table.blocks), 0)

    def start(self, table: BlockTable, n_tokens: int, most_tokens: int) -> None:
        """Take the blocks of `n_for_start`; the sequence may grow to `most_tokens`."""
        self._take(table, self.n_for_start(table, n_tokens), most_tokens)

    def blocks_needed(self, table: BlockTable, start: int, stop: int) -> int:
        """The number of blocks to take from the pool for the tokens from `start` to `stop`."""
        n_new = self.n_blocks(stop) - table.stop
        if n_new <= 0:
            return 0
        n_spent = min(max(self.first_seen(start) - table.first, 0), n_new)
        spent = table.blocks[table.n_kept :][:n_spent]
        return n_new - sum(self.pool.is_sole(block) for block in spent)

    def reach(self, table: BlockTable, start: int, stop: int) -> int:
        """The largest end, at most `stop`, up to which tokens from `start` on can get blocks."""
        while self.blocks_needed(table, start, stop) > self.pool.n_allocatable():
            stop = (self.n_blocks(stop) - 1) * self.pool.block_size
        return stop

    def extend(self, table: BlockTable, start: int, stop: int, most_tokens: int) -> None:
        """Allocate blocks for tokens `start` to `stop`; the sequence may grow to `most_tokens`.

        Raises: OutOfBlocks.
        """
        first_seen = self.first_seen(start)
        n_new = self.n_blocks(stop) - table.stop
        while n_new > 0 and table.first < first_seen:
            block = table.blocks.pop(table.n_kept)
            table.n_given_up += 1
            if self.pool.is_sole(block):
                self.pool.forget(block)
                table.blocks.append(block)
            else:
                self.pool.release([block])
                self._take(table, 1, most_tokens)
            n_new -= 1
        if n_new > 0:
            self._take(table, n_new, most_tokens)

    def release(self, table: BlockTable) -> None:
        """Release all blocks of a table, which must not be used again."""
        self.pool.release(table.blocks)

    def _take(self, table: BlockTable, n: int, most_tokens: int) -> None:
        room = self.n_held(most_tokens) - len(table.blocks)
        after = table.blocks[-1] if table.blocks else None
        table.blocks += self.pool.take(n, after, room)
