"""Attention reads a sequence's keys wherever its blocks lie, and nothing else."""

import pytest
import torch
from torch import Tensor

from parallel_llama.attention import Window, attend
from parallel_llama.cache import Past
from parallel_llama.plan import Run

N_SLOTS, D = 24, 4
RUNS = (Run(range(0, 3), range(0, 1)), Run(range(3, 5), range(1, 2)))  # 3 + 2 query heads
GROUP_OF = (0, 0, 0, 1, 1)


def by_definition(q: Tensor, k: Tensor, v: Tensor, slots: list[int], start: int) -> Tensor:
    """One query, one head and one key at a time."""
    result = torch.empty_like(q)
    for row in range(len(q)):
        seen = slots[: start + row + 1]
        for head, kv_head in enumerate(GROUP_OF):
            weights = (k[kv_head, seen] @ q[row, head] * D**-0.5).softmax(0)
            result[row, head] = weights @ v[kv_head, seen]
    return result.flatten(1)


@pytest.mark.parametrize("n_rows", [1, 3, 9])
@pytest.mark.parametrize("keys", [(slice(5, 14),), (slice(20, 24), slice(2, 6), slice(10, 11))])
def test_every_query_sees_its_own_past(keys: tuple[slice, ...], n_rows: int) -> None:
    """What is not its own is NaN, as memory that nobody has written may be."""
    slots = [slot for own in keys for slot in range(own.start, own.stop)]
    q = torch.randn(n_rows, 7, D, dtype=torch.float64)[:, 1:6]  # a part of a wider product
    kv = torch.full((1, 2, 2, N_SLOTS, D), torch.nan, dtype=torch.float64)
    k, v = kv[0]
    k[:, slots] = torch.randn(2, len(slots), D, dtype=torch.float64)
    v[:, slots] = torch.randn(2, len(slots), D, dtype=torch.float64)
    start = len(slots) - n_rows
    mask = None
    if start and n_rows > 1:
        hidden = torch.arange(len(slots)) > torch.arange(start, len(slots))[:, None]
        mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    pasts = tuple(Past(kv[:, :, run.kv_heads.start : run.kv_heads.stop], keys) for run in RUNS)
    o = attend(q, 0, [Window(slice(0, n_rows), pasts, mask)], RUNS)
    expected = by_definition(q, k, v, slots, start)
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
