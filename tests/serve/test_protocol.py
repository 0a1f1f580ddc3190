"""The limits of a connection in bytes and in time: raw bytes to an application that reads them."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from parallel_llama.serve import protocol
from parallel_llama.serve.access import Access
from parallel_llama.serve.asgi import RequestIds
from parallel_llama.serve.fair_queue import Pacer
from parallel_llama.serve.protocol import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_UNPARSED_BYTES,
    MAX_URL_BYTES,
    PIPELINE_GAP_S,
    BoundedProtocol,
    protocol_factory,
)
from parallel_llama.serve.server import abort_slow_readers

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


async def reads_all(_scope, receive, send) -> None:
    """Answers with the number of bytes of the body, which it reads piece by piece."""
    n_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        n_bytes += len(message["body"])
        if not message["more_body"]:
            break
    body = str(n_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def listening(app):
    config = uvicorn.Config(
        RequestIds(app), http=BoundedProtocol, ws="none", lifespan="off", log_config=None
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    make = partial(protocol_factory(), config, state, {})
    server = await loop.create_server(make, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], state
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()


@asynccontextmanager
async def talking(app=reads_all):
    """A connection to an application."""
    async with listening(app) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()


async def reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(first.split()[1]), headers, body


def asked(data: bytes, app=reads_all) -> tuple[int, dict[str, str], bytes]:
    """The reply to these bytes."""

    async def ask() -> tuple[int, dict[str, str], bytes]:
        async with talking(app) as (reader, writer):
            writer.write(data)
            return await asyncio.wait_for(reply(reader), 100)

    return asyncio.run(ask())


def refused(data: bytes, status: int, says: str) -> None:
    """The reply to these bytes is an error in OpenAI's form, and the connection's last."""
    found, headers, body = asked(data)
    assert found == status, body
    error = json.loads(body)["error"]
    assert re.search(says, error["message"]) and error["type"].endswith("_error")
    assert headers["connection"] == "close" and headers["x-request-id"]


def header(n_bytes: int, name: bytes = b"x") -> bytes:
    """A header line with this many bytes of name and value."""
    return name + b": " + b"a" * (n_bytes - len(name)) + b"\r\n"


def test_the_bytes_of_headers_are_bounded():
    room = MAX_HEADER_BYTES - len("hostlocalhost")
    assert asked(GET + header(room) + b"\r\n")[0] == 200
    refused(GET + header(room + 1) + b"\r\n", 431, "more than 65536 bytes")
    half = header(room // 2 + 1)
    refused(GET + half + half + b"\r\n", 431, "more than 65536 bytes")


def test_the_number_of_headers_is_bounded():
    most = MAX_HEADERS - 1
    assert asked(GET + header(2) * most + b"\r\n")[0] == 200
    refused(GET + header(2) * (most + 1) + b"\r\n", 431, "more than 100 headers")


def test_the_length_of_a_url_is_bounded():
    def get(n_bytes: int) -> bytes:
        return b"GET /" + b"a" * (n_bytes - 1) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"

    assert asked(get(MAX_URL_BYTES))[0] == 200
    refused(get(MAX_URL_BYTES + 1), 414, "more than 8192 bytes")


@pytest.mark.parametrize(
    "before",
    [
        GET + b"x: ",
        GET,
        b"",
        POST + CHUNKED + b"0\r\nx: ",
        POST + CHUNKED + b"1;x=",
    ],
    ids=["value", "name", "method", "trailer", "chunk extension"],
)
async def test_endless_request_is_cut_off_before_it_fills_memory(before):
    """Regression: the parser buffers a header until it is complete, and buffered 64 MB."""
    async with talking() as (reader, writer):
        writer.write(before)
        n_sent = 0
        with pytest.raises(ConnectionError):
            while n_sent < 16 << 20:
                writer.write(b"a" * 65536)
                n_sent += 65536
                await writer.drain()
                await asyncio.sleep(0)
                if reader.at_eof():
                    raise ConnectionResetError
        assert n_sent < 8 << 20  # most of it in the buffers of both ends


def test_long_body_does_not_count_as_header():
    body = b"a" * (1 << 20)
    length = f"content-length: {len(body)}\r\n\r\n".encode()
    assert asked(POST + length + body)[2] == b"1048576"
    chunks = b"".join(b"1000\r\n" + body[:0x1000] + b"\r\n" for _ in range(256))
    assert asked(POST + CHUNKED + chunks + b"0\r\n\r\n")[2] == b"1048576"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        GET + b"a b: c\r\n\r\n",
        GET + b"x: a\x00b\r\n\r\n",
        GET + b"x: a\rb\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 99999999999999999999\r\n\r\n",
        POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
        POST + CHUNKED + b"zz\r\n",
        b"GET http://[ HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST / HTTP/2.0\r\nhost: localhost\r\n\r\n",
        b"GET /\r\n\r\n",
    ],
)  # fmt: skip
def test_malformed_http_is_refused_with_a_json_error(data):
    refused(data, 400, "HTTP/1.1")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "is chunked"),
        (POST + b"transfer-encoding: gzip\r\n\r\n", "is chunked"),
        (POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n", "or HTTP/1.0"),
        (b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", "CONNECT"),
        (POST + b"content-length: 00000000000000000001\r\n\r\na", "one number"),
    ],
)
def test_requests_that_proxies_may_read_differently_are_refused(data, says):
    refused(data, 400, says)


@pytest.mark.parametrize(
    ("data", "limit", "says"),
    [
        (GET, "HEAD_LIMIT_S", "headers did not arrive"),
        (b"G", "HEAD_LIMIT_S", "headers did not arrive"),
        (POST + b"content-length: 9\r\n\r\nabc", "BODY_LIMIT_S", "body did not arrive"),
        (POST + CHUNKED + b"1\r\na\r\n", "BODY_LIMIT_S", "body did not arrive"),
    ],
)
def test_slow_head_or_body_gets_408(monkeypatch, data, limit, says):
    monkeypatch.setattr(protocol, limit, 0.2)
    refused(data, 408, says)


async def test_dripped_bytes_do_not_keep_a_connection_open(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_LIMIT_S", 0.3)
    async with talking() as (reader, writer):
        writer.write(GET + b"\r\n")
        assert (await reply(reader))[0] == 200
        started = asyncio.get_running_loop().time()
        sending = asyncio.create_task(_drip(writer))
        status, headers, _ = await reply(reader)
        sending.cancel()
        assert status == 408 and headers["connection"] == "close"
        assert asyncio.get_running_loop().time() - started < 60


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\r\n")
        await asyncio.sleep(0.02)


async def test_idle_connection_is_closed_after_a_body_that_follows_its_reply():
    """Regression: such a connection stayed open, so 1,024 clients could lock out all others."""

    async def early(_scope, _receive, send) -> None:
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 415, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async with listening(early) as (port, state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"content-length: 2\r\n\r\n")
        assert (await reply(reader))[0] == 415
        (connection,) = state.connections
        connection.timeout_keep_alive = 0.1
        writer.write(b"{}")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_an_answer_that_takes_long_is_not_cut_off(monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_LIMIT_S", 0.4)
    monkeypatch.setattr(protocol, "BODY_LIMIT_S", 0.4)

    async def slow(scope, receive, send) -> None:
        await asyncio.sleep(0.8)
        await reads_all(scope, receive, send)

    for data in (GET + b"\r\n", POST + b"content-length: 3\r\n\r\nabc"):
        async with talking(slow) as (reader, writer):
            writer.write(data)
            assert (await reply(reader))[0] == 200
    # Nor is a slow answer cut off while the next request waits unread behind it.
    long = POST + b"content-length: 200000\r\n\r\n" + b"a" * 200_000
    async with talking(slow) as (reader, writer):
        writer.write(GET + b"\r\n" + long)
        assert [(await reply(reader))[2], (await reply(reader))[2]] == [b"0", b"200000"]


async def test_connection_runs_one_request_while_others_wait_in_socket():
    """Regression: the server started all pipelined requests, and 100 connections took 1.4 GB."""
    begun, may_go_on = [], asyncio.Event()
    n_requests = 2 << 20

    async def held(scope, receive, send) -> None:
        begun.append(scope["path"])
        await may_go_on.wait()
        await reads_all(scope, receive, send)

    async with listening(held) as (port, state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = b"".join(b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % i for i in range(99))
        writer.write(data * (n_requests // len(data)))
        for _ in range(100):
            await asyncio.sleep(0.01)
        (protocol,) = state.connections
        assert begun == ["/0"] and not protocol.pipeline
        assert len(protocol._unparsed) < MAX_UNPARSED_BYTES + (256 << 10)  # plus one read
        may_go_on.set()
        for _ in range(500):
            assert (await reply(reader))[0] == 200
        assert begun[:500] == [f"/{i % 99}" for i in range(500)]
        writer.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_disconnect_with_unanswered_requests_logs_nothing(caplog, run):
    """Regression: a disconnect with unanswered requests logged a traceback of 58 lines."""
    body = b"a" * 100_000
    headers = [(b"content-length", b"%d" % len(body))]

    async def app(_scope, _receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def leave() -> None:
        async with listening(app) as (port, state):
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write((GET + b"\r\n") * 1000)
                while not any(each.flow and each.flow.write_paused for each in state.connections):
                    await asyncio.sleep(0.01)
                writer.transport.abort()
                while state.connections or state.tasks:
                    await asyncio.sleep(0.01)

    run(asyncio.wait_for(leave(), 100))
    assert not caplog.records


async def test_disconnect_ends_request_despite_pipelined_requests():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(_scope, receive, _send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async with talking(endless) as (_, writer):
        writer.write((GET + b"\r\n") * 10)
        await begun.wait()
        writer.transport.abort()
        await ended.wait()


KEY = "sk-of-one-person"
WITH_KEY = b"authorization: Bearer " + KEY.encode() + b"\r\n\r\n"
HEALTH = GET.replace(b"/", b"/health", 1) + b"\r\n"


class Crowd:
    """Connections to a server with 4 slots, and 2 more for connections without a slot."""

    def __init__(self, port: int, state: ServerState) -> None:
        self.port, self.connections = port, state.connections
        self.open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self, data: bytes = b"") -> int:
        """The status of the answer to these bytes on a new connection; 0 without bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.open.append((reader, writer))
        writer.write(data)
        if not data:
            await asyncio.sleep(0.02)
        return (await asyncio.wait_for(reply(reader), 10))[0] if data else 0

    async def statuses(self, data: bytes) -> list[int]:
        """The statuses of the answers on the open connections."""
        found = []
        for reader, writer in self.open:
            try:
                writer.write(data)
                found.append((await asyncio.wait_for(reply(reader), 10))[0])
            except (ConnectionError, asyncio.IncompleteReadError):
                found.append(0)
        return found


