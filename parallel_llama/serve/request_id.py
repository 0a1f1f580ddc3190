"""The name of each request, in the header of its reply, for people who compare notes."""

from secrets import token_hex

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
MAX_CHARS = 128


def new_request_id() -> str:
    return token_hex(16)


class RequestIds:
    """Puts a request's id on its reply: the client's own where it is short and printable ASCII."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER, "")
        is_fit = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_CHARS
        request_id = given if is_fit else new_request_id()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, named)
