"""Elastic groups of ranks on any hosts: after a rank is lost, the other ranks form a new group.

For ranks that torchrun, srun or mpirun has started; `regroup` is for ranks that rank 0 has started.

Each rank above 0 has a TCP connection to rank 0, its link, as long as both processes run:

    from rank 0   orders to form a new group, one line of JSON each
    to rank 0     why the rank ends, at most one line

The system closes a link when either process ends, or when the other host has been unreachable for
`_UNREACHABLE_S` seconds. A stopped process keeps its link. So rank 0 detects which ranks are lost,
and orders the remaining ranks to form a group; every rank detects the loss of rank 0.

The rank of a process can change with each group. Its first rank, in the group of all processes,
identifies the process during the whole run.

Each group has a number, and a connection for each pair of its ranks. Both ends of a connection
prove that they know a key derived from this number, so a rank never accepts a connection of another
group. Each rank listens at the same port as long as it runs.

A rank that receives an order while it loads its shard for the old group connects to the new group,
sends keepalives there, and joins when it has finished.
"""

import hmac
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from parallel_llama.errors import printable
from parallel_llama.parallel.authenticated_sockets import NotConnected, connect_all, listen
from parallel_llama.parallel.collectives import Communicator, Solo, joined
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.sealed_store import SealedStore
from parallel_llama.parallel.shared_memory import HostMemory
from parallel_llama.parallel.sockets import Endpoint, Sockets, memory_bytes
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.wait_policy import wait_policy

_UNREACHABLE_S = 5
_LINK_OPTIONS = {
    socket.TCP_KEEPIDLE: 2,  # seconds
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: _UNREACHABLE_S - 2,
    socket.TCP_USER_TIMEOUT: 1000 * _UNREACHABLE_S,  # while an order is not acknowledged
}
_LEAVE_S = 1.0  # for the other ranks to leave before rank 0 closes the links
_POLL_S = 0.02
_MAX_REASON_BYTES = 2000
_MAX_ADDRESS_BYTES = 100
_MAX_ORDER_BYTES = 1 << 16  # a line has a number for each rank


@dataclass(frozen=True)
class LinkOrder:
    """An order to join a new group.

    Args:
        number: the number of the group.
        rank: the rank of the receiver in the group.
        members: the first ranks of the group's processes, by rank in the group.
    """

    number: int
    rank: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Connector:
    """Connects this rank to other ranks of the run whenever a group is formed.

    Args:
        listener: this rank's listening socket.
        addresses: where each rank listens, by first rank.
        key: derived from the secret of the run.
    """

    listener: socket.socket
    addresses: Sequence[tuple[str, int]]
    key: bytes
    timeouts: Timeouts

    def connect(
        self, what: str, rank: int, members: Mapping[int, int], on_wait: Callable[[], None]
    ) -> dict[int, socket.socket]:
        """Connects this rank to other ranks.

        Args:
            what: the purpose; ranks that state another purpose are refused.
            members: the ranks to connect to: for each its first rank, by its rank in the group.

        Raises: RankError naming a rank that cannot be reached.
        """
        addresses = {other: self.addresses[first] for other, first in members.items()}
        key = hmac.digest(self.key, what.encode(), "sha256")
        try:
            return connect_all(rank, self.listener, addresses, key, self.timeouts.start_s, on_wait)
        except NotConnected as error:
            raise RankError(
                f"rank {rank} cannot connect to {error}; elastic needs TCP between all ranks, so "
                "allow it in the firewall, and check that no rank is stopped"
            ) from error

    def group(
        self, number: int, rank: int, members: Sequence[int], on_wait: Callable[[], None]
    ) -> Sockets:
        """Connects the group with this number, of the processes with the first ranks `members`.

        The ranks must wait for each other at a barrier before they use the group; see `joined`.

        Raises: RankError if a rank cannot be reached.
        Collective: all members call it.
        """
        others = {other: first for other, first in enumerate(members) if other != rank}
        connected = self.connect(f"group {number}", rank, others, on_wait)
        own_host = self.addresses[members[rank]][0]
        n_local = sum(self.addresses[first][0] == own_host for first in members)
        memory = HostMemory.alone(len(members), memory_bytes(len(members)))
        comm = Sockets(rank, connected, memory, self.timeouts, wait_policy(n_local))
        comm.on_wait = on_wait
        return comm


