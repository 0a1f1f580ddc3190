"""The generation loop: a request's result depends on the request only."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from mixes import (
    ARGS,
    HYBRID,
    OF_FAMILIES,
    WINDOWED,
    alone,
    make_engine,
    make_runner,
    random_mix,
    run_mixes,
)
from parity_steps import full_logits
from thread_ranks import run_on_threads

from parallel_llama.dtypes import KVFormat
from parallel_llama.engine import engine as engine_module
from parallel_llama.engine import sampling_rows
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.outputs import StepOutput
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.request import Completion, Request, SamplingParams

PROMPTS = ((5, 6, 7), (9,), tuple(range(40)), (1, 2), (100, 50, 25, 12, 6))
GREEDY = SamplingParams(max_tokens=12)
SEEDED = SamplingParams(max_tokens=12, temperature=1.5)


def make_request(
    index: int, prompt: tuple[int, ...], params: SamplingParams, stop_ids: tuple[int, ...] = ()
) -> Request:
    return Request(index, prompt, params, seed=1000 + index, stop_ids=frozenset(stop_ids))


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Completions in the order of the requests, choices side by side; every rank calls it."""
    if engine.comm.rank == 0:
        for request in requests:
            engine.submit(request)
    completions = [each.completion for each in steps(engine) if each.completion is not None]
    return sorted(completions, key=lambda each: (each.index, each.choice))


def steps(engine: Engine) -> list[StepOutput]:
    progress = engine.step()
    while not engine.idle:
        progress += engine.step()
    assert not any(pool.n_used for pool in engine.pools)
    return progress


def run_all(
    comm: Communicator, params: SamplingParams, kv_format: KVFormat | None = None
) -> list[tuple[int, ...]]:
    requests = [make_request(i, prompt, params) for i, prompt in enumerate(PROMPTS)]
    engine = make_engine(make_runner(comm, kv_format=kv_format))
    return [each.tokens for each in run(engine, requests)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_tokens_are_the_same_at_every_world_size(ranks, params):
    whole = run_all(Solo(), params)
    assert len({len(set(tokens)) for tokens in whole}) > 1  # not one token over and over
    for tp_size in (2, 3, 5, 7):
        for tokens in ranks(tp_size).run(run_all, params):
            assert tokens == whole


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_narrow_kv_dtypes_give_same_tokens_at_every_world_size(dtype):
    """Each head has its own scales, so it does not matter which heads are on the same rank."""
    kv_format = KVFormat(dtype)
    whole = run_all(Solo(), GREEDY, kv_format)
    for tp_size in (3, 9):
        for tokens in run_on_threads(tp_size, run_all, GREEDY, kv_format):
            assert tokens == whole


# Random mixes: arrivals, cancellations, preemption, prefix cache, chunks, drafts, block sizes.


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(25), range(60, 85)])
def test_results_in_a_mix_equal_results_alone(seeds):
    assert not run_mixes(Solo(), seeds)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_results_in_a_mix_equal_results_alone_for_every_family(name):
    args = OF_FAMILIES[name]
    assert not run_mixes(Solo(), range(3), args)
    assert not run_on_threads(3, run_mixes, range(3, 4), args)[0]


@pytest.mark.slow
@pytest.mark.parametrize("args", [WINDOWED, HYBRID], ids=["windowed", "hybrid"])
def test_results_in_a_mix_equal_results_alone_with_windows(args):
    assert not run_mixes(Solo(), range(500, 508), args)


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "args"), [(2, WINDOWED), (3, HYBRID), (5, HYBRID)])
def test_results_on_many_ranks_equal_results_alone_with_windows(tp_size, args):
    assert not run_on_threads(tp_size, run_mixes, range(560, 563), args)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "seeds"), [(2, range(400, 408)), (3, range(450, 456))])
def test_results_on_many_ranks_equal_results_alone_on_one_rank(tp_size, seeds):
    assert not run_on_threads(tp_size, run_mixes, seeds)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize(
    ("tp_size", "args", "seeds"), [(1, ARGS, range(500, 508)), (3, HYBRID, range(520, 523))]
)
def test_results_in_a_mix_equal_results_alone_with_narrow_kv(tp_size, args, seeds, dtype):
    """Chunked, preempted or after a cached prefix, each token sees the same rounded keys."""
    assert not run_on_threads(tp_size, run_mixes, seeds, args, KVFormat(dtype))[0]


def test_results_on_rank_processes_equal_results_alone(ranks):
    assert not ranks(3).run(run_mixes, range(480, 488))[0]


