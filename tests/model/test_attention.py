"""Attention reads the keys of a sequence in any blocks, and no other memory."""

import pytest
import torch
from torch import Tensor

from parallel_llama.dtypes import KVFormat
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.model.attention import attend
from parallel_llama.model.batch import KVGroupBatch
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.ops import DecodeBatch, QueryChunk, Scores, TorchOps, choose_ops
from parallel_llama.plan import HeadRun, make_plan

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


def make_cache() -> KVCache:
    """Two KV heads; memory that is not written is NaN, as uninitialised memory may be."""
    args = ModelArgs(
        dim=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=D, ffn_dim=8, vocab_size=8
    )
    shard = make_plan(args, 1).shards[0]
    device = torch.device("cpu")
    cache = KVCache(args, shard, 2, N_SLOTS, 1, form=KVFormat("float64"), device=device)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


def make_batch(keys: tuple[slice, ...], n_rows: int, n_decoded: int) -> KVGroupBatch:
    """The last `n_rows` queries of a sequence: the last ones one by one, the others at once."""
    n_keys = sum(own.stop - own.start for own in keys)
    start, n_together = n_keys - n_rows, n_rows - n_decoded
    chunks = []
    if n_together:
        queries = range(start, start + n_together)
        chunks.append(QueryChunk.of(0, queries, first_slots(keys, queries.stop)))
    decoded = {row: (0, first_slots(keys, start + row + 1)) for row in range(n_together, n_rows)}
    nothing = torch.empty(0)
    return KVGroupBatch(
        slots=nothing,
        rotations=nothing,
        chunks=tuple(chunks),
        decode=DecodeBatch.of(decoded) if decoded else None,
    )


def first_slots(keys: tuple[slice, ...], n: int) -> tuple[slice, ...]:
    seen = []
    for own in keys:
        take = min(n, own.stop - own.start)
        n -= take
        if take:
            seen.append(slice(own.start, own.start + take))
    return tuple(seen)


@pytest.mark.parametrize(("n_rows", "n_decoded"), [(1, 0), (1, 1), (3, 0), (3, 1), (4, 4), (9, 2)])
@pytest.mark.parametrize("keys", [(slice(5, 14),), (slice(20, 24), slice(2, 6), slice(10, 11))])
@pytest.mark.parametrize("scores", [Scores(), Scores(scale=0.9, soft_cap=1.5)], ids=str)
def test_every_query_sees_its_own_past(
    keys: tuple[slice, ...], n_rows: int, n_decoded: int, scores: Scores
) -> None:
    slots = [slot for own in keys for slot in range(own.start, own.stop)]
    q = torch.randn(n_rows, 7, D, dtype=torch.float64)[:, 1:6]  # a part of a wider product
    cache = make_cache()
    k, v = cache.k[1], cache.v[1]
    k[:, slots] = torch.randn(2, len(slots), D, dtype=torch.float64)
    v[:, slots] = torch.randn(2, len(slots), D, dtype=torch.float64)
    expected = by_definition(q, k, v, slots, len(slots) - n_rows, scores)
    best = choose_ops(torch.float64, torch.device("cpu"), D, {2, 3}, scores)
    for ops in (TorchOps(scores), best):
        o = attend(q, 1, make_batch(keys, n_rows, n_decoded), cache, RUNS, ops)
        torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
