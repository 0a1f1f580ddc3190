"""The blocks of one group of layers, and how sequences hold them.

Layers that see all keys keep those of every token. Layers with a sliding window need a token's no
longer once it is out of the window of all that are to come; its block takes a later token then, so
that a long sequence goes round in the same blocks, however long it becomes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from parallel_llama.engine.block_pool import BlockPool
from parallel_llama.memory import blocks_held

# Tokens of one forward pass, by kind of device: enough to make prefill a matter of matrix products
# and not of weight traffic, few enough that those who decode do not wait long and an interruption
# is heard.
STEP_TOKENS: Mapping[str, int] = {"cpu": 512, "cuda": 4096}


@dataclass(eq=False)
class BlockTable:
    """The blocks that a sequence holds in one group of layers, in order.

    Behind the first `n_kept`, which hold its first tokens for good, `n_given_up` are missing.
    """

    blocks: list[int] = field(default_factory=list)
    n_given_up: int = 0
    n_kept: int = 0

    @property
    def first(self) -> int:
        """The number of the first block that is held and may be given up."""
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
        """The sequence's block of this number, or those from one to another; all are still held."""
        if isinstance(number, slice):
            first, stop, step = number.indices(self.stop)
            n_missing = 0 if stop <= self.n_kept else self.n_given_up
            assert step == 1 and (first >= self.first or not n_missing)
            return self.blocks[first - n_missing : stop - n_missing]
        if number < self.n_kept:
            return self.blocks[number]
        assert number >= self.first
        return self.blocks[number - self.n_given_up]


class BlockGroup:
    """A pool, and the tables of the sequences that share it.

    `window` is the number of keys that a token sees, its own among them, None for all. At most
    `step_tokens` tokens of a sequence run in one step: all of them must be kept at once, with what
    the first of them sees. A sequence's first `n_sinks` tokens are always seen.
    """

    def __init__(
        self, pool: BlockPool, window: int | None, step_tokens: int, n_sinks: int = 0
    ) -> None:
        self.pool, self.window, self.step_tokens, self.n_sinks = pool, window, step_tokens, n_sinks

    def n_blocks(self, n_tokens: int) -> int:
        """The blocks that so many tokens fill, whole or in part."""
        return -(-n_tokens // self.pool.block_size)

    def n_held(self, n_tokens: int) -> int:
        """The most blocks that a sequence of so many tokens holds at any time."""
        size, window = self.pool.block_size, self.window
        return blocks_held(n_tokens, size, window, self.step_tokens, self.n_sinks)

    def first_seen(self, start: int) -> int:
        """The number of the first block that a token at this position sees, or one behind it."""
        if self.window is None:
            return 0
        return max(start - self.window + 1, 0) // self.pool.block_size

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks a sequence can begin with: the most whose window is held."""
        if self.window is None:
            return len(self.pool.lookup(keys))
        n, at = len(keys), len(keys) - 1
        # One that is missing rules out every beginning in whose window it lies.
        while at >= self.first_seen(n * self.pool.block_size):
            if not self.pool.lookup(keys[at : at + 1]):
                n = at
            at -= 1
        n_kept = min(self.n_blocks(self.n_sinks), n)
        return n if len(self.pool.lookup(keys[:n_kept])) == n_kept else 0

    def prefix(self, keys: Sequence[bytes]) -> BlockTable:
        """The table of a sequence that begins with these blocks, not yet owned by it."""
        n_kept = self.n_blocks(self.n_sinks)
        first = max(self.first_seen(len(keys) * self.pool.block_size), n_kept)
        wanted = [*keys[:n_kept], *keys[first:]]
        blocks = [block for key in wanted for block in self.pool.lookup([key])]
        assert len(blocks) == len(wanted)
        return BlockTable(blocks, max(len(keys) - len(wanted), 0), n_kept)

    def n_for_start(self, table: BlockTable, n_tokens: int) -> int:
        """New blocks with which a sequence of so many known tokens starts behind its prefix."""
        n_held = min(self.n_blocks(n_tokens) - table.n_given_up, self.n_held(n_tokens))
        return max(n_held - len(table.blocks), 0)

    def start(self, table: BlockTable, n_tokens: int, most_tokens: int) -> None:
        """Take those; the sequence may grow to `most_tokens`."""
        self._take(table, self.n_for_start(table, n_tokens), most_tokens)

    def n_to_take(self, table: BlockTable, start: int, stop: int) -> int:
        """Blocks that the pool must give before the tokens from `start` to `stop` have a place."""
        n_new = self.n_blocks(stop) - table.stop
        if n_new <= 0:
            return 0
        n_spent = min(max(self.first_seen(start) - table.first, 0), n_new)
        spent = table.blocks[table.n_kept :][:n_spent]
        return n_new - sum(self.pool.is_sole(block) for block in spent)

    def reach(self, table: BlockTable, start: int, stop: int) -> int:
        """Up to which position, `stop` at the most, there are blocks for tokens from `start` on."""
        while self.n_to_take(table, start, stop) > self.pool.n_takeable():
            stop = (self.n_blocks(stop) - 1) * self.pool.block_size
        return stop

    def extend(self, table: BlockTable, start: int, stop: int, most_tokens: int) -> None:
        """Give the tokens from `start` to `stop` a place; the sequence may grow to `most_tokens`.

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
        """Give up all that a sequence holds, which has no table then."""
        self.pool.release(table.blocks)

    def _take(self, table: BlockTable, n: int, most_tokens: int) -> None:
        room = self.n_held(most_tokens) - len(table.blocks)
        after = table.blocks[-1] if table.blocks else None
        table.blocks += self.pool.take(n, after, room)
