"""Work of many clients in shared threads: small work and clients with little work go first."""

import asyncio
import threading
import time
from collections.abc import Awaitable
from functools import partial

import msgspec
import pytest

from parallel_llama.serve.asgi import CHUNK_BYTES, JSONBody
from parallel_llama.serve.fair_threads import LARGE_WORK, MAX_LARGE_WAITING, FairThreads
from parallel_llama.serve.replies import CompletionChoice, CompletionReply
from parallel_llama.serve.service import RequestContext, Service

LARGE = LARGE_WORK + 1


async def started(work: Awaitable[object]) -> "asyncio.Task[object]":
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.01)
    return task


async def test_small_work_runs_while_large_work_of_many_clients_waits():
    """Regression: work ran in the order of arrival, in four threads."""
    threads = FairThreads()
    goes_on = threading.Event()
    large = [await started(threads.run(goes_on.wait, LARGE, str(n))) for n in range(40)]
    assert await threads.run(lambda: 7, 100, "small") == 7
    assert not any(task.done() for task in large)
    goes_on.set()
    await asyncio.gather(*large)


async def test_client_with_little_work_overtakes_client_with_much():
    threads = FairThreads()
    goes_on, order = threading.Event(), []
    tasks = [await started(threads.run(goes_on.wait, LARGE, "greedy"))]
    for n in range(9):
        work = threads.run(partial(order.append, n), LARGE, "greedy")
        tasks.append(await started(work))
    tasks.append(await started(threads.run(lambda: order.append("fair"), LARGE, "fair")))
    goes_on.set()
    await asyncio.gather(*tasks)
    assert order == ["fair", *range(9)]


async def test_large_bodies_wait_while_much_large_work_is_waiting():
    """Regression: the server read all bodies at once, and 100 clients took 900 MB."""
    threads = FairThreads()
    await threads.wait_for_large(1, "a", 0.05)
    goes_on = threading.Event()
    half = MAX_LARGE_WAITING // 2
    tasks = [await started(threads.run(goes_on.wait, half, str(n))) for n in range(2)]
    with pytest.raises(TimeoutError):
        await threads.wait_for_large(1, "a", 0.05)
    waiting = [await started(threads.wait_for_large(1, "a", 60)) for _ in range(3)]
    assert not any(task.done() for task in waiting)
    tasks[1].cancel()
    await asyncio.gather(*waiting)
    goes_on.set()
    await tasks[0]


async def test_work_that_times_out_in_the_queue_is_not_run():
    threads = FairThreads()
    goes_on, done = threading.Event(), []
    first = await started(threads.run(goes_on.wait, LARGE, "a"))
    with pytest.raises(TimeoutError):
        await threads.run(lambda: done.append(1), LARGE, "b", 0.05)
    goes_on.set()
    assert await first
    assert await threads.run(lambda: 3, LARGE, "b") == 3 and done == []


async def test_thread_stays_busy_until_cancelled_work_ends():
    threads = FairThreads()
    goes_on, left = threading.Event(), []
    first = await started(threads.run(goes_on.wait, LARGE, "gone"))
    first.cancel()
    second = await started(threads.run(lambda: left.append(goes_on.is_set()), LARGE, "b"))
    assert not second.done()
    goes_on.set()
    await second
    assert left == [True]


async def test_slow_templates_do_not_delay_other_small_work():
    threads = FairThreads()
    goes_on = threading.Event()
    chats = [await started(threads.run(goes_on.wait, 100, str(n), renders=True)) for n in range(9)]
    assert await threads.run(lambda: 7, 100, "small") == 7
    goes_on.set()
    await asyncio.gather(*chats)


async def test_lane_stays_idle_three_times_as_long_as_large_work_ran():
    """Regression: large bodies of many clients kept a core and the GIL busy all the time."""
    threads = FairThreads()
    times = []

    def work():
        times.append(time.monotonic())
        time.sleep(0.03)
        times.append(time.monotonic())

    await asyncio.gather(*(threads.run(work, LARGE, str(n)) for n in range(3)))
    for ended, started in ((times[1], times[2]), (times[3], times[4])):
        assert started - ended > 0.08


async def test_only_large_parts_of_an_answer_are_encoded_in_a_thread():
    """Regression: the event loop encoded all parts of an answer, and other clients waited."""
    context = RequestContext(Service(["m"], None, None), None)
    own = threading.get_ident()
    assert await context.serialize(threading.get_ident, 100) == own
    assert await context.serialize(threading.get_ident, LARGE) != own


def test_large_json_body_is_sent_in_chunks():
    sent, text = [], b"1234567" * CHUNK_BYTES

    async def send(message):
        sent.append(message)

    asyncio.run(JSONBody(text)({}, None, send))
    start, *pieces = sent
    assert (b"content-length", str(len(text)).encode()) in start["headers"]
    assert b"".join(piece["body"] for piece in pieces) == text
    assert [piece["more_body"] for piece in pieces] == [True] * 6 + [False]


def test_reply_from_encoded_choices_has_the_same_choices():
    choices = [CompletionChoice(index=n, text='a"', token_ids=[n]) for n in range(2)]
    fields = {"id": "1", "object": "text_completion", "created": 2, "model": "m"}
    encoded = CompletionReply(**fields, choices=[]).encode_with([each.encode() for each in choices])
    assert (
        msgspec.json.decode(encoded, type=dict)["choices"]
        == msgspec.json.decode(CompletionReply(**fields, choices=choices).encode())["choices"]
    )
