"""A KV cache that is sharded by token gives the same logits as an unsharded cache."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from mixes import ARGS, make_runner, run_mixes
from parity_steps import BLOCK_SIZE, full_logits, load_runner
from thread_ranks import ThreadComm, run_on_threads
from tiny_models import TINY_MODELS, write_hf
from torch import Tensor
from transformers_oracle import reference_logits

from parallel_llama.dtypes import KVFormat
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import KVSplit

pytestmark = pytest.mark.slow

TOKENS = [(7 * at + 3) % 200 for at in range(90)]
# All at once in tiles of 64, piece by piece, and one by one at the end.
CUTS: list[list[int]] = [[], [7, 30, 33], list(range(75, 90))]


def spread_logits(comm: Communicator, folder: Path, cuts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits of all positions, fed in pieces that end at the cuts, on scattered blocks."""
    n_blocks = -(-len(TOKENS) // BLOCK_SIZE) + 3
    runner = load_runner(comm, folder, 1, cut={"kv_split": "sequence"})
    runner.reserve([n_blocks] * len(runner.kv_groups), BLOCK_SIZE)
    table = [(5 * number + 2) % n_blocks for number in range(n_blocks)]
    assert len(set(table)) == n_blocks
    results = []
    for own in cuts:
        hidden = [
            runner.forward(
                [Chunk(TOKENS[start:stop], start, [table] * len(runner.kv_groups), len(TOKENS))]
            )
            for start, stop in pairwise([0, *own, len(TOKENS)])
        ]
        results.append(full_logits(runner, torch.cat(hidden)))
    return results


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("7/1 llama3", (2, 3, 5, 7)),
        ("10/2 all biases, tied", (3, 4, 7, 10)),
        ("8/1 gemma", (2, 8)),
        ("8/4 gemma2", (3, 5, 8)),
    ],
)
def test_logits_equal_transformers_at_any_size(tmp_path, name, sizes):
    folder = write_hf(TINY_MODELS[name], tmp_path, seed=2)
    expected = reference_logits(folder, TOKENS)
    for tp_size in sizes:
        for logits in run_on_threads(tp_size, spread_logits, folder, CUTS):
            for each in logits:
                torch.testing.assert_close(each, expected, rtol=0, atol=1e-10)


def test_logits_of_processes_equal_transformers(ranks, tmp_path):
    folder = write_hf(TINY_MODELS["7/1 llama3"], tmp_path, seed=2)
    expected = reference_logits(folder, TOKENS)
    for tp_size in (3, 5):
        for logits in ranks(tp_size).run(spread_logits, folder, CUTS):
            for each in logits:
                torch.testing.assert_close(each, expected, rtol=0, atol=1e-10)


MQA = replace(ARGS, n_kv_heads=1)


@pytest.mark.parametrize(("tp_size", "seeds"), [(2, range(4)), (5, range(10, 13))])
def test_request_in_any_mix_matches_request_alone_on_one_rank(tp_size, seeds):
    """With preemption, prefix cache hits, chunked prefill and draft tokens."""
    assert not run_on_threads(tp_size, run_mixes, seeds, MQA, None, "sequence")[0]


def int8_logits(comm: Communicator, kv_split: KVSplit) -> Tensor:
    runner = make_runner(comm, MQA, KVFormat("int8"), kv_split)
    runner.reserve([30], BLOCK_SIZE)
    tokens = [token % MQA.vocab_size for token in TOKENS]
    hidden = [
        runner.forward([Chunk(tokens[start:stop], start, [range(30)], len(tokens))])
        for start, stop in pairwise([0, 40, *range(70, 91)])
    ]
    return full_logits(runner, torch.cat(hidden))


@pytest.mark.parametrize("tp_size", [2, 3])
def test_int8_logits_match_for_kv_sharded_by_head_and_by_token(tp_size):
    (expected, *_) = run_on_threads(tp_size, int8_logits, "heads")
    for logits in run_on_threads(tp_size, int8_logits, "sequence"):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_results_gathered_in_slices_have_the_same_bits(monkeypatch):
    """Regression: the results of all rows of a step were gathered at once."""
    whole = run_on_threads(3, int8_logits, "sequence")
    monkeypatch.setattr("parallel_llama.model.sharded_attention.MAX_GATHERED_ROWS", 7)
    for sliced, expected in zip(run_on_threads(3, int8_logits, "sequence"), whole, strict=True):
        assert torch.equal(sliced, expected)


def test_each_rank_stores_its_part_of_the_blocks_plus_one(tmp_path):
    folder = write_hf(TINY_MODELS["7/1 llama3"], tmp_path)

    def kept(comm: ThreadComm) -> int:
        runner = load_runner(comm, folder, 1, cut={"kv_split": "sequence"})
        runner.reserve([100], 16)
        return runner.caches[0].n_blocks

    assert run_on_threads(3, kept) == [34 + 1] * 3


def counts_of_a_step(comm: ThreadComm, folder: Path) -> dict[str, int]:
    spread_logits(comm, folder, [])
    runner = load_runner(comm, folder, 4, cut={"kv_split": "sequence"})
    comm.counts.clear()
    runner.forward([Chunk(TOKENS[:3], 0, [[0]], 3)])
    return dict(comm.counts)


def test_sequence_sharding_adds_two_all_gathers_per_layer(tmp_path):
    tiny = TINY_MODELS["7/1 llama3"]
    folder = write_hf(tiny, tmp_path)
    expected = {"all_reduce": 2 * tiny.n_layers + 1, "all_gather": 2 * tiny.n_layers}
    assert run_on_threads(3, counts_of_a_step, folder) == [expected] * 3
