"""Many concurrent clients with known answers; some clients disconnect early."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from served import Served

WORDS = ("the", "cat", "sat", "on", "a mat", "and looked", "at an", "old", "red house", "by", "sea")


@dataclass
class Tally:
    """The outcomes of the requests."""

    n_asked: int = 0
    n_right: int = 0
    n_left: int = 0  # abandoned by the client
    wrong: list[str] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    slowest_s: float = 0.0


def requests(n: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all kinds: greedy and sampled, chats and completions, whole and streamed."""
    draw = random.Random(0)
    made = []
    for number in range(n):
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        fields: dict[str, Any] = {
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice((0.0, 0.8, 1.3)),
            "seed": draw.randrange(1000),
            "n": draw.choice((1, 1, 1, 2)),
            "stream": draw.random() < 0.5,
            "ignore_eos": draw.random() < 0.5,
        }
        if draw.random() < 0.2:
            fields |= {"top_p": 0.9, "top_k": 20, "presence_penalty": 0.5}
        if draw.random() < 0.2:
            fields["stop"] = ["e", "zq"]
        if number % 2:
            made.append(("/v1/completions", {**fields, "prompt": text}))
        else:
            messages = [{"role": "user", "content": text}]
            made.append(("/v1/chat/completions", {**fields, "messages": messages}))
    return made


class Client:
    """One connection, which is opened again after it has ended."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def texts(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[int, str]]:
        """The status of a request, and the text of each choice."""
        reader = await self._send(path, fields)
        status, headers = await _head(reader)
        texts: dict[int, str] = {}
        async for body in _bodies(reader, headers, fields["stream"] and status == 200):
            for choice in json.loads(body).get("choices", ()):
                said = choice.get("delta") or choice.get("message") or choice
                piece = said.get("content") or said.get("text") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + piece
        return status, texts

    async def leave(self, path: str, fields: dict[str, Any], after_s: float) -> None:
        """Sends a request and disconnects before the answer."""
        await self._send(path, fields)
        await asyncio.sleep(after_s)
        self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _send(self, path: str, fields: dict[str, Any]) -> asyncio.StreamReader:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        body = json.dumps(fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        return reader


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    return int(first.split()[1]), headers


async def _bodies(reader: asyncio.StreamReader, headers: dict[str, str], is_stream: bool):
    """The JSON bodies of a reply: one body, or the bodies of its events."""
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    assert is_stream
    held = b""
    while size := int(await reader.readline(), 16):
        held += await reader.readexactly(size)
        await reader.readexactly(2)
        *events, held = held.split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                yield event.removeprefix(b"data: ")
    await reader.readexactly(2)
    assert held == b""


async def load(served: Served, n_requests: int, n_connections: int, left: float = 0.2) -> Tally:
    """Sends every request alone first, then `n_requests` random ones concurrently."""
    host, port = served.url.removeprefix("http://").rsplit(":", 1)
    known = requests(60)
    alone = Client(host, int(port))
    expected = []
    for path, fields in known:
        status, texts = await alone.texts(path, fields)
        assert status == 200, texts
        expected.append(texts)
    alone.close()
    tally = Tally()
    draw = random.Random(1)

    async def work() -> None:
        client = Client(host, int(port))
        while tally.n_asked < n_requests:
            tally.n_asked += 1
            number = draw.randrange(len(known))
            path, fields = known[number]
            if draw.random() < left:
                await client.leave(path, fields, draw.random() * 0.05)
                tally.n_left += 1
                continue
            started = time.monotonic()
            status, texts = await asyncio.wait_for(client.texts(path, fields), 120)
            tally.slowest_s = max(tally.slowest_s, time.monotonic() - started)
            tally.statuses[status] = tally.statuses.get(status, 0) + 1
            if texts == expected[number]:
                tally.n_right += 1
            else:
                tally.wrong.append(f"{status} {fields}: {texts} and not {expected[number]}")
        client.close()

    await asyncio.gather(*(work() for _ in range(n_connections)))
    return tally


@dataclass
class Overload:
    """The outcomes of clients that overload a server. Units: seconds."""

    statuses: dict[int, int] = field(default_factory=dict)
    answered_s: list[float] = field(default_factory=list)
    rejected_s: list[float] = field(default_factory=list)
    n_without_reply: int = 0


async def overload(served: Served, fields: dict[str, Any], n: int, seconds: float) -> Overload:
    """Sends requests with `n` clients for `seconds`; a rejected client retries after a moment."""
    host, port = served.url.removeprefix("http://").rsplit(":", 1)
    met = Overload()
    until = time.monotonic() + seconds

    async def work() -> None:
        client = Client(host, int(port))
        while (started := time.monotonic()) < until:
            try:
                status, _ = await asyncio.wait_for(client.texts("/v1/completions", fields), 120)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                met.n_without_reply += 1
                client.close()
                continue
            met.statuses[status] = met.statuses.get(status, 0) + 1
            took_s = met.answered_s if status == 200 else met.rejected_s
            took_s.append(time.monotonic() - started)
            if status != 200:
                await asyncio.sleep(0.2)
        client.close()

    await asyncio.gather(*(work() for _ in range(n)))
    return met


def resident_bytes(served: Served) -> int:
    """Resident memory of the server process and all ranks."""
    front = psutil.Process(served.process.pid)
    return sum(each.memory_info().rss for each in (front, *front.children(recursive=True)))
