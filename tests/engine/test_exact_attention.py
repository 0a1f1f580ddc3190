"""The bits of attention to sinks, and over a KV cache that is sharded by token.

Sequences are longer than two parts of a softmax, so that parts are merged.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from mixes import ARGS, make_runner
from parity_steps import full_logits
from thread_ranks import ThreadComm, run_on_threads
from torch import Tensor

from parallel_llama.dtypes import KVFormat
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.ops import Queries, QueryRange, part_tiles
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import PART_KEYS, KVSplit

TOKENS = [(7 * at + 3) % ARGS.vocab_size for at in range(300)]
# All at once; in pieces; and one by one over the ends of a part and of the sequence.
CUTS: list[list[int]] = [
    [],
    sorted(random.Random(2).sample(range(1, 300), 4)),
    [*range(126, 131), *range(296, 300)],
]
SINKS = {
    "few": replace(ARGS, sliding_window=140, attention_sinks=3),
    "two parts": replace(ARGS, sliding_window=20, attention_sinks=150, n_kv_heads=1),
    "soft cap": replace(ARGS, sliding_window=33, attention_sinks=9, attention_soft_cap=5.0),
}
# 9 query heads on 1 and 3 KV heads; a window that begins and ends within parts.
SHARDED = {
    "one KV head": replace(ARGS, n_kv_heads=1),
    "three KV heads": ARGS,
    "window": replace(ARGS, n_kv_heads=1, sliding_window=200),
}


def hidden_of(
    comm: Communicator,
    args: ModelArgs,
    kv_split: KVSplit,
    form: KVFormat | None,
    companions: Sequence[int] = (),
) -> list[Tensor]:
    """Logits of all positions for each of CUTS, on scattered blocks and beside other sequences."""
    runner = make_runner(comm, args, form, kv_split, exact=True)
    table = [4, 9, 2]
    others = [[5 + 2 * number] for number in range(len(companions))]
    runner.reserve([20], PART_KEYS)
    results = []
    for cuts in CUTS:
        hidden = []
        for start, stop in pairwise([0, *cuts, len(TOKENS)]):
            chunks = [Chunk(TOKENS[start:stop], start, [table], len(TOKENS))]
            for n, blocks in zip(companions, others, strict=True):
                chunks.insert(0, Chunk(TOKENS[:n], 0, [blocks], n))
            hidden.append(runner.forward(chunks)[-(stop - start) :])
        results.append(full_logits(runner, torch.cat(hidden)))
    return results


def require_same_bits(
    args: ModelArgs, kv_split: KVSplit, sizes: Sequence[int], form: KVFormat | None = None
) -> None:
    expected, *others = hidden_of(Solo(), args, kv_split, form)
    assert all(torch.equal(expected, other) for other in others)
    for tp_size in sizes:
        for on_rank in run_on_threads(tp_size, hidden_of, args, kv_split, form, (1, 40)):
            assert all(torch.equal(expected, other) for other in on_rank), tp_size


@pytest.mark.parametrize("name", SINKS)
def test_sinks_have_the_same_bits_on_any_number_of_ranks(name):
    """Covers several chunkings and batches; query heads per KV head differ between the ranks."""
    require_same_bits(SINKS[name], "heads", (2, 5, 7))


def test_sinks_in_an_int8_cache_have_the_same_bits():
    require_same_bits(SINKS["few"], "heads", (3,), KVFormat("int8"))


@pytest.mark.parametrize("name", SHARDED)
def test_a_cache_sharded_by_token_has_the_bits_of_one_rank(name):
    """One rank has the whole cache, and uses the kernels for whole sequences."""
    require_same_bits(SHARDED[name], "sequence", (2, 5, 7))


def test_an_int8_cache_sharded_by_token_has_the_bits_of_one_rank():
    require_same_bits(SHARDED["one KV head"], "sequence", (3,), KVFormat("int8"))


def test_tiles_with_fewer_parts_have_the_same_bits(monkeypatch):
    """Regression: ranks gathered the results of 64 queries of any length at once."""
    monkeypatch.setattr("parallel_llama.ops.cpu.attention_plan.MAX_TILE_PARTS", 7)
    queries = Queries([QueryRange(0, range(253, 263), 0, [4, 9, 2], False)], PART_KEYS)
    # The first three queries have 2 parts, the others 3.
    rows = [tile.rows.tolist() for tile in part_tiles(queries, 0, 1)]
    assert rows == [[0, 1, 2], [3, 4], [5, 6], [7, 8], [9]]
    require_same_bits(SHARDED["window"], "sequence", (3,))


def n_gathered(comm: ThreadComm, kv_split: KVSplit) -> int:
    runner = make_runner(comm, SHARDED["one KV head"], None, kv_split, exact=True)
    runner.reserve([20], PART_KEYS)
    comm.counts.clear()
    runner.forward([Chunk(TOKENS[:1], at, [[1, 2, 3]], 299) for at in (3, 200, 270)])
    return comm.counts["all_gather"]


def test_cache_sharded_by_token_adds_two_all_gathers_per_layer():
    whole, sharded = (run_on_threads(3, n_gathered, split)[0] for split in get_args(KVSplit))
    assert sharded - whole == 2 * ARGS.n_layers
