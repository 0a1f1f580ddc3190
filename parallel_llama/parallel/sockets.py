"""Collectives over TCP for groups of several hosts, with at most 256 KiB of values per message.

A decode step of 16 layers has 33 all-reduces of a few kilobytes. gloo takes 0.5 to 1.6 ms for each
between two hosts, which is several times the latency of a network.

An all-reduce takes one exchange. Every rank sends its values to one rank of each other host, to all
hosts at once; the receiver stores them in the shared memory of its host, so they cross the network
once per host. Then every rank adds the values of all ranks in rank order, so all ranks get the same
bits. Ranks that cannot share memory count as ranks of different hosts. A broadcast goes from its
source to every rank directly.

`SocketsBesideGloo` leaves larger tensors to gloo, which sends fewer bytes for them. Between
collectives it detects lost ranks by the heartbeats of `process_group`; in an exchange, the end of a
connection also shows that a rank is lost. `linked_ranks` uses `Sockets` alone: larger tensors are
exchanged in pieces, and no ranks share memory.

Layout of the memory:

    message  two integers of 8 bytes: signature, number of the exchange, from 1; then the values
    rows     one per rank, in the memory of the host: the number of exchanges through this memory
             that the rank has received completely, aligned to a cache line; then the rank's
             message. Two sets of rows are used alternately; broadcasts and barriers use a third
             set, in private memory
    cells    private integers of 8 bytes. For each rank: the descriptors to send to and to receive
             from, bytes sent and received in this exchange, whether it is another rank of this
             host. Then two numbers: all finished exchanges, and the finished exchanges through the
             host's memory

In an exchange, each rank writes its message into its row and sends it. Each incoming message goes
into the row of its sender. When a rank has received all its messages, it publishes this, and waits
until all ranks of its host have published. Two sets of rows suffice for the same reason as two
slots in `shared_memory`.

Every pair of ranks is connected. Before a rank leaves because of a failure, it sends the number of
the failed rank to all other ranks; a waiting rank polls all its connections for such a message.

A kernel may run an exchange of `all_reduce` or `gather_columns`; see `Exchange`.
"""

import logging
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import NoReturn

import torch
from torch import Tensor

from parallel_llama.parallel.authenticated_sockets import NotConnected, connect_all, listen
from parallel_llama.parallel.collectives import Communicator, Exchange, put_columns, sum_in_order
from parallel_llama.parallel.failures import RankError, late
from parallel_llama.parallel.process_group import ProcessGroup
from parallel_llama.parallel.rank_stacks import call_site, own_evidence, process_state
from parallel_llama.parallel.shared_memory import (
    LONGEST_GAP_S,
    LONGEST_SLEEP_S,
    MAX_VIEWS,
    NOTHING,
    SHORTEST_SLEEP_S,
    YIELD_S,
    HostMemory,
    pieces,
)
from parallel_llama.parallel.signatures import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    DTYPES,
    GATHER_COLUMNS,
    SUMMED,
    described,
    signature_of,
)
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.wait_policy import WaitPolicy, wait_policy

logger = logging.getLogger(__name__)

# The limit on one rank's values. Above it, gloo sends fewer bytes between three or more ranks.
MAX_BYTES = 1 << 18

HEADER_BYTES = 16
_HEADER = struct.Struct("<qq")
VALUES_AT = 64  # bytes in a row
HEADER_AT = VALUES_AT - HEADER_BYTES
ROW_BYTES = VALUES_AT + MAX_BYTES
_READY, _SIGNATURE, _EXCHANGE = 0, HEADER_AT // 8, HEADER_AT // 8 + 1  # cells of 8 bytes of a row
CELLS = 5  # of a rank
SEND_FD, RECEIVE_FD, SENT, RECEIVED, IS_LOCAL = range(CELLS)
# The cells after those of the ranks: finished exchanges, and those through the host's memory.
FINISHED, SHARED = range(2)
# Sets of rows: 0 and 1 are in the memory of the host; 2, for broadcasts and barriers, is private.
_N_SHARED_SETS = _PRIVATE_SET = 2

