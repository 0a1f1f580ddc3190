"""One connection's HTTP: uvicorn's, with bounds on what a client may send and how slowly."""

import asyncio
import logging
import math
import re
import resource
from http import HTTPStatus
from typing import Any, NoReturn, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from parallel_llama.serve.access import ADMIT, TOO_MANY
from parallel_llama.serve.asgi import HEADER, new_request_id
from parallel_llama.serve.errors import Refused, error_reply, error_response, reason_of

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10  # of all names and values together
MAX_URL_BYTES = 8 << 10
HEAD_LIMIT_S = 10.0  # from the first byte of a request to the end of its headers
BODY_LIMIT_S = 30.0  # from there to the end of its body
MAX_BODIES_BYTES = 256 << 20  # of all requests that are not answered yet
MAX_UNREAD_BYTES = 64 << 10  # behind a request that is not answered yet
MAX_CONNECTIONS = 1024  # that have been admitted
MAX_OTHERS = 128  # at least so many more, that have not
UNREAD_LIMIT_S = 1.0  # for a client to read some of its answer, while others have no place

# What may come without a head or a part of a body being whole: the parser keeps it meanwhile. Twice
# the limits, for the signs between headers.
_MAX_PENDING_BYTES = 2 * (MAX_URL_BYTES + MAX_HEADER_BYTES)

# Bodies up to this size are not counted: it takes a look at all connections.
_SMALL_BODY_BYTES = 64 << 10

# The end of a head, and of a chunked body with or without trailers.
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"[0-9]{1,18}")


