"""Runs the HTTP server: listening socket, signals, draining, and clients that do not read."""

import asyncio
import errno
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from parallel_llama.engine.free_memory import give_back_memory, n_kept_bytes
from parallel_llama.errors import UsageError
from parallel_llama.serve.asgi import RequestIds
from parallel_llama.serve.engine_client import EngineClient, EngineEnded
from parallel_llama.serve.protocol import (
    BoundedProtocol,
    max_connections,
    max_unadmitted,
    protocol_factory,
)

logger = logging.getLogger(__name__)

BACKLOG = 512
# The most unsent bytes in the kernel's buffer of a connection; more would hide slow readers.
_KERNEL_BUFFER_BYTES = 32 << 10
_POLL_S = 0.05
_TICKS_PER_CHECK = 10  # ticks of uvicorn, 0.1 s each
_TICKS_PER_TRIM = 100
_MAX_KEPT_BYTES = 32 << 20  # freed memory that malloc may keep
_CLOSING_S = 5  # for open connections to close at shutdown
_LAST_ANSWER_S = 1.0  # for cancelled requests to answer, which takes a few milliseconds
# Signals within this time of each other count as one: `timeout`, for example, signals a process and
# then its group.
_SAME_SIGNAL_S = 0.5

READ_LIMIT_S = 60.0  # for a client to read MIN_READ_BYTES of a pending response
MIN_READ_BYTES = 16 << 10
MAX_UNSENT_BYTES = 256 << 20  # of all connections together


def abort_slow_readers(connections: Iterable[BoundedProtocol], now_s: float) -> None:
    """Aborts connections whose clients read too slowly; to be called about once a second.

    If all connections together have more than MAX_UNSENT_BYTES unsent, those that have waited
    longest are aborted too.
    """
    waiting = sorted(
        ((connection.waits_since(now_s, MIN_READ_BYTES), connection) for connection in connections),
        key=lambda pair: pair[0],
    )
    n_unsent = sum(connection.n_unsent for _, connection in waiting)
    for since_s, connection in waiting:
        if now_s - since_s < READ_LIMIT_S and n_unsent <= MAX_UNSENT_BYTES:
            break
        n_unsent -= connection.n_unsent
        fields = {"waited_s": round(now_s - since_s), "unsent_bytes": connection.n_unsent}
        logger.info("closed the connection of a slow reader", extra={"fields": fields})
        connection.transport.abort()


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises: UsageError if the port is in use, or the address is not one of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_BUFFER_BYTES)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        is_bad_address = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "give a --host that is an address of this machine"
            if is_bad_address
            else "give another --port, or 0 for any free port"
        )
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror or error}; {remedy}"
        ) from error
    return sock


async def serve(
    app: ASGIApp,
    engine: EngineClient,
    listener: socket.socket,
    drain_s: float,
    *,
    has_launcher: bool = False,
) -> int:
    """Serves until a signal or the engine's final end, and returns the exit code.

    After the first SIGTERM or Ctrl-C, new requests are refused, and accepted requests may run for
    up to `drain_s` seconds; a second signal, not within half a second of the first, ends them.
    Requests that do not finish get status 503, or an error as the last event of their stream.

    Args:
        has_launcher: whether a launcher started the ranks. One signal may then arrive several
            times, seconds apart, so only the first one counts.
    """
    server = _Server(
        uvicorn.Config(
            RequestIds(app),
            http=cast(type[asyncio.Protocol], protocol_factory()),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # lower levels report errors of clients
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSING_S,
        )
    )
    shutdown = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals: list[int] = []
    last_s = -math.inf

    def request_shutdown(number: int) -> None:
        nonlocal last_s
        if not signals or (not has_launcher and loop.time() - last_s >= _SAME_SIGNAL_S):
            signals.append(number)
        last_s = loop.time()
        engine.drain()
        shutdown.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_shutdown, number)
    running = asyncio.create_task(engine.run())
    serving = asyncio.create_task(server.serve([listener]))
    awaiting_shutdown = asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait(
            (running, serving, awaiting_shutdown), return_when=asyncio.FIRST_COMPLETED
        )
        deadline = loop.time() + drain_s
        while shutdown.is_set() and engine.n_choices and len(signals) == 1:
            if running.done() or loop.time() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
        engine.fail_unfinished()
    finally:
        server.should_exit = True
        server.force_exit = len(signals) > 1
        await serving
        if not server.force_exit:
            await server.await_cancelled()
        awaiting_shutdown.cancel()
        running.cancel()
        code = await _ending(running)
    return 128 + signals[-1] if len(signals) > 1 else code


async def _ending(running: "asyncio.Task[None]") -> int:
    try:
        with suppress(asyncio.CancelledError):
            await running
    except EngineEnded as error:
        sys.stderr.write(f"parallel-llama: {error}\n")
        return error.code
    return 0


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers, and with a check for slow readers."""

    _is_full = False  # whether all connections were in use at the last check

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_CHECK == 0:
            connections = cast(set[BoundedProtocol], self.server_state.connections)
            abort_slow_readers(connections, asyncio.get_running_loop().time())
            is_full = len(connections) >= max_connections() + max_unadmitted()
            if is_full and not self._is_full:
                logger.warning("connection limit reached: %d", len(connections))
            self._is_full = is_full
        if counter % _TICKS_PER_TRIM == 0 and n_kept_bytes() > _MAX_KEPT_BYTES:
            asyncio.get_running_loop().run_in_executor(None, give_back_memory)
        return await super().on_tick(counter)

    async def await_cancelled(self) -> None:
        """Waits for the requests that uvicorn has cancelled, which still answer with status 503."""
        if tasks := {*self.server_state.tasks}:
            await asyncio.wait(tasks, timeout=_LAST_ANSWER_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
