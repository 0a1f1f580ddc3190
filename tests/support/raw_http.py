"""A connection of the server without a socket, and of h11 for comparison."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState

from parallel_llama.serve.protocol import protocol_factory

_N_ITERATIONS = 10  # of the event loop; after these, nothing more can happen


@dataclass
class Read:
    """The complete requests that a server read on one connection, and whether it closed."""

    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    is_closed: bool = False
    written: bytes = b""


class MemoryTransport(asyncio.Transport):
    """Records what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_paused = self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)


def read_by_server(
    packets: Iterable[bytes], on_headers: Callable[[Any], None] = lambda _: None
) -> Read:
    """What BoundedProtocol reads from packets, with an application that answers 200.

    `on_headers` is called with the headers of each complete request.
    """
    read = Read()

    async def app(scope, receive, send) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        on_headers(scope["headers"])
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        read.requests.append((scope["method"], (scope["raw_path"] + query).decode(), body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        config.load()
        state, transport = ServerState(), MemoryTransport()
        protocol = protocol_factory(0.0)(config, state, {}, asyncio.get_running_loop())
        protocol.connection_made(transport)
        for packet in packets:
            while transport.is_paused:  # the socket keeps it
                await asyncio.sleep(0)
            protocol.data_received(packet)
            await asyncio.sleep(0)
        for _ in range(_N_ITERATIONS):
            while state.tasks and protocol.cycle.response_complete:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        read.is_closed, read.written = transport.is_closed, bytes(transport.written)
        protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)

    asyncio.run(run())
    return read


def read_by_h11(data: bytes) -> Read:
    """What h11 reads from these bytes; it answers each request."""
    read = Read()
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    request, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                read.requests.append((request.method.decode(), request.target.decode(), body))
                connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    break
                connection.start_next_cycle()
            else:
                return read
    except h11.RemoteProtocolError:
        pass
    read.is_closed = True
    return read