@asynccontextmanager
async def crowding(monkeypatch, keys: Sequence[str] = ()):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(protocol, "max_unadmitted", lambda: 2, raising=False)
    async with listening(Access(reads_all, keys, "127.0.0.1")) as (port, state):
        crowd = Crowd(port, state)
        yield crowd
        for _, writer in crowd.open:
            writer.close()


async def test_health_check_is_answered_when_all_slots_are_taken(monkeypatch):
    """Regression: health checks got 503 like all requests, so a busy server looked dead."""
    async with crowding(monkeypatch) as crowd:
        assert [await crowd.connect(GET + b"\r\n") for _ in range(6)] == [200] * 4 + [503] * 2
        for _ in range(5):
            assert await crowd.connect(HEALTH) == 200
        assert await crowd.connect(GET + b"\r\n") == 503
        assert (await crowd.statuses(GET + b"\r\n"))[:4] == [200] * 4


async def test_slot_is_freed_when_its_connection_ends(monkeypatch):
    async with crowding(monkeypatch) as crowd:
        for _ in range(4):
            assert await crowd.connect(GET + b"\r\n") == 200
        assert await crowd.connect(GET + b"\r\n") == 503
        crowd.open.pop(0)[1].close()
        while len(crowd.connections) > 3:
            await asyncio.sleep(0.01)
        assert await crowd.connect(GET + b"\r\n") == 200


