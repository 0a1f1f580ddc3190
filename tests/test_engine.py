"""The generation loop: what a request gets depends on nothing but itself."""

from dataclasses import replace

import pytest
import torch

from parallel_llama import engine
from parallel_llama.checkpoint import random_checkpoint
from parallel_llama.config import ModelArgs
from parallel_llama.engine import Generation
from parallel_llama.parallel import Communicator, Solo
from parallel_llama.plan import make_plan
from parallel_llama.request import Completion, Request, SamplingParams
from parallel_llama.runner import Piece, Runner

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
PROMPTS = ((5, 6, 7), (9,), tuple(range(40)), (1, 2), (100, 50, 25, 12, 6))


def make_runner(comm: Communicator) -> Runner:
    return Runner.load(
        ARGS,
        random_checkpoint(ARGS, seed=1),
        make_plan(ARGS, comm.size),
        comm,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def make_request(
    index: int, prompt: tuple[int, ...], params: SamplingParams, stop_ids: tuple[int, ...] = ()
) -> Request:
    return Request(index, prompt, params, seed=1000 + index, stop_ids=frozenset(stop_ids))


def run(runner: Runner, requests: list[Request]) -> dict[int, Completion]:
    generation = Generation(runner, requests, None)
    ended = {}
    while not generation.done:
        for progress in generation.step():
            if progress.completion is not None:
                ended[progress.index] = progress.completion
    assert runner.cache.n_used == 0
    return ended


def run_all(comm: Communicator, params: SamplingParams) -> list[tuple[int, ...]]:
    requests = [make_request(i, prompt, params) for i, prompt in enumerate(PROMPTS)]
    ended = run(make_runner(comm), requests)
    return [ended[i].tokens for i in range(len(PROMPTS))]


SEEDED = SamplingParams(max_tokens=12, temperature=1.5)


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=12), SEEDED])
def test_tokens_are_the_same_at_every_world_size(ranks, params):
    whole = run_all(Solo(), params)
    assert len({len(set(tokens)) for tokens in whole}) > 1  # not one token over and over
    for tp_size in (2, 3, 5, 7):
        for tokens in ranks(tp_size).run(run_all, params):
            assert tokens == whole


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12),
        SEEDED,
        replace(SEEDED, top_k=5, top_p=0.9),
        replace(SEEDED, min_p=0.05),
    ],
)
def test_a_request_alone_gets_what_it_gets_among_strangers(params):
    together = run_all(Solo(), params)
    for index, prompt in enumerate(PROMPTS):
        alone = run(make_runner(Solo()), [make_request(index, prompt, params)])
        assert alone[index].tokens == together[index]


def test_greedy_tokens_are_the_argmax_of_a_full_forward():
    runner = make_runner(Solo())
    ended = run(runner, [make_request(0, PROMPTS[0], SamplingParams(max_tokens=10))])
    sequence = list(PROMPTS[0])
    for token in ended[0].tokens:
        runner.reserve(len(sequence))
        span = runner.cache.allocate(len(sequence))
        hidden = runner.forward([Piece(span, sequence, 0)])
        assert token == int(runner.full_logits(hidden[-1:]).argmax())
        sequence.append(token)


def test_logprobs_are_those_of_a_full_forward():
    runner = make_runner(Solo())
    params = replace(SEEDED, logprobs=3)
    (completion,) = run(runner, [make_request(0, PROMPTS[4], params)]).values()
    sequence = [*PROMPTS[4], *completion.tokens]
    runner.reserve(len(sequence))
    hidden = runner.forward([Piece(runner.cache.allocate(len(sequence)), sequence, 0)])
    expected = runner.full_logits(hidden).log_softmax(-1)[len(PROMPTS[4]) - 1 :]
    assert completion.logprobs is not None and len(completion.logprobs) == 12
    for row, entry in zip(expected, completion.logprobs, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-12)
        others = [token for token in row.topk(4).indices.tolist() if token != entry.token]
        assert [token for token, _ in entry.top] == others[:3]


def test_a_long_prompt_in_pieces_gives_the_same_tokens(monkeypatch):
    whole = run_all(Solo(), SEEDED)
    monkeypatch.setattr(engine, "MAX_STEP_TOKENS", 7)
    assert run_all(Solo(), SEEDED) == whole


def test_a_cache_with_room_for_one_request_serves_them_in_turn(monkeypatch):
    whole = run_all(Solo(), SEEDED)
    monkeypatch.setattr(engine, "MAX_CACHE_BYTES", 0)
    assert run_all(Solo(), SEEDED) == whole


def test_a_stop_id_ends_a_completion_and_stays_in_its_tokens():
    greedy = SamplingParams(max_tokens=12)
    free = run(make_runner(Solo()), [make_request(0, PROMPTS[0], greedy)])[0]
    assert free.finish_reason == "length"
    stop = free.tokens[4]
    ended = run(make_runner(Solo()), [make_request(0, PROMPTS[0], greedy, (stop,))])[0]
    assert ended.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert ended.finish_reason == "stop"


def interrupt_on_rank_0(comm: Communicator) -> list[tuple[str, int]]:
    params = SamplingParams(max_tokens=200)
    requests = [make_request(i, prompt, params) for i, prompt in enumerate(PROMPTS)]
    generation = Generation(make_runner(comm), requests, None)
    ended = {}
    for n_steps in range(400):
        if n_steps == 5 and comm.rank == 0:
            generation.interrupt()
        if generation.done:
            break
        for progress in generation.step():
            if progress.completion is not None:
                ended[progress.index] = progress.completion
    return [(ended[i].finish_reason, len(ended[i].tokens)) for i in range(len(PROMPTS))]


def test_an_interruption_on_rank_0_ends_every_rank_at_the_same_step(ranks):
    results = ranks(3).run(interrupt_on_rank_0)
    assert results[0] == results[1] == results[2]
    assert results[0] == [("interrupted", 6)] * len(PROMPTS)


def draw_wrongly_on_rank_1(comm: Communicator) -> str:
    runner = make_runner(comm)
    generation = Generation(runner, [make_request(0, (5, 6), SamplingParams())], None)
    if comm.rank == 1:
        original = engine.sample
        engine.sample = lambda *args: [replace(s, token=s.token ^ 1) for s in original(*args)]
    try:
        generation.step()
    except RuntimeError as error:
        return str(error)
    finally:
        if comm.rank == 1:
            engine.sample = original
    return ""


def test_a_rank_that_draws_another_token_is_named(ranks):
    first, second = ranks(2).run(draw_wrongly_on_rank_1)
    assert first == ""
    assert "rank 1" in second and "the ranks disagree" in second