def link_ranks(
    rank: int, size: int, store: SealedStore, endpoint: Endpoint | None, timeouts: Timeouts
) -> tuple["Links | Link", Sockets]:
    """Connects the links of this rank, and forms the first group, of all ranks.

    Raises: RankError naming a rank that has no IPv4 address or cannot be reached.
    Collective: every rank calls it, with its `endpoint`.
    """
    who = f"rank {rank} of {size}"
    if endpoint is None:
        raise RankError(f"{who} has no IPv4 address, which elastic needs; drop elastic")
    try:
        listener = listen(endpoint.address)
    except OSError as error:
        reason = error.strerror or error
        raise RankError(f"{who} cannot listen at {endpoint.address}: {reason}") from error
    store.set(f"listens/{rank}", f"{endpoint.address} {listener.getsockname()[1]}")
    addresses = [_address_of(other, store, timeouts.start_s) for other in range(size)]
    connector = Connector(listener, addresses, endpoint.key, timeouts)
    others = {other: other for other in range(size) if other != rank}
    peers_of_links = others if rank == 0 else {0: 0}
    connected = connector.connect("links", rank, peers_of_links, lambda: None)
    if rank == 0:
        links = Links(connector, connected)
        return links, joined(connector.group(0, 0, range(size), links.require_alive))
    link = Link(connector, connected[0], rank, size)
    return link, joined(connector.group(0, rank, range(size), link.require_no_order))


def _address_of(rank: int, store: SealedStore, limit_s: float) -> tuple[str, int]:
    """The address that a rank has published.

    Raises: TimeoutError after `limit_s` seconds without an address; RankError for an invalid one.
    """
    key, deadline = f"listens/{rank}", time.monotonic() + limit_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_S)
    host, _, port = store.get(key)[:_MAX_ADDRESS_BYTES].decode("ascii", "replace").partition(" ")
    if not port.isdigit():
        raise RankError(f"rank {rank} has published an invalid address")
    return host, int(port)


class Links:
    """Rank 0's end of all links, with which it forms new groups.

    Args:
        connected: the sockets, by first rank.
    """

    def __init__(self, connector: Connector, connected: Mapping[int, socket.socket]) -> None:
        self._connector, self._links, self._number = connector, dict(sorted(connected.items())), 0
        for sock in self._links.values():
            _prepare(sock)

    @property
    def size(self) -> int:
        """The number of ranks that still run."""
        return 1 + len(self._links)

    def require_alive(self, within_s: float = 0.0) -> None:
        """Waits `within_s` seconds; returns if no rank is lost meanwhile.

        Raises: RankError with the reason that a lost rank has given.
        """
        if ended := self._ended(within_s):
            raise RankError("; ".join(ended.values()))

    def drop_ended(self, within_s: float) -> str | None:
        """Closes the links of the ranks that are lost.

        Args:
            within_s: how long to wait for a rank to be lost, in seconds.

        Returns: why ranks were lost; None if all are alive.
        """
        ended = self._ended(within_s)
        for first in ended:
            self._links.pop(first).close()
        return "; ".join(ended.values()) or None

    def group(self) -> Communicator:
        """Forms a new group of this rank and all remaining ranks.

        Raises: RankError if another rank is lost meanwhile, or cannot be reached.
        """
        self._number += 1
        members = 0, *self._links
        if len(members) == 1:
            return Solo()
        for rank, sock in enumerate(self._links.values(), 1):
            order = LinkOrder(self._number, rank, members)
            with suppress(OSError):  # the rank is lost, and `require_alive` will raise
                sock.sendall(msgspec.json.encode(order) + b"\n")
        return joined(self._connector.group(self._number, 0, members, self.require_alive))

    def close(self) -> None:
        """Waits until the other ranks have left, at most _LEAVE_S seconds, and closes the links."""
        deadline = time.monotonic() + _LEAVE_S
        for sock in self._links.values():
            _is_readable(sock, max(0.0, deadline - time.monotonic()))
            sock.close()
        self._links = {}
        self._connector.listener.close()

    def _ended(self, within_s: float) -> dict[int, str]:
        """Waits up to `within_s` seconds for a rank to be lost. Returns: reasons, by first rank."""
        poller = select.poll()
        numbered = enumerate(self._links.items(), 1)
        by_fd = {sock.fileno(): (rank, first) for rank, (first, sock) in numbered}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        lost = [by_fd[fd] for fd, _ in poller.poll(1e3 * within_s)]
        return {first: self._why(rank, first) for rank, first in lost}

    def _why(self, rank: int, first: int) -> str:
        reason = b""
        with suppress(OSError):
            reason = self._links[first].recv(_MAX_REASON_BYTES, socket.MSG_PEEK)
        text = printable(reason.decode("utf-8", "replace").partition("\n")[0], _MAX_REASON_BYTES)
        who = f"rank {rank} of {self.size} on {self._connector.addresses[first][0]}"
        return f"{who}: {text}" if text else f"{who} has ended or cannot be reached"


