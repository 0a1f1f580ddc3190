"""Queries of one sequence that follow each other, and where the keys are that they see."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryChunk:
    """Consecutive queries of one sequence, at `positions` of it, in these rows of a batch.

    A query sees itself and the keys before it; with a `window` no more than that many.

    Shapes: int64 `slots` [S], those of the keys from the first that one of the queries sees to the
    last query's. `taken` [1] is 0 whenever no kernel is at work on the chunk; there its threads
    count what they have taken of it.
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
        """From the first query's row, and the slots of the keys, in order."""
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
