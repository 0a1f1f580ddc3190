"""What all routes share: request ids, streamed responses, and the detection of disconnects.

Source: the event stream format of the HTML standard.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from contextvars import ContextVar
from secrets import token_hex
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")

REQUEST_ID_HEADER = "x-request-id"
MAX_ID_CHARS = 128
CLIENT_CLOSED_REQUEST = 499  # nginx's status, only for the log
# Key of the ASGI scope under which an error's code and parameter are stored for the log.
REASON = "parallel_llama.reason"
CHUNK_BYTES = 64 << 10
DONE = b"data: [DONE]\n\n"

_VALID_ID = re.compile(f"[!-~]{{1,{MAX_ID_CHARS}}}")  # printable ASCII without spaces

# The id of the request whose handler runs.
current_id: ContextVar[str] = ContextVar("current_id", default="")

logger = logging.getLogger(__name__)


class ClientDisconnected(Exception):
    """The client has disconnected."""


def new_request_id() -> str:
    return token_hex(16)


class RequestIds:
    """Adds a request id to each response: the client's own if it is short printable ASCII.

    Also logs requests that are refused, that fail, or whose client disconnects.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = client_id if _VALID_ID.fullmatch(client_id) else new_request_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
                if message["status"] >= 400 and not scope["path"].startswith("/health"):
                    _log(request_id, message["status"], scope)
            await send(message)

        current_id.set(request_id)
        await self._app(scope, receive, send_with_id)


def _log(request_id: str, status: int, scope: Scope) -> None:
    fields = {"request_id": request_id, "status": status, "path": scope["path"][:MAX_ID_CHARS]}
    is_disconnected = status == CLIENT_CLOSED_REQUEST
    fields |= {} if is_disconnected else scope.get(REASON, {})
    logger.info("cancelled" if is_disconnected else "refused", extra={"fields": fields})


def event(body: bytes) -> bytes:
    """A server-sent event with a JSON body, which must not contain line breaks."""
    return b"data: " + body + b"\n\n"


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work`, and cancels it if the client disconnects. The body must be read first.

    Raises: ClientDisconnected.
    """
    return await _while_connected(request.receive, work)


class JSONBody(Response):
    """Sends a JSON body in chunks, so that the server does not buffer it all for a slow client."""

    media_type = "application/json"

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for start in range(0, len(self.body), CHUNK_BYTES):
            chunk = bytes(self.body[start : start + CHUNK_BYTES])
            is_last = start + CHUNK_BYTES >= len(self.body)
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})


class EventStream(Response):
    """Streams the event `first` and the events of `rest`; a slow client delays the next event.

    Unlike starlette's StreamingResponse it closes `rest` as soon as the client disconnects, which
    cancels the request in the engine.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._first, self._rest = first, rest

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnected):
                await _while_connected(receive, self._send(send))
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for chunk in self._rest:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_connected(receive: Receive, work: Awaitable[T]) -> T:
    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    disconnecting = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        disconnecting.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
        # The task's exception refers to this frame; the cycle would keep the body in memory.
        del working
