"""Which queries of a step are decoded, each on its own, and where their keys are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeBatch:
    """The decode rows of a batch: each is one query, which sees keys of its own in all layers.

    Shapes: int64 `rows` [n, 4], those with the most keys first: a row's number, how many keys it
    sees, and from where to where in `slot_ranges` [m, 2] they are, each range being its first slot
    and the one after its last. `taken` [1] is 0 whenever no kernel is at work on the batch; there
    its threads count what they have taken of it.
    """

    rows: Tensor
    slot_ranges: Tensor
    max_len: int
    taken: Tensor

    @classmethod
    def of(cls, slots: Mapping[int, Sequence[slice]]) -> "DecodeBatch":
        """From the slots that each row sees, in order; each sees some, and no slice is empty."""
        rows: list[tuple[int, int, int, int]] = []
        slot_ranges: list[tuple[int, int]] = []
        for row, slices in slots.items():
            n_keys = sum(each.stop - each.start for each in slices)
            rows.append((row, n_keys, len(slot_ranges), len(slot_ranges) + len(slices)))
            slot_ranges += [(each.start, each.stop) for each in slices]
        # The longest come first, so that no thread is left with one while the others have finished.
        rows.sort(key=lambda row: row[1], reverse=True)
        return cls(
            torch.from_numpy(
                np.array(rows, dtype=np.int64)
            ),  # several times as fast as torch.tensor
            torch.from_numpy(np.array(slot_ranges, dtype=np.int64)),
            max_len=rows[0][1],
            taken=torch.zeros(1, dtype=torch.int64),
        )

    @classmethod
    def with_room(cls, n_rows: int, n_ranges: int, max_len: int) -> "DecodeBatch":
        """A batch to be filled, over and over, by others of so many rows that are no larger."""
        return cls(
            torch.zeros((n_rows, 4), dtype=torch.int64),
            torch.zeros((n_ranges, 2), dtype=torch.int64),
            max_len,
            torch.zeros(1, dtype=torch.int64),
        )

    def has_room_for(self, other: "DecodeBatch") -> bool:
        return other.max_len <= self.max_len and len(other.slot_ranges) <= len(self.slot_ranges)

    def fill(self, other: "DecodeBatch") -> None:
        """Take over the rows of another batch, and where their keys are."""
        self.rows.copy_(other.rows)
        self.slot_ranges[: len(other.slot_ranges)].copy_(other.slot_ranges)
