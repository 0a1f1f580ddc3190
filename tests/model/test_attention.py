"""Attention reads the keys of a sequence in any blocks, and no other memory."""

import pytest
import torch
from torch import Tensor

from parallel_llama.model.sharded_attention import merge_lse
from parallel_llama.ops import HeadMap, Queries, QueryRange, Scores, TorchOps, choose_ops
from parallel_llama.plan import HeadRun

N_SLOTS, D = 24, 4
RUNS = (HeadRun(range(0, 3), range(0, 1)), HeadRun(range(3, 5), range(1, 2)))  # 3 + 2 query heads
GROUP_OF = (0, 0, 0, 1, 1)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, slots: list[int], start: int, scores: Scores
) -> Tensor:
    """One query, one head and one key at a time."""
    result = torch.empty_like(q)
    for row in range(len(q)):
        seen = slots[: start + row + 1]
        for head, kv_head in enumerate(GROUP_OF):
            products = k[kv_head, seen] @ q[row, head] * (scores.scale or D**-0.5)
            if (cap := scores.soft_cap) is not None:
                products = cap * (products / cap).tanh()
            result[row, head] = products.softmax(0) @ v[kv_head, seen]
    return result.flatten(1)


def make_queries(slots: list[int], n_rows: int, n_decoded: int) -> Queries:
    """The last `n_rows` queries of a sequence, the last `n_decoded` of these one by one."""
    start, n_together = len(slots) - n_rows, n_rows - n_decoded
    ends = range(start, start + n_together), range(start + n_together, len(slots))
    ranges = (
        QueryRange(positions.start - start, positions, 0, slots[: positions.stop], is_decoded)
        for positions, is_decoded in zip(ends, (False, True), strict=True)
    )
    return Queries([own for own in ranges if own.positions], 1)


@pytest.mark.parametrize(("n_rows", "n_decoded"), [(1, 0), (1, 1), (3, 0), (3, 1), (4, 4), (9, 2)])
@pytest.mark.parametrize("keys", [(slice(5, 14),), (slice(20, 24), slice(2, 6), slice(10, 11))])
@pytest.mark.parametrize("scores", [Scores(), Scores(scale=0.9, soft_cap=1.5)], ids=str)
def test_query_attends_to_itself_and_earlier_keys(keys, n_rows, n_decoded, scores):
    slots = [slot for own in keys for slot in range(own.start, own.stop)]
    q = torch.randn(n_rows, 7, D, dtype=torch.float64)[:, 1:6]  # a part of a wider product
    # Memory that is not written is NaN, as uninitialised memory may be.
    k, v = torch.full((2, 2, N_SLOTS, D), torch.nan, dtype=torch.float64)
    k[:, slots] = torch.randn(2, len(slots), D, dtype=torch.float64)
    v[:, slots] = torch.randn(2, len(slots), D, dtype=torch.float64)
    expected = by_definition(q, k, v, slots, len(slots) - n_rows, scores)
    device = torch.device("cpu")
    best = choose_ops(torch.float64, device, D, {2, 3}, scores)
    for ops in (TorchOps(scores), best):
        plan = ops.plan(make_queries(slots, n_rows, n_decoded), device)
        o = q.new_empty(q.shape)
        ops.attention(q, k, v, plan, HeadMap.of(RUNS, device), o)
        torch.testing.assert_close(o.flatten(1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_decoded", [False, True])
def test_merged_partial_attention_equals_full_attention(
    window: int | None, is_decoded: bool
) -> None:
    """Each rank has every second block, and -1 instead of the other blocks."""
    blocks, positions, device = [3, 5, 0, 1, 4], range(3, 10), torch.device("cpu")
    q = torch.randn(len(positions), 5, D, dtype=torch.float64)
    k, v = torch.randn(2, 2, N_SLOTS, D, dtype=torch.float64)
    ops, heads = TorchOps(), HeadMap.of(RUNS, device)
    whole = Queries([QueryRange(0, positions, 0, blocks, is_decoded)], 2, window)
    expected = torch.empty_like(q)
    ops.attention(q, k, v, ops.plan(whole, device), heads, expected)
    found = torch.zeros(2, *q.shape[:2], D + 1, dtype=q.dtype)
    found[..., -1] = -torch.inf
    for rank, part in enumerate(found):
        own = [block if number % 2 == rank else -1 for number, block in enumerate(blocks)]
        queries = Queries([QueryRange(0, positions, 0, own, is_decoded)], 2, window)
        for tile in queries.tiles(q.dtype, device):
            for own_heads, kv in heads.runs:
                at = tile.rows, own_heads
                part[at][..., :-1], part[at][..., -1] = ops.partial_attention(
                    q[at], k[kv], v[kv], tile
                )
    torch.testing.assert_close(merge_lse(found), expected, rtol=0, atol=1e-12)
