"""uvicorn's HTTP protocol, with limits on the size and the speed of requests."""

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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from parallel_llama.serve.access import ADMIT, TOO_MANY_CONNECTIONS
from parallel_llama.serve.asgi import REQUEST_ID_HEADER, new_request_id
from parallel_llama.serve.errors import HTTPError, error_reply, error_response, reason_of
from parallel_llama.serve.fair_queue import Pacer

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10  # total of all names and values
MAX_URL_BYTES = 8 << 10
HEAD_LIMIT_S = 10.0  # from the first byte of a request to the end of its headers
BODY_LIMIT_S = 30.0  # from the end of the headers to the end of the body
MAX_BODIES_BYTES = 256 << 20  # total of all unanswered requests
PIPELINE_GAP_S = 0.001  # between the starts of two pipelined requests, of all connections together
MAX_UNPARSED_BYTES = 64 << 10  # pipelined after an unanswered request
MAX_CONNECTIONS = 1024  # admitted connections
MAX_UNADMITTED = 128  # other connections; they may also use free slots of MAX_CONNECTIONS
UNREAD_LIMIT_S = 1.0  # for a client to read its response, while other connections need its slot

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

    A connection is admitted, and takes a slot, with its first request that passes `Access` and is
    not a health check. It keeps the slot until it closes, or its client stops reading while another
    connection needs a slot. Connections that are not admitted share the remaining slots, at least
    `max_unadmitted()`; if all are taken, the oldest such connection is closed for a new one. So
    neither silent clients nor clients without a key can lock out health checks and clients with a
    key.

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
        self._is_pipelined = False  # whether the next request arrived before the last answer
        self._is_queued = False  # whether the next request waits in a pacer
        self._refused: HTTPError | None = None
        self._framing = ""  # the header that frames the body
        self._timer: asyncio.TimerHandle | None = None
        self._unparsed = bytearray()  # received
        self._is_admitted = False
        self._connected_s = self._body_start_s = self.loop.time()
        self._n_body_bytes = 0  # body bytes of the current request, until it is answered
        self._begin_head()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._set_timer(HEAD_LIMIT_S)
        if len(self.connections) > max_connections() + max_unadmitted():
            unadmitted = (other for other in self._all_connections() if not other._is_admitted)
            min(unadmitted, key=lambda other: other._connected_s)._give_up_slot()

    def admit(self) -> bool:
        """Admits the connection; False if no slot is free.

        If all slots are taken and clients leave responses unread, the connection where a response
        has waited longest is closed, if the response has waited for more than UNREAD_LIMIT_S.
        """
        if not self._is_admitted:
            admitted = [
                connection for connection in self._all_connections() if connection._is_admitted
            ]
            if len(admitted) >= max_connections():
                slowest = min(admitted, key=lambda connection: connection.flow.waits_since_s)
                if slowest.flow.waits_since_s > self.loop.time() - UNREAD_LIMIT_S:
                    return False
                slowest._give_up_slot()
            self._is_admitted = True
        return self._is_admitted

    def _all_connections(self) -> "set[BoundedProtocol]":
        return cast("set[BoundedProtocol]", self.connections)

    def _give_up_slot(self) -> None:
        """Closes this connection to free its slot."""
        self.connections.discard(self)
        if self.n_unsent:
            self.transport.abort()  # the client may never read
        else:
            self._end_with(HTTPError(503, TOO_MANY_CONNECTIONS))

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_timer()
        self._unparsed.clear()  # reference cycles keep this object alive for a long time
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unparsed += data
        self._parse()

    def on_response_complete(self) -> None:
        self._n_body_bytes = 0
        self._is_pipelined = len(self._unparsed) > 0
        super().on_response_complete()
        self._parse()

    def _begin_request(self) -> None:
        self._is_queued = False
        self._parse(may_begin=True)

    def _parse(self, *, may_begin: bool = False) -> None:
        """Parses up to the end of a request, unless one is being answered.

        The first bytes of a request are parsed only if it `may_begin`; otherwise the request is
        queued in a pacer.
        """
        while self._unparsed and not (self._is_answering() or self.transport.is_closing()):
            self._unset_keepalive_if_required()
            if self._timer is None:  # the first bytes of a request on a kept-alive connection
                self._set_timer(HEAD_LIMIT_S)
            n_bytes = self._n_parsable()
            if not n_bytes:
                break
            if self._is_head and not self._n_pending and not may_begin:
                if not self._is_queued:
                    self._is_queued = True
                    pacer = self._pipeline_pacer if self._is_pipelined else self._pacer
                    pacer.submit(self._begin_request, 1, self.client)
                break
            may_begin = False
            part = self._unparsed[:n_bytes]
            del self._unparsed[:n_bytes]
            self._n_pending += n_bytes
            try:
                self.parser.feed_data(part)
            except HttpParserUpgrade:
                self._read_body_despite_upgrade()
            except HttpParserError:  # from the parser, or from `_refuse` in a callback
                self._end_with(self._refused or HTTPError(400, "malformed HTTP/1.1 request"))
            if self._n_pending > _MAX_PENDING_BYTES:
                self._end_with(
                    HTTPError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
                )
        was_full, self.flow.is_full = self.flow.is_full, len(self._unparsed) >= MAX_UNPARSED_BYTES
        if self.flow.is_full:
            self.flow.pause_reading()
        elif was_full:
            self.flow.resume_reading()

    def _is_answering(self) -> bool:
        """Whether a request has been read completely and its response is not complete."""
        return self._is_head and self.cycle is not None and not self.cycle.response_complete

    def _n_parsable(self) -> int:
        """How many unparsed bytes to pass to the parser: never bytes of two requests."""
        if self._n_body_left:
            return min(self._n_body_left, len(self._unparsed))
        end = self._unparsed.find(_END)
        if end >= 0:
            return end + len(_END)
        n_of_end = max(n for n in range(len(_END)) if self._unparsed.endswith(_END[:n]))
        return len(self._unparsed) - n_of_end

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
        # A client that sends "Expect: 100-continue" may omit its body after another status, so the
        # start of its next request is unknown.
        self.cycle.keep_alive &= not self.expect_100_continue
        if self.parser.get_http_version() == "1.0":
            _end_body_with_connection(self.cycle)
        self._is_head, self._n_pending = False, 0
        self._body_start_s = self.loop.time()
        self._set_timer(BODY_LIMIT_S)

    def on_body(self, body: bytes) -> None:
        self._n_pending = 0
        self._n_body_left -= min(len(body), self._n_body_left)
        if not self.cycle.response_complete:
            self._n_body_bytes += len(body)
        super().on_body(body)
        if self._n_body_bytes > _SMALL_BODY_BYTES:
            self._bound_bodies()

    def _bound_bodies(self) -> None:
        """Refuses the request with the slowest body if all bodies together are too long."""
        if (
            sum(connection._n_body_bytes for connection in self._all_connections())
            > MAX_BODIES_BYTES
        ):
            with_body = (
                connection
                for connection in self._all_connections()
                if connection._n_body_bytes and not connection._is_head
            )
            slowest = min(with_body, key=lambda connection: connection._body_start_s)
            slowest._n_body_bytes = 0
            slowest._end_with(HTTPError(503, "too many long bodies at once; try again later"))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # only the head has ended
            return
        self._clear_timer()
        self._begin_head()
        # If the response was sent before the body arrived, the body has ended the keep-alive timer.
        if self.cycle.response_complete:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
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

    def _set_timer(self, limit_s: float) -> None:
        self._clear_timer()
        self._timer = self.loop.call_later(limit_s, self._time_out, limit_s)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self, limit_s: float) -> None:
        if self.flow.read_paused:  # this server is not reading, so the client is not late
            self._set_timer(limit_s)
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

    def _end_with(self, error: HTTPError) -> None:
        """Closes the connection, with an error response if no other response has been started."""
        self._clear_timer()
        cycle = self.cycle
        is_idle = cycle is None or cycle.response_complete
        if is_idle or not (self._is_head or cycle.response_started):
            request_id = new_request_id()
            self.transport.write(_response(error, request_id))
            has_begun = self._n_pending or self._unparsed or not self._is_head
            if has_begun and error.status != 503:  # under overload the log would be flooded
                reason = reason_of(error_reply(error)[1].error)
                fields = {"request_id": request_id, "status": error.status, **reason}
                logger.info("refused", extra={"fields": fields})
        self.transport.close()


