"""Random mixes of requests for the engine, and the result of each request alone.

The oracle uses neither the scheduler nor blocks: it runs the whole sequence for every token.
"""

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch

from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import KVFormat, Precision
from parallel_llama.engine.draft_model import DraftModel
from parallel_llama.engine.drafts import shared_tables
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.kv_capacity import Capacity
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.memory import blocks_held
from parallel_llama.ops import TorchOps
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import KVSplit, make_plan
from parallel_llama.request import Completion, FinishReason, Request, SamplingParams
from parallel_llama.sampling.draw import History, SamplingRow
from parallel_llama.sampling.sampler import sample

ARGS = ModelArgs(
    dim=36,
    n_layers=2,
    n_heads=9,
    n_kv_heads=3,
    head_dim=4,
    ffn_dim=50,
    vocab_size=101,
    dtype="float64",
)
# Other widths and heads, fewer layers, and a vocabulary with other padding.
SMALL = replace(ARGS, dim=20, n_layers=1, n_heads=5, n_kv_heads=5, ffn_dim=14, vocab_size=104)
# Windows shorter than the sequences below, in all layers and in all but one.
WINDOWED = replace(ARGS, sliding_window=7)
HYBRID = replace(
    ARGS,
    n_layers=3,
    sliding_window=5,
    full_layers=(1,),
    local_rope_theta=100.0,
    tied_embeddings=True,
)
_GEMMA = replace(
    ARGS,
    n_kv_heads=1,
    norm_offset=1.0,
    activation="gelu_tanh",
    embedding_scale=6.0,
    tied_embeddings=True,
)
_FALCON = replace(
    ARGS, norm="layer", norm_bias=True, activation="gelu", gated=False, parallel_block=True
)
# The features of each family, with windows shorter than the sequences.
OF_FAMILIES: dict[str, ModelArgs] = {
    "mistral": WINDOWED,
    "mistral with sinks": replace(WINDOWED, attention_sinks=3),
    "mixtral": replace(ARGS, n_experts=5, n_active_experts=2),
    "qwen2": replace(ARGS, attention_bias=True, wo_bias=False),
    "qwen2_moe": replace(
        ARGS,
        attention_bias=True,
        wo_bias=False,
        ffn_dim=17,
        n_experts=5,
        n_active_experts=2,
        normed_experts=False,
        shared_ffn_dim=43,
        shared_gate=True,
        dense_layers=(1,),
        dense_ffn_dim=50,
    ),
    "glm4_moe": replace(
        ARGS,
        ffn_dim=17,
        n_experts=6,
        n_active_experts=3,
        n_expert_groups=3,
        n_active_groups=2,
        sigmoid_router=True,
        routed_scale=1.7,
        shared_ffn_dim=34,
        dense_layers=(0,),
        dense_ffn_dim=50,
        rotary_dim=2,
    ),
    "gpt_oss": replace(
        ARGS,
        attention_bias=True,
        ffn_dim=17,
        n_experts=5,
        n_active_experts=3,
        activation="clamped_swiglu",
        swiglu_limit=0.5,
        sink_logits=True,
        expert_bias=True,
        sliding_window=6,
        full_layers=(1,),
    ),
    "cohere": replace(
        ARGS,
        norm="layer",
        parallel_block=True,
        shared_norm=True,
        qk_norm=True,
        qk_layer_norm=True,
        logit_scale=0.25,
        tied_embeddings=True,
    ),
    "llama4": replace(
        ARGS,
        n_layers=3,
        ffn_dim=17,
        n_experts=5,
        n_active_experts=1,
        sigmoid_router=True,
        router_bias=False,
        normed_experts=False,
        scaled_inputs=True,
        shared_ffn_dim=17,
        dense_layers=(1,),
        dense_ffn_dim=50,
        qk_unit_norm=True,
        query_scale=0.3,
        query_scale_step=4,
        sliding_window=6,
        window_chunks=True,
        full_layers=(2,),
        unrotated_layers=(2,),
    ),
    "qwen3": replace(ARGS, qk_norm=True),
    "qwen3_moe": replace(ARGS, qk_norm=True, n_experts=7, n_active_experts=3, normed_experts=False),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        n_layers=3,
        post_norms=True,
        attention_scale=0.4,
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
        sliding_window=6,
        full_layers=(1,),
    ),
    "gemma3": replace(
        _GEMMA,
        n_layers=3,
        post_norms=True,
        qk_norm=True,
        attention_scale=0.4,
        sliding_window=6,
        full_layers=(2,),
        local_rope_theta=100.0,
    ),
    "falcon 7b": replace(_FALCON, n_kv_heads=1, shared_norm=True),
    "falcon 40b": _FALCON,
    "palm": replace(
        ARGS,
        n_kv_heads=1,
        norm="layer",
        parallel_block=True,
        shared_norm=True,
        logit_scale=1 / 6,
        tied_embeddings=True,
    ),
    "glm": replace(ARGS, attention_bias=True, wo_bias=False, rotary_dim=2),
}
MAX_PROMPT, MAX_NEW = 40, 12
NEVER = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """The result of one choice."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Guest:
    """A request, the step at which it arrives, and the step at which it is cancelled."""

    request: Request
    comes: int
    cancelled: int


@dataclass(frozen=True)
class Mix:
    """Concurrent requests for one engine with certain settings."""

    n_blocks: int
    block_size: int
    step_tokens: int
    max_drafts: int
    guests: tuple[Guest, ...]


def make_runner(
    comm: Communicator,
    args: ModelArgs = ARGS,
    kv_format: KVFormat | None = None,
    kv_split: KVSplit = "heads",
    ops: TorchOps | None = None,
    *,
    exact: bool = False,
    seed: int = 1,
) -> ModelRunner:
    return ModelRunner.load(
        args,
        random_checkpoint(args, seed),
        make_plan(args, comm.size, kv_split=kv_split, exact=exact),
        comm,
        precision=Precision.plain("float64"),
        device=torch.device("cpu"),
        kv_format=kv_format,
        ops=ops,
    )


def make_draft_model(
    comm: Communicator, draft: ModelArgs, args: ModelArgs = ARGS, *, seed: int = 7
) -> DraftModel:
    """A draft model for a model of `args`; with the same ModelArgs, seed 1 makes them equal."""
    tables = shared_tables(args, draft)
    return DraftModel(make_runner(comm, draft, seed=seed), tables, args.vocab_size, 0.1)


def make_engine(
    runner: ModelRunner,
    n_blocks: int = 64,
    block_size: int = 16,
    step_tokens: int = 512,
    max_drafts: int = 0,
    *,
    integrity_check: bool = False,
    draft_model: DraftModel | None = None,
) -> Engine:
    """An engine with `n_blocks` for full-attention layers, and as few as possible for others."""
    windows = [kv_group.window for kv_group in runner.kv_groups]
    longest = n_blocks * block_size
    n_sinks = runner.args.attention_sinks
    sizes = [blocks_held(longest, block_size, window, step_tokens, n_sinks) for window in windows]
    capacity = Capacity(tuple(sizes), block_size, 0, tuple(windows), n_sinks)
    return Engine(
        runner,
        capacity,
        step_tokens=step_tokens,
        max_drafts=max_drafts,
        integrity_check=integrity_check,
        draft_model=draft_model,
    )


def random_mix(seed: int) -> Mix:
    """One to eight requests, some with a common prefix, in a pool that is often too small."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    guests = tuple(
        Guest(
            _random_request(rng, index),
            comes=rng.choice([0, 0, rng.randrange(12)]),
            cancelled=rng.choice([NEVER, NEVER, NEVER, rng.randrange(1, 30)]),
        )
        for index in range(rng.randint(1, 8))
    )
    largest = max(len(guest.request.prompt) + guest.request.params.max_tokens for guest in guests)
    least = -(-largest // block_size)
    return Mix(
        n_blocks=rng.choice([least, least + 1, least + rng.randrange(1 + least), 4 * least]),
        block_size=block_size,
        step_tokens=rng.choice([1, 2, 5, 16, 64, 512]),
        max_drafts=rng.choice([0, 1, 8]),
        guests=guests,
    )


# Few prompts, settings and seeds, so that results of the oracle are reused in many mixes.
_rng = random.Random(0)
_BEGINNINGS = [[_rng.randrange(ARGS.vocab_size) for _ in range(24)] for _ in range(3)]
_PROMPTS = [
    tuple(
        _rng.choice(_BEGINNINGS)[: _rng.randint(0, 24)]
        + [_rng.randrange(ARGS.vocab_size) for _ in range(_rng.randint(1, MAX_PROMPT - 24))]
    )
    for _ in range(12)
]
_PROMPTS += [(7, 8, 9) * 12, tuple(_BEGINNINGS[0]), tuple(_BEGINNINGS[0][:16])]
_PARAMS = [
    SamplingParams(max_tokens=MAX_NEW),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=MAX_NEW, temperature=1.5),
    SamplingParams(max_tokens=9, temperature=1.0, top_k=5, top_p=0.9),
    SamplingParams(max_tokens=7, temperature=2.0, min_p=0.02, n=3),
    SamplingParams(max_tokens=MAX_NEW, repetition_penalty=1.3, min_tokens=4),
    SamplingParams(max_tokens=10, temperature=0.7, presence_penalty=0.8, frequency_penalty=0.5),
    SamplingParams(max_tokens=6, logit_bias=((3, 4.0), (5, -50.0)), n=2, temperature=1.0),
    SamplingParams(max_tokens=5, prompt_logprobs=2, logprobs=1),
]


