"""Paged attention on torch's operators: queries read their own keys, in any blocks."""

import pytest
import torch
from paged_samples import POISON, make_sample, runs_of

from parallel_llama.ops import HeadMap, Scores, TorchOps
from parallel_llama.plan import HeadRun

DECODED = ((1, 0), (1, 3), (0, 5), (1, 4), (1, 23))
CHUNKS = ((5, 0), (1, 9), (3, 6), (0, 0), (9, 14))
SCORES = [Scores(), Scores(scale=0.7), Scores(scale=0.7, soft_cap=2.0)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("ranges", [DECODED, CHUNKS], ids=["decoded", "chunks"])
@pytest.mark.parametrize("heads_per_kv", [(1,), (2, 2), (3, 2), (1, 3, 3, 2), (7,)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 6, 40])
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_query_attends_to_window_of_its_own_sequence(
    ranges: tuple[tuple[int, int], ...],
    heads_per_kv: tuple[int, ...],
    window: int | None,
    scores: Scores,
) -> None:
    sample = make_sample(ranges, heads_per_kv, 6, dtype=torch.float64, window=window)
    torch.testing.assert_close(
        sample.run(TorchOps(scores)), sample.expected(scores), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_blocks_may_have_any_size(block_size: int) -> None:
    sample = make_sample(CHUNKS, (3, 2), 8, dtype=torch.float64, window=7, block_size=block_size)
    torch.testing.assert_close(sample.run(TorchOps()), sample.expected(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_attention_reads_8_bit_kv_cache(cache_dtype: torch.dtype) -> None:
    sample = make_sample(CHUNKS, (3, 2), 8, dtype=torch.float64, cache_dtype=cache_dtype)
    torch.testing.assert_close(sample.run(TorchOps()), sample.expected(), rtol=0, atol=1e-10)


def test_padding_only_batch_writes_no_output() -> None:
    sample = make_sample(((0, 0), (0, 3)), (2,), 4, dtype=torch.float64)
    assert sample.queries.blocks.numel() == 0
    assert (sample.run(TorchOps()) == POISON).all()


def test_head_map_gives_query_head_bounds_per_kv_head() -> None:
    device = torch.device("cpu")
    uneven = HeadMap.of(
        (HeadRun(range(0, 3), range(0, 1)), HeadRun(range(3, 5), range(1, 2))), device
    )
    assert (uneven.bounds.tolist(), uneven.max_heads_per_kv) == ([0, 3, 5], 3)
    even = HeadMap.of((HeadRun(range(0, 8), range(0, 4)),), device)
    assert (even.bounds.tolist(), even.max_heads_per_kv) == ([0, 2, 4, 6, 8], 2)
    assert HeadMap.of(runs_of((1, 3, 3, 2)), device).bounds.dtype == torch.int32
