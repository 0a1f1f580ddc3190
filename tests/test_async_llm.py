"""Concurrent coroutines share one model: each gets the result of a single run, or an error."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from commands import ROOT, run_python
from llm_program import Counts, soaked, until_idle

from parallel_llama import LLM, AsyncLLM, SamplingParams
from parallel_llama.async_llm import RequestHandle
from parallel_llama.engine import rank_rpc
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.request import Grammar

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
# 20 blocks of 4 tokens at one rank and at two: the longest request needs 19, so that requests
# are preempted on a machine of any speed.
KV_CACHE_BYTES = {1: 64_000, 2: 42_000}
LIMIT_S = 120  # long enough for a busy machine, so that only a hang exceeds the limit


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    # Without draft tokens each step yields one token. A test changes weights, which an integrity
    # check would report.
    settings = {"dtype": "float64", "kv_cache_bytes": 4 << 20, "integrity_check": False}
    llm = LLM(str(model), **settings, max_drafts=0)
    yield llm
    assert llm.engine.pools[0].n_used == 0
    llm.close()


@asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[AsyncLLM]:
    """An engine that is closed afterwards; checks that no request and no thread is left."""
    engine = AsyncLLM(llm)
    try:
        yield engine
    finally:
        await asyncio.wait_for(engine.close(), LIMIT_S)
    assert not engine._thread.is_alive() and not len(engine._loop)


# Many requests at once.


def check_counts(counts: Counts, n: int) -> None:
    assert counts.wrong == 0
    assert counts.finished + counts.cancelled == n
    assert n / 10 < counts.cancelled < n / 3 and counts.preempted > 0


def test_concurrent_requests_match_single_runs(model):
    llm = LLM(str(model), dtype="float64", kv_cache_bytes=KV_CACHE_BYTES[1], block_size=4)
    check_counts(soaked(llm, 100), 100)
    llm.close()


def test_concurrent_requests_on_two_ranks_match_single_runs(model):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program = str(ROOT / "tests" / "support" / "llm_program.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    soak = ("soak", str(model), "60", str(KV_CACHE_BYTES[2]))
    done = run_python("-m", *torchrun, program, *soak, env=env)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    check_counts(msgspec.json.decode(lines["0"], type=Counts), 60)


# Single requests.


async def test_progress_adds_up_to_the_completion(llm):
    (alone,) = llm.generate(["Hello"], PARAMS)
    async with serving(llm) as engine:
        text, tokens, ends = "", (), []
        async for progress in await engine.submit("Hello", PARAMS):
            text, tokens = text + progress.text, tokens + progress.tokens
            ends.append(progress.completion)
        assert (text, tokens) == (alone.text, alone.tokens)
        assert [end for end in ends if end] == [ends[-1]]


async def test_generate_returns_same_completions_as_llm(llm):
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=1, n=3)
    prompts = ["Hello", [5, 6, 7], [{"role": "user", "content": "Good day"}]]
    alone = llm.generate(prompts, params)
    async with serving(llm) as engine:
        assert await engine.generate(prompts, params) == alone


async def test_requests_without_a_seed_draw_differently(llm):
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    async with serving(llm) as engine:
        one, other = await engine.generate(["Hello", "Hello"], params)
        assert one.tokens != other.tokens


async def test_cancelled_request_ends_with_finish_reason_cancelled(llm):
    async with serving(llm) as engine:
        answer = await engine.submit("Hello", LONG)
        answer.cancel()
        answer.cancel()
        (completion,) = await answer.completions()
        assert completion.finish_reason == "cancelled" and len(completion.tokens) < 400
        answer.cancel()  # no effect after the end
        assert await answer.completions() == []


async def test_cancelling_a_reader_task_cancels_its_request(llm):
    slow_down(llm)
    async with serving(llm) as engine:
        answer = await engine.submit("Hello", LONG)
        task = asyncio.create_task(answer.completions())
        while not engine.statistics().n_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)
        assert engine.statistics().times.n_steps < 390


async def test_cancelled_or_failed_generate_cancels_all_its_requests(llm):
    slow_down(llm)
    async with serving(llm) as engine:
        task = asyncio.create_task(engine.generate(["Hello", "you"], LONG))
        while engine.statistics().n_running < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)
        with pytest.raises(UsageError, match="empty"):
            await engine.generate(["Hello", ""], LONG)
        await until_idle(engine)
        assert engine.statistics().times.n_steps < 390


async def test_timed_out_request_returns_tokens_so_far(llm):
    slow_down(llm)
    async with serving(llm) as engine:
        over = await engine.submit("Hello", LONG, timeout_s=0)
        late = await engine.submit("Hello", LONG, timeout_s=1)
        enough = await engine.submit("Hello", PARAMS, timeout_s=LIMIT_S)
        ends = [(await answer.completions())[0] for answer in (over, late, enough)]
        assert [end.finish_reason for end in ends] == ["timeout", "timeout", "length"]
        assert not ends[0].tokens and 0 < len(ends[1].tokens) < 400


async def test_timeout_includes_tokenisation_of_prompt(llm, monkeypatch):
    original = llm.input_processor.request

    def request(*args: object, **settings: object) -> object:
        time.sleep(0.1)
        return original(*args, **settings)

    monkeypatch.setattr(llm.input_processor, "request", request)
    async with serving(llm) as engine:
        answer = await engine.submit("Hello", LONG, timeout_s=0.09)
        (completion,) = await answer.completions()
        assert (completion.finish_reason, completion.tokens) == ("timeout", ())


def slow_down(llm: LLM) -> None:
    """Makes each step take at least 20 ms, so that tests can end requests of 400 tokens early."""
    original = llm.engine.step

    def step() -> object:
        time.sleep(0.02)
        return original()

    llm.engine.step = step


# The event loop and the thread.


async def test_prompts_are_tokenised_outside_the_event_loop(llm, monkeypatch):
    seen = []
    original = llm.input_processor.request
    monkeypatch.setattr(
        llm.input_processor,
        "request",
        lambda *args, **more: seen.append(threading.get_ident()) or original(*args, **more),
    )
    async with serving(llm) as engine:
        await engine.generate(["Hello", "you"], PARAMS)
    assert len(set(seen)) == 1 and threading.get_ident() not in seen


async def test_idle_engine_runs_no_steps_and_does_not_spin(llm):
    """Also after a request was cancelled at the moment of its end."""
    async with serving(llm) as engine:
        await engine.generate(["Hello"], PARAMS)
        answer = await engine.submit("Hello", PARAMS)
        reading = aiter(answer)
        while (await anext(reading)).completion is None:
            pass
        answer._n_open = 1  # as if the end of the request and its cancellation had crossed
        answer.cancel()
        answer._n_open = 0
        while not llm.engine.idle:
            await asyncio.sleep(0.001)
        before, used_s = engine.statistics().times.n_steps, time.process_time()
        await asyncio.sleep(0.2)
        assert engine.statistics().times.n_steps == before
        assert time.process_time() - used_s < 0.1


async def test_statistics_are_snapshots_of_engine_load(llm):
    async with serving(llm) as engine:
        before = engine.statistics()
        (n_blocks,) = llm.engine.capacity.n_blocks
        assert (before.n_running, before.n_blocks_free) == (0, n_blocks)
        await engine.generate([[5] * 40, [5] * 40], PARAMS)
        after = engine.statistics()
        assert (before.times.n_steps, after.n_running, after.n_waiting) == (0, 0, 0)
        assert after.times.n_steps >= 12
        assert (after.n_prompt_tokens, after.n_blocks_used) == (80, 0)
        assert after.n_blocks_cached + after.n_blocks_free == n_blocks
        await engine.generate([[5] * 40], PARAMS)
        assert engine.statistics().n_prefix_tokens == after.n_prefix_tokens + 32


async def test_close_cancels_running_and_submitted_requests(llm):
    """The LLM stays usable after the engine is closed."""
    before = llm.generate(["Hello"], PARAMS)
    slow_down(llm)
    engine = AsyncLLM(llm)
    answers = [await engine.submit("Hello", LONG) for _ in range(3)]
    await anext(aiter(answers[0]))
    answers.append(await engine.submit("Hello", LONG))
    tasks = [asyncio.create_task(answer.completions()) for answer in answers[1:]]
    await asyncio.wait_for(engine.close(), LIMIT_S)
    for (end,) in await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S):
        assert end.finish_reason == "cancelled"
    with pytest.raises(RuntimeError, match="closed"):
        await engine.submit("Hello", PARAMS)
    await asyncio.wait_for(engine.close(), LIMIT_S)
    assert llm.generate(["Hello"], PARAMS) == before


async def test_submit_during_close_is_refused(llm):
    """Regression: a prompt that was still being tokenised was queued after the closing message."""
    engine = AsyncLLM(llm)
    task = asyncio.create_task(engine.submit("Hello", PARAMS))
    await asyncio.sleep(0)  # the prompt is being tokenised now
    closing = asyncio.create_task(engine.close())
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.wait_for(task, LIMIT_S)
    await asyncio.wait_for(closing, LIMIT_S)


def test_engine_thread_ends_if_event_loop_ends_without_close(llm):
    """The engine stops before the 400 tokens are complete, and the LLM stays usable."""
    before = llm.generate(["Hello"], PARAMS)
    slow_down(llm)

    async def forget() -> AsyncLLM:
        engine = AsyncLLM(llm)
        await anext(aiter(await engine.submit("Hello", LONG)))
        return engine

    engine = asyncio.run(forget())
    engine._thread.join(LIMIT_S)
    assert not engine._thread.is_alive()
    assert llm.engine.idle and llm.engine.times.n_steps < 390
    assert llm.generate(["Hello"], PARAMS) == before


async def test_generate_takes_and_returns_what_llm_does(llm):
    """Regression: a string was taken for a list of one-letter prompts."""
    messages = [{"role": "user", "content": "Hello"}]
    prompts = ("Hello", [5, 6, 7], {"prompt": "Hello"}, messages, ["Hello", [5, 6], messages])
    expected = [llm.generate(prompt, PARAMS) for prompt in prompts]
    two = [PARAMS, SamplingParams(max_tokens=3)]
    expected_of_two = llm.generate(["Hello", "The sky"], two)
    async with serving(llm) as engine:
        for prompt, completions in zip(prompts, expected, strict=True):
            assert await engine.generate(prompt, PARAMS) == completions
        assert await engine.generate(["Hello", "The sky"], sampling_params=two) == expected_of_two
        with pytest.raises(UsageError, match="1 prompts and 2 sampling params"):
            await engine.generate("Hello", two)


# Errors.


def test_another_event_loop_is_refused(llm):
    """Regression: its requests were never answered."""

    async def make() -> AsyncLLM:
        return AsyncLLM(llm)

    async def ask(engine: AsyncLLM) -> None:
        await engine.submit("Hello", PARAMS)

    engine = asyncio.run(make())
    with pytest.raises(RuntimeError, match="another event loop; create a new one"):
        asyncio.run(ask(engine))
    asyncio.run(asyncio.wait_for(engine.close(), LIMIT_S))


async def test_llm_refuses_calls_until_its_async_llm_is_closed(llm):
    """Regression: both stepped one engine, which failed."""
    pieces = llm.stream("Hello", LONG)
    next(pieces)
    with pytest.raises(UsageError, match="unfinished requests"):
        AsyncLLM(llm)
    pieces.close()
    async with serving(llm):
        for call in (lambda: llm.generate("Hello"), lambda: llm.score([[5, 6]]), llm.machine):
            with pytest.raises(UsageError, match="close the AsyncLLM first"):
                call()
        with pytest.raises(UsageError, match="close the AsyncLLM first"):
            AsyncLLM(llm)
    assert len(llm.generate("Hello", PARAMS)) == 1


async def test_async_llm_waits_for_a_call_of_another_thread(llm, monkeypatch):
    """Regression: both used the engine at the same time."""
    begun, is_lent = threading.Event(), threading.Event()

    def measure_slowly(_):
        begun.set()
        return is_lent.wait(0.5)

    monkeypatch.setattr(rank_rpc, "measure_machine", measure_slowly)
    with ThreadPoolExecutor() as pool:
        measured = pool.submit(llm.machine)
        assert begun.wait(LIMIT_S)
        async with serving(llm):
            is_lent.set()
            assert measured.result() is False


async def test_async_llm_is_refused_while_another_thread_scores_texts(llm, monkeypatch):
    """Regression: the AsyncLLM took the LLM between two texts, and `score` failed."""
    forward, begun = llm.engine.runner.forward, threading.Event()

    def slow_forward(*args):
        begun.set()
        time.sleep(0.5)
        return forward(*args)

    texts = [[5, 6, 7], [8, 9]]
    expected = llm.score(texts)
    monkeypatch.setattr(llm.engine.runner, "forward", slow_forward)
    with ThreadPoolExecutor() as pool:
        scored = pool.submit(llm.score, texts)
        assert begun.wait(LIMIT_S)
        with pytest.raises(UsageError, match="another thread scores texts"):
            AsyncLLM(llm)
        assert scored.result() == expected


async def test_invalid_prompts_and_grammars_are_refused_on_submit(llm):
    async with serving(llm) as engine:
        for prompt, params in (("", PARAMS), ([999], PARAMS), ([5] * 600, PARAMS), ("a", {"n": 2})):
            with pytest.raises(UsageError):
                await engine.submit(prompt, params)
        with pytest.raises(UsageError, match="regular expression"):
            await engine.submit("a", SamplingParams(grammar=Grammar("regex", "(")))
        assert len(await engine.generate(["Hello"], PARAMS)) == 1


async def test_engine_refusal_fails_only_the_refused_request(llm, monkeypatch):
    async with serving(llm) as engine:
        original = llm.engine.submit

        def submit(request: object, timeout_s: float | None) -> int:
            if request.prompt == (5,):
                raise UsageError("not this one")
            return original(request, timeout_s)

        monkeypatch.setattr(llm.engine, "submit", submit)
        wrong, right = await engine.submit([5], PARAMS), await engine.submit([6], PARAMS)
        with pytest.raises(UsageError, match="not this one"):
            await wrong.completions()
        assert len(await right.completions()) == 1


async def test_nan_fails_all_running_requests_but_not_the_next(llm):
    (before,) = llm.generate(["Hello"], PARAMS)
    weight = llm.engine.runner.model.norm.weight.values
    kept = weight.clone()
    async with serving(llm) as engine:
        with torch.no_grad():
            weight.fill_(torch.nan)
        answers = [await engine.submit("Hello", LONG) for _ in range(3)]
        ends = await asyncio.gather(*(a.completions() for a in answers), return_exceptions=True)
        assert [type(end) for end in ends] == [NumericalError] * 3
        with torch.no_grad():
            weight.copy_(kept)
        (after,) = await engine.generate(["Hello"], PARAMS)
        assert after.tokens == before.tokens


async def test_engine_error_fails_running_submitted_and_later_requests(llm, monkeypatch):
    slow_down(llm)
    engine = AsyncLLM(llm)
    answers = [await engine.submit("Hello", LONG) for _ in range(3)]
    reading = aiter(answers[0])
    await anext(reading)
    tasks = [asyncio.create_task(answer.completions()) for answer in answers[1:]]

    def fail(*_: object) -> None:
        broken.set()
        raise ValueError("something broke")

    broken = threading.Event()
    monkeypatch.setattr(llm.engine.runner, "step", fail)
    while not broken.is_set():  # blocks the event loop, which sees the error only afterwards
        time.sleep(0.001)
    engine._thread.join(LIMIT_S)
    # A request that `submit` puts into the queue while the engine ends.
    engine._client.queue.put(late := RequestHandle(answers[0].request, engine._client.queue))
    tasks.append(asyncio.create_task(late.completions()))
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LIMIT_S)
    assert [str(end) for end in ends] == ["something broke"] * 3
    with pytest.raises(ValueError, match="something broke"):
        while True:
            await asyncio.wait_for(anext(reading), LIMIT_S)
    with pytest.raises(RuntimeError, match="ended on an error") as caught:
        await engine.submit("Hello", PARAMS)
    assert str(caught.value.__cause__) == "something broke"
    with pytest.raises(ValueError, match="something broke"):
        await asyncio.wait_for(engine.close(), LIMIT_S)
