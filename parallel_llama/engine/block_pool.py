"""Allocates the blocks of the paged KV cache, with prefix caching.

A block is `block_size` consecutive slots. It is free, or used by one or more owners, or cached. A
cached block has no owner, but keeps its contents so that a prefix key can find them. The pool never
reads keys or values, so it is the same on every rank.

Attention reads consecutive blocks of a sequence without copying them. So the free blocks right
after a new sequence are promised to that sequence, up to the length that it may reach, and other
sequences start elsewhere if possible. A promise is not a reservation: promised blocks are free, and
other sequences get them before an allocation fails.
"""

import struct
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 32

# Cached blocks are evicted early, so that a new sequence can grow in place, only while less than
# this fraction of the pool is promised.
MAX_PROMISED_FRACTION = 1 / 4


class OutOfBlocks(RuntimeError):
    """More blocks were requested than are free or cached; no block was allocated."""


class BlockPool:
    """Allocates, shares and evicts the blocks of one KV group.

    Cached blocks are evicted if too few blocks are free. While less than MAX_PROMISED_FRACTION of
    the pool is promised, they are also evicted so that a new sequence can grow in place. The least
    recently used block is evicted first. The tail of a sequence counts as less recently used than
    its head, because more prompts share the head; so eviction frees consecutive blocks.

    Cost: a few binary searches among the free runs for each block that changes its state.
    """

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size
        self._n_owners = [0] * n_blocks
        self._key_of: list[bytes | None] = [None] * n_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._open = _Runs()  # free runs that are not promised; adjacent runs are merged
        self._promised = _Runs()  # free runs, each right after the last block of its sequence
        if n_blocks:
            self._open.add(0, n_blocks)

    @property
    def n_free(self) -> int:
        return self._open.n_blocks + self._promised.n_blocks

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    @property
    def n_used(self) -> int:
        return self.n_blocks - self.n_free - self.n_cached

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `keys` in the pool; changes nothing."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def n_allocatable(self, acquired: Sequence[int] = ()) -> int:
        """The number of blocks that can be allocated once the blocks `acquired` have an owner."""
        return self.n_free + self.n_cached - sum(not self._n_owners[block] for block in acquired)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block. Raises: ValueError if a block is free."""
        for block in blocks:
            if not self._n_owners[block] and block not in self._cached:
                raise ValueError(f"block {block} is free; take it first")
        for block in blocks:
            self._cached.pop(block, None)
            self._n_owners[block] += 1

    def take(self, n: int, after: int | None = None, room: int = 0) -> list[int]:
        """Allocate `n` blocks, whose contents are undefined.

        The caller may need up to `room` blocks in total, including these. The free blocks right
        after its block `after` are taken first. The remaining blocks come from a free run that is
        long enough for the rest of `room`, or from the longest run. The free blocks after the taken
        blocks, up to `room` in total, are promised to the caller.

        Raises: OutOfBlocks, with the pool unchanged.
        """
        if n > self.n_allocatable():
            raise OutOfBlocks(
                f"{n} blocks are requested, {self.n_free} are free and {self.n_cached} cached "
                f"of {self.n_blocks}"
            )
        taken: list[int] = []
        while len(taken) < n:
            n_missing = n - len(taken)
            room_left = max(room - len(taken), n_missing)
            start, stop = self._pop_run_after(after) or self._pop_run(n_missing, room_left)
            middle = min(start + n_missing, stop)
            promised = min(start + room_left, stop)
            if middle < promised:
                self._promised.add(middle, promised)
            if promised < stop:
                self._add_open(promised, stop)
            for block in range(start, middle):
                self._n_owners[block] = 1
            taken += range(start, middle)
            after = middle - 1
        return taken

    def publish(self, block: int, key: bytes) -> None:
        """Register a full used block under its key, unless the block or the key is registered."""
        assert self._n_owners[block], f"block {block} has no owner"
        if key not in self._block_of and self._key_of[block] is None:
            self._block_of[key] = block
            self._key_of[block] = key

    def is_sole(self, block: int) -> bool:
        """Whether a used block has exactly one owner."""
        return self._n_owners[block] == 1

    def forget(self, block: int) -> None:
        """Drop the prefix key of a block, so that its only owner can overwrite the block."""
        assert self._n_owners[block] == 1, f"block {block} has {self._n_owners[block]} owners"
        self._drop_key(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove an owner from each block of a sequence; `blocks` are in the sequence's order.

        Raises: ValueError if a block has no owner.
        """
        for block in blocks:
            if not self._n_owners[block]:
                raise ValueError(f"block {block} is not in use")
        for block in reversed(blocks):
            self._n_owners[block] -= 1
            if not self._n_owners[block]:
                self._free(block)

    def _free(self, block: int) -> None:
        if block + 1 in self._promised:
            self._add_open(block + 1, self._promised.remove(block + 1))
        if self._key_of[block] is None:
            self._add_open(block, block + 1)
        else:
            self._cached[block] = None

    def _pop_run_after(self, block: int | None) -> tuple[int, int] | None:
        """Remove and return the free run that starts right after a used block, if any."""
        for runs in (self._promised, self._open):
            if block is not None and block + 1 in runs:
                return block + 1, runs.remove(block + 1)
        return None

    def _pop_run(self, n: int, room: int) -> tuple[int, int]:
        """Remove and return a free run in which a sequence can start.

        Prefers the shortest run with enough room, then the longest run, then the second half of a
        run that is promised to another sequence.
        """
        promisable = max(int(self.n_blocks * MAX_PROMISED_FRACTION) - self._promised.n_blocks, 0)
        self._evict(max(n - self.n_free, min(room, promisable) - self._open.n_blocks))
        start, stop = self._open.fitting(room)
        other_start, other_stop = self._promised.fitting(self.n_blocks)
        half = (other_stop - other_start) // 2
        if stop - start >= min(room, max(half, 1)):
            return start, self._open.remove(start)
        self._promised.remove(other_start)
        middle = other_stop - max(half, 1)
        if other_start < middle:
            self._promised.add(other_start, middle)
        return middle, other_stop

    def _evict(self, n: int) -> None:
        for _ in range(min(n, len(self._cached))):
            block, _ = self._cached.popitem(last=False)
            self._drop_key(block)
            self._add_open(block, block + 1)

    def _drop_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            self._key_of[block] = None
            del self._block_of[key]

    def _add_open(self, start: int, stop: int) -> None:
        before = self._open.start_of(start)
        if before is not None:
            self._open.remove(before)
            start = before
        if stop in self._open:
            stop = self._open.remove(stop)
        self._open.add(start, stop)