def _random_request(rng: random.Random, index: int) -> Request:
    stop_ids = rng.choice([frozenset[int](), frozenset(range(0, 30, 2))])
    return Request(index, rng.choice(_PROMPTS), rng.choice(_PARAMS), rng.randrange(2), stop_ids)


# In some tests ranks are threads, and one runner computes the results alone.
_ALONE = threading.Lock()


@cache
def alone(
    prompt: tuple[int, ...],
    params: SamplingParams,
    seed: int,
    stop_ids: frozenset[int],
    choice: int,
    args: ModelArgs = ARGS,
    kv_format: KVFormat | None = None,
) -> Outcome:
    """The result of a choice alone: each token from a forward pass over all tokens before it."""
    runner = _oracle(args, kv_format)
    history = History(prompt)
    tokens = list(prompt)
    while True:
        tables = [range(len(tokens))] * len(runner.kv_groups)
        hidden = runner.forward([Chunk(tuple(tokens), 0, tables, len(prompt))])
        early = len(tokens) - len(prompt) < params.min_tokens
        banned = stop_ids if early else frozenset[int]()
        draw = SamplingRow(params, seed, choice, len(tokens), history=history, banned=banned)
        (drawn,) = sample(runner.logits(hidden[-1:]), range(args.vocab_size), [draw], runner.comm)
        tokens.append(drawn.token)
        history.append(drawn.token)
        new = tuple(tokens[len(prompt) :])
        if drawn.token in stop_ids:
            return Outcome(new, "stop")
        if len(new) == params.max_tokens:
            return Outcome(new, "length")


