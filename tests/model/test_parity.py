"""The model's logits equal those of transformers and of Meta's own model, at every world size.

In float64, so that 1e-10 separates rounding (about 1e-14) from one wrong weight (about 1e-3).
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meta_oracle import fairscale_alone, meta_logits
from parity_steps import (
    load_runner,
    logits_alone_and_together,
    logits_by_cuts,
    logits_in_pieces,
    logits_of_models,
)
from thread_ranks import ThreadComm, run_on_threads
from tiny_models import META_SCALED_ROPE, TINY_MODELS, TinyModel, write_hf, write_meta
from torch import Tensor
from transformers_oracle import reference_logits, reference_logits_token_by_token, unpatched_logits

from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.parallel.collectives import Solo
from parallel_llama.request import SamplingParams
from parallel_llama.sampling.draw import SamplingRow
from parallel_llama.sampling.sampler import sample

N_TOKENS = 40
NAMES = list(TINY_MODELS)
# One of every family and kind of scaling, because each has its own code in transformers.
KINDS = {(tiny.family, tiny.rope["rope_type"]): name for name, tiny in TINY_MODELS.items()}
SCALED = [name for name in NAMES if TINY_MODELS[name].rope["rope_type"] != "default"]
BIASED = "10/2 all biases, tied"
UNEVEN = "9/3 attention bias"
DYNAMIC = "6/6 dynamic"


META_MODELS = {
    "plain": TinyModel(12, 4, 8, 96, ffn_dim=92, vocab_size=212),
    "scaled": TinyModel(
        8, 4, 16, 128, ffn_dim=100, vocab_size=204, max_seq_len=16384, rope=META_SCALED_ROPE
    ),
}


@dataclass(frozen=True)
class OnDisk:
    """A tiny model on disk, a sequence, and the sequence's logits by the reference."""

    tiny: TinyModel
    folder: Path
    tokens: list[int]
    logits: Tensor


Models = dict[str, OnDisk]


def some_tokens(n: int, vocab_size: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(n)]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = {}
    for seed, (name, tiny) in enumerate(TINY_MODELS.items()):
        folder = write_hf(tiny, tmp_path_factory.mktemp("hf"), seed)
        tokens = some_tokens(N_TOKENS, tiny.vocab_size, seed)
        made[name] = OnDisk(tiny, folder, tokens, reference_logits(folder, tokens))
    return made


@pytest.fixture(scope="module")
def meta_hf_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_hf(tiny, tmp_path_factory.mktemp("meta-hf"), seed)
        for seed, (name, tiny) in enumerate(META_MODELS.items())
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS.values() if name != DYNAMIC])
def test_the_reference_is_float64_throughout(models, name):
    """A float32 cast left in the reference would differ by 1e-7 between prefill and decode."""
    model = models[name]
    by_token = reference_logits_token_by_token(model.folder, model.tokens[:24])
    torch.testing.assert_close(by_token, model.logits[:24], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_unpatched_reference_is_not_float64(models):
    for model in models.values():
        error = (unpatched_logits(model.folder, model.tokens) - model.logits).abs().max()
        assert 1e-8 < error < 3e-5


@pytest.mark.parametrize("name", SCALED)
def test_sequence_is_long_enough_for_rope_scaling_to_matter(models, tmp_path, name):
    model = models[name]
    rope = {"rope_type": "default", "rope_theta": model.tiny.rope["rope_theta"]}
    folder = write_hf(replace(model.tiny, rope=rope), tmp_path, seed=NAMES.index(name))
    unscaled = reference_logits(folder, model.tokens)
    assert (unscaled - model.logits).abs().max() > 1e-2


def test_logits_on_one_rank_equal_transformers(models):
    for model in models.values():
        runner = load_runner(Solo(), model.folder, N_TOKENS)
        assert_same(logits_in_pieces(runner, model.tokens), model.logits)


@pytest.mark.parametrize("tp_size", [2, 3, 5, 7])
def test_logits_on_processes_equal_transformers(ranks, models, tp_size):
    fitting = [model for model in models.values() if model.tiny.n_heads >= tp_size]
    work = [(model.folder, model.tokens) for model in fitting]
    for results in ranks(tp_size).run(logits_of_models, work):
        for logits, model in zip(results, fitting, strict=True):
            assert_same(logits, model.logits)


def in_threads() -> Iterator[Any]:
    """Sizes other than 1, 2, 3, 5 and 7, which other tests cover; for 40 heads, only a few."""
    for name in NAMES:
        n_heads = TINY_MODELS[name].n_heads
        sizes = {4, 6, n_heads - 1, n_heads} if n_heads < 13 else {9, 10, 11, 20, 39, 40}
        for tp_size in sorted(sizes - {2, 3, 5, 7}):
            is_quick = name == UNEVEN
            yield pytest.param(name, tp_size, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "tp_size"), in_threads())
def test_logits_at_more_sizes_up_to_n_heads_equal_transformers(models, name, tp_size):
    model = models[name]
    work = [(model.folder, model.tokens)]
    for (logits,) in run_on_threads(tp_size, logits_of_models, work):
        assert_same(logits, model.logits)


