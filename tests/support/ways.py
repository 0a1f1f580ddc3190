"""Ways to run the same requests: settings that, with exact sums, must not change any bit."""

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from mixes import NEVER, Guest, Mix, completions_of, make_engine
from parity_steps import make_stage_comm

from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import PART_KEYS
from parallel_llama.request import Completion, Request, SamplingParams

MAX_GUESTS = 16

Completions = dict[tuple[int, int], Completion]  # by request and choice


@dataclass(frozen=True)
class Way:
    """One way to run requests: the ranks and their plan, the threads of a rank, and the batch."""

    config: LLMConfig
    n_threads: int
    mix: Mix

    @property
    def n_ranks(self) -> int:
        assert self.config.tp_size is not None
        return self.config.tp_size

    def __str__(self) -> str:
        config, mix = self.config, self.mix
        memory = "" if config.memory is None else f", memory {config.memory}"
        return (
            f"{self.n_ranks} ranks, {config.pp} stages, KV cache by {config.kv_split}{memory}, "
            f"{self.n_threads} threads, {len(mix.guests)} requests, {mix.step_tokens} tokens a "
            f"step, {mix.n_blocks} blocks of {mix.block_size}, {mix.max_drafts} drafts"
        )


def random_way(
    rng: random.Random,
    config: LLMConfig,
    requests: Sequence[Request],
    n_ranks: int,
    pp: int = 1,
) -> Way:
    """A random way to run requests to the model of `config` on `n_ranks` ranks in `pp` stages."""
    changed = replace(
        config,
        tp_size=n_ranks,
        pp=pp,
        memory=rng.choice([None, [rng.randint(2, 12) for _ in range(n_ranks)]]),
        kv_split=rng.choice(["heads", "sequence"]) if pp == 1 else "heads",
    )
    # Several threads on each of many ranks take long on few cores.
    n_threads = rng.choice([1, 2] if n_ranks <= 3 else [1, 1, 1, 1, 2])
    return Way(changed, n_threads, _random_mix(rng, changed, requests))


def random_company(rng: random.Random, requests: Sequence[Request]) -> list[Request]:
    """1 to MAX_GUESTS of the requests, often 4 at most."""
    most = rng.choice([4, min(MAX_GUESTS, len(requests))])
    return rng.sample(requests, rng.randint(1, most))


def _random_mix(rng: random.Random, config: LLMConfig, requests: Sequence[Request]) -> Mix:
    """Random arrivals, and steps and blocks of a random size; often the cache is too small."""
    block_size = PART_KEYS if config.kv_split == "sequence" else rng.choice([1, 4, 16, 32])
    least = max(-(-(len(each.prompt) + each.max_tokens) // block_size) for each in requests)
    total = len(requests) * least
    if rng.random() < 0.5:  # each request computes its own keys
        requests = [
            replace(each, params=replace(each.params, cache_salt=str(each.index)))
            for each in requests
        ]
    return Mix(
        n_blocks=rng.choice([max(least, total // 4), total]),
        block_size=block_size,
        step_tokens=rng.choice([16, 64, rng.randint(16, 512), 512]),
        max_drafts=rng.choice([0, 3, 8]),
        guests=tuple(Guest(each, rng.choice([0, rng.randrange(20)]), NEVER) for each in requests),
    )


def random_requests(rng: random.Random, n: int, vocab_size: int, max_seq_len: int) -> list[Request]:
    """Requests of 1 to 280 tokens, most below 120, with common beginnings."""
    beginnings = [[rng.randrange(vocab_size) for _ in range(300)] for _ in range(3)]
    requests = []
    for index in range(n):
        n_new = rng.randint(1, min(16, max_seq_len // 3))
        n_prompt = rng.randint(1, min(rng.choice([20, 120, 120, 280]), max_seq_len - n_new - 1))
        n_common = rng.choice([0, rng.randrange(n_prompt)])
        prompt = rng.choice(beginnings)[:n_common]
        prompt += [rng.randrange(vocab_size) for _ in range(n_prompt - n_common)]
        params = SamplingParams(
            max_tokens=n_new,
            temperature=rng.choice([0.0, 0.8, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            n=rng.choice([1, 1, 2]),
            logprobs=rng.randint(0, 3),
            prompt_logprobs=rng.choice([None, 0, 2]),
        )
        requests.append(Request(index, tuple(prompt), params, rng.randrange(1 << 32), frozenset()))
    return requests


@contextmanager
def no_warnings() -> Iterator[None]:
    """Logs no notes about slow settings, which every rank of every run would repeat."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@no_warnings()
def run_way(comm: Communicator, way: Way) -> Completions:
    """The completions of one way. Collective: every rank calls it."""
    torch.set_num_threads(way.n_threads)
    setup, mix = ModelSetup(way.config), way.mix
    limits = mix.n_blocks, mix.block_size, mix.step_tokens, mix.max_drafts
    engine = make_engine(_load(comm, setup), *limits, integrity_check=setup.integrity_check)
    return completions_of(engine, mix)


@no_warnings()
def run_alone(comm: Communicator, config: LLMConfig, requests: Sequence[Request]) -> Completions:
    """The completions of requests, each alone in a new cache, on one rank with one thread."""
    torch.set_num_threads(1)
    runner = _load(comm, ModelSetup(config))
    completions: Completions = {}
    for request in requests:
        n_blocks = (1 + (len(request.prompt) + request.max_tokens) // 16) * request.params.n
        mix = Mix(n_blocks, 16, 512, 0, (Guest(request, 0, NEVER),))
        completions |= completions_of(make_engine(runner, mix.n_blocks), mix)
    return completions


def _load(comm: Communicator, setup: ModelSetup) -> ModelRunner:
    """This rank's shard of a model, read from its files."""
    return ModelRunner.load(
        setup.args,
        setup.checkpoint,
        setup.plan,
        comm,
        stage_comm=make_stage_comm(comm, [stage.ranks for stage in setup.plan.stages]),
        precision=setup.precision,
        device=setup.device,
        kv_format=setup.kv_format,
    )
