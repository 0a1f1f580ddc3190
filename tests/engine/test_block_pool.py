"""A block has one state at a time, and a prefix key finds only the block published under it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parallel_llama.engine.block_pool import BlockPool, OutOfBlocks, prefix_keys


class Ownership(RuleBasedStateMachine):
    """Sequences take, share, publish and release blocks; a simple model records the owners."""

    @initialize(n_blocks=st.integers(1, 24))
    def start(self, n_blocks: int) -> None:
        self.pool = BlockPool(n_blocks, 4)
        self.owned: list[list[int]] = []
        self.written: dict[int, bytes] = {}  # key of each block, if published since it was taken
        self.n_keys = 0

    @rule(n=st.integers(1, 8), room=st.integers(0, 12))
    def take(self, n: int, room: int) -> None:
        self.grow([], n, room)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), n=st.integers(1, 3), room=st.integers(0, 12))
    def take_behind(self, data: st.DataObject, n: int, room: int) -> None:
        self.grow(self.owned.pop(self.which(data)), n, room)

    def grow(self, blocks: list[int], n: int, room: int) -> None:
        pool, before = self.pool, self.counts()
        used = {block for each in [*self.owned, blocks] for block in each}
        try:
            taken = pool.take(n, blocks[-1] if blocks else None, room)
        except OutOfBlocks:
            assert n > before[0] + before[1]
            assert self.counts() == before
            taken = []
        else:
            assert len(set(taken)) == n and not used & set(taken)
        for block in taken:
            self.written.pop(block, None)
        if blocks or taken:
            self.owned.append(blocks + taken)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), key=st.integers(0, 9))
    def publish(self, data: st.DataObject, key: int) -> None:
        block = data.draw(st.sampled_from(self.owned[self.which(data)]))
        if block not in self.written:  # a full block is not written again
            self.written[block] = bytes([key])
            self.pool.publish(block, bytes([key]))

    @rule(keys=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def share(self, keys: list[int]) -> None:
        found = self.pool.lookup([bytes([key]) for key in keys])
        for key, block in zip(keys, found, strict=False):
            assert self.written[block] == bytes([key])
        if found and len(set(found)) == len(found):
            self.pool.acquire(found)
            self.owned.append(found)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(self.which(data)))

    def which(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.owned) - 1))

    def counts(self) -> tuple[int, int]:
        return self.pool.n_free, self.pool.n_cached

    @invariant()
    def every_block_has_one_state_and_its_owners(self) -> None:
        pool = self.pool
        owners = [0] * pool.n_blocks
        for blocks in self.owned:
            for block in blocks:
                owners[block] += 1
        assert pool._n_owners == owners
        used = {block for block, n in enumerate(owners) if n}
        runs = [*pool._open._stops.items(), *pool._promised._stops.items()]
        free = [block for start, stop in runs for block in range(start, stop)]
        assert sorted([*used, *free, *pool._cached]) == list(range(pool.n_blocks))
        assert (pool.n_used, *self.counts()) == (len(used), len(free), len(pool._cached))

    @invariant()
    def a_promise_lies_behind_a_used_block_and_free_runs_are_whole(self) -> None:
        pool = self.pool
        assert all(pool._n_owners[start - 1] for start in pool._promised._stops)
        assert not set(pool._open._stops) & set(pool._open._starts)
        for runs in (pool._open, pool._promised):
            lengths = sorted((stop - start, start) for start, stop in runs._stops.items())
            assert runs._by_length == lengths
            assert runs.n_blocks == sum(length for length, _ in lengths)


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_sequences_that_fit_together_each_get_consecutive_blocks():
    pool, rooms = BlockPool(60, 4), [10, 30, 5, 15]
    blocks = [pool.take(1, room=room) for room in rooms]
    for _ in range(30):
        for own, room in zip(blocks, rooms, strict=True):
            if len(own) < room:
                own += pool.take(1, own[-1], room - len(own))
    for own in blocks:
        assert own == list(range(own[0], own[0] + len(own)))
    assert pool.n_free == 0


def test_blocks_stay_consecutive_in_a_pool_full_of_cached_blocks():
    pool = BlockPool(128, 4)
    for number in range(16):
        blocks = pool.take(8)
        for block in blocks:
            pool.publish(block, bytes([number, block]))
        pool.release(blocks)
    assert pool.n_free == 0
    sequences = [pool.take(1, room=8) for _ in range(4)]
    for _ in range(7):
        for own in sequences:
            own += pool.take(1, own[-1], 8 - len(own))
    assert all(own == list(range(own[0], own[0] + 8)) for own in sequences)


def test_promised_blocks_are_given_to_others_before_take_fails():
    pool = BlockPool(8, 4)
    first = pool.take(1, room=8)
    assert first[0] + 1 not in pool.take(1, room=2)
    assert len(pool.take(6)) == 6


def test_promise_ends_when_its_sequence_is_released():
    pool = BlockPool(8, 4)
    pool.release(pool.take(1, room=8))
    assert pool.take(8, room=8) == list(range(8))


def test_the_tail_of_the_least_recently_used_sequence_is_evicted_first():
    pool = BlockPool(4, 4)
    for name in (b"a", b"b"):
        blocks = pool.take(2)
        for index, block in enumerate(blocks):
            pool.publish(block, name + bytes([index]))
        pool.release(blocks)
    again = pool.lookup([b"a\0", b"a\1"])  # a is used later than b
    pool.acquire(again)
    pool.release(again)
    taken = pool.take(1)
    assert not pool.lookup([b"b\1"])
    assert len(pool.lookup([b"b\0"])) == 1 and len(pool.lookup([b"a\0", b"a\1"])) == 2
    taken += pool.take(2)
    assert pool.lookup([b"a\0", b"a\1"]) == again[:1]


def test_lookup_returns_first_block_published_under_a_key():
    pool = BlockPool(3, 4)
    first, second = pool.take(2)
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    pool.release([second])
    assert pool.lookup([b"key"]) == [first]
    assert (pool.n_used, pool.n_cached, pool.n_free) == (1, 0, 2)


def test_double_release_or_acquire_of_free_block_raises_and_changes_nothing():
    pool = BlockPool(3, 4)
    blocks = pool.take(2)
    pool.release(blocks[:1])
    with pytest.raises(ValueError, match="not in use"):
        pool.release([blocks[1], blocks[0]])
    with pytest.raises(ValueError, match="is free"):
        pool.acquire([blocks[1], blocks[0]])
    pool.release(blocks[1:])
    assert pool.n_free == 3


def test_prefix_keys_depend_on_all_earlier_tokens_and_the_context():
    keys = prefix_keys([1, 2, 3, 4, 5], 2, b"")
    assert len(keys) == 2
    assert prefix_keys([1, 2, 3, 4], 2, b"") == keys
    assert prefix_keys([9, 2, 3, 4], 2, b"")[1] != keys[1]
    assert prefix_keys([1, 2, 3, 4], 2, b"salt") != keys
    assert prefix_keys([3, 4], 2, keys[0])[0] != keys[1]  # a context is not a block key