class _Runs:
    """Disjoint runs [start, stop) of blocks, found by either end or by their length."""

    def __init__(self) -> None:
        self.n_blocks = 0
        self._stops: dict[int, int] = {}  # by the start of the run
        self._starts: dict[int, int] = {}  # by the stop of the run
        self._by_length: list[tuple[int, int]] = []  # (length, start), sorted

    def __contains__(self, start: int) -> bool:
        return start in self._stops

    def start_of(self, stop: int) -> int | None:
        return self._starts.get(stop)

    def add(self, start: int, stop: int) -> None:
        self._stops[start], self._starts[stop] = stop, start
        insort(self._by_length, (stop - start, start))
        self.n_blocks += stop - start

    def remove(self, start: int) -> int:
        """Remove the run that starts here. Returns: its stop."""
        stop = self._stops.pop(start)
        del self._starts[stop]
        del self._by_length[bisect_left(self._by_length, (stop - start, start))]
        self.n_blocks -= stop - start
        return stop

    def fitting(self, length: int) -> tuple[int, int]:
        """The shortest run of at least this length, else the longest run; (0, 0) without any."""
        if not self._by_length:
            return 0, 0
        index = bisect_left(self._by_length, (length, 0))
        found_length, start = self._by_length[min(index, len(self._by_length) - 1)]
        return start, start + found_length


def prefix_keys(
    tokens: Sequence[int], block_size: int, context: bytes, known: Sequence[bytes] = ()
) -> list[bytes]:
    """One key per full block of a sequence: a hash of all tokens up to the block's end.

    Args:
        context: everything else that must be equal for sequences to share a block.
        known: the keys of the first blocks, which are not computed again.
    """
    keys = list(known)
    # Contexts and blocks have different `person` values. Otherwise a client could choose a context
    # that has the hash of a block.
    root = blake2b(context, digest_size=KEY_BYTES, person=b"context").digest()
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        content = struct.pack(f"<{block_size}I", *tokens[start : start + block_size])
        parent = keys[-1] if keys else root
        keys.append(blake2b(parent + content, digest_size=KEY_BYTES, person=b"block").digest())
    return keys