class Link:
    """The end of a link at a rank above 0."""

    def __init__(self, connector: Connector, sock: socket.socket, rank: int, size: int) -> None:
        self._connector, self._sock, self._first, self._size = connector, sock, rank, size
        self._unfinished_line = b""
        # An order that arrived while this rank loaded its shard, and the connected group.
        self._next: tuple[LinkOrder, Sockets] | None = None
        _prepare(sock)

    def require_no_order(self) -> None:
        """Raises: RankError if rank 0 has sent an order, or is lost; `latest` shows which."""
        if self._next is not None or _is_readable(self._sock, 0.0):
            raise RankError("rank 0 forms a new group, or is lost")

    def keepalive(self) -> None:
        """Tells the ranks that wait in the group of a new order that this rank is still working.

        Raises: RankError if rank 0 is lost.
        """
        if _is_readable(self._sock, 0.0):
            self._close_next()
            order = self.latest()
            with suppress(RankError):  # a rank is lost, and rank 0 will send another order
                self._next = order, self._connect(order)
        if self._next is not None:
            self._next[1].keepalive()

    def latest(self) -> LinkOrder:
        """Waits for an order. Returns: the last order that has arrived.

        Raises: RankError if rank 0 is lost.
        """
        if self._next is not None and not _is_readable(self._sock, 0.0):
            return self._next[0]
        lines: list[bytes] = []
        while not lines or _is_readable(self._sock, 0.0):
            _is_readable(self._sock, None)
            try:
                data = self._sock.recv(_MAX_ORDER_BYTES)
            except OSError:
                data = b""
            if not data or len(self._unfinished_line) > _MAX_ORDER_BYTES:
                self._raise_lost()
            *complete, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
            lines += complete
        return self._order(lines[-1])

    def group(self, order: LinkOrder) -> Sockets:
        """Joins the group of an order.

        Raises: RankError if it cannot be formed, or another order arrives.
        """
        # `failures` takes the rank in its messages from RANK.
        os.environ.update(RANK=str(order.rank), WORLD_SIZE=str(len(order.members)))
        if self._next is not None and self._next[0] == order:
            comm, self._next = self._next[1], None
        else:
            self._close_next()
            comm = self._connect(order)
        return joined(comm)

    def send_reason(self, why: str) -> None:
        """Sends rank 0 the reason why this rank ends."""
        line = printable(why.partition("\n")[0], _MAX_REASON_BYTES // 4)
        with suppress(OSError):
            self._sock.send(line.encode() + b"\n")

    def close(self) -> None:
        self._close_next()
        self._sock.close()
        self._connector.listener.close()

    def _connect(self, order: LinkOrder) -> Sockets:
        return self._connector.group(order.number, order.rank, order.members, self.require_no_order)

    def _close_next(self) -> None:
        if self._next is not None:
            self._next[1].close()
            self._next = None

    def _order(self, line: bytes) -> LinkOrder:
        try:
            order = msgspec.json.decode(line, type=LinkOrder)
        except msgspec.MsgspecError as error:
            raise RankError("rank 0 has sent an invalid order") from error
        is_known = all(0 <= first < self._size for first in order.members)
        if not is_known or order.members[order.rank : order.rank + 1] != (self._first,):
            raise RankError("rank 0 has sent an order for other ranks")
        return order

    def _raise_lost(self) -> NoReturn:
        where = self._connector.addresses[0][0]
        raise RankError(
            f"rank 0 of {self._size} on {where} has ended or cannot be reached, so this rank ends; "
            "start all ranks again"
        )


def _is_readable(sock: socket.socket, within_s: float | None) -> bool:
    """Whether data has arrived or the connection has ended, within `within_s` (None: no limit)."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(None if within_s is None else 1e3 * within_s))


def _prepare(sock: socket.socket) -> None:
    for option, value in _LINK_OPTIONS.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
