"""TCP connections between the ranks of a run; both sides authenticate before they trust any data.

A rank connects to every lower rank and accepts every higher one:

    the higher rank sends a hello: both rank numbers, and 32 random bytes
    the lower rank answers a valid hello with its own
    the higher rank proves that it knows the secret: an HMAC-SHA256 of both hellos
    the lower rank checks the proof, and only then sends its own

So a stranger receives at most a hello. Without a secret, the proof only distinguishes runs. Data
that is sent later is neither encrypted nor authenticated, as with gloo.
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

from parallel_llama.errors import listed_ranks

_HELLO = struct.Struct("<8sII32s")  # magic, own rank, the other's rank, random bytes
_MAGIC = b"pllama/1"
_PROOF_BYTES = 32
_ANSWER_S = 5.0  # for each message of a proof
_MAX_UNPROVEN = 64  # connections at a time
_ACCEPT_S = 0.1
_REDIAL_S = 0.02

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
    look: Callable[[], None] | None = None,
) -> dict[int, socket.socket]:
    """Connects this rank with all other ranks; the sockets have no timeout and do not block.

    Args:
        addresses: where each other rank listens.
        key: derived from the secret of the run.
        look: called repeatedly while this waits; it may raise. With `look`, a failed connection to
            a lower rank is retried until the time limit; without `look`, the first failure raises.

    Raises: NotConnected naming a rank.
    Collective: every rank calls it.
    """
    deadline = time.monotonic() + limit_s
    connected: dict[int, socket.socket] = {}
    try:
        for other in sorted(r for r in addresses if r < rank):
            connected[other] = _dialled_again(rank, other, addresses[other], key, deadline, look)
        higher = {r for r in addresses if r > rank}
        connected |= _accepted(rank, higher, listener, key, deadline, look or (lambda: None))
    except BaseException:
        _close(connected.values())
        raise
    for own in connected.values():
        _prepare(own)
    return connected


def _dialled_again(
    rank: int,
    other: int,
    address: tuple[str, int],
    key: bytes,
    deadline: float,
    look: Callable[[], None] | None,
) -> socket.socket:
    while True:
        try:
            return _dialled(rank, other, address, key, deadline)
        except NotConnected:
            if look is None or time.monotonic() > deadline:
                raise
            look()
            time.sleep(_REDIAL_S)


def _dialled(
    rank: int, other: int, address: tuple[str, int], key: bytes, deadline: float
) -> socket.socket:
    where = f"{address[0]}:{address[1]}"
    try:
        own = socket.create_connection(address, max(0.1, deadline - time.monotonic()))
    except OSError as error:
        raise NotConnected(f"rank {other} at {where}: {error.strerror or error}") from error
    try:
        hello = _hello(rank, other)
        own.sendall(hello)
        answer = _read(own, _HELLO.size, deadline)
        if _HELLO.unpack(answer)[:3] != (_MAGIC, other, rank):
            raise NotConnected(f"rank {other} at {where}: another program answers")
        own.sendall(_proof(key, b"higher", hello, answer))
        proof = _read(own, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(key, b"lower", hello, answer)):
            raise NotConnected(f"rank {other} at {where}: another program answers")
    except OSError as error:
        own.close()
        raise NotConnected(f"rank {other} at {where}: {error.strerror or error}") from error
    except NotConnected:
        own.close()
        raise
    return own


def _accepted(
    rank: int,
    wanted: set[int],
    listener: socket.socket,
    key: bytes,
    deadline: float,
    look: Callable[[], None],
) -> dict[int, socket.socket]:
    """The connections of the ranks `wanted`.

    Each connection is answered in its own thread, so a connection that sends nothing delays no
    rank.
    """
    proven: dict[int, socket.socket] = {}
    lock, room = Lock(), BoundedSemaphore(_MAX_UNPROVEN)

    def answer(own: socket.socket) -> None:
        is_kept = False
        with suppress(OSError, NotConnected):
            other = _prove(rank, own, key, min(deadline, time.monotonic() + 2 * _ANSWER_S))
            with lock:
                is_kept = other in wanted and other not in proven
                if is_kept:
                    proven[other] = own
        if not is_kept:
            own.close()
        room.release()

    listener.settimeout(_ACCEPT_S)
    try:
        while missing := wanted - set(proven):
            if time.monotonic() > deadline:
                raise NotConnected(f"rank {listed_ranks(missing)}: it did not connect")
            look()
            with suppress(TimeoutError):
                own, _ = listener.accept()
                if room.acquire(blocking=False):
                    Thread(target=answer, args=(own,), name="prove", daemon=True).start()
                else:
                    own.close()
    except BaseException:
        with lock:
            wanted.clear()
        _close(proven.values())
        raise
    return proven


def _prove(rank: int, own: socket.socket, key: bytes, deadline: float) -> int:
    """The lower rank's part of a proof. Returns: the higher rank."""
    hello = _read(own, _HELLO.size, deadline)
    magic, other, asked, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or asked != rank:
        raise NotConnected("a stranger")
    answer = _hello(rank, other)
    own.sendall(answer)
    proof = _read(own, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"higher", hello, answer)):
        raise NotConnected("a stranger")
    own.sendall(_proof(key, b"lower", hello, answer))
    return int(other)


def _hello(rank: int, other: int) -> bytes:
    return _HELLO.pack(_MAGIC, rank, other, secrets.token_bytes(32))


def _proof(key: bytes, side: bytes, hello: bytes, answer: bytes) -> bytes:
    return hmac.digest(key, side + hello + answer, "sha256")


def _read(own: socket.socket, n_bytes: int, deadline: float) -> bytes:
    """Receives exactly `n_bytes` bytes. Raises: OSError if they do not arrive in time."""
    data = b""
    while len(data) < n_bytes:
        own.settimeout(max(1e-3, min(_ANSWER_S, deadline - time.monotonic())))
        piece = own.recv(n_bytes - len(data))
        if not piece:
            raise ConnectionResetError("the connection ended")
        data += piece
    return data


def _prepare(own: socket.socket) -> None:
    own.setblocking(False)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        own.setsockopt(socket.IPPROTO_TCP, option, value)


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
