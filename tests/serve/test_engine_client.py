"""The frontend's engine client, with simulated engines."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from parallel_llama.engine.statistics import EngineStatistics, StepTimes
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.request import Completion, Request, SamplingParams
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.engine_client import Busy, EngineClient, EngineEnded, NotReady
from parallel_llama.serve.metrics import Metrics
from parallel_llama.serve.wire import (
    AdapterChanged,
    Cancel,
    ChangeAdapter,
    EngineRefused,
    Failed,
    Frames,
    Loaded,
    Output,
    RankFacts,
    Regrouping,
    Stepped,
    Submit,
    ToEngine,
    framed,
    to_engine,
)

LOADED = Loaded("float32", "none", 1, 1000, 16, 1000, (RankFacts(0, 1),))
STATISTICS = EngineStatistics(1, 0, 1, 0, 9, 1, 0, 0, 0, 0, StepTimes())


class Played:
    """A simulated engine: the messages that it receives, and those that it sends."""

    def __init__(self, code: int = 1) -> None:
        self.socket, self._theirs = socket.socketpair()
        self._code = code
        self._frames, self._heard = Frames(), []

    async def end(self, grace_s: float = 0.0) -> tuple[int, str]:
        del grace_s
        self.socket.close()
        self._theirs.close()
        return self._code, "it was played"

    async def hear(self) -> ToEngine:
        self._theirs.setblocking(False)
        while not self._heard:
            data = await asyncio.get_running_loop().sock_recv(self._theirs, 1 << 16)
            self._heard += map(to_engine.decode, self._frames.feed(data))
        return self._heard.pop(0)

    def say(self, message: object) -> None:
        self._theirs.sendall(framed(message))

    def die(self) -> None:
        self._theirs.close()


def request(**settings: object) -> Request:
    params = SamplingParams(**{"max_tokens": 4, **settings})
    return Request(0, (1, 2), params, 0, frozenset())


def submit(client: EngineClient, asked: Request, account: str = "") -> Answer:
    (answer,) = client.submit([asked], account)
    return answer


def step(key: int, *tokens: int, ends: bool = False) -> Stepped:
    completion = Completion(0, "x", tokens, "length", 2) if ends else None
    output = Output(key, 0, tokens, "x" * len(tokens), (), completion)
    return Stepped((output,), (), 0.01, STATISTICS)


@asynccontextmanager
async def playing(
    **settings: float,
) -> AsyncIterator[tuple[EngineClient, list[Played], asyncio.Task]]:
    """A client, the engines that it starts in turn, and the task in which it runs."""
    engines: list[Played] = []

    def start() -> Played:
        engines.append(Played())
        return engines[-1]

    given = {"max_choices": 4, "restarts": 9, "step_timeout_s": 100.0, **settings}
    client = EngineClient(start, request(), Metrics("m"), **given)
    running = asyncio.create_task(client.run())
    await asyncio.sleep(0.01)
    try:
        yield client, engines, running
    finally:
        running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(ended, (asyncio.CancelledError, EngineEnded)), ended


async def ready(client: EngineClient, engines: list[Played], number: int = 0) -> Played:
    """The engine with this number, once it is loaded."""
    while len(engines) <= number:
        await asyncio.sleep(0.01)
    engines[number].say(LOADED)
    while client.state != "ready":
        await asyncio.sleep(0.01)
    return engines[number]


async def test_requests_are_refused_until_the_engine_is_loaded():
    async with playing() as (client, engines, _):
        with pytest.raises(NotReady, match="being loaded"):
            submit(client, request())
        assert not client.is_ready
        await ready(client, engines)
        assert client.is_ready


async def test_max_choices_is_enforced_and_room_is_freed():
    async with playing() as (client, engines, _):
        engine = await ready(client, engines)
        with pytest.raises(UsageError, match="5 completions at once exceed the limit of 4"):
            submit(client, request(n=5))
        first = submit(client, request(n=1))
        submit(client, request(n=3))
        with pytest.raises(Busy):
            submit(client, request())
        engine.say(step(first.key, 5, ends=True))
        assert [output.tokens for output in await first.whole()] == [(5,)]
        submit(client, request())


async def test_new_account_is_admitted_while_another_fills_the_server():
    async with playing() as (client, engines, _):
        engine = await ready(client, engines)
        first, *_others = [submit(client, request(), "greedy") for _ in range(4)]
        with pytest.raises(Busy, match="4 of at most 4"):
            submit(client, request(), "greedy")
        with pytest.raises(Busy, match="4 of at most 4"):
            client.require_room(1, "modest", is_large=True)
        with client.preparing(1, "modest", is_large=False):
            assert client.n_choices == 5
            with pytest.raises(Busy, match="5 of at most 4"):
                submit(client, request(), "modest")
        submit(client, request(), "modest")
        with pytest.raises(Busy, match="5 of at most 5"):
            submit(client, request(), "third")
        engine.say(step(first.key, 5, ends=True))
        await first.whole()
        submit(client, request(), "third")


@pytest.mark.parametrize("n", [1, 2])
async def test_requests_submitted_together_may_use_the_whole_limit(n):
    """Regression: earlier requests of the call counted as requests of other clients."""
    async with playing(max_choices=8) as (client, engines, _):
        await ready(client, engines)
        answers = client.submit([request(n=n)] * (8 // n))
        assert client.n_choices == 8 and len({answer.key for answer in answers}) == 8 // n


async def test_no_request_is_submitted_if_all_together_exceed_the_limit():
    async with playing(max_choices=8) as (client, engines, _):
        await ready(client, engines)
        submit(client, request())
        with pytest.raises(Busy, match="1 of at most 7"):
            client.submit([request(n=4)] * 2)
        assert client.n_choices == 1


async def test_refused_or_failed_request_does_not_end_others():
    async with playing() as (client, engines, _):
        engine = await ready(client, engines)
        refused, failed, good = (submit(client, request()) for _ in range(3))
        engine.say(EngineRefused(refused.key, "no such grammar"))
        engine.say(Failed((failed.key,), "nan"))
        engine.say(step(good.key, 7, ends=True))
        with pytest.raises(UsageError, match="no such grammar"):
            await refused.whole()
        with pytest.raises(NumericalError):
            await failed.whole()
        assert len(await good.whole()) == 1 and client.n_choices == 0


async def test_request_runs_on_at_most_three_engines():
    """Otherwise one request that crashes engines would end the server."""
    async with playing() as (client, engines, _):
        for number in range(3):
            engine = await ready(client, engines, number)
            if number == 0:
                answer = submit(client, request())
            assert (await engine.hear()).request == answer.request
            engine.say(step(answer.key, 5))
            engine.die()
        await ready(client, engines, 3)
        with pytest.raises(NotReady, match="every engine that ran this request has ended"):
            await answer.whole()
        assert client.n_choices == 0 and client.n_restarts == 3


async def test_abandoned_request_is_cancelled_and_not_resubmitted():
    async with playing() as (client, engines, _):
        engine = await ready(client, engines)
        answer = submit(client, request())
        answer.abandon()
        assert isinstance(await engine.hear(), Submit)
        assert await engine.hear() == Cancel(answer.key)
        engine.die()
        engine = await ready(client, engines, 1)
        assert client.n_choices == 0
        with pytest.raises(asyncio.TimeoutError):  # TimeoutError itself from Python 3.11 on
            await asyncio.wait_for(engine.hear(), 0.05)


async def test_engine_that_does_not_step_in_time_is_replaced():
    async with playing(step_timeout_s=0.3) as (client, engines, _):
        await ready(client, engines)
        submit(client, request())
        while len(engines) < 2:
            await asyncio.sleep(0.01)
        assert not client.is_ready


async def test_engine_that_regroups_longer_than_the_step_limit_is_not_replaced():
    """Regression: reading the shards of a lost rank counted as one long step."""
    async with playing(step_timeout_s=1.0) as (client, engines, _):
        engine = await ready(client, engines)
        answer = submit(client, request())
        for _ in range(15):
            engine.say(Regrouping())
            await asyncio.sleep(0.1)
        assert client.is_ready and len(engines) == 1
        engine.say(step(answer.key, 5, ends=True))
        assert [output.tokens for output in await answer.whole()] == [(5,)]


async def test_idle_engine_is_probed_and_stays_ready_when_it_steps():
    async with playing(step_timeout_s=2) as (client, engines, _):
        engine = await ready(client, engines)
        probe = await engine.hear()
        engine.say(step(probe.key, 1, ends=True))
        while client.step_age_s is None or client.step_age_s > 0.5:
            await asyncio.sleep(0.01)
        assert client.is_ready and client.n_choices == 0 and len(engines) == 1


async def test_too_many_engine_restarts_end_client_and_requests():
    async with playing(restarts=1) as (client, engines, running):
        engine = await ready(client, engines)
        answer = submit(client, request())
        engine.die()
        (await ready(client, engines, 1)).die()
        with pytest.raises(EngineEnded, match="it was played"):
            await running
        with pytest.raises(NotReady, match="it was played"):
            await answer.whole()


async def test_a_new_engine_gets_the_adapters_before_the_requests():
    """A new engine has only the command line's adapters, and would refuse the requests."""
    async with playing() as (client, engines, _):
        engine = await ready(client, engines)
        for name, folder in (("a", "x"), ("b", "y"), ("b", None)):
            changing = asyncio.create_task(client.change_adapter(name, folder))
            asked = await engine.hear()
            assert (asked.name, asked.folder) == (name, folder)
            engine.say(AdapterChanged(asked.key, None))
            await changing
        submit(client, request())
        engine.die()
        engine = await ready(client, engines, 1)
        changed = await engine.hear()
        assert (changed.name, changed.folder) == ("a", "x")
        assert isinstance(await engine.hear(), Submit)
        engine.say(AdapterChanged(changed.key, "it is not there"))  # nobody asked
        assert client.state == "ready"


