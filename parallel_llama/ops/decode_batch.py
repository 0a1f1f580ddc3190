"""Which queries of a step are decoded, each on its own, and where their keys are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Keys of a query that are worked off together: those of a sequence's first 128 positions, of the
# next 128, and so on. Where a query sees more, threads share it. The CPU's kernel for prompts takes
# the same parts, whose scores stay in a core's first cache.
PART_KEYS = 128

# What is known of a part, as `DecodeBatch` says.
PART_FIELDS = 7

# The keys that a query sees: the position of the first, and the slots of all, in order; no slice is
# empty.
SeenKeys = tuple[int, Sequence[slice]]


@dataclass(frozen=True)
class DecodeRows:
    """A `DecodeBatch` in plain numbers; `parts` and `slot_ranges` have a tuple for each row."""

    n_rows: int
    parts: list[tuple[int, ...]]
    slot_ranges: list[tuple[int, int]]
    max_len: int

    @classmethod
    def of(cls, seen: Mapping[int, SeenKeys]) -> "DecodeRows":
        """From the keys that each row sees, of which there are some."""
        lengths = {row: sum(s.stop - s.start for s in slices) for row, (_, slices) in seen.items()}
        parts: list[tuple[int, ...]] = []
        slot_ranges: list[tuple[int, int]] = []
        # The longest come first, so that no thread is left with one while the others have finished.
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
    """The decode rows of a batch: each is one query, which sees keys of its own in all layers.

    Shapes: int64 `parts` [room, PART_FIELDS], those of a row one behind the other, and rows with
    the most keys first: a row's number, how many keys the part has, from where to where in
    `slot_ranges` [m, 2] they are, each range being its first slot and the one after its last, the
    part's number in its row, how many the row has, and how many keys the row does not see at the
    part's beginning. `n_parts` [1] is how many there are.
    `taken` [1] and `done` [room] are 0 whenever no kernel is at work on the batch; there its
    threads count what they have taken of it, and at a row's first part what is done of the row.
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
    """A batch to be filled, over and over, by other rows, as many and with no more keys."""

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
        """Take over other rows, and where their keys are."""
        self._parts[: len(rows.parts)] = rows.parts
        self._n_parts[0] = len(rows.parts)
        self._slot_ranges[: len(rows.slot_ranges)] = rows.slot_ranges


def _in_parts(slices: Sequence[slice], before: int, n_keys: int) -> list[list[tuple[int, int]]]:
    """The ranges of slots of each part; a slice may end in a later one than it begins in.

    The first part has `before` keys less than others; all parts together have `n_keys`.

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
