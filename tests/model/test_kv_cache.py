"""A token's keys and values are stored in its own slot, which the block table gives."""

from itertools import combinations, combinations_with_replacement

import pytest
import torch

from parallel_llama.dtypes import KV_DTYPES, kv_format
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.memory import kv_bytes_per_token
from parallel_llama.model.kv_cache import KVCache
from parallel_llama.ops.attention import part_of, slices_of, slots_of
from parallel_llama.plan import make_plan

ARGS = ModelArgs(dim=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2, ffn_dim=8, vocab_size=8)
TABLE = [7, 8, 2, 5, 6]  # three runs of consecutive blocks


@pytest.mark.parametrize("name", KV_DTYPES)
@pytest.mark.parametrize("tp_size", [1, 3])
def test_cache_size_matches_planned_bytes(name, tp_size):
    form = kv_format(name, "float32")
    for shard in make_plan(ARGS, tp_size).shards:
        cache = KVCache(ARGS, shard, 2, 10, 4, form=form, device=torch.device("cpu"))
        (per_token,) = kv_bytes_per_token(ARGS, shard, form)
        assert cache.k.nbytes + cache.v.nbytes == 10 * 4 * per_token


def test_block_table_maps_positions_to_slots():
    assert slots_of(TABLE, 4, range(7, 10)) == [35, 8, 9]


def test_slices_hold_the_slots_of_all_positions_in_order():
    for start, stop in combinations(range(21), 2):
        positions = range(start, stop)
        slices = slices_of(TABLE, 4, positions)
        assert slots_in(slices) == slots_of(TABLE, 4, positions)


def test_part_of_slices_selects_the_same_part_of_their_slots():
    slices = slices_of(TABLE, 4, range(1, 19))
    for start, stop in combinations_with_replacement(range(19), 2):
        assert slots_in(part_of(slices, range(start, stop))) == slots_in(slices)[start:stop]


def slots_in(slices: tuple[slice, ...]) -> list[int]:
    assert all(own.start < own.stop for own in slices)
    return [slot for own in slices for slot in range(own.start, own.stop)]


def test_consecutive_blocks_are_one_slice():
    assert slices_of(TABLE, 4, range(8)) == (slice(28, 36),)
    assert len(slices_of(TABLE, 4, range(20))) == 3
    assert slices_of([3, 3], 4, range(8)) == (slice(12, 16), slice(12, 16))
