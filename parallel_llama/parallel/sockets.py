"""Collectives of small tensors between ranks of several hosts.

A decode step of 16 layers has 33 all-reduces of a few kilobytes. gloo takes 0.5 to 1.6 ms for each
between two hosts, which is several times the latency of a network. Here every rank sends its values
over TCP to one rank of each other host, to all of these at once. The receiver stores the values in
the shared memory of its host, so a rank's values cross the link to a host only once. Every rank
then adds the values of all ranks in rank order, so all ranks get the same bits. Ranks that cannot
share memory count as ranks of different hosts. A broadcast goes from its source to every rank
directly.

Normally a process group of torch sets up the connections, carries larger tensors, for which gloo
sends fewer bytes, and detects lost ranks by their heartbeats. `linked_ranks` needs no group of
torch: larger tensors are exchanged in pieces, and no ranks share memory.

    message  two numbers of 8 bytes: signature, number of the exchange, from 1; then the values
    rows     per rank, in the memory of the host: how many exchanges through this memory the rank
             has received completely, aligned to a cache line; and the rank's message. Two sets of
             rows are used alternately. Broadcasts and barriers use rows of this rank alone
    cells    per rank, 8 bytes each: descriptors to send to and to receive from, bytes sent and
             received in the current exchange, whether the rank is another rank of this host; then
             the number of finished exchanges, and of exchanges through the memory of the host

A rank writes its message into its row, sends it, receives messages into the rows of their senders,
publishes that it has received them, and waits until all ranks of its host have published. Two sets
of rows suffice for the same reason as two slots in `shared_memory`.

Every pair of ranks is connected. A rank that finds a failure tells the other ranks which rank has
failed before it leaves them, and a rank that waits looks at all its connections.

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
from parallel_llama.parallel.shared_memory import HostMemory
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

# The limit on one rank's values. For larger tensors of three or more ranks, gloo sends fewer bytes.
MAX_BYTES = 1 << 18

HEADER_BYTES = 16
_HEADER = struct.Struct("<qq")
VALUES_AT = 64  # bytes in a row
HEADER_AT = VALUES_AT - HEADER_BYTES
ROW_BYTES = VALUES_AT + MAX_BYTES
_READY, _SIGNATURE, _EXCHANGE = 0, HEADER_AT // 8, HEADER_AT // 8 + 1  # cells of 8 bytes of a row
CELLS = 5  # of a rank
SEND_FD, RECEIVE_FD, SENT, RECEIVED, IS_LOCAL = range(CELLS)
# After the cells of all ranks: finished exchanges, and those through the memory of the host.
FINISHED, SHARED = range(2)
# The sets of rows: two in the memory of the host, and one of this rank for broadcasts and barriers.
_N_SHARED_SETS = _PRIVATE_SET = 2

# Tries to receive before this rank waits in the system: about 0.5 ms in Python. A kernel tries for
# some milliseconds, longer than messages take between most hosts, because Python is slow to take
# over.
_SPINS = 150
_LOOKS = {WaitPolicy.SPIN: 8000, WaitPolicy.YIELD: 500, WaitPolicy.SLEEP: 100}
_POLL_S = 0.25
_LONGEST_GAP_S = 0.5  # the maximum time counted between two polls, since this rank may be stopped
_CONNECT_S = 20.0
_YIELD_S = 0.005  # for ranks of this host, before this rank sleeps
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_KEEPALIVE_S = 1.0
# The events of poll for a connection that the other side has closed.
_HAS_LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR

# A message that names a failed rank has a signature of this kind; its lower bits hold one of the
# reasons below, the rank that has found the failure, and the failed rank.
_FAILURE = 7 << 60
# Messages without values. A rank that is still loading sends keepalives to ranks at a barrier. A
# rank sends _COMPUTING + 1 when it enters `computing`, and _COMPUTING when it leaves.
_KEEPALIVE, _COMPUTING = 6 << 60, 5 << 60
_DIED, _LATE, _MISMATCH = range(3)
_RANK_BITS = 16

_MAX_VIEWS = 256

_NOTHING = torch.zeros(1, dtype=torch.uint8)  # the tensor of a barrier


@dataclass(frozen=True)
class Endpoint:
    """Where a rank listens for the others, and what proves that they belong to its run.

    Args:
        address: the address of this host that the other ranks reach.
        key: derived from the secret of the run.
        host: equal on ranks that share memory; see `shared_memory.host_id`.
    """

    address: IPv4Address
    key: bytes
    host: str


def connect(group: ProcessGroup, own: Endpoint | None, timeouts: Timeouts) -> Communicator:
    """The group over sockets, or `group` itself if two ranks cannot connect.

    Args:
        own: None if this rank has no IPv4 address.

    Collective: every rank calls it; all get the same kind of communicator.
    """
    listener = None
    if own is not None:
        with suppress(OSError):
            listener = listen(own.address)
    port = 0 if listener is None else listener.getsockname()[1]
    address = 0 if own is None else int(own.address)
    rows = group.all_gather(torch.tensor([address, port])).tolist()
    if own is None or listener is None or not all(map(_is_endpoint, rows)):
        if listener is not None:
            listener.close()
        return group
    addresses = {r: (str(IPv4Address(a)), p) for r, (a, p) in enumerate(rows) if r != group.rank}
    connected: dict[int, socket.socket] = {}
    with listener:
        limit_s = min(timeouts.start_s, _CONNECT_S)
        try:
            connected = connect_all(group.rank, listener, addresses, own.key, limit_s)
        except NotConnected as error:
            logger.warning(
                "rank %d of %d exchanges through gloo, which is slower: it cannot connect to %s; "
                "allow TCP between the ranks in the firewall",
                group.rank,
                group.size,
                error,
            )
    if not bool(group.all_gather(torch.tensor([bool(connected)])).all()):
        for each in connected.values():
            each.close()
        return group
    policy = wait_policy(sum(row[0] == address for row in rows))
    memory = HostMemory.share(group, own.host, memory_bytes(group.size))
    return SocketsBesideGloo(group, connected, memory, timeouts, policy)


def memory_bytes(size: int) -> int:
    """The size of the `HostMemory` of a group of `size` ranks."""
    return _N_SHARED_SETS * size * ROW_BYTES


def receivers_of(rank: int, hosts: Sequence[Sequence[int]]) -> list[int]:
    """The ranks, one of every other host, to which a rank sends its messages.

    Args:
        hosts: the ranks of each host.
    """
    own = next(host for host in hosts if rank in host)
    return [host[own.index(rank) % len(host)] for host in hosts if host is not own]


def _is_endpoint(row: Sequence[int]) -> bool:
    address, port = row
    return 0 < address < 1 << 32 and 0 < port < 1 << 16


class Sockets(Communicator):
    """A group of ranks with one connection for each pair; it sums in rank order.

    A tensor that is larger than a message is exchanged in pieces.

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
        self._spins = _SPINS if policy is WaitPolicy.SPIN else 0
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
        # Called again and again while this rank waits for others; it may raise a RankError.
        self.on_wait: Callable[[], None] = lambda: None
        with torch.inference_mode(False):  # also written outside of inference mode
            private = torch.zeros(self.size, ROW_BYTES, dtype=torch.uint8)
            self._memory = host.memory.view(_N_SHARED_SETS, self.size, ROW_BYTES)
            self._state = torch.zeros(self.size * CELLS + 2, dtype=torch.int64)
        self._sets = [*self._memory, private]
        self._rows = [[row.numpy().data for row in each] for each in self._sets]
        self._heads = [[row[:VALUES_AT].cast("q") for row in rows] for rows in self._rows]
        self._set = _PRIVATE_SET  # the set of rows of the current exchange
        self._cells = self._state.numpy().data
        for rank in range(self.size):
            fd = self._sockets[rank].fileno() if rank in self._sockets else -1
            cell = rank * CELLS
            self._cells[cell + SEND_FD] = fd if rank in self._receivers else -1
            self._cells[cell + RECEIVE_FD] = fd if rank in self._senders else -1
            self._cells[cell + IS_LOCAL] = rank in self._pids
        self._signature, self._n_own = 0, 0  # of the current exchange
        self._busy = False
        self._keepalive_s, self._n_notes = 0.0, 0  # when a keepalive was sent; received notes
        self._computing = set[int]()  # ranks that compute before their message of this exchange
        self._views: dict[tuple[int, int, torch.dtype, int], Tensor] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in SUMMED:
            raise TypeError(f"all_reduce of {x.dtype}; use one of {', '.join(map(str, SUMMED))}")
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        for piece in _pieces(x.view(-1)):
            counts = [piece.numel()] * self.size
            self._all_to_all(ALL_REDUCE, piece, piece, counts)
            sum_in_order(self._parts(x.dtype, counts), piece)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel() == 0:
            return gathered
        rows = gathered.view(self.size, -1).view(torch.uint8)
        pieces = _pieces(x.contiguous().view(-1).view(torch.uint8))
        for piece, columns in zip(pieces, torch.split(rows, MAX_BYTES, dim=1), strict=True):
            counts = [len(piece)] * self.size
            self._all_to_all(ALL_GATHER, piece, piece, counts)
            for row, part in zip(columns, self._parts(torch.uint8, counts), strict=True):
                row.copy_(part)
        return gathered

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        most = max(widths)
        if x.dtype not in DTYPES or most * x.itemsize > MAX_BYTES:
            return super().gather_columns(x, widths, out)
        whole = x.new_empty(len(x), sum(widths)) if out is None else out
        if not whole.numel():
            return whole
        at_once = MAX_BYTES // (most * x.itemsize)  # rows
        for target, own in zip(torch.split(whole, at_once), torch.split(x, at_once), strict=True):
            counts = [len(own) * width for width in widths]
            self._all_to_all(GATHER_COLUMNS, target[:, :most], own.contiguous(), counts)
            put_columns(self._parts(x.dtype, counts), widths, target)
        return whole

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.broadcast(x.contiguous(), src, no_timeout=no_timeout))
        limit_s = math.inf if no_timeout and self.rank != src else self._timeouts.step_s
        for piece in _pieces(x.view(-1).view(torch.uint8)):
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
        self._exchange(BARRIER, _NOTHING, None, nothing, self._sockets, self._timeouts.start_s)

    @contextmanager
    def computing(self) -> Iterator[None]:
        n_finished = self._n_finished
        self._note(_COMPUTING + 1)
        try:
            yield
        finally:
            # After an exchange, the other ranks have forgotten the first note.
            if self._n_finished == n_finished and not self._busy:
                self._note(_COMPUTING)

    def keepalive(self) -> None:
        now = time.monotonic()
        if now - self._keepalive_s > _KEEPALIVE_S:
            self._keepalive_s = now
            self._note(_KEEPALIVE)

    def _note(self, kind: int) -> None:
        """Sends a message without values to every other rank, between two exchanges."""
        for own in self._sockets.values():
            with suppress(OSError):  # the next exchange fails
                own.send(_HEADER.pack(kind, self._n_finished))

    def require_alive(self) -> None:
        for rank, own in self._sockets.items():
            try:
                has_ended = not own.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                has_ended = False
            except OSError:
                has_ended = True
            if has_ended:
                raise RankError(f"rank {rank} of {self.size} has died or left early")

    def close(self) -> None:
        self._busy = True
        for each in self._sockets.values():
            each.close()
        self._sockets = {}

    def sum_exchange(self, x: Tensor) -> Exchange | None:
        """What a kernel needs to reduce tensors like x; None if x is empty or too large."""
        if not self._takes(x.nbytes):
            return None
        counts = [x.numel()] * self.size

        def complete(x: Tensor) -> None:
            sum_in_order(self._parts(x.dtype, counts), x.view(-1))

        return self._kernel_exchange(ALL_REDUCE, x, counts, complete)

    def column_exchange(self, whole: Tensor, widths: Sequence[int]) -> Exchange | None:
        """What a kernel needs to gather columns into `whole`; None if empty or too large."""
        columns = whole[:, : max(widths)]
        if not self._takes(columns.nbytes):
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
        n_own = HEADER_BYTES + counts[self.rank] * itemsize

        def finish(x: Tensor) -> None:
            self._busy = True
            self._signature, self._n_own = signature, n_own
            self._set = self._n_shared % _N_SHARED_SETS
            self._finish(expected, self._receivers, self._timeouts.step_s, 0)
            complete(x)

        own = self.rank, self.size, signature, _LOOKS[self._policy], self._policy
        cells, messages = self._state.data_ptr(), self._memory.data_ptr()
        return Exchange("sockets", cells, messages, *own, finish)

    @staticmethod
    def _takes(n_bytes: int) -> bool:
        return 0 < n_bytes <= MAX_BYTES

    def _all_to_all(self, kind: int, like: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """Exchanges `own`; rank r sends counts[r] values."""
        expected = {rank: counts[rank] * own.itemsize for rank in self._senders}
        self._set = self._n_shared % _N_SHARED_SETS
        self._exchange(kind, like, own, expected, self._receivers, self._timeouts.step_s)

    def _exchange(
        self,
        kind: int,
        like: Tensor,
        own: Tensor | None,
        expected: Mapping[int, int],
        receivers: Collection[int],
        limit_s: float,
    ) -> None:
        """Sends this rank's values to the receivers, and receives the values of other ranks.

        After an exception inside, this rank cannot use the group any more.

        Args:
            like: a tensor with the dtype and size that the signature states.
            own: this rank's values; None for a rank that only receives.
            expected: the bytes of values to receive, by the rank that sends them.
        """
        if self._busy:
            raise RankError(
                f"rank {self.rank} left a collective unfinished, or has closed its group: "
                "it cannot take part in another"
            )
        self._busy = True
        self._signature = signature_of(kind, like)
        if own is not None and own.numel():
            self._view(self.rank, own.dtype, own.numel()).copy_(own.view(-1))
        head = self._heads[self._set][self.rank]
        head[_SIGNATURE] = self._signature
        head[_EXCHANGE] = self._n_finished + 1  # last; see _require_same_on_host
        for rank in self._sockets:
            self._cells[rank * CELLS + SENT] = self._cells[rank * CELLS + RECEIVED] = 0
        self._computing.clear()
        self._n_own = HEADER_BYTES + (0 if own is None else own.nbytes)
        self._finish(expected, receivers, limit_s, self._spins)

    def _finish(
        self,
        expected: Mapping[int, int],
        receivers: Collection[int],
        limit_s: float,
        spins: int,
    ) -> None:
        """Sends and receives what is left of the current exchange."""
        to_send = dict.fromkeys(receivers, self._n_own)
        to_receive = {rank: HEADER_BYTES + n for rank, n in expected.items()}
        is_shared = self._set != _PRIVATE_SET
        awaited = set(self._pids) if is_shared else set()
        while self._advance(to_send, to_receive, awaited):
            spins -= 1
            if spins < 0:
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
        """Waits in the system until nothing is left to send, to receive and to await.

        A rank is late after `limit_s` seconds without progress. Without a limit, a rank that
        computes has the limit of a step.
        """
        seen_s, waited_s, before = time.monotonic(), 0.0, (0, 0)
        pause_s, early, gone = _SHORTEST_SLEEP_S, set[int](), set[int]()
        while self._advance(to_send, to_receive, awaited):
            now_s = time.monotonic()
            waited_s += min(now_s - seen_s, _LONGEST_GAP_S)
            seen_s = now_s
            progress = self._n_moved(), len(awaited)
            if progress != before:
                before, waited_s = progress, 0.0
            allowed_s = limit_s
            if limit_s == math.inf and not self._computing.isdisjoint(to_receive):
                allowed_s = self._timeouts.step_s
            if waited_s > allowed_s:
                overdue = self._overdue(to_receive, awaited) or sorted(to_send)
                what = late(overdue, self.size, allowed_s) + self._why_late()
                self._fail(what, overdue[0], _LATE, self.rank)
            self.on_wait()
            may_yield = self._policy is not WaitPolicy.SLEEP and waited_s < _YIELD_S
            if not to_send and not to_receive and may_yield:
                os.sched_yield()
                continue
            poller = select.poll()
            for rank, own in self._sockets.items():
                is_heard = rank in to_receive or rank not in early
                events = select.POLLIN * is_heard | select.POLLOUT * (rank in to_send)
                if rank in early:
                    events |= select.POLLRDHUP
                if events and rank not in gone:
                    poller.register(own, events)
            if to_send or to_receive:
                left_s = max(0.0, limit_s - waited_s)
                found = poller.poll(1e3 * min(_POLL_S, left_s + 1e-3))
            else:  # ranks of this host publish in memory, which cannot be polled
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_SLEEP_S)
                found = poller.poll(0)
            events_of = dict(found)
            for rank, own in self._sockets.items():
                events = 0 if rank in to_receive else events_of.get(own.fileno(), 0)
                has_left = rank in early and events & _HAS_LEFT
                if has_left or (events and rank not in early):
                    later = self._later_signature(rank, awaited)
                    # The message of a later exchange may hide the report of a rank that has left.
                    if later is not None and (has_left or later & _FAILURE == _FAILURE):
                        limit_s, waited_s = min(limit_s, self._timeouts.step_s), 0.0
                        gone.add(rank)
                    early.add(rank)
                if has_left:
                    gone.add(rank)  # otherwise poll would return at once
            self._require_same_on_host()

    def _overdue(self, to_receive: Collection[int], awaited: set[int]) -> list[int]:
        """The ranks that have not sent a message to this rank or to another rank of this host.

        A rank of this host may wait for another host, so only the rows show which rank is late.
        """
        stopped = {rank for rank in awaited if process_state(self._pids[rank]) in ("T", "t")}
        current = self._n_finished + 1
        heads = enumerate(self._heads[self._set])
        begun = {rank for rank, head in heads if head[_EXCHANGE] == current}
        waiting = awaited - stopped
        remote = {sender for sender, rank in self._received_by.items() if rank in waiting}
        missing = {*to_receive, *stopped, *((waiting | remote) - begun)}
        return sorted(missing or awaited)

    def _later_signature(self, rank: int, awaited: Collection[int]) -> int | None:
        """Looks at the data of a rank that does not send to this rank in this exchange.

        The rank may have left after the last collective. It may also have begun the next one; the
        message of the next collective stays in the socket. A rank that has failed in the next
        collective has finished this one, so this rank can finish this one too, and reports the
        failure in the next.

        Returns: the signature of the rank's first message if it belongs to a later collective.
        Raises: RankError if the rank has failed in this collective, or is in another one.
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
            self._fail_unlike(rank, signature)
        return int(signature)

    def _require_same_on_host(self) -> None:
        """Raises: RankError if a rank of this host has begun another collective than this rank."""
        for rank in self._pids:
            for rows in range(_N_SHARED_SETS):
                head = self._heads[rows][rank]
                if head[_EXCHANGE] == self._n_finished + 1 and head[_SIGNATURE] != self._signature:
                    self._fail_unlike(rank, head[_SIGNATURE])

    def _is_ready(self, rank: int) -> bool:
        """Whether a rank of this host has received all its messages of this exchange."""
        n_received: int = self._heads[self._set][rank][_READY]
        return n_received > self._n_shared

    def _advance(
        self, to_send: dict[int, int], to_receive: dict[int, int], awaited: set[int]
    ) -> bool:
        """Sends and receives what it can without waiting, and publishes that all is received.

        Returns: whether anything is left.
        """
        for rank in tuple(to_receive):
            if self._receive(rank, to_receive[rank]):
                del to_receive[rank]
        for rank in tuple(to_send):
            if self._send(rank, to_send[rank], is_heard=rank in to_receive):
                del to_send[rank]
        if awaited and not to_receive:
            self._heads[self._set][self.rank][_READY] = self._n_shared + 1
            awaited -= {other for other in awaited if self._is_ready(other)}
        return bool(to_send or to_receive or awaited)

    def _send(self, rank: int, n_bytes: int, *, is_heard: bool) -> bool:
        """Sends a part of this rank's message. Returns: whether all of it is sent."""
        cell = rank * CELLS + SENT
        if self._cells[cell] < n_bytes:
            try:
                row = self._rows[self._set][self.rank]
                message = row[HEADER_AT + self._cells[cell] : HEADER_AT + n_bytes]
                self._cells[cell] += self._sockets[rank].send(message)
            except BlockingIOError:
                return False
            except OSError:
                if is_heard:  # the rank may have sent the reason before it left
                    return True
                self._later_signature(rank, ())
                self._fail_lost(rank)
        return self._cells[cell] == n_bytes

    def _receive(self, rank: int, n_bytes: int) -> bool:
        """Receives a part of a rank's message. Returns: whether all of it is there."""
        cell = rank * CELLS + RECEIVED
        before = self._cells[cell]
        if before < n_bytes:
            try:
                room = self._rows[self._set][rank][HEADER_AT + before : HEADER_AT + n_bytes]
                n_new = self._sockets[rank].recv_into(room)
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
        """Removes a message without values that came before the message of a rank."""
        message, cell = self._rows[self._set][rank][HEADER_AT:], rank * CELLS + RECEIVED
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
        head = self._heads[self._set][rank]
        found = head[_SIGNATURE], head[_EXCHANGE]
        if found != (self._signature, self._n_finished + 1):
            self._fail_unlike(rank, head[_SIGNATURE])

    def _fail_unlike(self, rank: int, signature: int) -> NoReturn:
        """Raises the error for a message of a rank that does not belong to this exchange."""
        if signature & _FAILURE == _FAILURE:
            mask = (1 << _RANK_BITS) - 1
            culprit, finder = signature & mask, signature >> _RANK_BITS & mask
            self._fail_alike(rank, culprit, finder, signature >> 2 * _RANK_BITS & 3)
        self._fail(
            f"rank {rank} is in {described(signature)} and rank {self.rank} in "
            f"{described(self._signature)}: the ranks called different collectives",
            rank,
            _MISMATCH,
            self.rank,
        )

    def _fail_alike(self, rank: int, culprit: int, finder: int, reason: int) -> NoReturn:
        """Raises the error for a failure that a rank has reported, and the finder has found."""
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
        """Tells all other ranks why this rank leaves; then raises."""
        self._tell(culprit, reason, finder)
        what = f"exchange {self._n_finished + 1}, {described(self._signature)}"
        raise RankError(message + self._evidence(what, reason))

    def tell_failure(self, rank: int, has_died: bool) -> None:
        """Tells the other ranks of a failure that this rank has found outside of this group.

        After this call, this rank must leave the group.
        """
        self._tell(rank, _DIED if has_died else _LATE, self.rank)

    def _tell(self, culprit: int, reason: int, finder: int) -> None:
        failure = _FAILURE | reason << 2 * _RANK_BITS | finder << _RANK_BITS | culprit
        header = _HEADER.pack(failure, self._n_finished + 1)
        for rank, own in self._sockets.items():
            # Only between messages: within a message, the header would be read as values.
            sent = self._cells[rank * CELLS + SENT]
            if sent in (0, self._n_own):
                with suppress(OSError):
                    own.send(header)

    def _why_late(self) -> str:
        """The end of the error message about a late rank."""
        return ""

    def _evidence(self, what: str, reason: int) -> str:
        """Lines that are appended to the message of a failure."""
        if reason == _DIED:
            return f"\n  rank {self.rank} is in {what}, called at {call_site()}"
        return own_evidence(self.rank, what)

    def _n_moved(self) -> int:
        """The bytes sent and received in this exchange, plus the number of notes so far."""
        starts = (rank * CELLS for rank in self._sockets)
        n_bytes = sum(self._cells[at + SENT] + self._cells[at + RECEIVED] for at in starts)
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
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            n_bytes = n_values * dtype.itemsize
            # A tensor created in inference mode cannot be written outside of it.
            with torch.inference_mode(False):
                view = self._sets[self._set][rank, VALUES_AT : VALUES_AT + n_bytes].view(dtype)
            self._views[key] = view
        return view


class SocketsBesideGloo(Sockets):
    """Sockets for small tensors; the group of torch takes larger ones, and barriers.

    Args:
        group: the group of this rank and the ranks of `connected`.
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
        is_small = x.dtype in SUMMED and self._takes(x.nbytes)
        return super().all_reduce(x) if is_small else self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x) if self._takes(x.nbytes) else self._group.all_gather(x)

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        is_small = x.dtype in DTYPES and self._takes(len(x) * max(widths) * x.itemsize)
        if is_small:
            return super().gather_columns(x, widths, out)
        return self._group.gather_columns(x, widths, out)

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        if self._takes(x.nbytes):
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


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    """Consecutive pieces that fit into a message."""
    return torch.split(flat, MAX_BYTES // flat.itemsize) if flat.numel() else ()