async def test_restarted_engine_replaces_an_adapter_of_the_command_line():
    """Regression: the engine kept the first adapter, and refused the other one of that name."""
    async with playing() as (client, engines, _):
        engine = await ready(client, engines)
        for folder in (None, "other"):
            changing = asyncio.create_task(client.change_adapter("own", folder))
            engine.say(AdapterChanged((await engine.hear()).key, None))
            await changing
        engine.die()
        engine = await ready(client, engines, 1)
        heard = [await engine.hear() for _ in range(2)]
        assert [(each.name, each.folder) for each in heard] == [("own", None), ("own", "other")]


async def test_restarted_engine_may_end_choices_in_another_order():
    """Regression: an output of a choice that had ended before ended the server."""

    def ended(key: int, choice: int) -> Output:
        completion = Completion(0, "x", (5,), "length", 2, choice=choice)
        return Output(key, choice, (5,), "x", (), completion)

    async with playing() as (client, engines, running):
        engine = await ready(client, engines)
        answer = submit(client, request(n=2))
        engine.say(Stepped((ended(answer.key, 1),), (), 0.01, STATISTICS))
        await asyncio.sleep(0.05)
        engine.die()
        engine = await ready(client, engines, 1)
        assert isinstance(await engine.hear(), Submit)
        both = ended(answer.key, 0), ended(answer.key, 1)
        engine.say(Stepped(both, (answer.key,), 0.01, STATISTICS))
        engine.say(Failed((answer.key,), "late"))
        assert [output.choice for output in await answer.whole()] == [1, 0]
        cancelled = await engine.hear()
        assert isinstance(cancelled, Cancel) and cancelled.key == answer.key
        await asyncio.sleep(0.05)
        assert not running.done()


async def test_a_change_of_adapters_that_fails_is_not_repeated():
    async with playing() as (client, engines, _):
        with pytest.raises(NotReady, match="being loaded"):
            await client.change_adapter("a", "x")
        engine = await ready(client, engines)
        refused = asyncio.create_task(client.change_adapter("a", "x"))
        engine.say(AdapterChanged((await engine.hear()).key, "there is no x"))
        with pytest.raises(UsageError, match="there is no x"):
            await refused
        lost = asyncio.create_task(client.change_adapter("b", "y"))
        assert isinstance(await engine.hear(), ChangeAdapter)
        engine.die()
        with pytest.raises(NotReady, match="restarted"):
            await lost
        engine = await ready(client, engines, 1)
        with pytest.raises(asyncio.TimeoutError):  # TimeoutError itself from Python 3.11 on
            await asyncio.wait_for(engine.hear(), 0.05)
