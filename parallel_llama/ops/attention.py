"""The inputs of the attention operators: queries, the slots of their keys, and the score function.

A query attends to itself and to the keys before it in its sequence; with a sliding window, to the
last `window` keys alone. Three records describe the queries of a step: `PagedQueries` for operators
that read block tables, `QueryChunk` (prefill) and `DecodeBatch` (decode) for those that read slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from parallel_llama.plan import HeadRun

NO_WINDOW = 2**31 - 1  # a window that is longer than any sequence

# Keys per part of a query: its sequence's positions 0 to 127, 128 to 255, and so on. Threads share
# the parts of a long query. The CPU's prefill kernel uses the same parts, so that the scores of one
# fit in the L1 cache.
PART_KEYS = 128

# Columns of `DecodeBatch.parts`.
PART_FIELDS = 7

# The keys that a query attends to: the position of the first, and the slots of all in order, as
# slices that are not empty.
SeenKeys = tuple[int, Sequence[slice]]


@dataclass(frozen=True)
class Scores:
    """The attention score of a query and a key: scale q k, or c tanh(scale q k / c).

    Args:
        scale: The factor on q k; None for 1 / sqrt(head_dim).
        soft_cap: The bound c of the scores; None for unbounded scores.

    Source: soft cap, Gemma 2, arXiv 2408.00118, section 2.
    """

    scale: float | None = None
    soft_cap: float | None = None

    def scale_of(self, head_dim: int) -> float:
        """The scale for heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def factor_of(self, head_dim: int) -> float:
        """The factor on queries: the scale, divided by the soft cap if there is one."""
        return self.scale_of(head_dim) / (self.soft_cap or 1)


PLAIN = Scores()  # as in Llama


