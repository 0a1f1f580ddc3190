"""The frontend's engine client, with simulated engines."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from parallel_llama.engine.statistics import EngineStatistics, StepTimes
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.request import Completion, Request, SamplingParams
from parallel_llama.serve import answer as answers
from parallel_llama.serve import metrics
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.engine_client import (
    WRONG_USE,
    Busy,
    EngineClient,
    EngineEnded,
    NotReady,
    UnknownModel,
)
from parallel_llama.serve.metrics import SHORT_WINDOW_S, Metrics
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
    Stepped,
    Submit,
    ToEngine,
    Working,
    framed,
    to_engine,
)

LOADED = Loaded("float32", "none", 1, 1000, 16, 1000, (RankFacts(0, 1),))
STATISTICS = EngineStatistics(1, 0, 1, 0, 9, 1, 0, 0, 0, 0, StepTimes())


class Played:
    """A simulated engine: the messages that it receives, and those that it sends.

    `adapters` are those that it loads at its start, and `code` is its exit code.
    """

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self.socket, self._theirs = socket.socketpair()
        self.adapters, self.code = dict(adapters), 1
        self._frames, self._heard = Frames(), []

    async def end(self, grace_s: float = 0.0) -> tuple[int, str]:
        del grace_s
        self.socket.close()
        self._theirs.close()
        return self.code, "it was played"

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


def measured(client: EngineClient) -> dict[str, float]:
    """The metrics of a client, except those with more than one value."""
    samples = [sample for family in client.metrics.collect() for sample in family.samples]
    return {each.name: each.value for each in samples if len(each.labels) == 1}


@asynccontextmanager
async def playing(
    **settings: object,
) -> AsyncIterator[tuple[EngineClient, list[Played], asyncio.Task]]:
    """A client, the engines that it starts in turn, and the task in which it runs."""
    engines: list[Played] = []

    def start(adapters: Mapping[str, str]) -> Played:
        engines.append(Played(adapters))
        return engines[-1]

    given = {"max_choices": 4, "restarts": 9, "step_timeout_s": 100.0, **settings}
    given = {"adapters": {}, "check_adapter": lambda *_: None, **given}
    client = EngineClient(start, request(), Metrics("m"), **given)
    running = asyncio.create_task(client.run())
    await asyncio.sleep(0.01)
    try:
        yield client, engines, running
    finally:
        running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(ended, (asyncio.CancelledError, EngineEnded)), ended


async def started(engines: list[Played], number: int) -> Played:
    """The engine with this number, once it is started."""
    while len(engines) <= number:
        await asyncio.sleep(0.01)
    return engines[number]


async def ready(client: EngineClient, engines: list[Played], number: int = 0) -> Played:
    """The engine with this number, once it is loaded."""
    (await started(engines, number)).say(LOADED)
    while client.state != "ready":
        await asyncio.sleep(0.01)
    return engines[number]


async def changed(client: EngineClient, engine: Played, name: str, folder: str | None) -> None:
    """Loads or unloads an adapter, and checks the message that the engine receives."""
    changing = asyncio.create_task(client.change_adapter(name, folder))
    change = await engine.hear()
    assert (change.name, change.folder) == (name, folder)
    engine.say(AdapterChanged(change.key, None))
    await changing


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


async def test_engine_that_works_between_steps_for_long_is_not_replaced():
    """Regression: reading the shards of a lost rank, or an adapter, counted as one long step."""
    async with playing(step_timeout_s=1.0) as (client, engines, _):
        engine = await ready(client, engines)
        answer = submit(client, request())
        for _ in range(15):
            engine.say(Working())
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


async def test_tokens_of_probes_are_not_counted_in_the_metrics():
    """Regression: an idle server generated a token every 5 s, according to its metrics."""
    async with playing(step_timeout_s=2) as (client, engines, _):
        engine = await ready(client, engines)
        probe = await engine.hear()
        answer = submit(client, request())
        outputs = (*step(probe.key, 1, ends=True).outputs, *step(answer.key, 5, 6).outputs)
        engine.say(Stepped(outputs, (), 0.01, STATISTICS))
        await anext(answer.outputs())
        counted = measured(client)
        assert counted["generation_tokens_total"] == counted["iteration_tokens_total_sum"] == 2
        assert counted["prompt_tokens_total"] == 2 and counted["step_seconds_count"] == 1
        assert client.metrics.token_rate.per_s() == 2 / SHORT_WINDOW_S


async def test_times_between_tokens_are_those_of_one_choice(monkeypatch):
    """Regression: they were those between two tokens of any choices, so half of them were 0."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    for module in (answers, metrics):
        monkeypatch.setattr(module, "time", clock)
    async with playing() as (client, engines, _):
        engine = await ready(client, engines)
        answer = submit(client, request(n=2))
        emitted = answer.outputs()
        for gap_s, ends in ((0.5, False), (0.25, False), (0.25, True)):
            now_s += gap_s
            (output,) = step(answer.key, 5, ends=ends).outputs
            both = tuple(msgspec.structs.replace(output, choice=choice) for choice in range(2))
            engine.say(Stepped(both, (), 0.01, STATISTICS))
            assert len(await anext(emitted)) == 2
    for name, count, total_s in (
        ("time_to_first_token_seconds", 1, 0.5),
        ("inter_token_latency_seconds", 4, 1.0),
        ("request_time_per_output_token_seconds", 1, 0.25),
        ("request_decode_time_seconds", 1, 0.5),
        ("e2e_request_latency_seconds", 1, 1.0),
    ):
        found = measured(client)
        assert (found[f"{name}_count"], found[f"{name}_sum"]) == (count, total_s), name


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
            await changed(client, engine, name, folder)
        submit(client, request())
        assert isinstance(await engine.hear(), Submit)
        engine.die()
        engine = await started(engines, 1)
        engine.say(LOADED)
        change = await engine.hear()
        assert (change.name, change.folder) == ("a", "x")
        with pytest.raises(NotReady, match="is being restarted"):
            submit(client, request())
        engine.say(AdapterChanged(change.key, None))
        assert isinstance(await engine.hear(), Submit)
        assert client.state == "ready" and client.adapters == ["a"]


