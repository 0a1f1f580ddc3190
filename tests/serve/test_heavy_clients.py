"""A client with small requests is served soon although other clients send large requests."""

import asyncio
import http.client
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from load import Client
from served import Served
from tiny_folder import write_endless_folder

HONEST = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True, "stream": False}
N_HEAVY, N_HONEST = 40, 5
# Limits of the median time. The slack allows for a machine with two cores that others use too.
SLACK_S, MOST_TIMES_ALONE = 2.0, 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_endless_folder(tmp_path_factory.mktemp("models") / "tiny")
    with Served("--model", str(folder), "--nproc=1") as served:
        served.post("/v1/completions", **HONEST)
        yield served


def slow_pattern(number: int) -> str:
    """A regular expression that takes long to compile, and that no cache has."""
    return rf"({number}x|[a-z]{{2,40}}[0-9]{{3}})(.{{0,200}}y){{1,60}}"


HEAVY = {
    "tokenize": ("/tokenize", lambda n: {"prompt": f"{n} word" * 130_000}),
    "grammar": (
        "/v1/completions",
        lambda n: {**HONEST, "structured_outputs": {"regex": slow_pattern(n)}},
    ),
    "long prompt": ("/v1/completions", lambda n: {**HONEST, "prompt": f"{n:04}" + "x" * 6000}),
    "large answer": (
        "/v1/completions",
        lambda n: {**HONEST, "prompt": f"{n:04}" + "x" * 2000, "echo": True, "logprobs": 5, "n": 5},
    ),
    "scored prompt": (
        "/v1/completions",
        lambda n: {**HONEST, "prompt": f"{n:04}" + "x" * 3000, "echo": True, "logprobs": 5},
    ),
}


@pytest.mark.parametrize("kind", HEAVY)
def test_short_completions_stay_fast_beside_heavy_clients(served, kind):
    path, body = HEAVY[kind]
    alone_s, beside_s = asyncio.run(medians(served, path, body))
    assert beside_s < SLACK_S + MOST_TIMES_ALONE * alone_s, f"{beside_s:.2f} s, not {alone_s:.2f} s"


def test_address_that_fills_the_server_leaves_room_for_another(tmp_path):
    """Regression: 1,000 requests of clients that never read made all others fail with 429."""
    folder = write_endless_folder(tmp_path / "tiny")
    with Served("--model", str(folder), "--nproc=1", "--max-requests=4") as served:
        greedy = [asked(served, "127.0.0.1", max_tokens=8000, stream=True) for _ in range(4)]
        assert [connection.getresponse().status for connection in greedy] == [200] * 4
        assert asked(served, "127.0.0.1").getresponse().status == 429
        assert asked(served, "127.0.0.2").getresponse().status == 200
        for connection in greedy:
            connection.close()


def asked(served: Served, address: str, **fields: Any) -> http.client.HTTPConnection:
    """A connection from this address that has sent the honest request, changed by `fields`."""
    netloc = urlsplit(served.url).netloc
    connection = http.client.HTTPConnection(netloc, source_address=(address, 0))
    body = json.dumps({**HONEST, **fields})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def test_request_for_too_many_logprobs_is_refused(served):
    """Regression: encoding 82 MB of JSON blocked the event loop for 11 s."""
    fields = {**HONEST, "prompt": "x" * 8000, "echo": True, "logprobs": 5, "n": 16}
    status, _, body = served.send("POST", "/v1/completions", fields)
    assert status == 400 and b"8001 prompt tokens x 6 log-probabilities x n=16 make 768096" in body
    assert b"over the limit of 262144; shorten the prompts, or lower logprobs or n" in body


async def medians(served: Served, path: str, body: Any) -> tuple[float, float]:
    """Median seconds of short completions alone, and beside heavy requests."""
    host, port = served.url.removeprefix("http://").rsplit(":", 1)
    address = host, int(port)
    alone_s = await median(address)
    bodies = [json.dumps(body(n)).encode() for n in range(N_HEAVY)]
    heavy = [asyncio.create_task(heavy_client(address, path, each)) for each in bodies]
    await asyncio.sleep(1)
    beside_s = await median(address)
    n_left = sum(not task.done() for task in heavy)
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)
    assert n_left == N_HEAVY
    return alone_s, beside_s


async def median(address: tuple[str, int]) -> float:
    client, took_s = Client(*address), []
    for _ in range(N_HONEST):
        started = time.monotonic()
        status, texts = await asyncio.wait_for(client.texts("/v1/completions", HONEST), 120)
        assert status == 200, texts
        took_s.append(time.monotonic() - started)
    client.close()
    return statistics.median(took_s)


async def heavy_client(address: tuple[str, int], path: str, body: bytes) -> None:
    """Sends requests one after the other over one connection."""
    reader, writer = await asyncio.open_connection(*address)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    try:
        while True:
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                await asyncio.sleep(0.2)
            n_bytes = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while n_bytes:
                n_bytes -= len(await reader.read(min(n_bytes, 1 << 20)))
    finally:
        writer.close()