@dataclass(frozen=True)
class HeadMap:
    """Which query heads of a rank share which of its KV heads.

    Args:
        bounds: [K + 1] int32, on the model's device. Query heads bounds[i] to bounds[i + 1] share
            KV head i.
        widest: The largest number of query heads that share a KV head.
    """

    bounds: Tensor
    widest: int

    @classmethod
    def of(cls, runs: Sequence[HeadRun], device: torch.device) -> "HeadMap":
        """The map of a rank's shard: 5 query heads on 2 KV heads may be split into 3 and 2."""
        sizes = [len(run.heads) // len(run.kv_heads) for run in runs for _ in run.kv_heads]
        bounds = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
        return cls(bounds, max(sizes))


@dataclass(frozen=True)
class PagedQueries:
    """Ranges of consecutive queries, one range per sequence, and the block tables of their keys.

    A range without queries pads the batch: nothing is read or written for it.

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

    def slots_of(self, blocks: int, positions: range) -> Tensor:
        """The slots of positions that count from the first key of block number `blocks`."""
        at = torch.arange(positions.start, positions.stop, device=self.blocks.device)
        numbers = self.blocks[blocks + at // self.block_size].to(torch.int64)
        return numbers * self.block_size + at % self.block_size


@dataclass(frozen=True)
class QueryChunk:
    """Consecutive queries of one sequence, and the slots of the keys that they attend to.

    Args:
        rows: The queries' rows of the batch.
        positions: The queries' positions in the sequence.
        slots: [S] int64, the slots of the keys, from the first key that a query attends to up to
            the last query's own.
        taken: [1] int64, the number of work items that a kernel's threads have taken; 0 while no
            kernel runs.
        window: The sliding window, or None.
    """

    rows: slice
    positions: range
    slots: Tensor
    taken: Tensor
    window: int | None = None

    @classmethod
    def of(
        cls,
        row: int,
        positions: range,
        slots: Sequence[slice],
        window: int | None = None,
        device: torch.device | None = None,
    ) -> "QueryChunk":
        """Build a chunk from its first row and the slots of its keys, in order."""
        each = np.concatenate([np.arange(own.start, own.stop, dtype=np.int64) for own in slots])
        return cls(
            slice(row, row + len(positions)),
            positions,
            torch.from_numpy(each).to(device=device),
            torch.zeros(1, dtype=torch.int64),
            window,
        )

    @property
    def first_key(self) -> int:
        """The position of the first key."""
        return self.positions.stop - len(self.slots)


@dataclass(frozen=True)
class DecodeRows:
    """A `DecodeBatch` in plain numbers: one tuple per row of `parts` and of `slot_ranges`."""

    n_rows: int
    parts: list[tuple[int, ...]]
    slot_ranges: list[tuple[int, int]]
    max_len: int

    @classmethod
    def of(cls, seen: Mapping[int, SeenKeys]) -> "DecodeRows":
        """Build it from the keys of each row; every row has at least one key."""
        lengths = {row: sum(s.stop - s.start for s in slices) for row, (_, slices) in seen.items()}
        parts: list[tuple[int, ...]] = []
        slot_ranges: list[tuple[int, int]] = []
        # Longest rows first, so that no thread works on one alone at the end.
        for row in sorted(seen, key=lengths.__getitem__, reverse=True):
            at, slices = seen[row]
            in_parts = _in_parts(slices, at % PART_KEYS, lengths[row])
            for number, ranges in enumerate(in_parts):
                first = len(slot_ranges)
                slot_ranges += ranges
                size = sum(stop - start for start, stop in ranges)
                before = 0 if number else at % PART_KEYS
                parts.append((row, size, first, len(slot_ranges), number, len(in_parts), before))
        return cls(len(seen), parts, slot_ranges, max(lengths.values()))


@dataclass(frozen=True)
class DecodeBatch:
    """The decode rows of a batch: single queries, each with keys of its own.

    Args:
        n_rows: The number of rows.
        parts: [room, PART_FIELDS] int64, grouped by row, rows with the most keys first. For each
            part: its row of the batch, its number of keys, the first and the last + 1 of its
            entries in `slot_ranges`, its number within the row, the row's number of parts, and how
            many keys at the beginning of the part the row does not attend to.
        n_parts: [1] int64, the number of parts in use.
        slot_ranges: [m, 2] int64, the first slot and the last + 1 of each range of keys.
        max_len: The largest number of keys of a row.
        taken: [1] int64, the number of parts that a kernel's threads have taken; 0 while no kernel
            runs.
        done: [room] int64, at each row's first part the number of its parts that are done; 0 while
            no kernel runs.
    """

    n_rows: int
    parts: Tensor
    n_parts: Tensor
    slot_ranges: Tensor
    max_len: int
    taken: Tensor
    done: Tensor

    @classmethod
    def of(cls, seen: Mapping[int, SeenKeys]) -> "DecodeBatch":
        """As `DecodeRows.of`."""
        rows = DecodeRows.of(seen)
        return cls(
            rows.n_rows,
            _int64(rows.parts),
            _int64([len(rows.parts)]),
            _int64(rows.slot_ranges),
            rows.max_len,
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(len(rows.parts), dtype=torch.int64),
        )


class DecodeRoom:
    """A `DecodeBatch` at fixed addresses, which is filled anew for every step.

    Args:
        n_rows: The number of rows of every step.
        n_ranges: The number of slot ranges to allocate, beside one per part.
        max_len: The largest number of keys of a row.
    """

    def __init__(self, n_rows: int, n_ranges: int, max_len: int) -> None:
        n_parts = n_rows * (-(-max_len // PART_KEYS) + 1)  # a window begins and ends within parts
        self._parts = np.zeros((n_parts, PART_FIELDS), dtype=np.int64)
        self._n_parts = np.zeros(1, dtype=np.int64)
        self._slot_ranges = np.zeros((n_ranges + n_parts, 2), dtype=np.int64)
        self.batch = DecodeBatch(
            n_rows,
            torch.from_numpy(self._parts),
            torch.from_numpy(self._n_parts),
            torch.from_numpy(self._slot_ranges),
            max_len,
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(n_parts, dtype=torch.int64),
        )

    def has_room_for(self, rows: DecodeRows) -> bool:
        has_keys = rows.max_len <= self.batch.max_len
        return has_keys and len(rows.slot_ranges) <= len(self._slot_ranges)

    def fill(self, rows: DecodeRows) -> None:
        """Replace the batch's rows."""
        self._parts[: len(rows.parts)] = rows.parts
        self._n_parts[0] = len(rows.parts)
        self._slot_ranges[: len(rows.slot_ranges)] = rows.slot_ranges


def _in_parts(slices: Sequence[slice], before: int, n_keys: int) -> list[list[tuple[int, int]]]:
    """The slot ranges of each part; a slice may span several parts.

    The first part has `before` keys fewer than PART_KEYS; all parts together have `n_keys`.

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