class _Flow(FlowControl):
    """uvicorn's flow control, except that reading does not resume while `is_full` is set."""

    is_full = False
    wait: tuple[float, int] | None = None  # when the client last read, and the bytes unsent

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


def _end_body_with_connection(cycle: RequestResponseCycle) -> None:
    """Lets a body of unknown length end with the connection, as HTTP/1.0 requires.

    uvicorn would send it in chunks, which clients of HTTP/1.0 take for a part of the body.
    """
    send = cycle.send
    is_unframed = False

    async def send_unframed(message: Any) -> None:
        nonlocal is_unframed
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            is_unframed = b"content-length" not in names
            if is_unframed:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and is_unframed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign]


class _BodyCallbacks:
    """Callbacks of a parser that reads a body, after a made-up head with the body's framing."""

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


def max_unadmitted() -> int:
    """The limit of connections that are not admitted, in addition to `max_connections`."""
    return max(1, min(MAX_UNADMITTED, max_connections() // 4))


def _response(error: HTTPError, request_id: str) -> bytes:
    """The bytes of an error response that closes the connection."""
    response = error_response(error)
    response.headers[REQUEST_ID_HEADER] = request_id
    response.headers["connection"] = "close"
    first = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    headers = b"".join(b"%b: %b\r\n" % pair for pair in response.raw_headers)
    return first + headers + b"\r\n" + bytes(response.body)
