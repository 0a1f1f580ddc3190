"""An answer that a restarted engine generates again."""

import asyncio
import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_llama.errors import NumericalError
from parallel_llama.request import Completion, Request, SamplingParams, TokenLogprob
from parallel_llama.serve import answer as answers
from parallel_llama.serve import completions, rendering
from parallel_llama.serve.answer import Answer, Diverged, Stalled
from parallel_llama.serve.asgi import current_id, until_disconnect
from parallel_llama.serve.bodies import CompletionBody
from parallel_llama.serve.completions import _Pending
from parallel_llama.serve.wire import Output

TOKENS = tuple(range(100, 112))
TEXTS = [f"<{token}>" if token % 3 else "" for token in TOKENS]  # some tokens show nothing


def outputs(cuts: list[int], tokens: tuple[int, ...] = TOKENS) -> list[Output]:
    """The outputs of steps that end at these positions; the last has the completion."""
    ends = sorted({*(cut for cut in cuts if 0 < cut < len(tokens)), len(tokens)})
    found, start = [], 0
    for end in ends:
        text = "".join(TEXTS[start:end])
        completion = None
        if end == len(tokens):
            completion = Completion(0, "".join(TEXTS), tokens, "length", 1)
        found.append(Output(0, 0, tokens[start:end], text, (), completion))
        start = end
    return found


def new_answer(cancelled: list[Answer]) -> Answer:
    params = SamplingParams(max_tokens=len(TOKENS))
    return Answer(0, Request(0, (1,), params, 0, frozenset()), cancelled.append)


async def test_engine_that_ends_with_other_tokens_fails_the_request():
    """Regression: the request waited forever."""
    answer = new_answer([])
    for output in outputs([3, 6])[:2]:
        answer.put(output)
    answer.restart()
    completion = Completion(0, "", (100, 7), "stop", 1)
    answer.put(Output(0, 0, (100, 7), "", (), completion))
    assert answer.has_ended
    with pytest.raises(Diverged):
        await asyncio.wait_for(answer.whole(), 5)


async def test_outputs_of_several_prompts_are_read_at_once(monkeypatch):
    """Regression: the second prompt's outputs were unread, and its request failed."""
    monkeypatch.setattr(answers, "MAX_UNREAD", 2)

    async def serialize(write, _n_bytes):
        return write()

    both = [new_answer([]), new_answer([])]
    body = msgspec.json.decode(b'{"prompt": ["a", "b"]}', type=CompletionBody)
    context = SimpleNamespace(model="m", serialize=serialize)
    reading = asyncio.create_task(completions._whole(_Pending(context, body, both, "id", 0)))
    for answer in reversed(both):
        for output in outputs([3, 6, 9, 11]):
            answer.put(output)
            await asyncio.sleep(0.01)
    reply = msgspec.json.decode(await asyncio.wait_for(reading, 5))
    assert [choice["text"] for choice in reply["choices"]] == ["".join(TEXTS)] * 2


def test_prompt_logprobs_stay_complete_while_a_restarted_engine_sends_them_again():
    answer = new_answer([])
    scores = [TokenLogprob(token, -1.0, ()) for token in range(4)]
    answer.put_prompt_logprobs(scores)
    answer.restart()
    answer.put_prompt_logprobs(scores[:1])
    assert answer.prompt_logprobs == scores
    answer.put_prompt_logprobs(scores[1:])
    assert answer.prompt_logprobs == scores


places = st.lists(st.integers(1, len(TOKENS)), max_size=8)


@given(places, places, st.integers(0, 12), st.integers(0, 12))
def test_outputs_are_not_repeated_after_engine_restarts(first, second, n_told, n_again):
    """In another batch other drafts are accepted, so steps have other numbers of tokens."""

    async def run() -> list[Output]:
        answer = new_answer([])
        for output in outputs(first)[:n_told]:
            answer.put(output)
        for cuts in (second[:n_again], second):  # the second engine dies as well
            answer.restart()
            for output in outputs(cuts)[: None if cuts is second else n_again]:
                answer.put(output)
        return await answer.whole()

    told = asyncio.run(run())
    assert sum((output.tokens for output in told), ()) == TOKENS
    assert "".join(output.text for output in told) == "".join(TEXTS)
    assert [output.completion is not None for output in told][-1]


async def test_answer_ends_if_a_restarted_engine_has_room_for_fewer_tokens_than_emitted():
    """The new engine shortens a request without max_tokens to its own KV cache."""
    answer = new_answer([])
    for output in outputs([3, 6, 9])[:3]:
        answer.put(output)
    answer.restart()
    for output in outputs([2], TOKENS[:5]):
        answer.put(output)
    emitted = await answer.whole()
    assert sum((output.tokens for output in emitted), ()) == TOKENS[:9]
    assert answer.ends == ["length"] and emitted[-1].completion is not None


async def test_answer_that_diverges_after_a_restart_is_cancelled():
    cancelled: list[Answer] = []
    answer = new_answer(cancelled)
    for output in outputs([3, 6])[:2]:
        answer.put(output)
    answer.restart()
    answer.put(outputs([4], (*TOKENS[:2], 7, *TOKENS[3:]))[0])
    assert cancelled == [answer]
    with pytest.raises(Diverged):
        await answer.whole()


async def test_answer_with_too_many_unread_outputs_is_cancelled(monkeypatch):
    monkeypatch.setattr(answers, "MAX_UNREAD", 3)
    cancelled: list[Answer] = []
    answer = new_answer(cancelled)
    for output in outputs([1, 2, 3, 4, 5, 6])[:4]:
        answer.put(output)
    assert cancelled == [answer]
    with pytest.raises(Stalled):
        await answer.whole()


async def test_closing_the_output_stream_early_cancels_the_answer():
    cancelled: list[Answer] = []
    answer = new_answer(cancelled)
    answer.put(outputs([2])[0])
    told = answer.outputs()
    await anext(told)
    await told.aclose()
    assert cancelled == [answer] and answer.is_abandoned


def test_refused_request_is_freed_without_garbage_collection():
    """Regression: the error and its frame formed a cycle, and 300 bodies were never freed."""
    held = []

    class Body:
        pass

    async def refuse() -> None:
        body = Body()
        held.append(weakref.ref(body))
        raise ValueError("refused")

    async def run() -> None:
        request = SimpleNamespace(receive=asyncio.Event().wait)
        with suppress(ValueError):
            await until_disconnect(request, refuse())
        await asyncio.sleep(0)
        assert held[0]() is None

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_error_that_ends_a_stream_is_logged_with_the_request_id(caplog):
    """Regression: the status of such a stream is 200, and no line had its request id."""

    async def chunks():
        yield b"data: 1\n\n"
        raise NumericalError("NaN")

    async def rest():
        current_id.set("abc")
        stream = await rendering.streamed(chunks())
        return [chunk async for chunk in stream._rest]

    with caplog.at_level("INFO", "parallel_llama"):
        (last,) = asyncio.run(rest())
    assert b"numerical_error" in last
    (record,) = caplog.records
    assert record.getMessage() == "failed"
    assert record.fields == {"request_id": "abc", "code": "numerical_error"}
