"""The queries of a batch as the CPU's attention kernels read them.

`DecodeBatch` has single queries, whose keys are cut into parts that threads share; `QueryChunk` has
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
    MAX_QUERIES,
    Plan,
    Queries,
    QueryChunk,
    QueryParts,
    SeenKeys,
    SinkPlan,
)
from parallel_llama.plan import PART_KEYS

# Columns of `DecodeBatch.parts`.
PART_FIELDS = 7

Q = TypeVar("Q")

# The minimum capacity per row: keys, and ranges of slots.
_LEAST_KEYS, _LEAST_RANGES = 1024, 8


@dataclass(frozen=True)
class DecodeBatch:
    """The decode rows of a batch: single queries, each with keys of its own.

    Args:
        parts: [room, PART_FIELDS] int64, grouped by row, rows with the most keys first. For each
            part: its row of the batch, its number of keys, the first and the last + 1 of its
            entries in `slot_ranges`, its number within the row, the row's number of parts, and how
            many keys at the beginning of the part the row does not attend to.
        n_parts: [1] int64, the number of parts in use.
        slot_ranges: [m, 2] int64, the first slot and the last + 1 of each range of keys.
        max_len: The largest number of keys of a row.
        taken: [1] int64, the number of pairs of a part and a KV head that a kernel's threads have
            taken; 0 while no kernel runs.
        done: [room] int64, at each row's first part: how many of the row's results, one for each
            part and KV head, have been computed; 0 while no kernel runs.
    """

    parts: Tensor
    n_parts: Tensor
    slot_ranges: Tensor
    max_len: int
    taken: Tensor
    done: Tensor

    @classmethod
    def of(cls, seen: Mapping[int, SeenKeys]) -> "DecodeBatch":
        """Build it from the keys of each row; every row has at least one key."""
        parts, slot_ranges, max_len = _parts_of(seen)
        return cls.of_parts(parts, slot_ranges, max_len)

    @classmethod
    def of_parts(
        cls,
        parts: Sequence[tuple[int, ...]],
        slot_ranges: Sequence[tuple[int, int]],
        max_len: int = PART_KEYS,
    ) -> "DecodeBatch":
        """Build it from its rows of `parts` and `slot_ranges`."""
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
        return cls(tuple(queries.chunks()), DecodeBatch.of(decoded) if decoded else None)


# Stands for a row's number of parts where the attention kernel must not merge them:
# `MergePartsKernel` merges them later, with parts of other rows or other ranks.
_UNMERGED = 1 << 30


@dataclass(frozen=True)
class PartTile:
    """Queries and the parts of their keys. Parts are computed separately, perhaps on several ranks.

    Args:
        rows: [t] int64, the queries' rows of the batch.
        batch: The parts on this rank, or None if all parts are on other ranks.
        n_most: The largest number of parts on a rank.
        order: [m] int64, the parts by query and position, as indices of the parts of all ranks,
            which have `n_most` parts each.
        bounds: [t + 1] int64: the parts bounds[i] to bounds[i + 1] of `order` belong to query i.
    """

    rows: Tensor
    batch: DecodeBatch | None
    n_most: int
    order: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, queries: Sequence[QueryParts], rank: int = 0, n_ranks: int = 1) -> "PartTile":
        """Build it from some queries, on rank `rank`; a part without slots is on another rank."""
        every = [part for query in queries for part in query.parts]
        held: list[list[int]] = [[] for _ in range(n_ranks)]  # indices in `every`
        # Queries that read the same keys follow each other, so that the keys stay in the cache.
        for at in sorted(range(len(every)), key=lambda at: every[at].number):
            other = every[at].other
            held[rank if other is None else other].append(at)
        n_most, order = max(map(len, held)), [0] * len(every)
        for owner, own in enumerate(held):
            for number, at in enumerate(own):
                order[at] = owner * n_most + number
        parts: list[tuple[int, ...]] = []
        slot_ranges: list[tuple[int, int]] = []
        for row, _, first_key, slots, _ in (every[at] for at in held[rank]):
            first = len(slot_ranges)
            slot_ranges += [(each.start, each.stop) for each in slots]
            size = sum(each.stop - each.start for each in slots)
            fields = row, size, first, len(slot_ranges), 0, _UNMERGED, first_key % PART_KEYS
            parts.append(fields)
        return cls(
            _int64([query.row for query in queries]),
            DecodeBatch.of_parts(parts, slot_ranges) if parts else None,
            n_most,
            _int64(order),
            _int64([*accumulate((len(query.parts) for query in queries), initial=0)]),
        )


@dataclass(frozen=True)
class CPUSinkPlan(SinkPlan):
    """The queries in two versions: rotated back for the sinks, and as they are for the window.

    `tile` has the parts of the sinks and of the window. Their row numbers count the plan's rotated
    queries first, and then the rows of the batch.
    """

    tile: PartTile

    @classmethod
    def of(cls, window: Queries, sinks: Queries) -> "Iterator[CPUSinkPlan]":
        """Yields plans of up to MAX_QUERIES queries."""
        for both in _batched(zip(window.in_parts(), sinks.in_parts(), strict=True)):
            queries = []
            for number, (near, far) in enumerate(both):
                parts = [part._replace(row=number) for part in far.parts]
                parts += [part._replace(row=len(both) + near.row) for part in near.parts]
                queries.append(near._replace(parts=parts))
            tile = PartTile.of(queries)
            yield cls(tile.rows, [query.position for query in queries], tile)


def part_tiles(queries: Queries, rank: int, n_ranks: int) -> Iterator[PartTile]:
    """Yields tiles of up to MAX_QUERIES queries, on a rank as in `PartTile.of`."""
    for own in _batched(queries.in_parts()):
        yield PartTile.of(own, rank, n_ranks)


def _batched(queries: Iterable[Q]) -> Iterator[tuple[Q, ...]]:
    remaining = iter(queries)
    while batch := tuple(islice(remaining, MAX_QUERIES)):
        yield batch


class DecodeRoom:
    """A `CPUPlan` of decode rows at fixed addresses, which is filled anew for every step.

    Args:
        queries: The queries of the first step. Later steps have as many rows, perhaps more keys.
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
        """Replace the rows. Returns: False if there is no room for these keys."""
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
    """The rows of `DecodeBatch.parts` and of `slot_ranges`, and `max_len`."""
    lengths = {row: sum(s.stop - s.start for s in slices) for row, (_, slices) in seen.items()}
    parts: list[tuple[int, ...]] = []
    slot_ranges: list[tuple[int, int]] = []
    # Longest rows first, so that no thread is left alone with a long row at the end.
    for row in sorted(seen, key=lengths.__getitem__, reverse=True):
        at, slices = seen[row]
        in_parts = _in_parts(slices, at % PART_KEYS, lengths[row])
        for number, ranges in enumerate(in_parts):
            first = len(slot_ranges)
            slot_ranges += ranges
            size = sum(stop - start for start, stop in ranges)
            before = 0 if number else at % PART_KEYS
            parts.append((row, size, first, len(slot_ranges), number, len(in_parts), before))
    return parts, slot_ranges, max(lengths.values())


def _in_parts(slices: Sequence[slice], before: int, n_keys: int) -> list[list[tuple[int, int]]]:
    """The slot ranges of each part; a slice may span several parts.

    The first part has room for only PART_KEYS - `before` keys; all parts together have `n_keys`.

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
    # Several times as fast as torch.tensor.
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
