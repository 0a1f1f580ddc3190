"""TCP connections between the ranks of a run; both sides authenticate before they trust any data.

A rank connects to every lower rank and accepts every higher one:

    the higher rank sends a hello: both rank numbers, and 32 random bytes
    the lower rank replies to a valid hello with a hello
    the higher rank sends its proof that it knows the secret: an HMAC-SHA256 of both hellos
    the lower rank checks that proof, and only then sends its proof

So another program receives at most a hello. Without a secret, proofs only keep runs with different
names apart: any program that knows the name of the run can compute them. Data that is sent later is
neither encrypted nor authenticated, as with gloo.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from ipaddress import IPv4Address
from threading import BoundedSemaphore, Lock, Thread

from parallel_llama.errors import named_ranks

_HELLO = struct.Struct("<8sII32s")  # magic, sender, receiver, random bytes
_MAGIC = b"pllama/1"
_PROOF_BYTES = 32
_REPLY_S = 5.0  # for each message of the handshake
_MAX_UNPROVEN = 64  # connections that are authenticating at a time
_ACCEPT_S = 0.1
_REDIAL_S = 0.02
# A host that has lost power does not answer, and `on_wait` is only called between attempts.
_ATTEMPT_S = 1.0

# A host that has lost power or its network sends nothing, not even a FIN.
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,  # seconds without data
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
}


class NotConnected(Exception):
    """A rank could not be reached, or did not prove that it belongs to this run."""


def listen(address: IPv4Address) -> socket.socket:
    """A socket that listens at a free port of this address.

    Raises: OSError if the address is not one of this host.
    """
    return socket.create_server((str(address), 0), backlog=_MAX_UNPROVEN)


def connect_all(
    rank: int,
    listener: socket.socket,
    addresses: Mapping[int, tuple[str, int]],
    key: bytes,
    limit_s: float,
    on_wait: Callable[[], None] | None = None,
) -> dict[int, socket.socket]:
    """Connects this rank to all other ranks. Returns: non-blocking sockets, by rank.

    Args:
        addresses: where each other rank listens.
        key: derived from the secret of the run.
        limit_s: the time limit for all connections, in seconds.
        on_wait: called repeatedly while this waits; it may raise. Without it, a failed connection
            to a lower rank raises; with it, the connection is retried until the time limit.

    Raises: NotConnected naming a rank.
    Collective: every rank calls it.
    """
    deadline = time.monotonic() + limit_s
    connected: dict[int, socket.socket] = {}
    try:
        for other in sorted(r for r in addresses if r < rank):
            connected[other] = _dial_until(rank, other, addresses[other], key, deadline, on_wait)
        higher = {r for r in addresses if r > rank}
        connected |= _accept_all(rank, higher, listener, key, deadline, on_wait or (lambda: None))
    except BaseException:
        _close(connected.values())
        raise
    for sock in connected.values():
        _prepare(sock)
    return connected


def _dial_until(
    rank: int,
    other: int,
    address: tuple[str, int],
    key: bytes,
    deadline: float,
    on_wait: Callable[[], None] | None,
) -> socket.socket:
    while True:
        try:
            attempt_s = max(0.1, deadline - time.monotonic())
            if on_wait is not None:
                attempt_s = min(attempt_s, _ATTEMPT_S)
            return _dial(rank, other, address, key, deadline, attempt_s)
        except NotConnected:
            if on_wait is None or time.monotonic() > deadline:
                raise
            on_wait()
            time.sleep(_REDIAL_S)


def _dial(
    rank: int, other: int, address: tuple[str, int], key: bytes, deadline: float, attempt_s: float
) -> socket.socket:
    """Connects within `attempt_s` seconds, and completes the handshake before the deadline."""
    where = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, attempt_s)
    except OSError as error:
        raise NotConnected(f"rank {other} at {where}: {error.strerror or error}") from error
    try:
        hello = _hello(rank, other)
        sock.sendall(hello)
        reply = _read(sock, _HELLO.size, deadline)
        if _HELLO.unpack(reply)[:3] != (_MAGIC, other, rank):
            raise NotConnected(f"rank {other} at {where}: another program answers")
        sock.sendall(_proof(key, b"higher", hello, reply))
        proof = _read(sock, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(key, b"lower", hello, reply)):
            raise NotConnected(f"rank {other} at {where}: another program answers")
    except OSError as error:
        sock.close()
        raise NotConnected(f"rank {other} at {where}: {error.strerror or error}") from error
    except NotConnected:
        sock.close()
        raise
    return sock


def _accept_all(
    rank: int,
    expected: set[int],
    listener: socket.socket,
    key: bytes,
    deadline: float,
    on_wait: Callable[[], None],
) -> dict[int, socket.socket]:
    """Accepts the connections of the ranks `expected`; returns their sockets, by rank.

    Each connection has its own thread, so a connection that sends nothing delays no rank.
    """
    proven: dict[int, socket.socket] = {}
    lock, unproven = Lock(), BoundedSemaphore(_MAX_UNPROVEN)

    def authenticate(sock: socket.socket) -> None:
        is_accepted = False
        with suppress(OSError, NotConnected):
            other = _authenticate(rank, sock, key, min(deadline, time.monotonic() + 2 * _REPLY_S))
            with lock:
                is_accepted = other in expected and other not in proven
                if is_accepted:
                    proven[other] = sock
        if not is_accepted:
            sock.close()
        unproven.release()

    listener.settimeout(_ACCEPT_S)
    try:
        while missing := expected - set(proven):
            if time.monotonic() > deadline:
                raise NotConnected(f"{named_ranks(missing)}: no connection in time")
            on_wait()
            with suppress(TimeoutError):
                sock, _ = listener.accept()
                if unproven.acquire(blocking=False):
                    Thread(
                        target=authenticate, args=(sock,), name="authenticate", daemon=True
                    ).start()
                else:
                    sock.close()
    except BaseException:
        with lock:
            expected.clear()
        _close(proven.values())
        raise
    return proven


def _authenticate(rank: int, sock: socket.socket, key: bytes, deadline: float) -> int:
    """The lower rank's part of the handshake. Returns: the number of the higher rank."""
    hello = _read(sock, _HELLO.size, deadline)
    magic, other, addressee, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or addressee != rank:
        raise NotConnected("another program connects")
    reply = _hello(rank, other)
    sock.sendall(reply)
    proof = _read(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"higher", hello, reply)):
        raise NotConnected("another program connects")
    sock.sendall(_proof(key, b"lower", hello, reply))
    return int(other)


def _hello(rank: int, other: int) -> bytes:
    return _HELLO.pack(_MAGIC, rank, other, secrets.token_bytes(32))


def _proof(key: bytes, side: bytes, hello: bytes, reply: bytes) -> bytes:
    return hmac.digest(key, side + hello + reply, "sha256")


def _read(sock: socket.socket, n_bytes: int, deadline: float) -> bytes:
    """Receives exactly `n_bytes` bytes. Raises: OSError if they do not arrive in time."""
    data = b""
    while len(data) < n_bytes:
        sock.settimeout(max(1e-3, min(_REPLY_S, deadline - time.monotonic())))
        chunk = sock.recv(n_bytes - len(data))
        if not chunk:
            raise ConnectionResetError("the connection ended")
        data += chunk
    return data


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _close(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