logger = logging.getLogger(__name__)


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that goes beyond a limit, with a reply that names the limit.

    A connection is admitted by its first request that passes `Access`, health checks excepted, and
    then keeps its place until it ends, or until others need it while its client reads nothing.
    Others have what admitted ones leave free, MAX_OTHERS at
    least: where that is full, the oldest of them makes room for a new one. So neither silent
    connections nor those without a key keep out a health check, or a client with a key.

    Each request has a parser of its own, which is given no byte of the next request: what a request
    says cannot change how the bytes after it are read. A request is parsed when the one before it
    is answered; until then its bytes wait, most of them in the socket.
    """

    flow: "_Flow"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused: Refused | None = None
        self._framing = ""  # the header that says where the body ends
        self._timer: asyncio.TimerHandle | None = None
        self._unread = bytearray()  # received, and not parsed yet
        self._is_admitted = False
        self._made_s = self._begun_s = self.loop.time()
        self._n_body = 0  # bytes of the body of the request that is not answered yet
        self._begin_head()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._limit(HEAD_LIMIT_S)
        if len(self.connections) > max_connections() + max_others():
            others = (each for each in self._every() if not each._is_admitted)
            min(others, key=lambda each: each._made_s)._make_room()

    def admit(self) -> bool:
        """Give the connection a place that it keeps; whether it has one.

        If none is free, the connection whose client has read nothing for longest makes room.
        """
        if not self._is_admitted:
            admitted = [each for each in self._every() if each._is_admitted]
            if len(admitted) >= max_connections():
                slowest = min(admitted, key=lambda each: each.flow.waits_since_s)
                if slowest.flow.waits_since_s > self.loop.time() - UNREAD_LIMIT_S:
                    return False
                slowest._make_room()
            self._is_admitted = True
        return self._is_admitted

    def _every(self) -> "set[BoundedProtocol]":
        return cast("set[BoundedProtocol]", self.connections)

    def _make_room(self) -> None:
        """End a connection for the sake of a new one."""
        self.connections.discard(self)
        if self.n_unsent:
            self.transport.abort()  # its client may never read
        else:
            self._end_with(Refused(503, TOO_MANY))

    def connection_lost(self, exc: Exception | None) -> None:
        self._unlimit()
        self._unread.clear()  # the rest of the connection is in cycles, which last for long
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unread += data
        self._parse()

    def on_response_complete(self) -> None:
        self.flow.is_full, self._n_body = False, 0
        super().on_response_complete()
        self._parse()

    def _parse(self) -> None:
        """Parse up to the end of a request, unless one is in work."""
        while self._unread and not (self._is_answering() or self.transport.is_closing()):
            self._unset_keepalive_if_required()
            if self._timer is None:  # the first of a request on a connection that was used before
                self._limit(HEAD_LIMIT_S)
            n_bytes = self._piece_bytes()
            if not n_bytes:
                break
            piece = self._unread[:n_bytes]
            del self._unread[:n_bytes]
            self._n_pending += n_bytes
            try:
                self.parser.feed_data(piece)
            except HttpParserUpgrade:
                self._read_body_despite_upgrade()
            except HttpParserError:  # what the parser, or one of the limits below, does not take
                self._end_with(self._refused or Refused(400, "this is no request of HTTP/1.1"))
            if self._n_pending > _MAX_PENDING_BYTES:
                self._end_with(Refused(431, f"the headers have more than {MAX_HEADER_BYTES} bytes"))
        if len(self._unread) >= MAX_UNREAD_BYTES:
            self.flow.pause_reading()
            self.flow.is_full = True

    def _is_answering(self) -> bool:
        """Whether a request has been read to its end, and its answer is not complete."""
        return self._is_head and self.cycle is not None and not self.cycle.response_complete

    def _piece_bytes(self) -> int:
        """How many of the unread bytes the parser is given at once: never two requests' bytes."""
        if self._n_body_left:
            return min(self._n_body_left, len(self._unread))
        end = self._unread.find(_END)
        if end >= 0:
            return end + len(_END)
        n_begun = max(n for n in range(len(_END)) if self._unread.endswith(_END[:n]))
        return len(self._unread) - n_begun

    def _read_body_despite_upgrade(self) -> None:
        """Read a body that the parser would leave to another protocol, which nobody speaks here."""
        self.parser = HttpRequestParser(_BodyCallbacks(self))
        self.parser.feed_data(f"POST / HTTP/1.1\r\n{self._framing}\r\n\r\n".encode())

    # What the parser has found

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ADMIT] = self.admit

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
        if self._is_head:  # a trailer is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_framing()
        super().on_headers_complete()
        # Who waits for 100 may leave the body out after another status: nothing can follow it.
        self.cycle.keep_alive &= not self.expect_100_continue
        self._is_head, self._n_pending = False, 0
        self._begun_s = self.loop.time()
        self._limit(BODY_LIMIT_S)

    def on_body(self, body: bytes) -> None:
        self._n_pending = 0
        self._n_body_left -= min(len(body), self._n_body_left)
        if not self.cycle.response_complete:
            self._n_body += len(body)
        super().on_body(body)
        if self._n_body > _SMALL_BODY_BYTES:
            self._bound_bodies()

    def _bound_bodies(self) -> None:
        """Refuse the request that sends its body for the longest, if all bodies are too long."""
        if sum(each._n_body for each in self._every()) > MAX_BODIES_BYTES:
            sending = (each for each in self._every() if each._n_body and not each._is_head)
            slowest = min(sending, key=lambda each: each._begun_s)
            slowest._n_body = 0
            slowest._end_with(Refused(503, "too many long bodies are being sent; try again later"))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the end of the head alone
            return
        self._unlimit()
        self._begin_head()
        super().on_message_complete()

    def _begin_head(self) -> None:
        self.parser = HttpRequestParser(self)
        self._is_head = True
        self._n_headers = self._n_header_bytes = self._n_pending = self._n_body_left = 0

    def _check_framing(self) -> None:
        """Learn where the body ends, and refuse what others may read in another way."""
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refuse(400, "this is no request of HTTP/1.1")
        if self.parser.get_method() == b"CONNECT":
            self._refuse(400, "this is no proxy: CONNECT is not supported")
        lengths = [value for name, value in self.headers if name == b"content-length"]
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (lengths or self.parser.get_http_version() == "1.0"):
            self._refuse(400, "Transfer-Encoding goes with neither Content-Length nor HTTP/1.0")
        if codings not in ([], [b"chunked"]):
            self._refuse(400, "Transfer-Encoding is not supported but for one: chunked")
        if len(lengths) > 1 or not all(_LENGTH.fullmatch(each) for each in lengths):
            self._refuse(400, "Content-Length must be one number of at most 18 digits")
        self._n_body_left = int(lengths[0]) if lengths else 0
        chunked = "transfer-encoding: chunked"
        self._framing = chunked if codings else f"content-length: {self._n_body_left}"

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

    @property
    def n_unsent(self) -> int:
        """Bytes of answers that the client, or the network, has not taken yet."""
        return self.transport.get_write_buffer_size()

    def waits_since(self, now_s: float, min_bytes: int) -> float:
        """When the client has last taken so many bytes of what waits for it; now if nothing does.

        Right to the time between two calls.
        """
        flow, n_unsent = self.flow, self.n_unsent
        if not n_unsent or not (flow.write_paused or self.transport.is_closing()):
            flow.wait = None
        elif flow.wait is None or n_unsent <= flow.wait[1] - min_bytes:
            flow.wait = now_s, n_unsent
        return now_s if flow.wait is None else flow.wait[0]

    # The end

    def _end_with(self, refused: Refused) -> None:
        """Say why where no other answer is on its way, and close."""
        self._unlimit()
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete
        if is_free or not (self._is_head or cycle.response_started):
            request_id = new_request_id()
            self.transport.write(_response(refused, request_id))
            has_begun = self._n_pending or self._unread or not self._is_head
            if has_begun and refused.status != 503:  # what overload ends is not logged one by one
                reason = reason_of(error_reply(refused)[1].error)
                told = {"request_id": request_id, "status": refused.status, **reason}
                logger.info("refused", extra={"told": told})
        self.transport.close()


class _Flow(FlowControl):
    """uvicorn's, but that a request which reads its body does not ask for more of the next ones."""

    is_full = False
    wait: tuple[float, int] | None = None  # since when, and then for how many bytes to be taken

    @property
    def waits_since_s(self) -> float:
        """Since when the client has read too little of its answer; infinite if it reads."""
        return math.inf if self.wait is None else self.wait[0]

    def resume_writing(self) -> None:
        self.wait = None
        super().resume_writing()

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class _BodyCallbacks:
    """What a parser calls that reads a body, and a head only to know where the body ends."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete


def max_connections() -> int:
    """How many may be admitted at once; each is a file, and some are left for others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def max_others() -> int:
    """How many more connections may be open that have not been admitted."""
    return max(1, min(MAX_OTHERS, max_connections() // 4))


def _response(refused: Refused, request_id: str) -> bytes:
    """What `error_response` says, as it goes over a connection that ends with it."""
    response = error_response(refused)
    response.headers[HEADER] = request_id
    response.headers["connection"] = "close"
    first = f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\n".encode()
    headers = b"".join(b"%b: %b\r\n" % pair for pair in response.raw_headers)
    return first + headers + b"\r\n" + bytes(response.body)
