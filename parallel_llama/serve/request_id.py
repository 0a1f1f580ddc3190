"""The name of each request, in the header of its reply and in the log."""

import logging
import re
from contextvars import ContextVar
from secrets import token_hex

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
MAX_CHARS = 128
CLIENT_GONE = 499  # nginx's, for the log: nobody is there to see it
REASON = "parallel_llama.reason"  # in the scope of a request that is refused: why, for the log

_FIT = re.compile(f"[!-~]{{1,{MAX_CHARS}}}")  # what is printed, but for spaces

# That of the request whose handler runs.
current_id: ContextVar[str] = ContextVar("current_id", default="")

logger = logging.getLogger(__name__)


def new_request_id() -> str:
    return token_hex(16)


class RequestIds:
    """Puts a request's id on its reply: the client's own where it is short printable ASCII.

    What is turned away, or fails, is logged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER, "")
        is_fit = _FIT.fullmatch(given) is not None
        request_id = given if is_fit else new_request_id()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
                if message["status"] >= 400 and not scope["path"].startswith("/health"):
                    _log(request_id, message["status"], scope)
            await send(message)

        current_id.set(request_id)
        await self._app(scope, receive, named)


def _log(request_id: str, status: int, scope: Scope) -> None:
    """One line for a request that was refused, failed, or left by its client."""
    told = {"request_id": request_id, "status": status, "path": scope["path"][:MAX_CHARS]}
    is_gone = status == CLIENT_GONE
    told |= {} if is_gone else scope.get(REASON, {})
    logger.info("cancelled" if is_gone else "refused", extra={"told": told})
