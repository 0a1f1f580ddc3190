"""Which queries a step has, and where the keys are that each of them sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from parallel_llama.plan import Run

NO_WINDOW = 2**31 - 1  # one that nothing falls out of


@dataclass(frozen=True)
class PagedQueries:
    """Consecutive queries of some sequences, and the blocks in which their keys are.

    A query sees itself and the keys before it; with a `window` no more than that many. A range of
    no queries is there to fill a batch up: nothing is read or written for it.

    Shapes: int32 `rows` [n, 5], of each range its first row of the batch, how many queries it has
    (`max_queries` at most), the position of the first of them, the position of the first key in its
    blocks (where a block begins, and no later than what its first query sees), and where in
    `blocks` [m] its blocks begin; both on the model's device.
    """

    rows: Tensor
    blocks: Tensor
    block_size: int
    max_queries: int
    window: int | None = None

    def slots_of(self, blocks: int, positions: range) -> Tensor:
        """Where such positions lie, counted from the first key of the blocks from this one on."""
        at = torch.arange(positions.start, positions.stop, device=self.blocks.device)
        numbers = self.blocks[blocks + at // self.block_size].to(torch.int64)
        return numbers * self.block_size + at % self.block_size


@dataclass(frozen=True)
class HeadMap:
    """Which query heads of a rank see which of its KV heads.

    Shapes: int32 `bounds` [K + 1], on the model's device: query heads bounds[i] to bounds[i + 1]
    see KV head i. `widest` is the largest number of heads that see the same one.
    """

    bounds: Tensor
    widest: int

    @classmethod
    def of(cls, runs: Sequence[Run], device: torch.device) -> "HeadMap":
        """Those of a plan's share: a rank with 5 query heads over 2 KV heads may have 3 and 2."""
        sizes = [len(run.heads) // len(run.kv_heads) for run in runs for _ in run.kv_heads]
        bounds = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
        return cls(bounds, max(sizes))