@pytest.mark.slow
def test_mixes_have_preemption_prefix_hits_drafts_and_chunks():
    runner = make_runner(Solo())
    n_preempted = n_prefix = n_long_steps = n_pieces = 0
    for seed in range(60, 100):
        mix = random_mix(seed)
        engine = make_engine(runner, mix.n_blocks, mix.block_size, mix.step_tokens, mix.max_drafts)
        longest = max(len(guest.request.prompt) for guest in mix.guests)
        n_pieces += longest > mix.step_tokens
        for guest in mix.guests:
            engine.submit(guest.request)
        n_long_steps += sum(len(each.tokens) > 1 for each in steps(engine))
        n_preempted += engine.scheduler.n_preempted
        n_prefix += engine.scheduler.n_prefix_tokens
    assert min(n_preempted, n_prefix, n_long_steps, n_pieces) > 10


# One request.


def test_greedy_tokens_are_the_argmax_of_a_full_forward():
    runner = make_runner(Solo())
    (completion,) = run(make_engine(runner), [make_request(0, PROMPTS[0], GREEDY)])
    sequence = PROMPTS[0]
    assert len(completion.tokens) == 12
    for token in completion.tokens:
        runner.reserve([len(sequence)], 1)
        hidden = runner.forward([Chunk(sequence, 0, [range(len(sequence))], len(sequence))])
        assert token == int(full_logits(runner, hidden[-1:]).argmax())
        sequence += (token,)


