"""Collectives of small tensors over TCP, between ranks that do not share memory.

A decode step of 16 layers has 33 all-reduces of a few kilobytes. gloo takes 0.5 to 1.6 ms for each
between two hosts, which is several times the latency of a network. Here every rank sends its values
to every other rank at once, and adds what it receives in rank order: one message each way, and the
same bits on all ranks. Normally a process group of torch sets up the connections, carries larger
tensors, for which gloo sends fewer bytes, and detects lost ranks by their heartbeats.
`linked_ranks` needs no group of torch: larger tensors are exchanged in pieces.

    message  two numbers of 8 bytes: signature, exchange; then the values
    cells    per rank, 8 bytes each: descriptor, bytes sent and received of the current exchange;
             then the number of finished exchanges

A rank that finds a failure tells the other ranks which rank has failed before it leaves them.

A kernel may run an exchange of `all_reduce` or `gather_columns`; see `Exchange`.
"""

import logging
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import NoReturn

import torch
from torch import Tensor

from parallel_llama.parallel.authenticated_sockets import NotConnected, connect_all, listen
from parallel_llama.parallel.collectives import Communicator, Exchange, put_columns, sum_in_order
from parallel_llama.parallel.failures import RankError, late
from parallel_llama.parallel.process_group import ProcessGroup
from parallel_llama.parallel.rank_stacks import call_site, own_evidence
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

logger = logging.getLogger(__name__)

# Of one rank's values. gloo needs fewer bytes for a larger tensor of three or more ranks.
MAX_BYTES = 1 << 18

HEADER_BYTES = 16
_HEADER = struct.Struct("<qq")
MESSAGE_BYTES = HEADER_BYTES + MAX_BYTES  # room for the message of a rank
CELLS = 3  # of a rank
FD, SENT, RECEIVED = range(CELLS)

# Tries to receive before this rank waits in the system: about 0.5 ms, in Python and in a kernel.
_SPINS, _LOOKS = 150, 2000
_POLL_S = 0.25
_LONGEST_GAP_S = 0.5  # the maximum time counted between two polls, since this rank may be stopped
_CONNECT_S = 20.0
_KEEPALIVE_S = 1.0

# A message that names a failed rank has a signature of this kind; its lower bits hold one of the
# reasons below, and the rank's number.
_FAILURE = 7 << 60
# A message without values, which a rank that loads sends to those that wait at a barrier.
_KEEPALIVE = 6 << 60
_DIED, _LATE, _MISMATCH = range(3)
_RANK_BITS = 32

_MAX_VIEWS = 256

_NOTHING = torch.zeros(1, dtype=torch.uint8)  # the tensor of a barrier


@dataclass(frozen=True)
class Endpoint:
    """Where a rank listens for the others, and what proves that they belong to its run.

    Args:
        address: the address of this host that the other ranks reach.
        key: derived from the secret of the run.
    """

    address: IPv4Address
    key: bytes


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
    spins = n_spins(sum(row[0] == address for row in rows))
    return SocketsBesideGloo(group, connected, timeouts, spins)


def n_spins(n_local: int) -> int:
    """Tries to receive before a rank waits in the system, with `n_local` ranks on its host."""
    return _SPINS if len(os.sched_getaffinity(0)) >= n_local else 0


def _is_endpoint(row: Sequence[int]) -> bool:
    address, port = row
    return 0 < address < 1 << 32 and 0 < port < 1 << 16


