"""uvicorn's HTTP protocol, with bounds on what a client may send and how slowly."""

import asyncio
import logging
import math
import re
import resource
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from parallel_llama.serve.access import ADMIT, TOO_MANY
from parallel_llama.serve.asgi import HEADER, new_request_id
from parallel_llama.serve.errors import HTTPError, error_reply, error_response, reason_of
from parallel_llama.serve.fair_queue import Pacer

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10  # total of all names and values
MAX_URL_BYTES = 8 << 10
HEAD_LIMIT_S = 10.0  # from the first byte of a request to the end of its headers
BODY_LIMIT_S = 30.0  # from the end of the headers to the end of the body
MAX_BODIES_BYTES = 256 << 20  # total of all requests that have not been answered
PIPELINE_GAP_S = 0.001  # between the starts of two pipelined requests, of all connections together
MAX_UNREAD_BYTES = 64 << 10  # pipelined after a request that has not been answered
MAX_CONNECTIONS = 1024  # admitted connections
MAX_OTHERS = 128  # other connections; they also use the slots of MAX_CONNECTIONS that are free
UNREAD_LIMIT_S = 1.0  # for a client to read some of its response, if others need its slot

# Bytes of an incomplete head or chunk, which the parser buffers. Twice the limits, because of the
# separators between headers.
_MAX_PENDING_BYTES = 2 * (MAX_URL_BYTES + MAX_HEADER_BYTES)

# Smaller bodies are not counted, because counting iterates over all connections.
_SMALL_BODY_BYTES = 64 << 10

# The end of a head, and of a chunked body with or without trailers.
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"[0-9]{1,18}")


