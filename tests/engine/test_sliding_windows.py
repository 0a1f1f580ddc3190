"""A sequence far longer than its window, in blocks that are reused.

The reference is transformers over the whole sequence, with the window as a mask; the engine keeps
no more than the window and one step.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixes import WINDOWED, make_runner
from parity_steps import load_runner
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from torch import Tensor
from transformers_oracle import reference_logits, reference_logits_token_by_token

from parallel_llama.engine.engine import Engine
from parallel_llama.engine.kv_capacity import Capacity
from parallel_llama.engine.recorded_steps import Logits
from parallel_llama.memory import blocks_held
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.request import Request, SamplingParams
from parallel_llama.sampling.scoring import gather_logits

pytestmark = pytest.mark.slow

WINDOW, BLOCK_SIZE, STEP_TOKENS = 16, 4, 12
MODELS = {
    "all layers": TinyModel(6, 2, 8, 48, family="mistral", own={"sliding_window": WINDOW}),
    "some layers": TinyModel(
        6,
        2,
        8,
        48,
        tied=True,
        n_layers=6,
        family="gemma3_text",
        own={"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    ),
}
# The first two share a beginning, and the first is five windows long. The third repeats itself.
BEGINNING = [7 * i % 211 for i in range(2 * WINDOW)]
PROMPTS = (
    [*BEGINNING, *(11 * i % 211 for i in range(3 * WINDOW))],
    [*BEGINNING, 5],
    [1, 2, 3, 4] * 5,
)
N_NEW = 3 * WINDOW


def is_hybrid(folder: Path) -> bool:
    return "full_attention" in (folder / "config.json").read_text()


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(MODELS[request.param], tmp_path_factory.mktemp("windows"))


class Recorded:
    """An engine's requests and, for each, the logits from which every token was drawn."""

    def __init__(self, comm: Communicator, folder: Path, n_blocks: int, max_drafts: int) -> None:
        runner = load_runner(comm, folder, 1)
        windows = tuple(kv_group.window for kv_group in runner.kv_groups)
        sizes = tuple(
            n_blocks if window is None else min(n_blocks, 2 * self.ring() - 1) for window in windows
        )
        capacity = Capacity(sizes, BLOCK_SIZE, 0, windows)
        self.engine = Engine(runner, capacity, step_tokens=STEP_TOKENS, max_drafts=max_drafts)
        self.logits: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # by request and tokens before
        step = runner.step

        def recording(*arguments: Any) -> tuple[Logits, Tensor]:
            wanted = [item for item in self.engine.scheduler._scheduled.values() if item.draws]
            logits, hidden = step(*arguments)
            vocabs = [shard.vocab for shard in runner.plan.shards]
            rows = iter(gather_logits(logits.values, vocabs, comm))
            for item in wanted:
                known = [*item.sequence.tokens[: item.start], *item.tokens]
                for n_drafts in range(item.n_drafts + 1):
                    seen = known[: len(known) - item.n_drafts + n_drafts]
                    self.logits[item.request.index, tuple(seen)] = next(rows)
            return logits, hidden

        runner.step = recording

    @staticmethod
    def ring() -> int:
        return blocks_held(1 << 20, BLOCK_SIZE, WINDOW, STEP_TOKENS)

    def run(self, comes: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Each request's tokens; request i comes at step comes[i]."""
        tokens: dict[int, tuple[int, ...]] = {}
        step = 0
        while len(tokens) < len(PROMPTS):
            for index, when in enumerate(comes):
                if when == step and self.engine.comm.rank == 0:
                    params = SamplingParams(max_tokens=N_NEW)
                    prompt = tuple(PROMPTS[index])
                    self.engine.submit(Request(index, prompt, params, 0, frozenset()))
            for output in self.engine.step():
                if output.completion is not None:
                    tokens[output.index] = output.completion.tokens
            step += 1
            assert step < 2000
        return tokens


def run_recorded(
    comm: Communicator, folder: Path, n_blocks: int, max_drafts: int, comes: Sequence[int]
) -> tuple[dict[int, tuple[int, ...]], list[dict[tuple[int, ...], Tensor]], int]:
    recorded = Recorded(comm, folder, n_blocks, max_drafts)
    tokens = recorded.run(comes)
    logits = [
        {seen: row for (index, seen), row in recorded.logits.items() if index == each}
        for each in range(len(PROMPTS))
    ]
    return tokens, logits, recorded.engine.scheduler.n_preempted


def assert_every_step_is_the_references(
    folder: Path, tokens: dict[int, tuple[int, ...]], logits: list[dict[tuple[int, ...], Tensor]]
) -> None:
    for index, prompt in enumerate(PROMPTS):
        whole = [*prompt, *tokens[index]]
        expected = reference_logits(folder, whole)
        for n in range(len(prompt), len(whole)):
            actual = logits[index][tuple(whole[:n])]
            torch.testing.assert_close(actual, expected[n - 1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("tp_size", [1, 5])
def test_logits_of_every_step_equal_masked_full_attention(folder, tp_size):
    """Sequences of up to eight windows, with drafts, and too few blocks for all at once."""
    n_blocks = -(-(len(PROMPTS[0]) + N_NEW) // BLOCK_SIZE) + 4
    found = run_on_threads(tp_size, run_recorded, folder, n_blocks, 4, (0, 9, 3))
    first_tokens, first_logits, _ = found[0]
    assert_every_step_is_the_references(folder, first_tokens, first_logits)
    for tokens, logits, n_preempted in found:
        # With windows alone, a sequence never needs more blocks than its ring has.
        assert n_preempted > 0 or not is_hybrid(folder)
        assert tokens == first_tokens
        for own, first in zip(logits, first_logits, strict=True):
            assert own.keys() == first.keys()
            assert all(torch.equal(own[seen], first[seen]) for seen in own)


def test_reference_with_its_own_cache_gives_the_same_logits(folder):
    tokens = PROMPTS[0]
    by_token = reference_logits_token_by_token(folder, tokens)
    torch.testing.assert_close(by_token, reference_logits(folder, tokens), rtol=0, atol=1e-12)


def test_rank_processes_give_the_tokens_of_one_rank(ranks, folder):
    whole = run_recorded(Solo(), folder, 200, 4, (0, 0, 0))[0]
    for tokens, *_ in ranks(3).run(run_recorded, folder, 44, 4, (0, 9, 3)):
        assert tokens == whole


def test_a_prefix_is_found_while_its_window_is_held(folder):
    engine = Recorded(Solo(), folder, 200, 0).engine
    for n_found in (0, len(BEGINNING)):
        before = engine.scheduler.n_prefix_tokens
        params = SamplingParams(max_tokens=1)
        engine.submit(Request(0, tuple(PROMPTS[1]), params, 0, frozenset()))
        while not engine.idle:
            engine.step()
        assert engine.scheduler.n_prefix_tokens - before == n_found


def test_windowed_sequence_reuses_the_same_blocks():
    """The pool has room for the whole sequence, which reuses blocks nevertheless."""
    runner = make_runner(Solo(), replace(WINDOWED, sliding_window=WINDOW))
    capacity = Capacity((500,), BLOCK_SIZE, 0, (WINDOW,))
    engine = Engine(runner, capacity, step_tokens=STEP_TOKENS)
    engine.submit(Request(0, tuple(range(90)), SamplingParams(max_tokens=400), 0, frozenset()))
    engine.step()
    blocks = set(engine.scheduler.running[0].tables[0].blocks)
    assert len(blocks) == blocks_held(400, BLOCK_SIZE, WINDOW, STEP_TOKENS)
    while not engine.idle:
        assert set(engine.scheduler.running[0].tables[0].blocks) == blocks
        engine.step()
