"""Converts block tables to the slots that a step writes and the keys that its tokens attend to.

With kv_split="sequence" each rank keeps a shard of the KV cache. Blocks are assigned to ranks round
robin, by their numbers in the pool, so schedulers and block tables are the same as without
sharding. A rank writes the tokens of other ranks into one spare block of its cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_llama.engine.step_buffer import Chunk, KVGroupStep
from parallel_llama.families.model_args import KVGroup
from parallel_llama.ops import Queries, QueryRange
from parallel_llama.ops.attention import first_key, relative_to, slots_of


@dataclass(frozen=True)
class CachePart:
    """The blocks that this rank keeps: every `n_parts`-th block, from block `number` on."""

    number: int
    n_parts: int

    def n_blocks(self, n_blocks: int) -> int:
        """The size of this rank's cache for a pool of `n_blocks`, including the spare block."""
        return -(-n_blocks // self.n_parts) + 1

    def local(self, blocks: Sequence[int]) -> list[int]:
        """The block numbers in this rank's cache; -1 - r for a block that rank r keeps."""
        n = self.n_parts
        return [block // n if block % n == self.number else -1 - block % n for block in blocks]


@dataclass(frozen=True)
class KVLayout:
    """Converts the block tables of chunks to slots and ranges of keys, for every KV group.

    Args:
        block_size: Slots per block.
        spare_slots: A slot of each KV group for tokens that are not kept on this rank.
        n_sinks: The number of attention sinks.
        part: This rank's part of a cache that is sharded by token, or None.
    """

    kv_groups: tuple[KVGroup, ...]
    block_size: int
    spare_slots: Sequence[int]
    n_sinks: int
    part: CachePart | None

    def steps(self, chunks: Sequence[Chunk]) -> list[KVGroupStep]:
        """The slots and queries of a step in every KV group."""
        return [self.step(number, chunks) for number in range(len(self.kv_groups))]

    def step(self, number: int, chunks: Sequence[Chunk]) -> KVGroupStep:
        """The slots and queries of a step in one KV group."""
        kv_group, size = self.kv_groups[number], self.block_size
        window, has_chunks = kv_group.window, kv_group.has_chunks
        slots: list[int] = []
        ranges: list[QueryRange] = []
        window_ranges: list[QueryRange] = []
        sink_ranges: list[QueryRange] = []
        for chunk in chunks:
            row, positions = len(slots), chunk.positions
            query_range = self._range(number, row, chunk, positions)
            slots += slots_of(
                query_range.blocks, size, relative_to(query_range.first_key, positions)
            )
            if has_chunks and window is not None:
                ranges += [
                    self._range(number, row + part.start - positions.start, chunk, part)
                    for part in _within_chunks(positions, window)
                ]
                continue
            if not self.n_sinks or window is None or positions.stop <= window:
                ranges.append(query_range)
                continue
            n_plain = max(window - positions.start, 0)
            if n_plain:
                ranges.append(self._range(number, row, chunk, positions[:n_plain]))
            query_range = self._range(number, row + n_plain, chunk, positions[n_plain:])
            # Each query gets two ranges: the keys of its window, and the sinks before the window.
            before_window = relative_to(window, query_range.positions)
            blocks = self._blocks(chunk, number, 0, min(self.n_sinks, before_window.stop))
            window_ranges.append(query_range)
            sink_ranges.append(
                query_range._replace(positions=before_window, first_key=0, blocks=blocks)
            )
        spare_slot = self.spare_slots[number]
        queries = Queries(ranges, size, window, has_chunks=has_chunks)
        if self.part is not None:
            slots = [spare_slot if slot < 0 else slot for slot in slots]
        if not window_ranges:
            return KVGroupStep(slots, spare_slot, queries)
        beyond_window = (
            Queries(window_ranges, size, window),
            Queries(sink_ranges, size, n_keys=self.n_sinks),
        )
        return KVGroupStep(slots, spare_slot, queries, beyond_window)

    def slots(self, number: int, chunks: Sequence[Chunk]) -> list[int]:
        """The slots of a step's tokens in one KV group; for a cache not sharded by token."""
        assert self.part is None
        slots: list[int] = []
        for chunk in chunks:
            first, positions = chunk.start // self.block_size, chunk.positions
            blocks = self._blocks(chunk, number, first, positions.stop)
            positions = relative_to(first * self.block_size, positions)
            slots += slots_of(blocks, self.block_size, positions)
        return slots

    def needs_sinks(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a token attends to attention sinks outside of its window."""
        windows = [each.window for each in self.kv_groups if self.n_sinks and each.window]
        return any(chunk.positions.stop > window for chunk in chunks for window in windows)

    def max_blocks(self, longest: int) -> int:
        """The most blocks that a token of a sequence of `longest` tokens sees, in all KV groups."""
        n_all_blocks = -(-longest // self.block_size)
        # A window may start at the last token of a block and end at the first of another.
        windows = (kv_group.window for kv_group in self.kv_groups)
        return sum(
            n_all_blocks
            if window is None
            else min((window + 2 * self.block_size - 2) // self.block_size, n_all_blocks)
            for window in windows
        )

    def _range(self, number: int, row: int, chunk: Chunk, positions: range) -> QueryRange:
        """The queries at some positions of a chunk; `row` is the row of the first query."""
        kv_group = self.kv_groups[number]
        first = first_key(positions.start, kv_group.window, has_chunks=kv_group.has_chunks)
        first //= self.block_size
        blocks = self._blocks(chunk, number, first, positions.stop)
        return QueryRange(row, positions, first * self.block_size, blocks, chunk.is_decoded)

    def _blocks(self, chunk: Chunk, number: int, first: int, stop: int) -> Sequence[int]:
        """A sequence's blocks in a KV group: block `first` to the block of position `stop` - 1."""
        blocks = chunk.tables[number][first : -(-stop // self.block_size)]
        return blocks if self.part is None else self.part.local(blocks)


def _within_chunks(positions: range, size: int) -> list[range]:
    """The positions, cut at multiples of `size`.

    >>> _within_chunks(range(2, 9), 4)
    [range(2, 4), range(4, 8), range(8, 9)]
    """
    cuts = range(positions.start // size * size, positions.stop, size)
    return [range(max(cut, positions.start), min(cut + size, positions.stop)) for cut in cuts]
