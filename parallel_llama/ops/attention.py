"""Which queries of a batch attend to which keys, and the score function of attention.

A query attends to its own key and to the keys before it in its sequence. A sliding window limits
these to the last `window` keys, chunked attention to the keys since the last multiple of `window`.
`Queries` has the queries for the layers of a KV group. Each set of operators converts it to the
`Plan` that its kernels read: `SlotPlan` for torch, `PagedPlan` for CUDA, `CPUPlan` for the CPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_llama.plan import MAX_QUERIES, PART_KEYS, HeadRun

NO_WINDOW = 2**31 - 1  # a window that is longer than any sequence

# The keys that a query attends to: the position of the first key, and the slots of all keys in
# order, as non-empty slices.
SeenKeys = tuple[int, Sequence[slice]]


@dataclass(frozen=True)
class Scores:
    """The attention score of a query and a key: scale q k, or c tanh(scale q k / c).

    With sinks, each head has one more score in its softmax, the sink, which has no value vector.

    Args:
        scale: The factor on q k; None for 1 / sqrt(head_dim).
        soft_cap: The bound c of the scores; None for unbounded scores.
        has_sinks: Whether each head has a sink.

    Source: soft cap, Gemma 2, arXiv 2408.00118, section 2; sinks, gpt-oss, arXiv 2508.10925.
    """

    scale: float | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def factor_of(self, head_dim: int) -> float:
        """The factor on queries: the scale, divided by the soft cap if there is one."""
        return self.scale_of(head_dim) / (self.soft_cap or 1)


PLAIN = Scores()  # as in Llama


@dataclass(frozen=True)
class HeadNorms:
    """The RMSNorms of queries and keys, head by head: x / rms(x) * (weight + offset).

    Args:
        q: The weight of each query head, [D].
        k: The weight of each key head, [D].
    """

    q: Tensor
    k: Tensor
    eps: float
    offset: float


@dataclass(frozen=True)
class HeadMap:
    """Which query heads of a rank share which of its KV heads.

    Args:
        bounds: [K + 1] int32, on the model's device. Query heads bounds[i] to bounds[i + 1] - 1
            share KV head i.
        max_heads_per_kv: The largest number of query heads that share a KV head.
        runs: Query heads and their KV heads, where each KV head of a run has equally many query
            heads: 5 query heads on 2 KV heads are two runs, 3 + 2.
    """

    bounds: Tensor
    max_heads_per_kv: int
    runs: tuple[tuple[slice, slice], ...]

    @classmethod
    def of(cls, runs: Sequence[HeadRun], device: torch.device) -> "HeadMap":
        """The map of a rank's shard, on a device."""
        sizes = [len(run.heads) // len(run.kv_heads) for run in runs for _ in run.kv_heads]
        bounds = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
        slices = [
            (slice(run.heads.start, run.heads.stop), slice(run.kv_heads.start, run.kv_heads.stop))
            for run in runs
        ]
        return cls(bounds, max(sizes), tuple(slices))


class QueryRange(NamedTuple):
    """Consecutive queries of one sequence, in consecutive rows of the batch.

    Args:
        row: The first query's row.
        positions: The queries' positions in the sequence.
        first_key: The position of the first key in `blocks`: a multiple of the block size, not
            above the first key that is attended to.
        blocks: The ids of the blocks from `first_key` to the last key that is attended to; -1 - r
            for a block that another rank r holds.
        is_decoded: Whether each query is computed alone, bitwise as in decoding.
    """

    row: int
    positions: range
    first_key: int
    blocks: Sequence[int]
    is_decoded: bool


@dataclass(frozen=True)
class QueryChunk:
    """Consecutive queries of one sequence, and the slots of the keys that they attend to.

    Args:
        rows: The queries' rows of the batch.
        positions: The queries' positions in the sequence.
        slots: [S] int64, the slots of consecutive keys. The first is the first key that any query
            attends to, and the last is the last query's own key.
        taken: [1] int64, the number of work items that a kernel's threads have taken; 0 while no
            kernel runs.
        window: The sliding window, or None.
    """

    rows: slice
    positions: range
    slots: Tensor
    taken: Tensor
    window: int | None = None

    @property
    def first_key(self) -> int:
        return self.positions.stop - len(self.slots)


@dataclass(frozen=True)
class QueryTile:
    """Consecutive queries of one sequence, and their keys on this rank.

    Args:
        rows: The queries' rows of the batch.
        positions: The queries' positions in the sequence.
        slots: The slots of the keys.
        mask: [len(positions), S], 0 where a query attends to a key and -inf elsewhere.
    """

    rows: slice
    positions: range
    slots: Sequence[slice]
    mask: Tensor


class KeyPart(NamedTuple):
    """Keys that a query attends to, all in the same part of their sequence.

    Args:
        row: The row of the query.
        number: The number of the part; part i has the positions from i * PART_KEYS to
            (i + 1) * PART_KEYS - 1.
        first_key: The position of the first of these keys.
        slots: The slots of the keys; empty if the keys are on another rank.
        other_rank: The rank that has the keys; None for this rank.
    """

    row: int
    number: int
    first_key: int
    slots: Sequence[slice]
    other_rank: int | None = None


class QueryParts(NamedTuple):
    """A query, with its row of the batch, and the parts of its keys in order of position."""

    row: int
    position: int
    parts: Sequence[KeyPart]


@dataclass(frozen=True)
class Queries:
    """The queries of a batch and their keys, in the layers of one KV group.

    Args:
        ranges: The queries; each row of the batch is in at most one range.
        block_size: Slots per block.
        window: The sliding window, or None.
        n_keys: The number of keys at the start of a sequence that queries may attend to; None for
            all keys.
        has_chunks: Whether attention is chunked: a query then attends to the keys from the last
            multiple of `window` up to its own, and the queries of a range share their first key.
    """

    ranges: Sequence[QueryRange]
    block_size: int
    window: int | None = None
    n_keys: int | None = None
    has_chunks: bool = False

    def seen(self, queries: range) -> range:
        """The positions of the keys that any of these consecutive queries attends to."""
        first = first_key(queries.start, self.window, has_chunks=self.has_chunks)
        return range(first, queries.stop if self.n_keys is None else min(queries.stop, self.n_keys))

    @property
    def mask_window(self) -> int | None:
        """The window that the mask must apply; none with chunks, which limit `seen` already."""
        return None if self.has_chunks else self.window

    def decoded(self) -> dict[int, SeenKeys]:
        """The keys of each query that is computed alone, by its row."""
        keys_of_rows: dict[int, SeenKeys] = {}
        for row, positions, first_key, blocks, is_decoded in self.ranges:
            if not is_decoded:
                continue
            seen = self.seen(positions)
            slices = slices_of(blocks, self.block_size, relative_to(first_key, seen))
            if len(positions) == 1:
                keys_of_rows[row] = seen.start, slices
                continue
            for number, position in enumerate(positions):
                keys = self.seen(range(position, position + 1))
                keys_of_rows[row + number] = (
                    keys.start,
                    part_of(slices, relative_to(seen.start, keys)),
                )
        return keys_of_rows

    def query_chunks(self, device: torch.device | None = None) -> Iterator[QueryChunk]:
        """Yields the ranges of queries that are computed together."""
        for row, positions, first_key, blocks, is_decoded in self.ranges:
            if not is_decoded:
                seen = self.seen(positions)
                slices = slices_of(blocks, self.block_size, relative_to(first_key, seen))
                ranges = [np.arange(s.start, s.stop, dtype=np.int64) for s in slices]
                slots = torch.from_numpy(np.concatenate(ranges)).to(device=device)
                taken = torch.zeros(1, dtype=torch.int64)
                rows = slice(row, row + len(positions))
                yield QueryChunk(rows, positions, slots, taken, self.mask_window)

    def in_parts(self) -> Iterator[QueryParts]:
        """Yields each query with the parts of its keys.

        If the cache is sharded by token, a part is in one block, so one rank has all of its keys;
        otherwise all parts are on this rank.
        """
        for row, positions, first_key, blocks, _ in self.ranges:
            for number, position in enumerate(positions):
                seen = self.seen(range(position, position + 1))
                parts = tuple(self._parts_of(row + number, seen, first_key, blocks))
                yield QueryParts(row + number, position, parts)

    def _parts_of(
        self, row: int, seen: range, first_key: int, blocks: Sequence[int]
    ) -> Iterator[KeyPart]:
        for number in range(seen.start // PART_KEYS, -(-seen.stop // PART_KEYS)):
            start = max(seen.start, number * PART_KEYS)
            positions = range(start, min(seen.stop, (number + 1) * PART_KEYS))
            block = blocks[(start - first_key) // self.block_size]
            if block < 0:
                yield KeyPart(row, number, start, (), -1 - block)
            else:
                slots = slices_of(blocks, self.block_size, relative_to(first_key, positions))
                yield KeyPart(row, number, start, slots)

    def tiles(self, dtype: torch.dtype, device: torch.device) -> Iterator[QueryTile]:
        """Yields the tiles that have keys on this rank, for `TorchOps.partial_attention`."""
        for row, positions, first_key, blocks, is_decoded in self.ranges:
            size = 1 if is_decoded else MAX_QUERIES
            for first in range(0, len(positions), size):
                queries = positions[first : first + size]
                key_ranges, slots = _local_keys(
                    blocks, self.block_size, first_key, self.seen(queries)
                )
                if key_ranges:
                    rows = slice(row + first, row + first + len(queries))
                    mask = causal_mask(queries, key_ranges, self.mask_window, dtype, device)
                    yield QueryTile(rows, queries, tuple(slots), mask)


class Plan:
    """`Queries` in the form that one set of operators reads."""


@dataclass(frozen=True)
class SinkPlan(Plan):
    """Queries that attend to their window and to attention sinks outside of it.

    Args:
        rows: The queries' rows of the batch.
        positions: The queries' positions in their sequences.
    """

    rows: slice | Tensor
    positions: Sequence[int]


@dataclass(frozen=True)
class TorchSinkPlan(SinkPlan):
    """Consecutive queries of one sequence, for torch.

    Args:
        window: The queries with the keys of their windows.
        sinks: The queries with the sinks.
    """

    window: QueryTile
    sinks: QueryTile


@dataclass(frozen=True)
class SlotPlan(Plan):
    """Queries for torch: ranges, and the keys of each query that is computed alone, by its row."""

    chunks: tuple[QueryChunk, ...]
    decoded: Mapping[int, SeenKeys]


@dataclass(frozen=True)
class PagedQueries:
    """Ranges of consecutive queries of a sequence, and the block tables of their keys.

    A query that is computed alone, such as a decoded token or a draft token, is a range of its own.
    A range without queries is padding: kernels skip it.

    Args:
        rows: [n, 5] int32, on the model's device. For each range: its first row of the batch, its
            number of queries, the position of its first query, the position of the first key in
            its blocks (a multiple of the block size, not above the first key that is attended to),
            and the index of its first block in `blocks`.
        blocks: [m] int32, on the model's device: the block tables.
        block_size: Slots per block.
        max_queries: The largest number of queries of a range.
        window: The sliding window, or None.
    """

    rows: Tensor
    blocks: Tensor
    block_size: int
    max_queries: int
    window: int | None = None

    @staticmethod
    def pack(
        queries: Queries, blocks: npt.NDArray[np.int32], n_used: int
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
        """Writes the block tables of queries to `blocks`, from index `n_used` on.

        Returns: the `rows` of the queries that are computed alone; the `rows` of the other queries;
        the number of entries of `blocks` that are used now.
        """
        decoded: list[tuple[int, ...]] = []
        tiled: list[tuple[int, ...]] = []
        for row, positions, first_key, table, is_decoded in queries.ranges:
            blocks[n_used : n_used + len(table)] = table
            if is_decoded:
                decoded += [(row + i, 1, p, first_key, n_used) for i, p in enumerate(positions)]
            else:
                tiled.append((row, len(positions), positions.start, first_key, n_used))
            n_used += len(table)
        return decoded, tiled, n_used

    def slots_of(self, first_block: int, positions: range) -> Tensor:
        """The slots of positions, counted from the start of the block at index `first_block`."""
        key = torch.arange(positions.start, positions.stop, device=self.blocks.device)
        block = self.blocks[first_block + key // self.block_size].to(torch.int64)
        return block * self.block_size + key % self.block_size


@dataclass(frozen=True)
class PagedPlan(Plan):
    """Queries for kernels that read block tables."""

    parts: tuple[PagedQueries, ...]


def slots_of(blocks: Sequence[int], block_size: int, positions: range) -> list[int]:
    """The slots of some positions of a sequence; negative if the id of their block is negative.

    >>> slots_of([7, 2], 4, range(2, 6))
    [30, 31, 8, 9]
    """
    if len(positions) == 1:
        number, within = divmod(positions.start, block_size)
        return [blocks[number] * block_size + within]
    slices = slices_of(blocks, block_size, positions)
    return [slot for piece in slices for slot in range(piece.start, piece.stop)]


def slices_of(blocks: Sequence[int], block_size: int, positions: range) -> tuple[slice, ...]:
    """The slots of some positions as slices; blocks with consecutive ids share a slice.

    >>> slices_of([7, 8, 2], 4, range(1, 10))
    (slice(29, 36, None), slice(8, 10, None))
    """
    if not positions:
        return ()
    first, stop = positions.start // block_size, -(-positions.stop // block_size)
    runs: list[list[int]] = []  # of consecutive ids: [first id, last id + 1]
    for block in blocks[first:stop]:
        if runs and runs[-1][1] == block:
            runs[-1][1] += 1
        else:
            runs.append([block, block + 1])
    slices = [[bound * block_size for bound in run] for run in runs]
    slices[0][0] += positions.start - first * block_size
    slices[-1][1] -= stop * block_size - positions.stop
    return tuple(slice(*bounds) for bounds in slices)


def part_of(slices: Sequence[slice], part: range) -> tuple[slice, ...]:
    """The slots at some indices of the concatenated slices.

    >>> part_of((slice(28, 36), slice(8, 10)), range(6, 9))
    (slice(34, 36, None), slice(8, 9, None))
    """
    pieces = []
    n_before = 0
    for piece in slices:
        start = piece.start + max(part.start - n_before, 0)
        stop = min(piece.stop, piece.start + part.stop - n_before)
        if start < stop:
            pieces.append(slice(start, stop))
        n_before += piece.stop - piece.start
    return tuple(pieces)


def first_key(position: int, window: int | None, *, has_chunks: bool) -> int:
    """The first key that the query at a position attends to.

    >>> first_key(9, 4, has_chunks=False), first_key(9, 4, has_chunks=True)
    (6, 8)
    """
    if window is None:
        return 0
    return position // window * window if has_chunks else max(position - window + 1, 0)


def relative_to(first: int, positions: range) -> range:
    """Positions counted from `first`."""
    return range(positions.start - first, positions.stop - first)


def causal_mask(
    queries: range, keys: list[range], window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask to add to the queries' scores; `keys` are the positions of the keys.

    Shapes: [len(queries), number of keys], 0 where the key is visible and -inf elsewhere.
    """
    key = torch.cat([torch.arange(part.start, part.stop, device=device) for part in keys])
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _local_keys(
    blocks: Sequence[int], block_size: int, first_key: int, positions: range
) -> tuple[list[range], list[slice]]:
    """The positions with keys on this rank, and the slots of these keys.

    `blocks` and `first_key` are as in `QueryRange`.

    >>> _local_keys([7, -2, 9, 10], 4, 0, range(2, 16))
    ([range(2, 4), range(8, 12), range(12, 16)], [slice(30, 32, None), slice(36, 44, None)])
    """
    local: list[range] = []
    slots: list[slice] = []
    start = positions.start
    while start < positions.stop:
        number, within = divmod(start - first_key, block_size)
        stop = min(start - within + block_size, positions.stop)
        slot = blocks[number] * block_size + within
        if slot >= 0:
            local.append(range(start, stop))
            if slots and slots[-1].stop == slot:
                slots[-1] = slice(slots[-1].start, slot + stop - start)
            else:
                slots.append(slice(slot, slot + stop - start))
        start = stop
    return local, slots