async def test_the_oldest_silent_connection_makes_room_for_a_new_one(monkeypatch):
    """Regression: 1,024 connections that sent nothing locked out all other clients."""
    async with crowding(monkeypatch) as crowd:
        for _ in range(20):
            await crowd.connect()
        assert len(crowd.connections) == 6
        for _ in range(4):
            assert await crowd.connect(GET + b"\r\n") == 200
        (reader, _), *_ = crowd.open
        assert (await reply(reader))[0] == 503 and await reader.read() == b""


async def test_silent_client_that_does_not_read_is_also_disconnected(monkeypatch):
    """A normal close waits until such a client has read everything."""
    async with crowding(monkeypatch) as crowd:
        for _ in range(6):
            await crowd.connect()
        for each in crowd.connections:
            each.transport.write(b"a" * (16 << 20))
        for _ in range(4):
            assert await crowd.connect(GET + b"\r\n") == 200
        await asyncio.sleep(0.05)
        assert len(crowd.connections) == 6


async def test_non_reading_client_loses_its_slot_when_all_are_taken(monkeypatch):
    """Regression: 1,024 clients that did not read kept the server at 503 for a minute."""
    async with crowding(monkeypatch) as crowd:
        for _ in range(4):
            assert await crowd.connect(GET + b"\r\n") == 200
        first, *_ = crowd.connections
        first.transport.write(b"a" * (16 << 20))
        now_s = asyncio.get_running_loop().time()
        abort_slow_readers(crowd.connections, now_s)  # as the server does each second
        assert await crowd.connect(GET + b"\r\n") == 503
        abort_slow_readers(crowd.connections, now_s)
        first.flow.wait = now_s - 2, first.n_unsent
        assert await crowd.connect(GET + b"\r\n") == 200
        assert first not in crowd.connections
        assert await crowd.connect(GET + b"\r\n") == 503


