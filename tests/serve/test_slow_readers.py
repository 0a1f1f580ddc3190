"""Clients that read their answers slowly, or not at all, with a simulated clock."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from parallel_llama.serve import server
from parallel_llama.serve.protocol import BoundedProtocol, protocol_factory
from parallel_llama.serve.server import (
    MIN_READ_BYTES,
    READ_LIMIT_S,
    abort_slow_readers,
    bound_socket,
    serve,
)

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
LARGE = b"a" * (16 << 20)  # more than the buffers of both ends

pytestmark = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Test = Callable[[int, set[BoundedProtocol]], Awaitable[None]]


def large(*, closes: bool = False):
    headers = [(b"content-length", b"%d" % len(LARGE))]

    async def app(_scope, _receive, send) -> None:
        ends = [(b"connection", b"close")] if closes else []
        await send({"type": "http.response.start", "status": 200, "headers": headers + ends})
        await send({"type": "http.response.body", "body": LARGE})

    return app


async def endless(_scope, _receive, send) -> None:
    """A stream whose producer waits until its client has read."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"a" * 1000, "more_body": True})
        await asyncio.sleep(0)


@asynccontextmanager
async def listening(app):
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    config.load()
    state, own = ServerState(), bound_socket("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    make = partial(protocol_factory(), config, state, {}, loop)
    server = await loop.create_server(make, sock=own)
    try:
        yield own.getsockname()[1], state.connections
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        while state.connections or state.tasks:
            for task in state.tasks:
                task.cancel()
            await asyncio.sleep(0.01)


def during(run, app, test: Test) -> None:
    async def whole() -> None:
        async with listening(app) as (port, connections):
            await asyncio.wait_for(test(port, connections), 200)

    run(whole())


async def asked(port: int, connections: set[BoundedProtocol]) -> tuple[BoundedProtocol, tuple]:
    """Both ends of a connection with an unread answer."""
    others = set(connections)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
    writer.write(GET)
    while True:
        for each in set(connections) - others:
            is_over = each.transport.is_closing() or each.flow.write_paused
            if is_over and each.n_unsent > MIN_READ_BYTES:
                n_bytes = each.n_unsent
                await asyncio.sleep(0.4)  # a busy machine fills the buffers slowly
                if each.n_unsent == n_bytes:  # the buffers of the system are full
                    return each, (reader, writer)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("app", [large(), large(closes=True), endless])
def test_client_that_does_not_read_is_disconnected(run, app):
    """Regression: 1,024 connections that did not read blocked the server forever."""

    async def test(port, connections) -> None:
        _, ends = await asked(port, connections)
        for now_s in (0, READ_LIMIT_S - 1):
            abort_slow_readers(connections, now_s)
            await asyncio.sleep(0.01)
            assert len(connections) == 1
        while connections:
            now_s += 1
            abort_slow_readers(connections, now_s)
            await asyncio.sleep(0.01)
        ends[1].close()

    during(run, app, test)


@pytest.mark.parametrize("app", [large(), endless])
def test_slow_but_steady_reader_stays_connected(run, app):
    async def test(port, connections) -> None:
        connection, (reader, _) = await asked(port, connections)
        for turn in range(8):
            while not connection.flow.write_paused:
                await asyncio.sleep(0)
            abort_slow_readers(connections, turn * (READ_LIMIT_S - 1))
            n_then, wait = connection.n_unsent, connection.flow.wait
            while connection.n_unsent > n_then - MIN_READ_BYTES and connection.flow.wait is wait:
                assert await reader.read(1000)
                await asyncio.sleep(0)
        assert len(connections) == 1 and not connection.transport.is_closing()

    during(run, app, test)


def test_idle_client_with_a_complete_answer_stays_connected(run):
    async def test(port, connections) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        while not any(each.cycle and each.cycle.response_complete for each in connections):
            await asyncio.sleep(0.01)
        for now_s in (0.0, READ_LIMIT_S, 2 * READ_LIMIT_S):
            abort_slow_readers(connections, now_s)
        assert len(connections) == 1 and not next(iter(connections)).transport.is_closing()

    async def small(_scope, _receive, send) -> None:
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    during(run, small, test)


def test_total_unsent_bytes_are_bounded(run, monkeypatch):
    """Above the limit, connections are aborted until the rest fits, the longest-waiting first."""

    async def test(port, connections) -> None:
        held = []
        for now_s in range(4):
            held.append(await asked(port, connections))
            abort_slow_readers(connections, now_s)
        n_unsent = sum(each.n_unsent for each, _ in held)
        monkeypatch.setattr(server, "MAX_UNSENT_BYTES", n_unsent - held[0][0].n_unsent - 1)
        abort_slow_readers(connections, 5)
        while len(connections) > 2:
            await asyncio.sleep(0.01)
        assert connections == {each for each, _ in held[2:]}
        abort_slow_readers(connections, 6)
        assert not any(each.transport.is_closing() for each in connections)

    during(run, large(), test)


def test_running_server_disconnects_slow_readers(run, monkeypatch):
    monkeypatch.setattr(server, "READ_LIMIT_S", 0.5)

    async def whole() -> None:
        gone = asyncio.Event()

        async def app(_scope, receive, send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": LARGE, "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        own = bound_socket("127.0.0.1", 0)
        engine = SimpleNamespace(run=asyncio.Event().wait, drain=lambda: None, n_choices=0)
        serving = asyncio.create_task(serve(app, engine, own, 0))
        _, writer = await asyncio.open_connection("127.0.0.1", own.getsockname()[1])
        writer.write(GET)
        await asyncio.wait_for(gone.wait(), 100)
        writer.close()
        serving.cancel()
        await asyncio.wait([serving])

    run(whole())