# How many times a rank tries to receive before it waits in `poll`. Python tries for about 0.5 ms. A
# kernel tries for a few milliseconds, longer than most networks take, because resuming in Python is
# slow.
_PYTHON_TRIES = 150
_KERNEL_TRIES = {WaitPolicy.SPIN: 8000, WaitPolicy.YIELD: 500, WaitPolicy.SLEEP: 100}
_POLL_S = 0.25
_CONNECT_S = 20.0
_KEEPALIVE_S = 1.0
# The events of poll for a connection that the other rank has closed.
_HAS_LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR

# The signature of a message that reports a failure. Its lower bits hold one of the reasons below,
# the rank that detected the failure (the finder), and the failed rank (the culprit).
_FAILURE = 7 << 60
# Notes: messages without values, between exchanges. A rank that is still loading sends keepalives
# to ranks at a barrier. A rank sends _COMPUTING + 1 when it enters the first open context of
# `computing`, and _COMPUTING when it leaves the last one.
_KEEPALIVE, _COMPUTING = 6 << 60, 5 << 60
_DIED, _LATE, _MISMATCH = range(3)
_RANK_BITS = 16


@dataclass(frozen=True)
class Endpoint:
    """What a rank needs to accept connections of the other ranks of its run.

    Args:
        address: an address of this host that the other ranks can reach.
        key: derived from the secret of the run.
        host: equal on ranks that share memory; see `shared_memory.host_id`.
    """

    address: IPv4Address
    key: bytes
    host: str


def connect(group: ProcessGroup, endpoint: Endpoint | None, timeouts: Timeouts) -> Communicator:
    """Connects the ranks of `group` over TCP; returns `group` itself if two ranks cannot connect.

    Args:
        endpoint: None if this rank has no IPv4 address.

    Collective: every rank calls it; all get the same kind of communicator.
    """
    listener = None
    if endpoint is not None:
        with suppress(OSError):
            listener = listen(endpoint.address)
    port = 0 if listener is None else listener.getsockname()[1]
    address = 0 if endpoint is None else int(endpoint.address)
    endpoints = group.all_gather(torch.tensor([address, port])).tolist()
    if endpoint is None or listener is None or not all(map(_is_endpoint, endpoints)):
        if listener is not None:
            listener.close()
        return group
    addresses = {
        r: (str(IPv4Address(a)), p) for r, (a, p) in enumerate(endpoints) if r != group.rank
    }
    connected: dict[int, socket.socket] = {}
    with listener:
        limit_s = min(timeouts.start_s, _CONNECT_S)
        try:
            connected = connect_all(group.rank, listener, addresses, endpoint.key, limit_s)
        except NotConnected as error:
            logger.warning(
                "rank %d of %d exchanges through gloo, which is slower: it cannot connect to %s; "
                "allow TCP between the ranks in the firewall",
                group.rank,
                group.size,
                error,
            )
    if not bool(group.all_gather(torch.tensor([bool(connected)])).all()):
        for sock in connected.values():
            sock.close()
        return group
    policy = wait_policy(sum(row[0] == address for row in endpoints))
    memory = HostMemory.share(group, endpoint.host, memory_bytes(group.size))
    return SocketsBesideGloo(group, connected, memory, timeouts, policy)


def memory_bytes(size: int) -> int:
    """The size of the `HostMemory` of a group of `size` ranks."""
    return _N_SHARED_SETS * size * ROW_BYTES


def receivers_of(rank: int, hosts: Sequence[Sequence[int]]) -> list[int]:
    """The ranks to which a rank sends its messages: one of every other host.

    Args:
        hosts: the ranks of each host.
    """
    own_host = next(host for host in hosts if rank in host)
    return [host[own_host.index(rank) % len(host)] for host in hosts if host is not own_host]


def _is_endpoint(row: Sequence[int]) -> bool:
    address, port = row
    return 0 < address < 1 << 32 and 0 < port < 1 << 16