async def test_clients_without_a_key_take_no_slots_from_keyed_clients(monkeypatch):
    """Regression: slots went to the first clients, with or without a key."""
    async with crowding(monkeypatch, [KEY]) as crowd:
        for _ in range(30):  # connections without a key that stay open
            assert await crowd.connect(GET + b"\r\n") == 401
            assert await crowd.connect(HEALTH) == 200
            await crowd.connect()
        crowd.open.clear()
        for _ in range(4):
            assert await crowd.connect(GET + WITH_KEY) == 200
        for _ in range(30):
            assert await crowd.connect(GET + b"\r\n") == 401
        assert await crowd.connect(GET + WITH_KEY) == 503
        assert await crowd.connect(HEALTH) == 200
        assert (await crowd.statuses(GET + WITH_KEY))[:4] == [200] * 4


async def test_total_bytes_of_unfinished_bodies_are_bounded(monkeypatch):
    """Regression: 1,000 connections with 2 MB each of an unfinished body took 2.3 GB."""
    monkeypatch.setattr(protocol, "MAX_BODIES_BYTES", 1 << 20, raising=False)
    length, part = b"content-length: 2000000\r\n\r\n", b"a" * 200_000
    async with listening(reads_all) as (port, state):
        slow = []
        for _ in range(12):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST + length + part)
            await writer.drain()
            slow.append((reader, writer))
            await asyncio.sleep(0.05)
            held = [each for each in state.connections if not each.transport.is_closing()]
            assert len(held) <= 5
        for reader, writer in slow[:7]:
            assert (await reply(reader))[0] == 503
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):  # a client that sends its body at once is not affected
            writer.write(POST + b"content-length: 200000\r\n\r\n" + part)
            assert (await reply(reader))[2] == b"200000"
        writer.close()
        for _, each in slow[7:]:
            each.close()