@pytest.mark.slow
def test_logits_match_unpatched_transformers_to_float32_rounding(models):
    for model in models.values():
        runner = load_runner(Solo(), model.folder, N_TOKENS)
        expected = unpatched_logits(model.folder, model.tokens)
        actual = logits_in_pieces(runner, model.tokens)
        torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("embeddings_dim", [0, 1])
@pytest.mark.parametrize("name", META_MODELS)
@pytest.mark.parametrize("n_files", [1, 2, 4])
def test_meta_folder_gives_logits_of_hf_folder_and_metas_model(
    ranks, meta_hf_folders, tmp_path, name, n_files, embeddings_dim
):
    """Meta's model runs with a rank per file, and only with embeddings cut along dim 0."""
    tiny, hf_folder = META_MODELS[name], meta_hf_folders[name]
    tokens = some_tokens(N_TOKENS, tiny.vocab_size)
    folder = write_meta(tiny, hf_folder, tmp_path / "meta", n_files, embeddings_dim)
    expected = reference_logits(hf_folder, tokens)
    if embeddings_dim == 0:
        with fairscale_alone() if n_files == 1 else nullcontext():
            for logits in ranks(n_files).run(meta_logits, folder, tokens):
                assert_same(logits, expected)
    for tp_size in (1, 2, 3, 5):
        work = [(folder, tokens), (hf_folder, tokens)]
        for from_meta, from_hf in run_on_threads(tp_size, logits_of_models, work):
            assert torch.equal(from_meta, from_hf)
            assert_same(from_meta, expected)


def some_cuts() -> list[list[int]]:
    """Token by token, and at random places."""
    rng = random.Random(5)
    return [
        list(range(1, N_TOKENS)),
        *(sorted(rng.sample(range(1, N_TOKENS), n)) for n in (2, 12)),
    ]


@pytest.mark.parametrize(
    ("name", "tp_size"),
    [
        pytest.param(name, 1 + 2 * (at % 2), marks=pytest.mark.slow if at > 2 else ())
        for at, name in enumerate([DYNAMIC, UNEVEN, *NAMES])
    ],
)
def test_prefill_in_pieces_and_token_by_token_equals_prefill_at_once(models, name, tp_size):
    """For dynamic scaling, the base follows from the total length, not from the tokens so far."""
    model = models[name]
    results = run_on_threads(tp_size, logits_by_cuts, model.folder, model.tokens, some_cuts())
    for per_rank in results:
        for logits in per_rank:
            assert_same(logits, model.logits)


def test_decoding_on_processes_equals_transformers(ranks, models):
    model = models[UNEVEN]
    cuts = [list(range(1, N_TOKENS))]
    for (logits,) in ranks(2).run(logits_by_cuts, model.folder, model.tokens, cuts):
        assert_same(logits, model.logits)


@pytest.mark.parametrize("tp_size", [1, 2, 5])
@pytest.mark.parametrize("name", [BIASED, DYNAMIC])
def test_request_gives_same_logits_alone_and_in_batch(models, name, tp_size):
    """Prefills and decodes share forwards; dynamic scaling has one base per sequence."""
    model = models[name]
    prompts = [some_tokens(n, model.tiny.vocab_size, seed=n) for n in (9, 1, 30, 2, 17, 13)]
    expected = [reference_logits(model.folder, prompt) for prompt in prompts]
    results = run_on_threads(tp_size, logits_alone_and_together, model.folder, prompts)
    for alone, together in results:
        for one, other, reference in zip(alone, together, expected, strict=True):
            assert_same(one, reference)
            assert_same(other, reference)


def counts_of_a_greedy_step(
    comm: ThreadComm, folder: Path, tokens: Sequence[int]
) -> list[dict[str, int]]:
    runner = load_runner(comm, folder, len(tokens) + 1)
    counted = []
    n = len(tokens)
    tables = [[0]] * len(runner.kv_groups)
    for piece in (Chunk(tokens, 0, tables, n + 1), Chunk(tokens[:1], n, tables, n + 1)):
        comm.counts.clear()
        hidden = runner.forward([piece])
        counted.append(dict(comm.counts))
        comm.counts.clear()
        draw = SamplingRow(SamplingParams(), seed=0, choice=0, position=len(tokens))
        sample(runner.logits(hidden[-1:]), runner.shard.vocab, [draw], comm)
        counted.append(dict(comm.counts))
    return counted


@pytest.mark.parametrize("name", KINDS.values())
@pytest.mark.parametrize("tp_size", [3])
def test_greedy_step_makes_2_n_layers_plus_1_all_reduces_and_1_all_gather(models, name, tp_size):
    """Counted in prefill and decode; a family with parallel blocks has 1 all_reduce per layer."""
    model = models[name]
    per_layer = 1 if model.tiny.family == "falcon" else 2
    forward = {"all_reduce": per_layer * model.tiny.n_layers + 1}
    head = {"all_gather": 1}
    results = run_on_threads(tp_size, counts_of_a_greedy_step, model.folder, model.tokens)
    assert results == [[forward, head, forward, head]] * tp_size
