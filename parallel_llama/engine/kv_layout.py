"""Where the keys and values of a step's tokens are, and which of them each token attends to.

With kv_split=sequence a rank keeps a shard of the KV cache: blocks are dealt to the ranks round
robin, by their numbers in the pool, so schedulers and block tables do not change. A rank's cache
has its shard of the blocks, and one spare block into which it writes the tokens of other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_llama.engine.step_buffer import Chunk, KVGroupStep
from parallel_llama.families.model_args import KVGroup
from parallel_llama.ops import Queries, QueryRange
from parallel_llama.ops.attention import after, slots_of


@dataclass(frozen=True)
class CachePart:
    """The blocks that this rank keeps: those whose number modulo `n_parts` is `number`."""

    number: int
    n_parts: int

    def n_blocks(self, n_blocks: int) -> int:
        """Blocks of this rank's cache for a pool of `n_blocks`; the last one is the spare block."""
        return -(-n_blocks // self.n_parts) + 1

    def local(self, blocks: Sequence[int]) -> list[int]:
        """The numbers of these blocks in this rank's cache; -1 for blocks that other ranks keep."""
        n = self.n_parts
        return [block // n if block % n == self.number else -1 for block in blocks]


@dataclass(frozen=True)
class KVLayout:
    """The block tables of all KV groups, as the layers of a group read them.

    Args:
        kv_groups: The KV groups.
        block_size: Slots per block.
        spare_slots: A slot of each KV group for tokens that are not kept on this rank.
        n_sinks: The number of attention sinks.
        part: This rank's part of a cache that is sharded by token, or None.
    """

    kv_groups: tuple[KVGroup, ...]
    block_size: int
    spare_slots: Sequence[int] = ()
    n_sinks: int = 0
    part: CachePart | None = None

    def steps(self, chunks: Sequence[Chunk]) -> list[KVGroupStep]:
        """A step in all KV groups."""
        return [self.step(number, chunks) for number in range(len(self.kv_groups))]

    def step(self, number: int, chunks: Sequence[Chunk]) -> KVGroupStep:
        """A step in a KV group. Its queries are all but those of `beyond_window`."""
        window, size = self.kv_groups[number].window, self.block_size
        slots: list[int] = []
        ranges: list[QueryRange] = []
        for chunk in chunks:
            row, positions = len(slots), chunk.positions
            own = self._range(number, row, chunk, positions)
            slots += slots_of(own.blocks, size, after(own.first_key, positions))
            if self.n_sinks and window is not None:
                near = positions[: max(window - chunk.start, 0)]
                if not near:
                    continue
                own = self._range(number, row, chunk, near)
            ranges.append(own)
        if self.part is not None:
            spare = self.spare_slots[number]
            slots = [spare if slot < 0 else slot for slot in slots]
        return KVGroupStep(slots, Queries(ranges, size, window))

    def beyond_window(self, number: int, chunks: Sequence[Chunk]) -> tuple[Queries, Queries]:
        """The queries that attend to sinks outside of their window, with each kind of keys.

        The sinks are attended to from a window's length before, since a sink inside of a query's
        window is seen there.
        """
        window = self.kv_groups[number].window
        assert window is not None
        near: list[QueryRange] = []
        far: list[QueryRange] = []
        row = 0
        for chunk in chunks:
            n_before = max(window - chunk.start, 0)
            positions = chunk.positions[n_before:]
            if positions:
                own = self._range(number, row + n_before, chunk, positions)
                before = range(positions.start - window, positions.stop - window)
                blocks = self._blocks(chunk, number, 0, min(self.n_sinks, before.stop))
                near.append(own)
                far.append(own._replace(positions=before, first_key=0, blocks=blocks))
            row += len(chunk.tokens)
        size = self.block_size
        return Queries(near, size, window), Queries(far, size, n_keys=self.n_sinks)

    def is_beyond_window(self, chunk: Chunk) -> bool:
        """Whether a token attends to sinks outside of its window, in any KV group."""
        stop = chunk.positions.stop
        return self.n_sinks > 0 and any(
            kv_group.window is not None and stop > kv_group.window for kv_group in self.kv_groups
        )

    def most_blocks(self, longest: int) -> int:
        """The most blocks that a token of a sequence of `longest` tokens sees in all KV groups."""
        most = -(-longest // self.block_size)
        # A window may start at the last token of a block and end at the first of another.
        windows = (kv_group.window for kv_group in self.kv_groups)
        return sum(
            most if w is None else min((w + 2 * self.block_size - 2) // self.block_size, most)
            for w in windows
        )

    def _range(self, number: int, row: int, chunk: Chunk, positions: range) -> QueryRange:
        """The queries at some positions of a chunk; `row` is that of the first."""
        window = self.kv_groups[number].window
        first = 0 if window is None else max(positions.start - window + 1, 0) // self.block_size
        blocks = self._blocks(chunk, number, first, positions.stop)
        return QueryRange(row, positions, first * self.block_size, blocks, chunk.is_decoded)

    def _blocks(self, chunk: Chunk, number: int, first: int, stop: int) -> Sequence[int]:
        """A sequence's blocks in a KV group, from block `first` up to before position `stop`."""
        blocks = chunk.tables[number][first : -(-stop // self.block_size)]
        return blocks if self.part is None else self.part.local(blocks)
