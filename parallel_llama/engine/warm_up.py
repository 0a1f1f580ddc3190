"""Warm-up on a GPU: runs every kind of step once, so that no request waits for compilation.

Triton compiles a kernel when it is first launched, which takes 0.2 to 3 seconds. Without a warm-up,
the first prompt, the first token sampled with top-k or top-p and the first log-probabilities would
each wait for 2 to 10 seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.recorded_steps import Logits
from parallel_llama.engine.step_buffer import MAX_DECODED, Chunk
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.parallel.collectives import without_peers
from parallel_llama.request import SamplingParams
from parallel_llama.sampling.draw import SamplingRow, row_sampling_key
from parallel_llama.sampling.pending import PendingDraws
from parallel_llama.sampling.sampler import sample
from parallel_llama.sampling.scoring import score_tokens

# More tokens than decode attention supports, and more rows than the kernels for few rows support.
_N_PROMPT = max(MAX_DECODED, 16) + 1


def warm_up(runner: ModelRunner, on_step: Callable[[], None]) -> None:
    """Run every kind of step once, on the blocks of an empty KV cache.

    Ranks with a cold Triton cache compile longer than others. So each rank runs the steps without
    exchanging data; ranks wait for each other only in the barrier at the end, with the timeout for
    starting.

    Args:
        on_step: called before each step.

    Collective: a barrier.
    """
    with without_peers(runner.comm):
        for step in _steps(runner):
            on_step()
            # Without the other ranks, logits may be NaN, and tokens may be outside the vocabulary.
            with suppress(NumericalError, UsageError):
                step()
    runner.comm.barrier()


def _steps(runner: ModelRunner) -> Iterator[Callable[[], object]]:
    """A prompt and decode steps, with every way to sample and to score tokens."""
    # The last block of a cache may be reserved for padding.
    n_blocks = max(min(cache.n_blocks for cache in runner.caches) - 1, 1)
    n_prompt = min(_N_PROMPT, n_blocks * runner.block_size, runner.args.max_seq_len)
    tables = [range(n_blocks)] * len(runner.kv_groups)
    prompt = Chunk([0] * n_prompt, 0, tables, n_prompt)
    draws = [
        SamplingRow(params, 0, 0, n_prompt)
        for params in (SamplingParams(temperature=1.0, top_k=20), SamplingParams(logprobs=1))
    ]
    yield partial(_draw, runner, [prompt], [n_prompt - 1], draws[:1])
    yield partial(_score, runner, prompt)
    # One row is enough: only the product with integer matrices has another variant for several
    # rows, which is compiled when graphs are captured.
    decoded = Chunk([0], n_prompt - 1, tables, n_prompt)
    for draw in draws:
        yield partial(_draw, runner, [decoded], [0], [draw])


def _draw(
    runner: ModelRunner, chunks: Sequence[Chunk], rows: Sequence[int], draws: Sequence[SamplingRow]
) -> None:
    """A step that samples tokens on the device, or on the host for log-probabilities."""
    sampling_keys = [
        row_sampling_key(draw.params, draw.seed, draw.choice, draw.position) for draw in draws
    ]
    logits: Logits = runner.step(chunks, rows, sampling_keys=sampling_keys)[0]
    vocab, comm = runner.shard.vocab, runner.comm
    if draws[0].params.logprobs is not None or logits.drawn is None:
        sample(logits.values, vocab, draws, comm)
        return
    ops, vocab_size = runner.model.ops, runner.args.vocab_size
    PendingDraws(logits.values, logits.drawn, vocab, vocab_size, draws, comm, ops).read()


def _score(runner: ModelRunner, prompt: Chunk) -> None:
    """A step that scores the tokens of a prompt."""
    hidden = runner.forward([prompt])
    targets = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    score_tokens(
        runner.logits(hidden), runner.shard.vocab, targets, [1] * len(targets), runner.comm
    )
