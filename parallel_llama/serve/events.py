"""Server-sent events as an ASGI response, and answers that end when their client goes.

Source: the event stream format of the HTML standard.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

PIECE_BYTES = 64 << 10

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody is there to take an answer."""


def event(body: bytes) -> bytes:
    """One event of a JSON body, which has no line breaks."""
    return b"data: " + body + b"\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What some work gives, which is cancelled when the client goes. The body must be read.

    Raises: ClientGone.
    """
    return await _while_there(request.receive, work)


class JSONBody(Response):
    """Sends a JSON body in pieces, each when the client has room for it."""

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
    """Sends pieces as they come, the first of which is there already; a slow client is waited for.

    Where the client goes the iteration is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._first, self._rest = first, rest

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await _while_there(receive, self._send(send))
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._rest:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_there(receive: Receive, work: Awaitable[T]) -> T:
    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(gone())
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
        del working  # its error knows this frame: a cycle would keep the request's body for long