def logprobs_of(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities after every token, from one forward. Shapes: [T, vocab_size]."""
    runner, sequence = make_runner(Solo()), prompt + tokens
    runner.reserve([len(sequence)], 1)
    hidden = runner.forward([Chunk(sequence, 0, [range(len(sequence))], len(sequence))])
    return full_logits(runner, hidden).log_softmax(-1)


def test_logprobs_are_those_of_a_full_forward():
    params = replace(SEEDED, logprobs=3)
    (completion,) = run(make_engine(make_runner(Solo())), [make_request(0, PROMPTS[4], params)])
    expected = logprobs_of(PROMPTS[4], completion.tokens)[len(PROMPTS[4]) - 1 :]
    assert completion.logprobs is not None and len(completion.logprobs) == 12
    for row, entry in zip(expected, completion.logprobs, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-12)
        others = [token for token in row.topk(4).indices.tolist() if token != entry.token]
        assert [token for token, _ in entry.top] == others[:3]


@pytest.mark.parametrize("step_tokens", [512, 7])
def test_prompt_logprobs_are_those_of_a_full_forward(step_tokens):
    """Covers one chunk and many, a second request with the same prompt, and every choice."""
    engine = make_engine(make_runner(Solo()), step_tokens=step_tokens, block_size=4)
    prompt = PROMPTS[2]
    params = SamplingParams(max_tokens=3, temperature=1.0, n=2, prompt_logprobs=2)
    requests = [make_request(i, prompt, params) for i in range(2)]
    expected = logprobs_of(prompt, ())
    completions = run(engine, requests)
    assert len(completions) == 4
    for completion in completions:
        first, *entries = completion.prompt_logprobs
        assert first is None and len(entries) == len(prompt) - 1
        for row, token, entry in zip(expected, prompt[1:], entries, strict=False):
            assert entry is not None and entry.token == token
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-12)
            others = [other for other in row.topk(3).indices.tolist() if other != token]
            assert [other for other, _ in entry.top] == others[:2]


def test_a_stop_id_ends_a_completion_and_stays_in_its_tokens():
    engine = make_engine(make_runner(Solo()))
    (free,) = run(engine, [make_request(0, PROMPTS[0], GREEDY)])
    assert free.finish_reason == "length"
    stop = free.tokens[4]
    (ended,) = run(engine, [make_request(0, PROMPTS[0], GREEDY, (stop,))])
    assert ended.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert ended.finish_reason == "stop"


def test_choices_differ_and_each_equals_its_result_alone():
    params = replace(SEEDED, n=4)
    completions = run(make_engine(make_runner(Solo())), [make_request(0, PROMPTS[1], params)])
    assert [each.choice for each in completions] == [0, 1, 2, 3]
    assert len({each.tokens for each in completions}) == 4
    for each in completions:
        expected = alone(PROMPTS[1], params, 1000, frozenset(), each.choice)
        assert each.tokens == expected.tokens


def test_the_choices_of_a_request_compute_its_prompt_once():
    engine = make_engine(make_runner(Solo()), block_size=4)
    run(engine, [make_request(0, PROMPTS[2], replace(SEEDED, n=3))])
    assert engine.scheduler.n_prefix_tokens == 2 * 36  # the last block is not full


def test_cached_prefix_is_found_only_with_the_same_salt():
    engine = make_engine(make_runner(Solo()), block_size=4)
    for salt in ("a", "b", "a"):
        before = engine.scheduler.n_prefix_tokens
        run(engine, [make_request(0, PROMPTS[2], replace(GREEDY, cache_salt=salt))])
        found = engine.scheduler.n_prefix_tokens - before
    assert before == 0 and found == 36


# Failures.


def test_request_larger_than_the_kv_cache_is_refused():
    engine = make_engine(make_runner(Solo()), n_blocks=3, block_size=4)
    with pytest.raises(UsageError, match="the KV cache has 3"):
        engine.submit(make_request(0, (1, 2, 3), GREEDY))
    assert engine.idle


def test_timed_out_request_ends_with_the_tokens_it_has(monkeypatch):
    engine = make_engine(make_runner(Solo()))
    now = [0.0]
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: now[0])
    engine.submit(make_request(0, PROMPTS[0], GREEDY), timeout_s=5)
    engine.submit(make_request(1, PROMPTS[0], GREEDY), timeout_s=500)
    engine.step()
    engine.step()
    now[0] = 6.0
    late, *others = [each.completion for each in steps(engine) if each.completion]
    assert late.finish_reason == "timeout" and len(late.tokens) == 2
    assert [each.finish_reason for each in others] == ["length"]


def test_request_without_an_allowed_token_ends_alone():
    """The stop ids are the whole vocabulary, and min_tokens does not allow a stop yet."""
    engine = make_engine(make_runner(Solo()))
    barred = make_request(0, (1, 2), replace(GREEDY, min_tokens=3), tuple(range(ARGS.vocab_size)))
    stuck, other = run(engine, [barred, make_request(1, PROMPTS[0], GREEDY)])
    assert (stuck.finish_reason, stuck.tokens) == ("no_token", ())
    assert other.tokens == alone(PROMPTS[0], GREEDY, 1001, frozenset(), 0).tokens


def test_engine_frees_all_blocks_and_runs_again_after_nan():
    runner = make_runner(Solo())
    engine = make_engine(runner)
    healthy = run(engine, [make_request(0, PROMPTS[2], GREEDY)])
    weight = runner.model.norm.weight.values
    kept = weight.clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    engine.submit(make_request(0, PROMPTS[2], GREEDY))
    with pytest.raises(NumericalError):
        engine.step()
    assert engine.idle and engine.pools[0].n_free == engine.capacity.n_blocks[0]
    with torch.no_grad():
        weight.copy_(kept)
    assert run(engine, [make_request(0, PROMPTS[2], GREEDY)]) == healthy


def cancel_on_rank_0(comm: Communicator) -> list[tuple[str, int]]:
    engine = make_engine(make_runner(comm))
    tickets = []
    if comm.rank == 0:
        params = SamplingParams(max_tokens=100)
        tickets = [engine.submit(make_request(i, p, params)) for i, p in enumerate(PROMPTS)]
    for _ in range(6):
        engine.step()
    for ticket in tickets:
        engine.cancel(ticket, "interrupted")
    completions = [each.completion for each in steps(engine) if each.completion]
    return [(each.finish_reason, len(each.tokens)) for each in completions]


def test_cancel_on_rank_0_ends_requests_in_same_step_on_all_ranks(ranks):
    for results in ranks(3).run(cancel_on_rank_0):
        assert results == [("interrupted", 6)] * len(PROMPTS)


def draw_wrongly_on_rank_1(comm: Communicator) -> str:
    engine = make_engine(make_runner(comm))
    if comm.rank == 0:
        engine.submit(make_request(0, (5, 6), SamplingParams()))
    original = sampling_rows.sample
    if comm.rank == 1:
        sampling_rows.sample = lambda *args: [
            replace(s, token=s.token ^ 1) for s in original(*args)
        ]
    try:
        engine.step()
    except RuntimeError as error:
        return str(error)
    finally:
        sampling_rows.sample = original
    return ""


def test_a_rank_that_draws_another_token_is_named(ranks):
    first, second = ranks(2).run(draw_wrongly_on_rank_1)
    assert first == ""
    assert "rank 1" in second and "the ranks disagree" in second


def test_decode_step_runs_only_the_expected_collectives():
    """Broadcasts of the step and of its tokens, all-reduces, and one exchange for sampling."""

    def count(comm):
        engine = make_engine(make_runner(comm))
        if comm.rank == 0:
            for i, prompt in enumerate(PROMPTS):
                engine.submit(make_request(i, prompt, GREEDY))
        for _ in range(3):
            engine.step()
        comm.counts.clear()
        engine.step()
        return dict(comm.counts)

    for counts in run_on_threads(3, count):
        assert counts == {"broadcast": 2, "all_reduce": 2 * ARGS.n_layers + 1, "all_gather": 1}


def test_random_mix_leaves_the_global_random_state_unchanged():
    """The mixes above are the same in every run."""
    state = random.getstate()
    random_mix(3)
    assert random.getstate() == state