logger = logging.getLogger(__name__)


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection that exceeds a limit, with an error response that names the limit.

    A connection is admitted by its first request that passes `Access`, except health checks. It
    keeps its slot until it closes, or its client stops reading while another connection needs a
    slot. Connections that are not admitted share the remaining slots, at least `max_others()`; if
    all are taken, the oldest such connection is closed for a new one. So neither silent clients nor
    clients without a key can lock out health checks and clients with a key.

    Each request has its own parser, which receives no byte of the next request, so that one request
    cannot change how the following bytes are parsed. A request is parsed after the previous one has
    been answered; until then its bytes wait, mostly in the socket. A pacer that all connections
    share then starts the request.

    Args:
        pacer: starts requests.
        pipeline_pacer: starts requests that arrive before the previous one has been answered.
    """

    flow: "_Flow"

    def __init__(self, *args: Any, pacer: Pacer, pipeline_pacer: Pacer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pacer, self._pipeline_pacer = pacer, pipeline_pacer
        self._is_pipelined = False  # the next request
        self._is_queued = False  # the next request, in a pacer
        self._refused: HTTPError | None = None
        self._framing = ""  # the header that frames the body
        self._timer: asyncio.TimerHandle | None = None
        self._unread = bytearray()  # received but not parsed
        self._is_admitted = False
        self._made_s = self._begun_s = self.loop.time()
        self._n_body = 0  # body bytes of the current request, until it is answered
        self._begin_head()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._limit(HEAD_LIMIT_S)
        if len(self.connections) > max_connections() + max_others():
            others = (each for each in self._every() if not each._is_admitted)
            min(others, key=lambda each: each._made_s)._give_up_slot()

    def admit(self) -> bool:
        """Admits the connection; False if no slot is free.

        If all slots are taken and clients leave responses unread, the connection where a response
        has waited longest is closed, if that is more than UNREAD_LIMIT_S.
        """
        if not self._is_admitted:
            admitted = [each for each in self._every() if each._is_admitted]
            if len(admitted) >= max_connections():
                slowest = min(admitted, key=lambda each: each.flow.waits_since_s)
                if slowest.flow.waits_since_s > self.loop.time() - UNREAD_LIMIT_S:
                    return False
                slowest._give_up_slot()
            self._is_admitted = True
        return self._is_admitted

    def _every(self) -> "set[BoundedProtocol]":
        return cast("set[BoundedProtocol]", self.connections)

    def _give_up_slot(self) -> None:
        """Closes this connection so that another can be opened."""
        self.connections.discard(self)
        if self.n_unsent:
            self.transport.abort()  # the client may never read
        else:
            self._end_with(HTTPError(503, TOO_MANY))

    def connection_lost(self, exc: Exception | None) -> None:
        self._unlimit()
        self._unread.clear()  # reference cycles keep this object alive for a long time
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unread += data
        self._parse()

    def on_response_complete(self) -> None:
        self._n_body = 0
        self._is_pipelined = len(self._unread) > 0
        super().on_response_complete()
        self._parse()

    def _begin_request(self) -> None:
        self._is_queued = False
        self._parse(may_begin=True)

    def _parse(self, *, may_begin: bool = False) -> None:
        """Parses up to the end of a request, unless one is being answered.

        The first bytes of a request are parsed only if it `may_begin`; else it is put in a pacer.
        """
        while self._unread and not (self._is_answering() or self.transport.is_closing()):
            self._unset_keepalive_if_required()
            if self._timer is None:  # the first bytes of a request on a kept-alive connection
                self._limit(HEAD_LIMIT_S)
            n_bytes = self._piece_bytes()
            if not n_bytes:
                break
            if self._is_head and not self._n_pending and not may_begin:
                if not self._is_queued:
                    self._is_queued = True
                    pacer = self._pipeline_pacer if self._is_pipelined else self._pacer
                    pacer.submit(self._begin_request, 1, self.client)
                break
            may_begin = False
            piece = self._unread[:n_bytes]
            del self._unread[:n_bytes]
            self._n_pending += n_bytes
            try:
                self.parser.feed_data(piece)
            except HttpParserUpgrade:
                self._read_body_despite_upgrade()
            except HttpParserError:  # from the parser, or from `_refuse` in a callback
                self._end_with(self._refused or HTTPError(400, "malformed HTTP/1.1 request"))
            if self._n_pending > _MAX_PENDING_BYTES:
                self._end_with(
                    HTTPError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
                )
        was_full, self.flow.is_full = self.flow.is_full, len(self._unread) >= MAX_UNREAD_BYTES
        if self.flow.is_full:
            self.flow.pause_reading()
        elif was_full:
            self.flow.resume_reading()

    def _is_answering(self) -> bool:
        """Whether a request has been read completely and its response is not complete."""
        return self._is_head and self.cycle is not None and not self.cycle.response_complete

    def _piece_bytes(self) -> int:
        """How many unread bytes to pass to the parser: never bytes of two requests."""
        if self._n_body_left:
            return min(self._n_body_left, len(self._unread))
        end = self._unread.find(_END)
        if end >= 0:
            return end + len(_END)
        n_begun = max(n for n in range(len(_END)) if self._unread.endswith(_END[:n]))
        return len(self._unread) - n_begun

    def _read_body_despite_upgrade(self) -> None:
        """Reads the body that the parser skips after an Upgrade header, which is ignored here."""
        self.parser = HttpRequestParser(_BodyCallbacks(self))
        self.parser.feed_data(f"POST / HTTP/1.1\r\n{self._framing}\r\n\r\n".encode())

    # Callbacks of the parser

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
        if self._is_head:  # ignores trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_framing()
        super().on_headers_complete()
        # A client that expects 100 may omit its body after another status, so that the next request
        # cannot be located.
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
        """Refuses the request with the slowest body if all bodies together are too long."""
        if sum(each._n_body for each in self._every()) > MAX_BODIES_BYTES:
            sending = (each for each in self._every() if each._n_body and not each._is_head)
            slowest = min(sending, key=lambda each: each._begun_s)
            slowest._n_body = 0
            slowest._end_with(HTTPError(503, "too many long bodies at once; try again later"))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # only the head has ended
            return
        self._unlimit()
        self._begin_head()
        super().on_message_complete()

    def _begin_head(self) -> None:
        self.parser = HttpRequestParser(self)
        self._is_head = True
        self._n_headers = self._n_header_bytes = self._n_pending = self._n_body_left = 0

    def _check_framing(self) -> None:
        """Finds where the body ends, and refuses framing that parsers interpret differently."""
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refuse(400, "only HTTP/1.0 and HTTP/1.1 are supported")
        if self.parser.get_method() == b"CONNECT":
            self._refuse(400, "CONNECT is not supported: this server is not a proxy")
        lengths = [value for name, value in self.headers if name == b"content-length"]
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (lengths or self.parser.get_http_version() == "1.0"):
            self._refuse(
                400, "Transfer-Encoding cannot be combined with Content-Length or HTTP/1.0"
            )
        if codings not in ([], [b"chunked"]):
            self._refuse(400, "the only supported Transfer-Encoding is chunked")
        if len(lengths) > 1 or not all(_LENGTH.fullmatch(each) for each in lengths):
            self._refuse(400, "Content-Length must be one number of at most 18 digits")
        self._n_body_left = int(lengths[0]) if lengths else 0
        chunked = "transfer-encoding: chunked"
        self._framing = chunked if codings else f"content-length: {self._n_body_left}"

    def _refuse(self, status: int, message: str) -> NoReturn:
        self._refused = HTTPError(status, message)
        raise self._refused  # the parser converts it to HttpParserError

    # Time limits

    def _limit(self, limit_s: float) -> None:
        self._unlimit()
        self._timer = self.loop.call_later(limit_s, self._is_late, limit_s)

    def _unlimit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self, limit_s: float) -> None:
        if self.flow.read_paused:  # this server is not reading, so the client is not late
            self._limit(limit_s)
        elif self._is_head:
            self._end_with(HTTPError(408, f"the headers did not arrive within {limit_s:g} s"))
        else:
            self._end_with(HTTPError(408, f"the body did not arrive within {limit_s:g} s"))

    @property
    def n_unsent(self) -> int:
        """Bytes of responses that have not been sent."""
        return self.transport.get_write_buffer_size()

    def waits_since(self, now_s: float, min_bytes: int) -> float:
        """Time of the client's last read of `min_bytes`; `now_s` if no response is blocked.

        The precision is the time between two calls.
        """
        flow, n_unsent = self.flow, self.n_unsent
        if not n_unsent or not (flow.write_paused or self.transport.is_closing()):
            flow.wait = None
        elif flow.wait is None or n_unsent <= flow.wait[1] - min_bytes:
            flow.wait = now_s, n_unsent
        return now_s if flow.wait is None else flow.wait[0]

    # Closing

    def _end_with(self, refused: HTTPError) -> None:
        """Closes the connection, with an error response if no other response has been started."""
        self._unlimit()
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete
        if is_free or not (self._is_head or cycle.response_started):
            request_id = new_request_id()
            self.transport.write(_response(refused, request_id))
            has_begun = self._n_pending or self._unread or not self._is_head
            if has_begun and refused.status != 503:  # under overload the log would be flooded
                reason = reason_of(error_reply(refused)[1].error)
                fields = {"request_id": request_id, "status": refused.status, **reason}
                logger.info("refused", extra={"fields": fields})
        self.transport.close()


class _Flow(FlowControl):
    """uvicorn's flow control, except that reading does not resume while `is_full` is set."""

    is_full = False
    wait: tuple[float, int] | None = None  # when the client last read, and the unsent bytes then

    @property
    def waits_since_s(self) -> float:
        """Time of the client's last read; infinite if no response is blocked."""
        return math.inf if self.wait is None else self.wait[0]

    def resume_writing(self) -> None:
        self.wait = None
        super().resume_writing()

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class _BodyCallbacks:
    """Callbacks of a parser that reads a body, after a head that only states its framing."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete


def protocol_factory(pipeline_gap_s: float = PIPELINE_GAP_S) -> Callable[..., BoundedProtocol]:
    """Makes the protocols of one server, which share their pacers."""
    return partial(BoundedProtocol, pacer=Pacer(), pipeline_pacer=Pacer(pipeline_gap_s))


def max_connections() -> int:
    """The limit of admitted connections: at most half of the open files allowed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def max_others() -> int:
    """How many more connections may be open without being admitted."""
    return max(1, min(MAX_OTHERS, max_connections() // 4))


def _response(refused: HTTPError, request_id: str) -> bytes:
    """The bytes of an error response that closes the connection."""
    response = error_response(refused)
    response.headers[HEADER] = request_id
    response.headers["connection"] = "close"
    first = f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\n".encode()
    headers = b"".join(b"%b: %b\r\n" % pair for pair in response.raw_headers)
    return first + headers + b"\r\n" + bytes(response.body)
