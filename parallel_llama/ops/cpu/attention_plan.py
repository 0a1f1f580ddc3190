"""The queries of a batch as the CPU's attention kernels read them.

`DecodeBatch` has single queries, and cuts their keys into parts for the threads; `QueryChunk` has
queries that are computed together. A recorded decode step reads its queries from the fixed
addresses of a `DecodeRoom`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from parallel_llama.ops.attention import (
    Plan,
    Queries,
    QueryChunk,
    QueryParts,
    SeenKeys,
    SinkPlan,
)
from parallel_llama.plan import MAX_QUERIES, MAX_TILE_PARTS, PART_KEYS

PART_FIELDS = 7  # columns of `DecodeBatch.parts`

Q = TypeVar("Q")

# The minimum capacity per row: keys, and ranges of slots.
_LEAST_KEYS, _LEAST_RANGES = 1024, 8


@dataclass(frozen=True)
class DecodeBatch:
    """The decode rows of a batch: single queries, each with its own keys.

    Args:
        parts: [capacity, PART_FIELDS] int64. In a `CPUPlan` they are grouped by row, rows with the
            most keys first; in a `PartTile` they are in order of their numbers. For each part: its
            row of the batch, its number of keys, where its entries in `slot_ranges` start and stop,
            its number within the row (0 in a `PartTile`), the row's number of parts (_UNMERGED in a
            `PartTile`), and the number of keys at the start of the part that the row does not
            attend to.
        n_parts: [1] int64, the number of parts in use.
        slot_ranges: [m, 2] int64, the first slot and the last + 1 of each range of keys.
        max_len: The largest number of keys of a row.
        taken: [1] int64, the number of pairs of a part and a KV head that a kernel's threads have
            taken; 0 while no kernel runs.
        done: [capacity] int64, at the index of each row's first part: how many of the row's
            results, one for each part and KV head, have been computed; 0 while no kernel runs.
    """

    parts: Tensor
    n_parts: Tensor
    slot_ranges: Tensor
    max_len: int
    taken: Tensor
    done: Tensor

    @classmethod
    def of(cls, seen: Mapping[int, SeenKeys]) -> "DecodeBatch":
        """Build a batch from the keys of each row; every row has at least one key."""
        parts, slot_ranges, max_len = _parts_of(seen)
        return cls.of_parts(parts, slot_ranges, max_len)

    @classmethod
    def of_parts(
        cls,
        parts: Sequence[tuple[int, ...]],
        slot_ranges: Sequence[tuple[int, int]],
        max_len: int = PART_KEYS,
    ) -> "DecodeBatch":
        """Build a batch from the rows of its `parts` and `slot_ranges`."""
        return cls(
            _int64(parts),
            _int64([len(parts)]),
            _int64(slot_ranges),
            max_len,
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(len(parts), dtype=torch.int64),
        )


@dataclass(frozen=True)
class CPUPlan(Plan):
    """Chunks of queries that are computed together, and the queries that are computed alone."""

    chunks: tuple[QueryChunk, ...]
    decode: DecodeBatch | None

    @classmethod
    def of(cls, queries: Queries) -> "CPUPlan":
        decoded = queries.decoded()
        return cls(tuple(queries.query_chunks()), DecodeBatch.of(decoded) if decoded else None)


# The number of parts that is stored for each row of a `PartTile`. The attention kernel never
# computes so many, so it does not merge the parts. `MergePartsKernel` merges them with the parts of
# other ranks.
_UNMERGED = 1 << 30


@dataclass(frozen=True)
class PartTile:
    """Queries and the parts of their keys, which are computed separately, perhaps on several ranks.

    Args:
        rows: [t] int64, the queries' rows of the batch.
        batch: The parts on this rank, or None if all parts are on other ranks.
        max_parts: The largest number of parts on a rank.
        order: [m] int64: for each part, by query and then by position, its index in the parts that
            are gathered from all ranks, `max_parts` from each.
        bounds: [t + 1] int64: the parts order[bounds[i] : bounds[i + 1]] belong to query i.
    """

    rows: Tensor
    batch: DecodeBatch | None
    max_parts: int
    order: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, queries: Sequence[QueryParts], rank: int = 0, n_ranks: int = 1) -> "PartTile":
        """Build the tile of some queries, on rank `rank` of `n_ranks`."""
        all_parts = [part for query in queries for part in query.parts]
        parts_of_rank: list[list[int]] = [[] for _ in range(n_ranks)]  # indices in `all_parts`
        # Parts with the same keys follow each other, so that the keys stay in the CPU's cache.
        for at in sorted(range(len(all_parts)), key=lambda at: all_parts[at].number):
            other_rank = all_parts[at].other_rank
            parts_of_rank[rank if other_rank is None else other_rank].append(at)
        max_parts, order = max(map(len, parts_of_rank)), [0] * len(all_parts)
        for owner, indices in enumerate(parts_of_rank):
            for number, at in enumerate(indices):
                order[at] = owner * max_parts + number
        parts: list[tuple[int, ...]] = []
        slot_ranges: list[tuple[int, int]] = []
        for row, _, first_key, slots, _ in (all_parts[at] for at in parts_of_rank[rank]):
            first = len(slot_ranges)
            slot_ranges += [(each.start, each.stop) for each in slots]
            size = sum(each.stop - each.start for each in slots)
            fields = row, size, first, len(slot_ranges), 0, _UNMERGED, first_key % PART_KEYS
            parts.append(fields)
        return cls(
            _int64([query.row for query in queries]),
            DecodeBatch.of_parts(parts, slot_ranges) if parts else None,
            max_parts,
            _int64(order),
            _int64([*accumulate((len(query.parts) for query in queries), initial=0)]),
        )


@dataclass(frozen=True)
class CPUSinkPlan(SinkPlan):
    """Queries in two versions: rotated back for the sinks, and unchanged for the window.

    Args:
        tile: The parts of the sinks and of the window. The row of a part is an index into the
            concatenation of the plan's rotated queries and all queries of the batch.
    """

    tile: PartTile

    @classmethod
    def of(cls, window: Queries, sinks: Queries) -> "Iterator[CPUSinkPlan]":
        """Yields plans of up to MAX_QUERIES queries."""
        for pairs in _batched(zip(window.in_parts(), sinks.in_parts(), strict=True)):
            queries = []
            for number, (window_parts, sink_parts) in enumerate(pairs):
                parts = [part._replace(row=number) for part in sink_parts.parts]
                parts += [
                    part._replace(row=len(pairs) + window_parts.row) for part in window_parts.parts
                ]
                queries.append(window_parts._replace(parts=parts))
            tile = PartTile.of(queries)
            yield cls(tile.rows, [query.position for query in queries], tile)


def part_tiles(queries: Queries, rank: int, n_ranks: int) -> Iterator[PartTile]:
    """Yields the `PartTile`s of rank `rank` of `n_ranks`; all ranks have the same tiles.

    A tile has up to MAX_QUERIES queries and, if it has several, up to MAX_TILE_PARTS parts.
    """
    tile: list[QueryParts] = []
    n_parts = 0
    for query in queries.in_parts():
        n_parts += len(query.parts)
        if tile and (len(tile) == MAX_QUERIES or n_parts > MAX_TILE_PARTS):
            yield PartTile.of(tile, rank, n_ranks)
            tile, n_parts = [], len(query.parts)
        tile.append(query)
    if tile:
        yield PartTile.of(tile, rank, n_ranks)


def _batched(queries: Iterable[Q]) -> Iterator[tuple[Q, ...]]:
    remaining = iter(queries)
    while batch := tuple(islice(remaining, MAX_QUERIES)):
        yield batch


class DecodeRoom:
    """A `CPUPlan` of decode rows at fixed addresses, which is filled again for every step.

    Args:
        queries: The queries of the first step. Later steps have as many rows, perhaps with more
            keys, for which the room has spare capacity.
    """

    def __init__(self, queries: Queries) -> None:
        seen = queries.decoded()
        _, slot_ranges, max_len = _parts_of(seen)
        n_rows, max_len = len(seen), max(_LEAST_KEYS, 2 * max_len)
        n_ranges = max(_LEAST_RANGES * n_rows, 2 * len(slot_ranges))
        n_parts = n_rows * (-(-max_len // PART_KEYS) + 1)  # a window begins and ends within parts
        self._max_len = max_len
        self._parts = np.zeros((n_parts, PART_FIELDS), dtype=np.int64)
        self._n_parts = np.zeros(1, dtype=np.int64)
        self._slot_ranges = np.zeros((n_ranges + n_parts, 2), dtype=np.int64)
        batch = DecodeBatch(
            torch.from_numpy(self._parts),
            torch.from_numpy(self._n_parts),
            torch.from_numpy(self._slot_ranges),
            max_len,
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(n_parts, dtype=torch.int64),
        )
        self.plan = CPUPlan((), batch)

    def fill(self, queries: Queries) -> bool:
        """Replace the rows. Returns: False, with no row replaced, if the keys need more room."""
        parts, slot_ranges, max_len = _parts_of(queries.decoded())
        if max_len > self._max_len or len(slot_ranges) > len(self._slot_ranges):
            return False
        self._parts[: len(parts)] = parts
        self._n_parts[0] = len(parts)
        self._slot_ranges[: len(slot_ranges)] = slot_ranges
        return True


def _parts_of(
    seen: Mapping[int, SeenKeys],
) -> tuple[list[tuple[int, ...]], list[tuple[int, int]], int]:
    """The rows of `DecodeBatch.parts` and of `DecodeBatch.slot_ranges`, and `max_len`."""
    lengths = {row: sum(s.stop - s.start for s in slices) for row, (_, slices) in seen.items()}
    parts: list[tuple[int, ...]] = []
    slot_ranges: list[tuple[int, int]] = []
    # Longest rows first, so that no thread is left alone with a long row at the end.
    for row in sorted(seen, key=lengths.__getitem__, reverse=True):
        first_key, slices = seen[row]
        in_parts = _in_parts(slices, first_key % PART_KEYS, lengths[row])
        for number, ranges in enumerate(in_parts):
            first = len(slot_ranges)
            slot_ranges += ranges
            size = sum(stop - start for start, stop in ranges)
            n_hidden = 0 if number else first_key % PART_KEYS
            parts.append((row, size, first, len(slot_ranges), number, len(in_parts), n_hidden))
    return parts, slot_ranges, max(lengths.values())


def _in_parts(slices: Sequence[slice], before: int, n_keys: int) -> list[list[tuple[int, int]]]:
    """The slot ranges of each part, from the slots of `n_keys` keys; a slice may span parts.

    The first part holds only PART_KEYS - `before` keys, every other part up to PART_KEYS.

    >>> _in_parts([slice(9, 12), slice(100, 300)], 0, 203)
    [[(9, 12), (100, 225)], [(225, 300)]]
    >>> _in_parts([slice(0, 10)], 122, 10)
    [[(0, 6)], [(6, 10)]]
    """
    parts: list[list[tuple[int, int]]] = [[] for _ in range(-(-(before + n_keys) // PART_KEYS))]
    number, room = 0, PART_KEYS - before
    for each in slices:
        start = each.start
        while start < each.stop:
            if not room:
                number, room = number + 1, PART_KEYS
            stop = min(each.stop, start + room)
            parts[number].append((start, stop))
            room -= stop - start
            start = stop
    return parts


def _int64(numbers: Sequence[object]) -> Tensor:
    # Not torch.tensor, which takes several times as long.
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