@cache
def _oracle(args: ModelArgs, kv_format: KVFormat | None) -> ModelRunner:
    runner = make_runner(Solo(), args, kv_format)
    runner.reserve([MAX_PROMPT + MAX_NEW] * len(runner.kv_groups), 1)
    return runner


def run_mix(engine: Engine, mix: Mix) -> dict[tuple[int, int], Outcome]:
    """The outcome by request and choice. Collective: every rank calls it."""
    return {
        key: Outcome(completion.tokens, completion.finish_reason)
        for key, completion in completions_of(engine, mix).items()
    }


def completions_of(engine: Engine, mix: Mix) -> dict[tuple[int, int], Completion]:
    """The completion by request and choice. Collective: every rank calls it."""
    leads = engine.comm.rank == 0
    tickets: dict[int, int] = {}
    completions = {}
    step = 0
    # Other ranks do not know future requests, so all continue to the same step.
    last = max(guest.comes for guest in mix.guests)
    while step <= last or not engine.idle:
        if leads:
            for guest in mix.guests:
                if guest.comes == step:
                    tickets[guest.request.index] = engine.submit(guest.request)
                if guest.cancelled == step and guest.request.index in tickets:
                    engine.cancel(tickets[guest.request.index])
        for progress in engine.step():
            if progress.completion is not None:
                completions[progress.index, progress.choice] = progress.completion
        step += 1
        assert step < 3000, "a request starves"
    assert not any(pool.n_used for pool in engine.pools)
    return completions


def run_mixes(
    comm: Communicator,
    seeds: Iterable[int],
    args: ModelArgs = ARGS,
    kv_format: KVFormat | None = None,
    kv_split: KVSplit = "heads",
    draft_model: Callable[[Communicator], DraftModel] | None = None,
) -> list[str]:
    """All differences in the mixes of these seeds, on rank 0. Collective: every rank calls it."""
    runner = make_runner(comm, args, kv_format, kv_split)
    drafts = None if draft_model is None else draft_model(comm)
    found = []
    for seed in seeds:
        mix = random_mix(seed)
        limits = mix.n_blocks, mix.block_size, mix.step_tokens, mix.max_drafts
        engine = make_engine(runner, *limits, draft_model=drafts)
        outcomes = run_mix(engine, mix)
        if comm.rank == 0:
            found += [f"mix {seed}: {each}" for each in differences(mix, outcomes, args, kv_format)]
    return found


def differences(
    mix: Mix,
    outcomes: dict[tuple[int, int], Outcome],
    args: ModelArgs = ARGS,
    kv_format: KVFormat | None = None,
) -> list[str]:
    """The differences between the results in a mix and the results alone."""
    found = []
    for guest in mix.guests:
        request = guest.request
        for choice in range(request.params.n):
            asked = request.prompt, request.params, request.seed, request.stop_ids
            with _ALONE:
                expected = alone(*asked, choice, args, kv_format)
            got = outcomes.get((request.index, choice))
            if got is None:
                found.append(f"request {request.index}, choice {choice}: nothing")
            elif got.finish_reason == "cancelled":
                if got.tokens != expected.tokens[: len(got.tokens)]:
                    found.append(f"request {request.index}, choice {choice}: {got} of {expected}")
            elif got != expected:
                found.append(f"request {request.index}, choice {choice}: {got}, not {expected}")
    return found