async def test_closed_connection_frees_its_unparsed_bytes():
    """Regression: reference cycles of 1,050 closed connections kept 190 MB until a collection."""

    async def endless(_scope, receive, _send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with listening(endless) as (port, state):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((GET + b"\r\n") * 1000)
        while not state.connections or not all(each._unparsed for each in state.connections):
            await asyncio.sleep(0.01)
        (connection,) = state.connections
        writer.transport.abort()
        while state.connections:
            await asyncio.sleep(0.01)
        assert not connection._unparsed


async def streams(_scope, _receive, send) -> None:
    """Answers with three pieces, without a length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one ", b"", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": piece != b"two"})


async def test_streamed_reply_to_http_1_0_has_no_chunks():
    """Regression: the sizes of the chunks were a part of the body for such clients."""
    async with talking(streams) as (reader, writer):
        writer.write(GET.replace(b"1.1", b"1.0") + b"connection: keep-alive\r\n\r\n")
        head, body = (await asyncio.wait_for(reader.read(), 10)).split(b"\r\n\r\n", 1)
    assert body == b"one two"
    assert b"transfer-encoding" not in head and b"connection: close" in head


def test_reply_with_a_length_to_http_1_0_keeps_its_length():
    _, headers, body = asked(GET.replace(b"1.1", b"1.0") + b"\r\n")
    assert headers["content-length"] == "1" and body == b"0"


def test_protocol_refusal_is_logged_with_its_reason(caplog):
    """Regression: refusals by the protocol were not logged."""
    with caplog.at_level("INFO", "parallel_llama"):
        _, headers, _ = asked(GET + header(2) * MAX_HEADERS + b"\r\n")
    (record,) = caplog.records
    assert record.getMessage() == "refused" and record.fields == {
        "request_id": headers["x-request-id"], "status": 431, "code": "headers_too_large",
    }  # fmt: skip


def test_upgrade_offers_are_ignored_and_not_logged(caplog):
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n"
    assert asked(GET + upgrade)[0] == 200
    assert (
        asked(POST + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 0\r\n\r\n")[0] == 200
    )
    assert not caplog.records


def test_every_reply_has_a_unique_or_the_given_request_id():
    ids = {asked(GET + b"\r\n")[1]["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    own = b"x-request-id: abc-123\r\n\r\n"
    assert asked(GET + own)[1]["x-request-id"] == "abc-123"


@pytest.mark.parametrize("given", [b"", b"a" * 129, b"a\xff", b"a\tb", b"a b=c"])
def test_invalid_request_id_is_replaced_by_a_generated_one(given):
    own = asked(GET + b"x-request-id: " + given + b"\r\n\r\n")[1]["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", own)


async def test_request_waits_for_few_requests_of_other_pipelines():
    """Regression: each step of an answer waited for one request of each of the other pipelines."""
    served: list[str] = []

    async def app(scope, receive, send) -> None:
        served.append(scope["path"])
        await reads_all(scope, receive, send)

    async with listening(app) as (port, _):
        started = time.monotonic()
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        for _, writer in busy:
            writer.write((GET + b"\r\n") * 1000)
        while len(served) < 200:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        n_before = len(served)
        writer.write(GET.replace(b"/", b"/honest", 1) + b"\r\n")
        assert (await reply(reader))[0] == 200
        assert served.index("/honest") - n_before < len(busy)
        # The first requests of connections are not pipelined.
        assert len(served) - len(busy) - 1 <= (time.monotonic() - started) / PIPELINE_GAP_S
        for _, writer in busy:
            writer.close()


async def test_pacer_starts_requests_one_at_a_time_and_fairly():
    begun = []
    pacer = Pacer()
    for number in range(3):
        pacer.submit(partial(begun.append, number), 1, "greedy")
    pacer.submit(partial(begun.append, "fair"), 1, "fair")
    assert begun == [0]
    for n_before in range(1, 4):
        while len(begun) == n_before:
            await asyncio.sleep(0)
        assert len(begun) == n_before + 1
    assert begun == [0, "fair", 1, 2]
