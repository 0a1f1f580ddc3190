"""ASGI parts that all routes share: request ids, streamed responses, and clients that disconnect.

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

HEADER = "x-request-id"
MAX_CHARS = 128
CLIENT_GONE = 499  # nginx's status for the log; no client sees it
REASON = "parallel_llama.reason"  # key in a scope: the code and parameter of an error, for the log
PIECE_BYTES = 64 << 10
DONE = b"data: [DONE]\n\n"

_VALID_ID = re.compile(f"[!-~]{{1,{MAX_CHARS}}}")  # printable ASCII without spaces

# The id of the request whose handler runs.
current_id: ContextVar[str] = ContextVar("current_id", default="")

logger = logging.getLogger(__name__)


class ClientGone(Exception):
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
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _VALID_ID.fullmatch(given) else new_request_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
                if message["status"] >= 400 and not scope["path"].startswith("/health"):
                    _log(request_id, message["status"], scope)
            await send(message)

        current_id.set(request_id)
        await self._app(scope, receive, send_with_id)


def _log(request_id: str, status: int, scope: Scope) -> None:
    fields = {"request_id": request_id, "status": status, "path": scope["path"][:MAX_CHARS]}
    is_gone = status == CLIENT_GONE
    fields |= {} if is_gone else scope.get(REASON, {})
    logger.info("cancelled" if is_gone else "refused", extra={"fields": fields})


def event(body: bytes) -> bytes:
    """A server-sent event with a JSON body, which must not contain line breaks."""
    return b"data: " + body + b"\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work`, and cancels it if the client disconnects. The body must have been read.

    Raises: ClientGone.
    """
    return await _while_connected(request.receive, work)


class JSONBody(Response):
    """Sends a JSON body in pieces, so that a slow client does not make the server buffer it all."""

    media_type = "application/json"

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for start in range(0, len(self.body), PIECE_BYTES):
            piece = bytes(self.body[start : start + PIECE_BYTES])
            is_last = start + PIECE_BYTES >= len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})


class EventStream(Response):
    """Streams events: `first`, then those of `rest`. A slow client delays the next event.

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
            with suppress(ClientGone):
                await _while_connected(receive, self._send(send))
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._rest:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_connected(receive: Receive, work: Awaitable[T]) -> T:
    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
        # The task's exception refers to this frame; the cycle would keep the body in memory.
        del working