class Sockets(Communicator):
    """A group with one TCP connection for each pair of ranks; it sums in rank order.

    A tensor of more than `MAX_BYTES` is exchanged in pieces.

    Args:
        connected: the socket to each other rank, in non-blocking mode.
        host: the memory that this rank shares with the other ranks of its host.
        policy: how this rank waits for messages.
    """

    def __init__(
        self,
        rank: int,
        connected: Mapping[int, socket.socket],
        host: HostMemory,
        timeouts: Timeouts,
        policy: WaitPolicy,
    ) -> None:
        self.rank, self.size = rank, len(connected) + 1
        self._timeouts, self._policy = timeouts, policy
        self._tries = _PYTHON_TRIES if policy is WaitPolicy.SPIN else 0
        self._sockets = dict(connected)
        self._receivers = receivers_of(self.rank, host.hosts)
        self._senders = [r for r in self._sockets if self.rank in receivers_of(r, host.hosts)]
        self._pids = host.pids
        self._received_by = {
            sender: rank
            for rank in self._pids
            for sender in range(self.size)
            if rank in receivers_of(sender, host.hosts)
        }
        # Called repeatedly while this rank waits for others; may raise a RankError.
        self.on_wait: Callable[[], None] = lambda: None
        with torch.inference_mode(False):  # they are also written outside of inference mode
            private = torch.zeros(self.size, ROW_BYTES, dtype=torch.uint8)
            self._memory = host.memory.view(_N_SHARED_SETS, self.size, ROW_BYTES)
            self._state = torch.zeros(self.size * CELLS + 2, dtype=torch.int64)
        self._sets = [*self._memory, private]
        self._messages = [[row.numpy().data for row in rows_of_set] for rows_of_set in self._sets]
        self._headers = [[row[:VALUES_AT].cast("q") for row in rows] for rows in self._messages]
        self._set = _PRIVATE_SET  # the set of rows of the current exchange
        self._cells = self._state.numpy().data
        for rank in range(self.size):
            fd = self._sockets[rank].fileno() if rank in self._sockets else -1
            cell = rank * CELLS
            self._cells[cell + SEND_FD] = fd if rank in self._receivers else -1
            self._cells[cell + RECEIVE_FD] = fd if rank in self._senders else -1
            self._cells[cell + IS_LOCAL] = rank in self._pids
        self._signature, self._n_own_bytes = 0, 0  # of this rank's message in the current exchange
        self._busy = False
        self._keepalive_s, self._n_notes = 0.0, 0  # when a keepalive was sent; notes received
        self._computing = set[int]()  # ranks in `computing`, by their notes
        self._n_computing = 0  # open contexts of `computing` of this rank
        self._views: dict[tuple[int, int, torch.dtype, int], Tensor] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in SUMMED:
            raise TypeError(f"all_reduce of {x.dtype}; use one of {', '.join(map(str, SUMMED))}")
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        for piece in pieces(x.view(-1), MAX_BYTES):
            counts = [piece.numel()] * self.size
            self._all_to_all(ALL_REDUCE, piece, piece, counts)
            sum_in_order(self._parts(x.dtype, counts), piece)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel() == 0:
            return gathered
        rows = gathered.view(self.size, -1).view(torch.uint8)
        sent = pieces(x.contiguous().view(-1).view(torch.uint8), MAX_BYTES)
        for piece, columns in zip(sent, torch.split(rows, MAX_BYTES, dim=1), strict=True):
            counts = [len(piece)] * self.size
            self._all_to_all(ALL_GATHER, piece, piece, counts)
            for row, part in zip(columns, self._parts(torch.uint8, counts), strict=True):
                row.copy_(part)
        return gathered

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        max_width = max(widths)
        if x.dtype not in DTYPES or max_width * x.itemsize > MAX_BYTES:
            return super().gather_columns(x, widths, out)
        whole = x.new_empty(len(x), sum(widths)) if out is None else out
        if not whole.numel():
            return whole
        n_rows = MAX_BYTES // (max_width * x.itemsize)
        for target, rows in zip(torch.split(whole, n_rows), torch.split(x, n_rows), strict=True):
            counts = [len(rows) * width for width in widths]
            self._all_to_all(GATHER_COLUMNS, target[:, :max_width], rows.contiguous(), counts)
            put_columns(self._parts(x.dtype, counts), widths, target)
        return whole

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.broadcast(x.contiguous(), src, no_timeout=no_timeout))
        limit_s = math.inf if no_timeout and self.rank != src else self._timeouts.step_s
        for piece in pieces(x.view(-1).view(torch.uint8), MAX_BYTES):
            self._set = _PRIVATE_SET
            if self.rank == src:
                self._exchange(BROADCAST, piece, piece, {}, self._sockets, limit_s)
            else:
                self._exchange(BROADCAST, piece, None, {src: len(piece)}, (), limit_s)
                piece.copy_(self._view(src, torch.uint8, len(piece)))
        return x

    def barrier(self) -> None:
        nothing = dict.fromkeys(self._sockets, 0)
        self._set = _PRIVATE_SET
        self._exchange(BARRIER, NOTHING, None, nothing, self._sockets, self._timeouts.start_s)

    @contextmanager
    def computing(self) -> Iterator[None]:
        self._n_computing += 1
        if self._n_computing == 1:
            self._send_note(_COMPUTING + 1)
        try:
            yield
        finally:
            self._n_computing -= 1
            if not self._n_computing and not self._busy:
                self._send_note(_COMPUTING)

    def keepalive(self) -> None:
        now = time.monotonic()
        if now - self._keepalive_s > _KEEPALIVE_S:
            self._keepalive_s = now
            self._send_note(_KEEPALIVE)

    def _send_note(self, kind: int) -> None:
        """Sends a note to every other rank, between two exchanges."""
        note = _HEADER.pack(kind, self._n_finished)
        for sock in self._sockets.values():
            with suppress(OSError):  # if the connection has ended, the next exchange fails
                try:
                    sock.send(note)
                except BlockingIOError:  # the other rank has not read the previous exchange yet
                    poller = select.poll()
                    poller.register(sock, select.POLLOUT)
                    poller.poll(1e3 * self._timeouts.step_s)
                    sock.send(note)

    def require_alive(self) -> None:
        for rank, sock in self._sockets.items():
            try:
                has_ended = not sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                has_ended = False
            except OSError:
                has_ended = True
            if has_ended:
                raise RankError(f"rank {rank} of {self.size} has died or left early")

    def close(self) -> None:
        self._busy = True
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}

    def sum_exchange(self, x: Tensor) -> Exchange | None:
        """What a kernel needs to reduce tensors like x; None if x is empty or too large."""
        if not self._fits(x.nbytes):
            return None
        counts = [x.numel()] * self.size

        def complete(x: Tensor) -> None:
            sum_in_order(self._parts(x.dtype, counts), x.view(-1))

        return self._kernel_exchange(ALL_REDUCE, x, counts, complete)

    def column_exchange(self, whole: Tensor, widths: Sequence[int]) -> Exchange | None:
        """What a kernel needs to gather columns into `whole`; None if empty or too large."""
        columns = whole[:, : max(widths)]
        if not self._fits(columns.nbytes):
            return None
        counts = [len(whole) * width for width in widths]

        def complete(whole: Tensor) -> None:
            put_columns(self._parts(whole.dtype, counts), widths, whole)

        return self._kernel_exchange(GATHER_COLUMNS, columns, counts, complete)

    def _kernel_exchange(
        self,
        kind: int,
        like: Tensor,
        counts: Sequence[int],
        complete: Callable[[Tensor], None],
    ) -> Exchange:
        signature, itemsize = signature_of(kind, like), like.itemsize
        expected = {rank: counts[rank] * itemsize for rank in self._senders}
        n_own_bytes = HEADER_BYTES + counts[self.rank] * itemsize

        def finish(x: Tensor) -> None:
            self._busy = True
            self._signature, self._n_own_bytes = signature, n_own_bytes
            self._set = self._n_shared % _N_SHARED_SETS
            self._finish(expected, self._receivers, self._timeouts.step_s, 0)
            complete(x)

        fields = self.rank, self.size, signature, _KERNEL_TRIES[self._policy], self._policy
        cells, messages = self._state.data_ptr(), self._memory.data_ptr()
        return Exchange("sockets", cells, messages, *fields, finish)

    @staticmethod
    def _fits(n_bytes: int) -> bool:
        return 0 < n_bytes <= MAX_BYTES

    def _all_to_all(self, kind: int, like: Tensor, values: Tensor, counts: Sequence[int]) -> None:
        """Exchanges the `values` of all ranks; rank r sends counts[r] values."""
        expected = {rank: counts[rank] * values.itemsize for rank in self._senders}
        self._set = self._n_shared % _N_SHARED_SETS
        self._exchange(kind, like, values, expected, self._receivers, self._timeouts.step_s)

    def _exchange(
        self,
        kind: int,
        like: Tensor,
        values: Tensor | None,
        expected: Mapping[int, int],
        receivers: Collection[int],
        limit_s: float,
    ) -> None:
        """Sends this rank's values to the receivers, and receives the values of other ranks.

        After an exception inside, this rank cannot use the group any more.

        Args:
            like: a tensor with the dtype and the size that the signature states.
            values: this rank's values; None for a rank that only receives.
            expected: the bytes of values to receive, by the rank that sends them.
        """
        if self._busy:
            raise RankError(
                f"rank {self.rank} left a collective unfinished, or has closed its group: "
                "it cannot take part in another"
            )
        self._busy = True
        self._signature = signature_of(kind, like)
        if values is not None and values.numel():
            self._view(self.rank, values.dtype, values.numel()).copy_(values.view(-1))
        header = self._headers[self._set][self.rank]
        header[_SIGNATURE] = self._signature
        header[_EXCHANGE] = self._n_finished + 1  # last; see _require_same_on_host
        for rank in self._sockets:
            self._cells[rank * CELLS + SENT] = self._cells[rank * CELLS + RECEIVED] = 0
        self._n_own_bytes = HEADER_BYTES + (0 if values is None else values.nbytes)
        self._finish(expected, receivers, limit_s, self._tries)

    def _finish(
        self,
        expected: Mapping[int, int],
        receivers: Collection[int],
        limit_s: float,
        tries: int,
    ) -> None:
        """Completes the current exchange, which this rank or a kernel has begun.

        Args:
            expected: as in `_exchange`.
            tries: how many times to try before waiting in system calls.
        """
        to_send = dict.fromkeys(receivers, self._n_own_bytes)
        to_receive = {rank: HEADER_BYTES + n for rank, n in expected.items()}
        is_shared = self._set != _PRIVATE_SET
        awaited = set(self._pids) if is_shared else set()
        while self._make_progress(to_send, to_receive, awaited):
            tries -= 1
            if tries < 0:
                self._wait(to_send, to_receive, awaited, limit_s)
                break
        if is_shared:
            for rank in self._sockets:
                if rank not in expected:
                    self._require_same(rank)
        self._cells[self.size * CELLS + FINISHED] += 1
        self._cells[self.size * CELLS + SHARED] += is_shared
        self._busy = False

    def _wait(
        self,
        to_send: dict[int, int],
        to_receive: dict[int, int],
        awaited: set[int],
        limit_s: float,
    ) -> None:
        """Waits in system calls until the current exchange is complete.

        A rank is late after `limit_s` seconds without progress. If `limit_s` is infinite, a rank in
        `computing` has the limit of a step.

        Args:
            to_send: the bytes of the message, by receiver.
            to_receive: the bytes of the message, by sender.
            awaited: ranks of this host that have not published.
        """
        seen_s, waited_s, before = time.monotonic(), 0.0, (0, 0)
        pause_s, has_sent_later, gone = SHORTEST_SLEEP_S, set[int](), set[int]()
        while self._make_progress(to_send, to_receive, awaited):
            now_s = time.monotonic()
            waited_s += min(now_s - seen_s, LONGEST_GAP_S)
            seen_s = now_s
            progress = self._progress(), len(awaited)
            if progress != before:
                before, waited_s = progress, 0.0
            allowed_s = limit_s
            if limit_s == math.inf and not self._computing.isdisjoint(to_receive):
                allowed_s = self._timeouts.step_s
            if waited_s > allowed_s:
                overdue = self._overdue(to_receive, awaited) or sorted(to_send)
                message = late(overdue, self.size, allowed_s) + self._why_late()
                self._fail(message, overdue[0], _LATE, self.rank)
            self.on_wait()
            may_yield = self._policy is not WaitPolicy.SLEEP and waited_s < YIELD_S
            if not to_send and not to_receive and may_yield:
                os.sched_yield()
                continue
            poller = select.poll()
            for rank, sock in self._sockets.items():
                is_polled = rank in to_receive or rank not in has_sent_later
                events = select.POLLIN * is_polled | select.POLLOUT * (rank in to_send)
                if rank in has_sent_later:
                    events |= select.POLLRDHUP
                if events and rank not in gone:
                    poller.register(sock, events)
            if to_send or to_receive:
                remaining_s = max(0.0, limit_s - waited_s)
                polled = poller.poll(1e3 * min(_POLL_S, remaining_s + 1e-3))
            else:  # ranks of this host publish in memory, which cannot be polled
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_SLEEP_S)
                polled = poller.poll(0)
            events_of = dict(polled)
            for rank, sock in self._sockets.items():
                events = 0 if rank in to_receive else events_of.get(sock.fileno(), 0)
                has_left = rank in has_sent_later and events & _HAS_LEFT
                if has_left or (events and rank not in has_sent_later):
                    later = self._peek_later_signature(rank, awaited)
                    # The rank's report of a failure may follow its message of the later exchange.
                    if later is not None and (has_left or later & _FAILURE == _FAILURE):
                        limit_s, waited_s = min(limit_s, self._timeouts.step_s), 0.0
                        gone.add(rank)
                    has_sent_later.add(rank)
                if has_left:
                    gone.add(rank)  # otherwise poll would return immediately
            self._require_same_on_host()

    def _overdue(self, to_receive: Collection[int], awaited: set[int]) -> list[int]:
        """The ranks whose message has not arrived at this host.

        A rank of this host that has not published may itself wait for a rank of another host. The
        rows show whose message is missing.
        """
        stopped = {rank for rank in awaited if process_state(self._pids[rank]) in ("T", "t")}
        current = self._n_finished + 1
        headers = enumerate(self._headers[self._set])
        has_begun = {rank for rank, header in headers if header[_EXCHANGE] == current}
        waiting = awaited - stopped
        remote_senders = {sender for sender, rank in self._received_by.items() if rank in waiting}
        missing = {*to_receive, *stopped, *((waiting | remote_senders) - has_begun)}
        return sorted(missing or awaited)

    def _peek_later_signature(self, rank: int, awaited: Collection[int]) -> int | None:
        """Peeks at the socket of a rank that sends this rank nothing in this exchange.

        The rank may have finished this exchange and left. It may also be in the next exchange; then
        its message stays in the socket. If it has failed in the next exchange, this rank
        finishes this exchange and raises in the next.

        Returns: the signature of the rank's first message, if that belongs to a later exchange.
        Raises: RankError if the rank has failed in this exchange, or is in another collective.
        """
        try:
            header = self._sockets[rank].recv(HEADER_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            header = b""
        if not header and rank in awaited and not self._is_ready(rank):
            self._fail_lost(rank)
        if len(header) < HEADER_BYTES:
            return None
        signature, exchange = _HEADER.unpack(header)
        if _is_note(signature):
            return None
        if exchange <= self._n_finished + 1:
            self._fail_different(rank, signature)
        return int(signature)

    def _require_same_on_host(self) -> None:
        """Raises: RankError if a rank of this host has begun another collective than this rank."""
        for rank in self._pids:
            for set_index in range(_N_SHARED_SETS):
                header = self._headers[set_index][rank]
                if (
                    header[_EXCHANGE] == self._n_finished + 1
                    and header[_SIGNATURE] != self._signature
                ):
                    self._fail_different(rank, header[_SIGNATURE])

    def _is_ready(self, rank: int) -> bool:
        """Whether a rank of this host has received all its messages of this exchange."""
        n_received: int = self._headers[self._set][rank][_READY]
        return n_received > self._n_shared

    def _make_progress(
        self, to_send: dict[int, int], to_receive: dict[int, int], awaited: set[int]
    ) -> bool:
        """Sends, receives and publishes what is possible without waiting.

        Returns: whether the exchange is still incomplete.
        """
        for rank in tuple(to_receive):
            if self._receive(rank, to_receive[rank]):
                del to_receive[rank]
        for rank in tuple(to_send):
            if self._send(rank, to_send[rank], is_receiving=rank in to_receive):
                del to_send[rank]
        if awaited and not to_receive:
            self._headers[self._set][self.rank][_READY] = self._n_shared + 1
            awaited -= {other for other in awaited if self._is_ready(other)}
        return bool(to_send or to_receive or awaited)

    def _send(self, rank: int, n_bytes: int, *, is_receiving: bool) -> bool:
        """Sends a part of this rank's message. Returns: whether the whole message is sent."""
        cell = rank * CELLS + SENT
        if self._cells[cell] < n_bytes:
            try:
                row = self._messages[self._set][self.rank]
                message = row[HEADER_AT + self._cells[cell] : HEADER_AT + n_bytes]
                self._cells[cell] += self._sockets[rank].send(message)
            except BlockingIOError:
                return False
            except OSError:
                if is_receiving:  # the rank may have sent the reason before it left
                    return True
                self._peek_later_signature(rank, ())
                self._fail_lost(rank)
        return self._cells[cell] == n_bytes

    def _receive(self, rank: int, n_bytes: int) -> bool:
        """Receives a part of a rank's message. Returns: whether the whole message has arrived."""
        cell = rank * CELLS + RECEIVED
        before = self._cells[cell]
        if before < n_bytes:
            try:
                buffer = self._messages[self._set][rank][HEADER_AT + before : HEADER_AT + n_bytes]
                n_new = self._sockets[rank].recv_into(buffer)
            except BlockingIOError:
                return False
            except OSError:
                n_new = 0
            if not n_new:
                self._fail_lost(rank)
            self._cells[cell] += n_new
        while self._cells[cell] >= HEADER_BYTES and self._drop_note(rank):
            pass
        if self._cells[cell] >= HEADER_BYTES:
            self._require_same(rank)
        return self._cells[cell] == n_bytes

    def _drop_note(self, rank: int) -> bool:
        """Removes a note before the message of a rank. Returns: whether there was one."""
        message, cell = self._messages[self._set][rank][HEADER_AT:], rank * CELLS + RECEIVED
        signature = _HEADER.unpack_from(message)[0]
        if not _is_note(signature):
            return False
        n_left = self._cells[cell] - HEADER_BYTES
        message[:n_left] = message[HEADER_BYTES : HEADER_BYTES + n_left]
        self._cells[cell] = n_left
        self._n_notes += 1
        if signature == _COMPUTING + 1:
            self._computing.add(rank)
        elif signature == _COMPUTING:
            self._computing.discard(rank)
        return True

    def _require_same(self, rank: int) -> None:
        """Raises: RankError if the message of a rank does not belong to this exchange."""
        header = self._headers[self._set][rank]
        actual = header[_SIGNATURE], header[_EXCHANGE]
        if actual != (self._signature, self._n_finished + 1):
            self._fail_different(rank, header[_SIGNATURE])

    def _fail_different(self, rank: int, signature: int) -> NoReturn:
        """Raises the error for a message of a rank that does not belong to this exchange."""
        if signature & _FAILURE == _FAILURE:
            mask = (1 << _RANK_BITS) - 1
            culprit, finder = signature & mask, signature >> _RANK_BITS & mask
            self._fail_reported(rank, culprit, finder, signature >> 2 * _RANK_BITS & 3)
        self._fail(
            f"rank {rank} is in {described(signature)} and rank {self.rank} in "
            f"{described(self._signature)}: the ranks called different collectives",
            rank,
            _MISMATCH,
            self.rank,
        )

    def _fail_reported(self, rank: int, culprit: int, finder: int, reason: int) -> NoReturn:
        """Raises the error for a failure that `rank` has reported and `finder` has detected."""
        if reason == _DIED:
            self._fail_lost(rank if culprit == self.rank else culprit)
        if reason == _LATE:
            self._fail(late([culprit], self.size, self._timeouts.step_s), culprit, reason, finder)
        self._fail(
            f"rank {finder} is in another collective than rank {culprit}: "
            "the ranks called different collectives",
            culprit,
            _MISMATCH,
            finder,
        )

    def _fail_lost(self, rank: int) -> NoReturn:
        self._fail(
            f"rank {rank} of {self.size} has died or left early; "
            f"rank {self.rank} was waiting for it",
            rank,
            _DIED,
            self.rank,
        )

    def _fail(self, message: str, culprit: int, reason: int, finder: int) -> NoReturn:
        """Reports the failure to all other ranks; then raises."""
        self._send_failure(culprit, reason, finder)
        what = f"exchange {self._n_finished + 1}, {described(self._signature)}"
        raise RankError(message + self._evidence(what, reason))

    def report_failure(self, rank: int, has_died: bool) -> None:
        """Reports to the other ranks a failure that this rank has detected outside of this group.

        After this call, this rank must leave the group.
        """
        self._send_failure(rank, _DIED if has_died else _LATE, self.rank)

    def _send_failure(self, culprit: int, reason: int, finder: int) -> None:
        failure = _FAILURE | reason << 2 * _RANK_BITS | finder << _RANK_BITS | culprit
        header = _HEADER.pack(failure, self._n_finished + 1)
        for rank, sock in self._sockets.items():
            # Only between messages: within a message, the header would be read as values. Between
            # exchanges, the size of a message that a kernel has sent may differ from _n_own_bytes.
            sent = self._cells[rank * CELLS + SENT]
            if not self._busy or sent in (0, self._n_own_bytes):
                with suppress(OSError):
                    sock.send(header)

    def _why_late(self) -> str:
        """The end of the error message about a late rank."""
        return ""

    def _evidence(self, what: str, reason: int) -> str:
        """Lines that are appended to the message of a failure."""
        if reason == _DIED:
            return f"\n  rank {self.rank} is in {what}, called at {call_site()}"
        return own_evidence(self.rank, what)

    def _progress(self) -> int:
        """A number that grows with every byte of this exchange and with every note."""
        cells = (rank * CELLS for rank in self._sockets)
        n_bytes = sum(self._cells[cell + SENT] + self._cells[cell + RECEIVED] for cell in cells)
        return n_bytes + self._n_notes

    @property
    def _n_finished(self) -> int:
        return self._cells[self.size * CELLS + FINISHED]

    @property
    def _n_shared(self) -> int:
        return self._cells[self.size * CELLS + SHARED]

    def _parts(self, dtype: torch.dtype, counts: Sequence[int]) -> list[Tensor]:
        """The values of all ranks in the last exchange."""
        return [self._view(rank, dtype, count) for rank, count in enumerate(counts)]

    def _view(self, rank: int, dtype: torch.dtype, n_values: int) -> Tensor:
        """The first values in the message of a rank, in the current set of rows."""
        key = self._set, rank, dtype, n_values
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            n_bytes = n_values * dtype.itemsize
            # A tensor created in inference mode cannot be written outside of it.
            with torch.inference_mode(False):
                view = self._sets[self._set][rank, VALUES_AT : VALUES_AT + n_bytes].view(dtype)
            self._views[key] = view
        return view


class SocketsBesideGloo(Sockets):
    """Sockets for small tensors, and a process group of torch for larger tensors and barriers.

    Args:
        group: the process group; it has the same ranks.
    """

    def __init__(
        self,
        group: ProcessGroup,
        connected: Mapping[int, socket.socket],
        host: HostMemory,
        timeouts: Timeouts,
        policy: WaitPolicy,
    ) -> None:
        super().__init__(group.rank, connected, host, timeouts, policy)
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        is_small = x.dtype in SUMMED and self._fits(x.nbytes)
        return super().all_reduce(x) if is_small else self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x) if self._fits(x.nbytes) else self._group.all_gather(x)

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        is_small = x.dtype in DTYPES and self._fits(len(x) * max(widths) * x.itemsize)
        if is_small:
            return super().gather_columns(x, widths, out)
        return self._group.gather_columns(x, widths, out)

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        if self._fits(x.nbytes):
            return super().broadcast(x, src, no_timeout=no_timeout)
        return self._group.broadcast(x, src, no_timeout=no_timeout)

    def barrier(self) -> None:
        self._group.barrier()

    def keepalive(self) -> None:
        self._group.keepalive()

    def require_alive(self) -> None:
        self._group.require_alive()

    def close(self) -> None:
        super().close()
        self._group.close()

    def _why_late(self) -> str:
        return f"; {self._group.culprits()}"

    def _evidence(self, what: str, reason: int) -> str:  # noqa: ARG002
        return self._group.evidence(what)


def _is_note(signature: int) -> bool:
    return signature in (_KEEPALIVE, _COMPUTING, _COMPUTING + 1)
