"""Runs the HTTP server: listening socket, signals, draining, and clients that do not read."""

import asyncio
import errno
import logging
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
    max_others,
    protocol_factory,
)

logger = logging.getLogger(__name__)

BACKLOG = 512
# Kernel's send buffer of a connection; with a larger one a slow reader would not be noticed.
_SYSTEM_UNSENT_BYTES = 32 << 10
_LOOK_S = 0.05
_TICKS_PER_LOOK = 10  # ticks of uvicorn, 0.1 s each
_TICKS_PER_TRIM = 100
_MAX_KEPT_BYTES = 32 << 20  # freed memory that malloc may keep
_CLOSING_S = 5  # for open connections to close at shutdown

READ_LIMIT_S = 60.0  # for a client to read MIN_READ_BYTES of a pending response
MIN_READ_BYTES = 16 << 10
MAX_UNSENT_BYTES = 256 << 20  # of all connections together


def abort_slow_readers(connections: Iterable[BoundedProtocol], now_s: float) -> None:
    """Aborts connections whose clients read too slowly; to be called about once a second.

    If all connections together have more than MAX_UNSENT_BYTES unsent, those that have waited
    longest are aborted too.
    """
    waiting = sorted(
        ((each.waits_since(now_s, MIN_READ_BYTES), each) for each in connections),
        key=lambda pair: pair[0],
    )
    n_unsent = sum(each.n_unsent for _, each in waiting)
    for since_s, each in waiting:
        if now_s - since_s < READ_LIMIT_S and n_unsent <= MAX_UNSENT_BYTES:
            break
        n_unsent -= each.n_unsent
        fields = {"waited_s": round(now_s - since_s), "unsent_bytes": each.n_unsent}
        logger.info("closed the connection of a slow reader", extra={"fields": fields})
        each.transport.abort()


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises: UsageError if the port is in use, or the address is not one of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        own = socket.socket(family)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _SYSTEM_UNSENT_BYTES)
        own.bind(address)
        own.listen(BACKLOG)
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "give a --host that is an address of this machine"
            if is_host
            else "give another --port, or 0 for any free port"
        )
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror or error}; {remedy}"
        ) from error
    return own


async def serve(app: ASGIApp, engine: EngineClient, own: socket.socket, drain_s: float) -> int:
    """Serves until a signal or the engine's final end, and returns the exit code.

    After the first SIGTERM or Ctrl-C, new requests are refused, and accepted ones may run for up to
    `drain_s` seconds; the second one ends them.
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
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def ask(number: int) -> None:
        signals.append(number)
        engine.drain()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask, number)
    running = asyncio.create_task(engine.run())
    serving = asyncio.create_task(server.serve([own]))
    asking = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait((running, serving, asking), return_when=asyncio.FIRST_COMPLETED)
        deadline = loop.time() + drain_s
        while asked.is_set() and engine.n_choices and len(signals) == 1:
            if running.done() or loop.time() >= deadline:
                break
            await asyncio.sleep(_LOOK_S)
    finally:
        server.should_exit = True
        server.force_exit = len(signals) > 1
        await serving
        asking.cancel()
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
        if counter % _TICKS_PER_LOOK == 0:
            connections = cast(set[BoundedProtocol], self.server_state.connections)
            abort_slow_readers(connections, asyncio.get_running_loop().time())
            is_full = len(connections) >= max_connections() + max_others()
            if is_full and not self._is_full:
                logger.warning("connection limit reached: %d", len(connections))
            self._is_full = is_full
        if counter % _TICKS_PER_TRIM == 0 and n_kept_bytes() > _MAX_KEPT_BYTES:
            asyncio.get_running_loop().run_in_executor(None, give_back_memory)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
