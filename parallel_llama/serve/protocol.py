"""One connection's HTTP: uvicorn's, with bounds on what a client may send and how slowly."""

import asyncio
import resource
from http import HTTPStatus
from typing import Any, NoReturn

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from parallel_llama.serve.errors import Refused, error_response
from parallel_llama.serve.request_id import HEADER, new_request_id

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10  # of all names and values together
MAX_URL_BYTES = 8 << 10
HEAD_LIMIT_S = 10.0  # from the first byte of a request to the end of its headers
BODY_LIMIT_S = 30.0  # from there to the end of its body
MAX_CONNECTIONS = 1024

# What may come without a header or a part of a body being whole: the parser keeps it meanwhile.
_MAX_PENDING_BYTES = MAX_URL_BYTES + MAX_HEADER_BYTES


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that goes beyond a limit, with a reply that names the limit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused: Refused | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begin_head()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            self._end_with(Refused(503, "too many connections are open; come again"))
        else:
            self._limit(HEAD_LIMIT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unlimit()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._timer is None:  # the first of a request on a connection that was used before
            self._limit(HEAD_LIMIT_S)
        self._n_pending += len(data)
        super().data_received(data)
        if self._n_pending > _MAX_PENDING_BYTES + len(data):
            self._end_with(Refused(431, f"the headers have more than {MAX_HEADER_BYTES} bytes"))

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002, uvicorn's
        """Called for what the parser, or one of the limits below, does not take."""
        self._end_with(self._refused or Refused(400, "this is no request of HTTP/1.1"))

    # What the parser has found

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(414, f"the URL has more than {MAX_URL_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._n_headers += 1
        self._n_header_bytes += len(name) + len(value)
        if self._n_headers > MAX_HEADERS:
            self._refuse(431, f"there are more than {MAX_HEADERS} headers")
        if self._n_header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._is_head, self._n_pending = False, 0
        self._limit(BODY_LIMIT_S)

    def on_body(self, body: bytes) -> None:
        self._n_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unlimit()
        self._begin_head()
        super().on_message_complete()

    def _begin_head(self) -> None:
        self._is_head = True
        self._n_headers = self._n_header_bytes = self._n_pending = 0

    def _refuse(self, status: int, message: str) -> NoReturn:
        self._refused = Refused(status, message)
        raise self._refused  # the parser turns it into an error of its own

    # Time

    def _limit(self, limit_s: float) -> None:
        self._unlimit()
        self._timer = self.loop.call_later(limit_s, self._is_late, limit_s)

    def _unlimit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self, limit_s: float) -> None:
        if self.flow.read_paused:  # the client does not keep us waiting: we do not read
            self._limit(limit_s)
        elif self._is_head:
            self._end_with(Refused(408, f"the headers did not come within {limit_s:g} s"))
        else:
            self._end_with(Refused(408, f"the body did not come within {limit_s:g} s"))

    # The end

    def _end_with(self, refused: Refused) -> None:
        """Say why where no other answer is on its way, and close."""
        self._unlimit()
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete
        if is_free or not (self._is_head or cycle.response_started):
            self.transport.write(_response(refused))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing here speaks another protocol, which is no news to the log."""


def max_connections() -> int:
    """How many may be open at once; each is a file, and half of those are left for others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def _response(refused: Refused) -> bytes:
    """What `error_response` says, as it goes over a connection that ends with it."""
    response = error_response(refused)
    response.headers[HEADER] = new_request_id()
    response.headers["connection"] = "close"
    first = f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\n".encode()
    headers = b"".join(b"%b: %b\r\n" % pair for pair in response.raw_headers)
    return first + headers + b"\r\n" + bytes(response.body)
