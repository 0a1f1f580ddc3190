"""Many coroutines share one model: each gets the result that it gets alone, or an error."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from commands import ROOT, run_python
from llm_program import Counts, soaked, until_idle

from parallel_llama import LLM, AsyncLLM, SamplingParams
from parallel_llama.async_llm import RequestHandle
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.request import Grammar

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
LIMIT_S = 120  # for what takes a moment: a busy machine is no failure, and a hang is one


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    # Without drafts each step is a token. A test changes weights, which a check would find.
    settings = {"dtype": "float64", "kv_cache_bytes": 4 << 20, "integrity_check": False}
    llm = LLM(str(model), **settings, max_drafts=0)
    yield llm
    assert llm.engine.pools[0].n_used == 0
    llm.close()


@asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[AsyncLLM]:
    """An engine that is closed afterwards, and then has neither requests nor a thread."""
    engine = AsyncLLM(llm)
    try:
        yield engine
    finally:
        await asyncio.wait_for(engine.close(), LIMIT_S)
    assert not engine._thread.is_alive() and not len(engine._loop)


# Many at once.


def check_counts(counts: Counts, n: int) -> None:
    assert counts.wrong == 0
    assert counts.finished + counts.cancelled == n
    assert n / 10 < counts.cancelled < n / 3 and counts.preempted > 0


def test_a_crowd_gets_what_each_gets_alone(model):
    llm = LLM(str(model), dtype="float64", kv_cache_bytes=100_000, block_size=4)
    check_counts(soaked(llm, 100), 100)
    llm.close()


def test_a_crowd_at_two_ranks_gets_what_each_gets_alone(model):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program = str(ROOT / "tests" / "support" / "llm_program.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python("-m", *torchrun, program, "soak", str(model), "60", env=env)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    check_counts(msgspec.json.decode(lines["0"], type=Counts), 60)


# One.


async def test_progress_adds_up_to_the_completion(llm):
    (alone,) = llm.generate(["Hello"], PARAMS)
    async with serving(llm) as engine:
        text, tokens, ends = "", (), []
        async for progress in await engine.submit("Hello", PARAMS):
            text, tokens = text + progress.text, tokens + progress.tokens
            ends.append(progress.completion)
        assert (text, tokens) == (alone.text, alone.tokens)
        assert [end for end in ends if end] == [ends[-1]]


async def test_completions_come_in_order_with_their_choices(llm):
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=1, n=3)
    prompts = ["Hello", [5, 6, 7], [{"role": "user", "content": "Good day"}]]
    alone = llm.generate(prompts, params)
    async with serving(llm) as engine:
        assert await engine.generate(prompts, params) == alone


async def test_requests_without_a_seed_draw_differently(llm):
    """Each is another line of the same run."""
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    async with serving(llm) as engine:
        one, other = await engine.generate(["Hello", "Hello"], params)
        assert one.tokens != other.tokens


async def test_an_answer_that_is_cancelled_tells_of_its_end(llm):
    async with serving(llm) as engine:
        answer = await engine.submit("Hello", LONG)
        answer.cancel()
        answer.cancel()
        (completion,) = await answer.completions()
        assert completion.finish_reason == "cancelled" and len(completion.tokens) < 400
        answer.cancel()  # it has ended: nothing happens
        assert await answer.completions() == []


async def test_a_reader_whose_task_is_cancelled_takes_its_request_along(llm):
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


async def test_a_call_that_is_cancelled_or_fails_takes_all_its_requests_along(llm):
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


async def test_a_late_answer_ends_with_what_it_has(llm):
    slow_down(llm)
    async with serving(llm) as engine:
        over = await engine.submit("Hello", LONG, timeout_s=0)
        late = await engine.submit("Hello", LONG, timeout_s=1)
        enough = await engine.submit("Hello", PARAMS, timeout_s=LIMIT_S)
        ends = [(await answer.completions())[0] for answer in (over, late, enough)]
        assert [end.finish_reason for end in ends] == ["timeout", "timeout", "length"]
        assert not ends[0].tokens and 0 < len(ends[1].tokens) < 400


async def test_the_time_in_which_a_prompt_becomes_tokens_counts(llm, monkeypatch):
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
    """Steps of 20 ms at least, so that 400 of them take longer than whoever ends them before."""
    original = llm.engine.step

    def step() -> object:
        time.sleep(0.02)
        return original()

    llm.engine.step = step


# The event loop and the thread.


async def test_prompts_become_tokens_outside_the_event_loop(llm, monkeypatch):
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


async def test_an_engine_without_requests_does_nothing(llm):
    """It waits without a step, also after a late cancellation."""
    async with serving(llm) as engine:
        await engine.generate(["Hello"], PARAMS)
        answer = await engine.submit("Hello", PARAMS)
        reading = aiter(answer)
        while (await anext(reading)).completion is None:
            pass
        answer._n_open = 1  # as if its cancellation and its end had crossed
        answer.cancel()
        answer._n_open = 0
        while not llm.engine.idle:
            await asyncio.sleep(0.001)
        before, used_s = engine.statistics().times.n_steps, time.process_time()
        await asyncio.sleep(0.2)
        assert engine.statistics().times.n_steps == before
        assert time.process_time() - used_s < 0.1


async def test_statistics_are_those_of_the_moment(llm):
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


async def test_closing_ends_what_is_running(llm):
    """All requests get the error, whether running or just submitted; the LLM stays usable."""
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


async def test_who_submits_while_it_closes_is_refused(llm):
    """The message of a prompt that was still being tokenised came behind the last one."""
    engine = AsyncLLM(llm)
    task = asyncio.create_task(engine.submit("Hello", PARAMS))
    await asyncio.sleep(0)  # it is at the tokenizer's now
    closing = asyncio.create_task(engine.close())
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.wait_for(task, LIMIT_S)
    await asyncio.wait_for(closing, LIMIT_S)


def test_a_loop_that_ends_early_ends_the_thread(llm):
    """If the event loop ends without `close`, the model runs for at most two more steps."""
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


# Errors.


async def test_what_cannot_be_done_is_refused_at_once(llm):
    async with serving(llm) as engine:
        for prompt, params in (("", PARAMS), ([999], PARAMS), ([5] * 600, PARAMS)):
            with pytest.raises(UsageError):
                await engine.submit(prompt, params)
        with pytest.raises(UsageError, match="regular expression"):
            await engine.submit("a", SamplingParams(grammar=Grammar("regex", "(")))
        assert len(await engine.generate(["Hello"], PARAMS)) == 1


async def test_what_the_engine_refuses_reaches_who_asked(llm, monkeypatch):
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


async def test_numbers_that_are_none_reach_all_and_the_next_gets_on(llm):
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


async def test_an_error_of_the_engine_reaches_everyone_who_waits(llm, monkeypatch):
    """Running, just submitted and later requests fail; none hangs."""
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
    while not broken.is_set():  # the event loop stands still: this comes when all is over
        time.sleep(0.001)
    engine._thread.join(LIMIT_S)
    # What `submit` puts into the queue in the moment in which the engine ends.
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