class Sockets(Communicator):
    """A group of ranks with one connection for each pair; it sums in rank order.

    A tensor that is larger than a message is exchanged in pieces.

    Args:
        connected: the socket to each other rank, in non-blocking mode.
        spins: tries to receive before a rank waits in the system.
    """

    def __init__(
        self, rank: int, connected: Mapping[int, socket.socket], timeouts: Timeouts, spins: int
    ) -> None:
        self.rank, self.size = rank, len(connected) + 1
        self._timeouts, self._spins = timeouts, spins
        self._sockets = dict(connected)
        # Called again and again while this rank waits for others; it may raise a RankError.
        self.on_wait: Callable[[], None] = lambda: None
        with torch.inference_mode(False):  # written outside of it too
            self._memory = torch.zeros(self.size, MESSAGE_BYTES, dtype=torch.uint8)
            self._state = torch.zeros(self.size * CELLS + 1, dtype=torch.int64)
        self._messages = [row.numpy().data for row in self._memory]
        self._cells = self._state.numpy().data
        for rank in range(self.size):
            own = self._sockets.get(rank)
            self._cells[rank * CELLS + FD] = -1 if own is None else own.fileno()
        self._signature, self._n_own = 0, 0  # of the current exchange
        self._busy = False
        self._keepalive_s, self._n_keepalives = 0.0, 0  # when sent; received
        self._views: dict[tuple[int, torch.dtype, int], Tensor] = {}

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
            if self.rank == src:
                self._exchange(BROADCAST, piece, piece, {}, self._sockets, limit_s)
            else:
                self._exchange(BROADCAST, piece, None, {src: len(piece)}, (), limit_s)
                piece.copy_(self._view(src, torch.uint8, len(piece)))
        return x

    def barrier(self) -> None:
        nothing = dict.fromkeys(self._sockets, 0)
        self._exchange(BARRIER, _NOTHING, None, nothing, self._sockets, self._timeouts.start_s)

    def keepalive(self) -> None:
        now = time.monotonic()
        if now - self._keepalive_s > _KEEPALIVE_S:
            self._keepalive_s = now
            for own in self._sockets.values():
                with suppress(OSError):  # the next exchange fails
                    own.send(_HEADER.pack(_KEEPALIVE, self._n_finished))

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
        """What a kernel needs to reduce tensors like x; None if x is empty or too large for it."""
        if not self._takes(x.nbytes):
            return None
        counts = [x.numel()] * self.size

        def complete(x: Tensor) -> None:
            sum_in_order(self._parts(x.dtype, counts), x.view(-1))

        return self._kernel_exchange(ALL_REDUCE, x, counts, complete)

    def column_exchange(self, whole: Tensor, widths: Sequence[int]) -> Exchange | None:
        """What a kernel needs to gather columns into tensors like `whole`.

        None if the columns are empty or too large for it.
        """
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
        expected = {rank: counts[rank] * itemsize for rank in self._sockets}
        n_own = HEADER_BYTES + counts[self.rank] * itemsize

        def finish(x: Tensor) -> None:
            self._busy = True
            self._signature, self._n_own = signature, n_own
            self._finish(expected, self._sockets, self._timeouts.step_s, 0)
            complete(x)

        own = self.rank, self.size, signature, _LOOKS if self._spins else 0
        cells, messages = self._state.data_ptr(), self._memory.data_ptr()
        return Exchange("sockets", cells, messages, *own, finish)

    @staticmethod
    def _takes(n_bytes: int) -> bool:
        return 0 < n_bytes <= MAX_BYTES

    def _all_to_all(self, kind: int, like: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """Exchanges `own`; rank r sends counts[r] values."""
        expected = {rank: counts[rank] * own.itemsize for rank in self._sockets}
        self._exchange(kind, like, own, expected, self._sockets, self._timeouts.step_s)

    def _exchange(
        self,
        kind: int,
        like: Tensor,
        own: Tensor | None,
        expected: Mapping[int, int],
        receivers: Collection[int],
        limit_s: float,
    ) -> None:
        """Sends this rank's values to the receivers, and receives those of other ranks.

        After an exception inside, this rank cannot use the group any more.

        Args:
            like: its dtype and size are the signature.
            own: this rank's values; None for a rank that only receives.
            expected: the bytes of values that come from each rank that sends.
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
        _HEADER.pack_into(self._messages[self.rank], 0, self._signature, self._n_finished)
        for rank in self._sockets:
            self._cells[rank * CELLS + SENT] = self._cells[rank * CELLS + RECEIVED] = 0
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
        while self._advance(to_send, to_receive):
            spins -= 1
            if spins < 0:
                self._wait(to_send, to_receive, limit_s)
                break
        self._cells[self.size * CELLS] += 1
        self._busy = False

    def _wait(self, to_send: dict[int, int], to_receive: dict[int, int], limit_s: float) -> None:
        """Waits in the system until nothing is left to send and to receive.

        A rank is late after `limit_s` seconds in which no byte moved.
        """
        seen_s, waited_s, n_moved = time.monotonic(), 0.0, self._n_moved()
        while self._advance(to_send, to_receive):
            now_s = time.monotonic()
            waited_s += min(now_s - seen_s, _LONGEST_GAP_S)
            seen_s = now_s
            if self._n_moved() != n_moved:
                n_moved, waited_s = self._n_moved(), 0.0
            if waited_s > limit_s:
                overdue = sorted(to_receive or to_send)
                what = late(overdue, self.size, limit_s) + self._why_late()
                self._fail(what, overdue[0], _LATE)
            self.on_wait()
            poller = select.poll()
            for rank in {*to_send, *to_receive}:
                events = select.POLLIN * (rank in to_receive) | select.POLLOUT * (rank in to_send)
                poller.register(self._sockets[rank], events)
            poller.poll(1e3 * min(_POLL_S, max(0.0, limit_s - waited_s) + 1e-3))

    def _advance(self, to_send: dict[int, int], to_receive: dict[int, int]) -> bool:
        """Sends and receives what it can without waiting. Returns: whether anything is left."""
        for rank in tuple(to_receive):
            if self._receive(rank, to_receive[rank]):
                del to_receive[rank]
        for rank in tuple(to_send):
            if self._send(rank, to_send[rank], is_heard=rank in to_receive):
                del to_send[rank]
        return bool(to_send or to_receive)

    def _send(self, rank: int, n_bytes: int, *, is_heard: bool) -> bool:
        """Sends a part of this rank's message. Returns: whether all of it is sent."""
        cell = rank * CELLS + SENT
        if self._cells[cell] < n_bytes:
            try:
                message = self._messages[self.rank][self._cells[cell] : n_bytes]
                self._cells[cell] += self._sockets[rank].send(message)
            except BlockingIOError:
                return False
            except OSError:
                if is_heard:  # it may have said why before it left
                    return True
                self._fail_lost(rank)
        return self._cells[cell] == n_bytes

    def _receive(self, rank: int, n_bytes: int) -> bool:
        """Receives a part of a rank's message. Returns: whether all of it is there."""
        cell = rank * CELLS + RECEIVED
        before = self._cells[cell]
        if before < n_bytes:
            try:
                room = self._messages[rank][before:n_bytes]
                n_new = self._sockets[rank].recv_into(room)
            except BlockingIOError:
                return False
            except OSError:
                n_new = 0
            if not n_new:
                self._fail_lost(rank)
            self._cells[cell] += n_new
        if self._cells[cell] >= HEADER_BYTES:
            self._drop_keepalive(rank)
        if self._cells[cell] >= HEADER_BYTES:
            self._require_same(rank)
        return self._cells[cell] == n_bytes

    def _drop_keepalive(self, rank: int) -> None:
        """Removes a keepalive that came before the message of a rank."""
        message, cell = self._messages[rank], rank * CELLS + RECEIVED
        if _HEADER.unpack_from(message)[0] == _KEEPALIVE:
            n_left = self._cells[cell] - HEADER_BYTES
            message[:n_left] = message[HEADER_BYTES : HEADER_BYTES + n_left]
            self._cells[cell] = n_left
            self._n_keepalives += 1

    def _require_same(self, rank: int) -> None:
        """Raises: RankError if the message of a rank does not belong to this exchange."""
        signature, exchange = _HEADER.unpack_from(self._messages[rank])
        if (signature, exchange) == (self._signature, self._n_finished):
            return
        if signature & _FAILURE == _FAILURE:
            self._fail_alike(rank, signature & ((1 << _RANK_BITS) - 1), signature >> _RANK_BITS & 3)
        self._fail(
            f"rank {rank} is in {described(signature)} and rank {self.rank} in "
            f"{described(self._signature)}: the ranks called different collectives",
            rank,
            _MISMATCH,
        )

    def _fail_alike(self, rank: int, culprit: int, reason: int) -> NoReturn:
        """Raises the error for a failure that another rank has reported."""
        if reason == _DIED:
            self._fail_lost(rank if culprit == self.rank else culprit)
        if reason == _LATE:
            self._fail(late([culprit], self.size, self._timeouts.step_s), culprit, reason)
        self._fail(
            f"rank {rank} is in another collective than rank {culprit}: "
            "the ranks called different collectives",
            culprit,
            _MISMATCH,
        )

    def _fail_lost(self, rank: int) -> NoReturn:
        self._fail(
            f"rank {rank} of {self.size} has died or left early; "
            f"rank {self.rank} was waiting for it",
            rank,
            _DIED,
        )

    def _fail(self, message: str, culprit: int, reason: int) -> NoReturn:
        """Tells the other ranks, and the one that has failed, why this one leaves; then raises."""
        failure = _FAILURE | reason << _RANK_BITS | culprit
        header = _HEADER.pack(failure, self._n_finished)
        for rank, own in self._sockets.items():
            # Only between messages, or it would be read as values.
            sent = self._cells[rank * CELLS + SENT]
            if sent in (0, self._n_own):
                with suppress(OSError):
                    own.send(header)
        what = f"exchange {self._n_finished + 1}, {described(self._signature)}"
        raise RankError(message + self._evidence(what, reason))

    def _why_late(self) -> str:
        """What is appended to the message of a rank that is late."""
        return ""

    def _evidence(self, what: str, reason: int) -> str:
        """Lines that are appended to the message of a failure."""
        if reason == _DIED:
            return f"\n  rank {self.rank} is in {what}, called at {call_site()}"
        return own_evidence(self.rank, what)

    def _n_moved(self) -> int:
        """The bytes that this exchange has sent and received, and the keepalives until now."""
        starts = (rank * CELLS for rank in self._sockets)
        n_bytes = sum(self._cells[at + SENT] + self._cells[at + RECEIVED] for at in starts)
        return n_bytes + self._n_keepalives

    @property
    def _n_finished(self) -> int:
        return self._cells[self.size * CELLS]

    def _parts(self, dtype: torch.dtype, counts: Sequence[int]) -> list[Tensor]:
        """The values of all ranks in the last exchange."""
        return [self._view(rank, dtype, count) for rank, count in enumerate(counts)]

    def _view(self, rank: int, dtype: torch.dtype, n_values: int) -> Tensor:
        """The first values in the message of a rank."""
        key = rank, dtype, n_values
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            n_bytes = n_values * dtype.itemsize
            # A tensor created in inference mode cannot be written outside of it.
            with torch.inference_mode(False):
                view = self._memory[rank, HEADER_BYTES : HEADER_BYTES + n_bytes].view(dtype)
            self._views[key] = view
        return view


class SocketsBesideGloo(Sockets):
    """Sockets for small tensors; the group of torch takes larger ones, and barriers.

    Args:
        group: its ranks are those of `connected`, and this one.
    """

    def __init__(
        self,
        group: ProcessGroup,
        connected: Mapping[int, socket.socket],
        timeouts: Timeouts,
        spins: int,
    ) -> None:
        super().__init__(group.rank, connected, timeouts, spins)
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


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    """Consecutive pieces that fit into a message."""
    return torch.split(flat, MAX_BYTES // flat.itemsize) if flat.numel() else ()