async def test_restarted_engine_replaces_an_adapter_of_the_command_line():
    """Regression: the engine kept the first adapter, and refused the other one of that name."""
    async with playing(adapters={"own": "first"}) as (client, engines, _):
        engine = await ready(client, engines)
        assert engine.adapters == {"own": "first"}
        for folder in (None, "other"):
            await changed(client, engine, "own", folder)
        engine.die()
        engine = await started(engines, 1)
        engine.say(LOADED)
        change = await engine.hear()
        assert engine.adapters == {} and (change.name, change.folder) == ("own", "other")


async def test_adapter_that_a_restarted_engine_refuses_is_dropped(caplog):
    """Regression: clients still saw the adapter, and requests that named it got status 400."""
    async with playing() as (client, engines, _):
        engine = await ready(client, engines)
        for name in ("lost", "kept"):
            await changed(client, engine, name, "folder")
        lost, kept = (submit(client, replace(request(), adapter=n)) for n in ("lost", "kept"))
        engine.die()
        engine = await started(engines, 1)
        engine.say(LOADED)
        for reason in ("adapter 'lost': folder: not a folder", None):
            engine.say(AdapterChanged((await engine.hear()).key, reason))
        resubmitted = await engine.hear()
        assert isinstance(resubmitted, Submit) and resubmitted.key == kept.key
        with pytest.raises(UnknownModel, match="'lost' is not loaded; see /v1/models"):
            await lost.whole()
        with pytest.raises(UnknownModel, match="'lost' is not loaded"):  # tokenised meanwhile
            submit(client, replace(request(), adapter="lost"))
        assert client.is_ready and client.adapters == ["kept"] and client.n_choices == 1
        assert "no longer served: adapter 'lost': folder: not a folder" in caplog.text
        engine.die()
        engine = await started(engines, 2)
        engine.say(LOADED)
        assert (await engine.hear()).name == "kept"


async def test_restarted_engine_starts_without_adapters_that_cannot_be_read(caplog):
    """Regression: the new engine refused the adapter of --adapter, which ended the server.

    The adapter `late` disappears after it was checked for the second engine.
    """
    gone = set()

    def check(name: str, folder: str) -> None:
        if name in gone:
            raise UsageError(f"adapter {name!r}: {folder}: not a folder")

    adapters = {"own": "x", "late": "y", "kept": "z"}
    async with playing(adapters=adapters, check_adapter=check) as (client, engines, _):
        engine = await ready(client, engines)
        assert engine.adapters == adapters
        gone.add("own")
        engine.die()
        engine = await started(engines, 1)
        assert engine.adapters == {"late": "y", "kept": "z"}
        gone.add("late")
        engine.code = WRONG_USE
        engine.die()
        engine = await ready(client, engines, 2)
        assert engine.adapters == {"kept": "z"} and client.adapters == ["kept"]
    for name, folder in (("own", "x"), ("late", "y")):
        assert f"no longer served: adapter '{name}': {folder}: not a folder" in caplog.text


async def test_first_engine_that_cannot_read_an_adapter_ends_the_client():
    def check(*_: str) -> None:
        raise UsageError("not a folder")

    async with playing(adapters={"own": "x"}, check_adapter=check) as (client, engines, running):
        engines[0].code = WRONG_USE
        engines[0].die()
        with pytest.raises(EngineEnded):
            await running
        assert client.adapters == ["own"]


async def test_restarted_engine_may_end_choices_in_another_order():
    """Regression: the server ended when an engine sent a choice that had already ended."""

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
