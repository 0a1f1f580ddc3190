"""Collectives through shared memory, for ranks of one host.

A decode step of 30 layers has 61 all-reduces of a few kilobytes. Each takes 0.4 to 0.9 ms in gloo,
and tens of microseconds here.

Set-up needs no torch.distributed. The ranks exchange the address of the memory through another
communicator (`share`), or rank 0 sends the other ranks a `Region`. The memory is an anonymous file
of rank 0, which the other ranks open through /proc; the kernel frees it when the last rank ends.

Layout of the memory:

    header   one line per rank: the number of phases that it has published, the signatures of its
             last two exchanges, keepalives, finished exchanges, open contexts of `computing`
    slots    two per rank, used alternately

A collective is one or more exchanges, and an exchange has these steps: copy the values of this rank
into its slot, publish (increment the number of phases), wait until all ranks have published, then
copy or sum the slots. An all-reduce of a large tensor has two phases; see `_sum_parts`.

With two slots, one wait per exchange is enough. A rank reuses the slot of exchange t in exchange
t + 2, after every rank has published exchange t + 1; and a rank publishes t + 1 only after it has
read all slots of t.

Plain loads and stores suffice: x86-64 keeps stores in order, loads in order, and a load before a
later store (total store order), so a rank that sees the new number of phases also sees the data.
Other processors do not guarantee this order; they use the slower communicator.

A kernel may run an exchange of `all_reduce` or `gather_columns`; see `Exchange`.
"""

import errno
import functools
import mmap
import operator
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from parallel_llama.parallel.collectives import Communicator, Exchange, put_columns, sum_in_order
from parallel_llama.parallel.failures import RankError, late
from parallel_llama.parallel.rank_stacks import (
    StackFile,
    call_site,
    gather_stacks,
    launcher_gathers,
    own_stack_file,
    record_stacks,
    site_in,
)
from parallel_llama.parallel.signatures import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    GATHER_COLUMNS,
    SUMMED,
    described,
    signature_of,
)
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.wait_policy import WaitPolicy, wait_policy
from parallel_llama.parallel.watchdog import Peers

# Small enough for the slots of a few ranks to stay in a core's cache. Larger tensors are split.
SLOT_BYTES = 1 << 20

# From this size on, each of three or more ranks sums one part, and copies the other ranks' sums.
SHARED_SUM_BYTES = 1 << 16

# Cells of 8 bytes in a rank's line of the header: two cache lines, which are fetched as a pair.
LINE = 16
# Cell 0 counts published phases; cells 1 and 2 hold the signatures of the two slots. EXCHANGE
# counts finished exchanges; other ranks read it only for the report of a failure.
SIGNATURE, _KEEPALIVES, EXCHANGE, _COMPUTING = 1, 3, 5, 6
_TOKEN_OFFSET = 32  # bytes: cell 4 of rank 0, read during set-up

# How many times a kernel reads a count before Python continues the wait and also detects dead
# ranks: about 0.2 ms of spins, or a few milliseconds of yields or sleeps if the cores are otherwise
# idle.
_KERNEL_TRIES = {WaitPolicy.SPIN: 4000, WaitPolicy.YIELD: 500, WaitPolicy.SLEEP: 100}
YIELD_S = 0.005  # a waiting rank yields its core for this time, then sleeps
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 50e-6, 1e-3
_IDLE_S, _IDLE_SLEEP_S = 1.0, 5e-3  # after a second, latency matters less
# How long the other ranks wait for the rank that reports a failure.
_REPORT_S = 1.0
# At most this time between two polls counts as waiting: in a longer gap, this rank itself may have
# been stopped.
LONGEST_GAP_S = 0.5

_NAME = "parallel_llama"
_INFO_BYTES = 4096  # of an encoded _RankInfo; Linux has up to 8192 cores, which are 2048 digits
NOTHING = torch.zeros(1, dtype=torch.uint8)  # the tensor of a barrier

# Cached views of slots: a decode step uses a few, and every prefill length adds one.
MAX_VIEWS = 256


# Whether a rank is exempt from the time limit now; if it is, its time limit restarts.
_IsExempt = Callable[[int], bool]


def _never_exempt(_: int) -> bool:
    return False


def share(
    comm: Communicator, timeouts: Timeouts, part: "PartOfGroup | None" = None
) -> Communicator:
    """Sets up shared memory for the ranks of `comm`; returns `comm` itself if a rank cannot use it.

    Args:
        part: as in `SharedMemory`.

    Collective: every rank calls it; all get the same kind of communicator.
    """
    fd, token = _create(_total_bytes(comm.size)) if comm.rank == 0 else (-1, "")
    try:
        infos = _RankInfo.here(host_id(), fd, token).gathered(comm)
        opened = _open(infos, comm)
        ready = comm.all_gather(torch.tensor([opened is not None]))
    finally:
        if fd >= 0:
            os.close(fd)
    if opened is None:
        return comm
    memory, peers = opened
    if not bool(ready.all()):
        peers.close()
        return comm
    others = [(rank, info) for rank, info in enumerate(infos) if rank != comm.rank]
    files = {rank: StackFile.open(info.pid, info.stacks_fd) for rank, info in others}
    files[comm.rank] = own_stack_file()
    stacks = {rank: file for rank, file in files.items() if file is not None}
    cores = functools.reduce(operator.or_, (int(info.cores, 16) for info in infos))
    policy = wait_policy(comm.size, cores.bit_count())
    arguments = comm.rank, comm.size, memory, peers, policy, timeouts, stacks
    return SharedMemory(*arguments, comm.close, part)


@dataclass(frozen=True)
class PartOfGroup:
    """How a group that is a part of a larger group reports failures.

    Args:
        ranks: the ranks of this group, as numbered in the larger group.
        size: the number of ranks of the larger group.
        on_failure: called with the failed rank, as numbered in the larger group, and whether it has
            died.
    """

    ranks: range
    size: int
    on_failure: Callable[[int, bool], None] = lambda _rank, _has_died: None


@dataclass(frozen=True)
class Region:
    """New memory for a group of `size` ranks, which other processes of the host can open.

    Args:
        pid: the process that holds the memory open.
        fd: the descriptor of the memory in that process.
        token: also written into the memory, to recognise it.
    """

    size: int
    pid: int
    fd: int
    token: str

    @classmethod
    def create(cls, size: int) -> "Region":
        """Raises: OSError if the memory cannot be allocated."""
        fd, token = _create(_total_bytes(size))
        if fd < 0:
            raise OSError(errno.ENOMEM, "no shared memory for the ranks")
        return cls(size, os.getpid(), fd, token)

    def group(self, rank: int, pids: Sequence[int], timeouts: Timeouts) -> "SharedMemory":
        """The group of the processes `pids`, by rank; it needs no other communicator.

        Raises: RankError if the memory or a process no longer exists.
        """
        memory = _map(self.pid, self.fd, self.token, _total_bytes(self.size))
        if memory is None:
            raise RankError(f"rank {rank} of {self.size} cannot open the memory of rank 0")
        try:
            peers = Peers({other: pid for other, pid in enumerate(pids) if other != rank})
        except OSError as error:
            raise RankError(f"rank {rank} of {self.size}: another rank has died") from error
        files = {other: StackFile.find(pid) for other, pid in enumerate(pids) if other != rank}
        files[rank] = own_stack_file()
        stacks = {other: file for other, file in files.items() if file is not None}
        policy = wait_policy(self.size)
        return SharedMemory(rank, self.size, memory, peers, policy, timeouts, stacks)

    def keepalive(self, rank: int) -> None:
        """Like `SharedMemory.keepalive`, for a rank that has not joined the group yet.

        No-op if the memory no longer exists.
        """
        memory = _map(self.pid, self.fd, self.token, _total_bytes(self.size))
        if memory is not None:
            with memoryview(memory).cast("q") as cells:
                cells[rank * LINE + _KEEPALIVES] += 1


@dataclass(frozen=True)
class HostMemory:
    """Memory that a rank shares with the other ranks of its host, in a group of several hosts.

    Args:
        hosts: the ranks of each host; a rank that cannot share memory is alone.
        memory: bytes, initially zero except those of the token.
        pids: the processes of the other ranks of this host, by rank.
    """

    hosts: tuple[tuple[int, ...], ...]
    memory: Tensor
    pids: Mapping[int, int]

    @classmethod
    def alone(cls, size: int, n_bytes: int) -> "HostMemory":
        """Memory that no rank shares, as if each of `size` ranks were on a host of its own."""
        with torch.inference_mode(False):  # it is also written outside of inference mode
            memory = torch.zeros(n_bytes, dtype=torch.uint8)
        return cls(tuple((rank,) for rank in range(size)), memory, {})

    @classmethod
    def share(cls, comm: Communicator, host: str, n_bytes: int) -> "HostMemory":
        """New memory for the ranks of each host.

        Args:
            host: equal on ranks that can share memory; see `host_id`.

        Collective: every rank calls it.
        """
        host_ids = [info.host for info in _RankInfo.here(host, -1, "").gathered(comm)]
        local_ranks = [rank for rank, other_host in enumerate(host_ids) if other_host == host]
        is_first = len(local_ranks) > 1 and comm.rank == local_ranks[0]
        fd, token = _create(n_bytes) if is_first else (-1, "")
        try:
            infos = _RankInfo.here(host, fd, token).gathered(comm)
            first = infos[local_ranks[0]]
            is_open = _is_supported() and first.fd >= 0
            memory = _map(first.pid, first.fd, first.token, n_bytes) if is_open else None
            ready = comm.all_gather(torch.tensor([memory is not None])).view(-1).tolist()
        finally:
            if fd >= 0:
                os.close(fd)
        hosts: list[tuple[int, ...]] = []
        for other_host in dict.fromkeys(host_ids):
            ranks = tuple(rank for rank, other in enumerate(host_ids) if other == other_host)
            hosts += [ranks] if all(ready[r] for r in ranks) else [(r,) for r in ranks]
        is_shared = memory is not None and tuple(local_ranks) in hosts
        pids = {r: infos[r].pid for r in local_ranks if r != comm.rank} if is_shared else {}
        with torch.inference_mode(False):  # it is also written outside of inference mode
            if memory is None or not is_shared:
                return cls(tuple(hosts), torch.zeros(n_bytes, dtype=torch.uint8), pids)
            return cls(tuple(hosts), torch.frombuffer(memory, dtype=torch.uint8), pids)


class SharedMemory(Communicator):
    """A group of ranks of one host; it sums in rank order, and half types in float32.

    If a rank dies, the errors of the waiting ranks name it.

    Args:
        leave: called by `close`.
        part: the numbers of the ranks in the larger group, for error messages.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: mmap.mmap,
        peers: Peers,
        policy: WaitPolicy,
        timeouts: Timeouts,
        stacks: Mapping[int, StackFile],
        leave: Callable[[], None] = lambda: None,
        part: PartOfGroup | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        part = part or PartOfGroup(range(size), size)
        self._global_ranks, self._global_size = part.ranks, part.size
        self._on_failure = part.on_failure
        self._name = f"rank {self._global_ranks[rank]}"
        self._peers, self._leave = peers, leave
        self._policy, self._timeouts, self._stacks = policy, timeouts, stacks
        self._tries = _KERNEL_TRIES[policy] if policy is WaitPolicy.SPIN else 0
        # Called repeatedly while this rank waits for others; may raise a RankError.
        self.on_wait: Callable[[], None] = lambda: None
        self._memory = memory
        self._cells = memoryview(memory).cast("q")
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._own_line = self.rank * LINE
        self._other_lines = [rank * LINE for rank in range(self.size) if rank != self.rank]
        self._is_busy = False
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in SUMMED:
            raise TypeError(f"all_reduce of {x.dtype}; use one of {', '.join(map(str, SUMMED))}")
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        for piece, slots in self._exchanges(pieces(x.view(-1), SLOT_BYTES)):
            slots[self.rank].copy_(piece)
            self._publish_and_wait(ALL_REDUCE, piece)
            if self.size > 2 and piece.nbytes >= SHARED_SUM_BYTES:
                self._sum_parts(slots, piece)
            else:
                sum_in_order(slots, piece)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel() == 0:
            return gathered
        parts = torch.split(_as_bytes(gathered).view(self.size, -1), SLOT_BYTES, dim=1)
        exchanges = self._exchanges(pieces(_as_bytes(x.contiguous()), SLOT_BYTES))
        for (piece, slots), part in zip(exchanges, parts, strict=True):
            slots[self.rank].copy_(piece)
            self._publish_and_wait(ALL_GATHER, piece)
            for row, slot in zip(part, slots, strict=True):
                row.copy_(slot)
        return gathered

    def gather_columns(self, x: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        gathered = x.new_empty(len(x), sum(widths)) if out is None else out
        if not gathered.numel():
            return gathered
        n_rows = max(1, SLOT_BYTES // (max(widths) * x.itemsize))
        pieces = torch.split(gathered[:, : max(widths)], n_rows)
        rows = zip(torch.split(gathered, n_rows), torch.split(x, n_rows), strict=True)
        for (piece, slots), (target, local) in zip(self._exchanges(pieces), rows, strict=True):
            slots[self.rank][: local.numel()].view(local.shape).copy_(local)
            self._publish_and_wait(GATHER_COLUMNS, piece)
            put_columns(slots, widths, target)
        return gathered

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.broadcast(x.contiguous(), src, no_timeout=no_timeout))
        is_exempt = self._may_await_user if no_timeout and self.rank != src else _never_exempt
        for piece, slots in self._exchanges(pieces(_as_bytes(x), SLOT_BYTES)):
            if self.rank == src:
                slots[src].copy_(piece)
            self._publish_and_wait(BROADCAST, piece, is_exempt)
            if self.rank != src:
                piece.copy_(slots[src])
        return x

    def barrier(self) -> None:
        counts = [self._cells[rank * LINE + _KEEPALIVES] for rank in range(self.size)]

        def sent_keepalive(rank: int) -> bool:
            before, counts[rank] = counts[rank], self._cells[rank * LINE + _KEEPALIVES]
            return counts[rank] != before

        for piece, _ in self._exchanges((NOTHING,)):
            self._publish_and_wait(BARRIER, piece, sent_keepalive, self._timeouts.start_s)

    @contextmanager
    def computing(self) -> Iterator[None]:
        self._cells[self._own_line + _COMPUTING] += 1
        try:
            yield
        finally:
            self._cells[self._own_line + _COMPUTING] -= 1

    def keepalive(self) -> None:
        self._cells[self._own_line + _KEEPALIVES] += 1

    def require_alive(self) -> None:
        self._peers.poll()
        if self._peers.gone:
            lost = self._global_ranks[min(self._peers.gone)]
            raise RankError(f"rank {lost} of {self._global_size} has died or left early")

    def close(self) -> None:
        # The memory is unmapped with its last view.
        self._peers.close()
        for file in self._stacks.values():
            file.close()
        self._stacks = {}
        self._views.clear()
        self._is_busy = True
        self._leave()

    def sum_exchange(self, x: Tensor) -> Exchange | None:
        """What a kernel needs to all-reduce tensors like x; None if x is empty or too large."""
        if x.nbytes >= SHARED_SUM_BYTES or not x.numel():
            return None
        return self._kernel_exchange(
            ALL_REDUCE, x, lambda slots, x: sum_in_order(slots, x.view(-1))
        )

    def column_exchange(self, whole: Tensor, widths: Sequence[int]) -> Exchange | None:
        """What a kernel needs to gather columns into `whole`; None if empty or too large."""
        max_values = len(whole) * max(widths)
        if max_values * whole.itemsize > SLOT_BYTES or not whole.numel():
            return None
        return self._kernel_exchange(
            GATHER_COLUMNS,
            whole[:, : max(widths)],
            lambda slots, whole: put_columns(slots, widths, whole),
        )

    def _kernel_exchange(
        self, kind: int, piece: Tensor, complete: Callable[[list[Tensor], Tensor], None]
    ) -> Exchange:
        """An exchange in which no rank writes more values than `piece` has."""
        slots, signature = self._address + _header_bytes(self.size), signature_of(kind, piece)
        dtype, n_values = piece.dtype, piece.numel()

        def finish(x: Tensor) -> None:
            self._is_busy = True
            self._await_all(signature, 0, _never_exempt, self._timeouts.step_s)
            complete(self._slots(dtype, n_values), x)
            self._cells[self._own_line + EXCHANGE] += 1
            self._is_busy = False

        fields = self.rank, self.size, signature, _KERNEL_TRIES[self._policy], self._policy
        return Exchange("shared memory", self._address, slots, *fields, finish)

    def _exchanges(self, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yields each piece of a tensor, with flat views of all ranks' slots in its size and dtype.

        After an exception inside, this rank cannot use the group any more.
        """
        if self._is_busy:
            raise RankError(
                f"{self._name} left a collective unfinished, or has closed its group: "
                "it cannot take part in another"
            )
        self._is_busy = True
        for piece in pieces:
            yield piece, self._slots(piece.dtype, piece.numel())
            self._cells[self._own_line + EXCHANGE] += 1
        self._is_busy = False

    def _sum_parts(self, slots: list[Tensor], piece: Tensor) -> None:
        """A reduce-scatter and an all-gather: each rank sums one part and publishes the sum.

        The sum overwrites this rank's values in its slot; no other rank reads that part of the slot
        before the second phase is published.
        """
        bounds = [piece.numel() * rank // self.size for rank in range(self.size + 1)]
        parts = list(pairwise(bounds))
        start, stop = parts[self.rank]
        sum_in_order([slot[start:stop] for slot in slots], piece[start:stop])
        slots[self.rank][start:stop].copy_(piece[start:stop])
        self._publish_and_wait(ALL_REDUCE, piece)
        for rank, (start, stop) in enumerate(parts):
            if rank != self.rank:
                piece[start:stop].copy_(slots[rank][start:stop])

    def _slots(self, dtype: torch.dtype, n_values: int) -> list[Tensor]:
        """A view of the first values of every rank's slot."""
        parity = self._cells[self._own_line + EXCHANGE] & 1
        key = (parity, dtype, n_values)
        slots = self._views.get(key)
        if slots is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            # A tensor created in inference mode cannot be written outside of it.
            with torch.inference_mode(False):
                slots = [
                    torch.frombuffer(
                        self._memory,
                        dtype=dtype,
                        count=n_values,
                        offset=_header_bytes(self.size) + (2 * rank + parity) * SLOT_BYTES,
                    )
                    for rank in range(self.size)
                ]
            self._views[key] = slots
        return slots

    def _publish_and_wait(
        self,
        kind: int,
        piece: Tensor,
        is_exempt: _IsExempt = _never_exempt,
        limit_s: float | None = None,
    ) -> None:
        """Publishes this rank's phase and waits until all ranks have published theirs."""
        signature, cells, own = signature_of(kind, piece), self._cells, self._own_line
        cells[own + SIGNATURE + (cells[own + EXCHANGE] & 1)] = signature
        cells[own] += 1
        self._await_all(signature, self._tries, is_exempt, limit_s or self._timeouts.step_s)

    def _await_all(self, signature: int, tries: int, is_exempt: _IsExempt, limit_s: float) -> None:
        """Waits until all ranks have published the phase that this rank has published."""
        phase = self._cells[self._own_line]
        for line in self._other_lines:
            while self._cells[line] < phase:
                tries -= 1
                if tries < 0:
                    self._wait(signature, phase, is_exempt, limit_s)
            self._require_same_collective(line, signature)

    def _require_same_collective(self, line: int, signature: int) -> None:
        """Raises: RankError if a rank that has published this phase is in another collective."""
        theirs = self._cells[line + SIGNATURE + (self._cells[self._own_line + EXCHANGE] & 1)]
        if theirs != signature:
            rank = line // LINE
            raise self._failure(
                f"rank {self._global_ranks[rank]} is in {described(theirs)} and {self._name} "
                f"in {described(signature)}: the ranks called different collectives",
                {rank, self.rank},
            )

    def _wait(self, signature: int, phase: int, is_exempt: _IsExempt, limit_s: float) -> None:
        """Waits, yielding the core, until all ranks have published this phase.

        A rank is late after `limit_s` seconds in which it was never exempt. Each poll also compares
        the collectives of the ranks that have published. A rank that detects a difference leaves
        `_REPORT_S` seconds later, and after that its stack can no longer be reported.
        """
        seen_s = time.monotonic()
        waited_s = 0.0
        counted_s = dict.fromkeys(self._other_lines, 0.0)
        pause = SHORTEST_SLEEP_S
        while behind := [line for line in self._other_lines if self._cells[line] < phase]:
            gap_s = min(time.monotonic() - seen_s, LONGEST_GAP_S)
            seen_s = time.monotonic()
            waited_s += gap_s
            if waited_s < YIELD_S and self._policy is not WaitPolicy.SLEEP:
                os.sched_yield()
                continue
            for line in self._other_lines:
                if line not in behind:
                    self._require_same_collective(line, signature)
            self._require_alive(behind, phase)
            for line in behind:
                counted_s[line] += gap_s
                # `is_exempt` is not called at every poll, because it may read a file.
                if counted_s[line] > min(limit_s / 4, 1.0) and is_exempt(line // LINE):
                    counted_s[line] = 0.0
            if overdue := [line for line in behind if counted_s[line] > limit_s]:
                raise self._late([line // LINE for line in overdue], limit_s)
            time.sleep(pause)
            pause = min(2 * pause, _IDLE_SLEEP_S if waited_s > _IDLE_S else LONGEST_SLEEP_S)

    def _require_alive(self, lines: Sequence[int], phase: int) -> None:
        self.on_wait()
        self._peers.poll()
        for line in lines:
            # Read the count again: the rank may have published this phase before it died.
            rank = line // LINE
            if rank in self._peers.gone and self._cells[line] < phase:
                lost = f"rank {self._global_ranks[rank]} of {self._global_size}"
                raise self._failure(
                    f"{lost} has died or left early; {self._name} was waiting for it", {rank}
                )

    def _may_await_user(self, rank: int) -> bool:
        """Whether a rank may be waiting for user input, so that it is not late."""
        return not self._cells[rank * LINE + _COMPUTING] and not self._peers.is_stopped(rank)

    def _late(self, ranks: Sequence[int], limit_s: float) -> RankError:
        if all(self._peers.is_stopped(rank) for rank in ranks):
            why = "stopped by a signal or a debugger"
        else:
            why = "alive, but swapping, without a free core, or in another collective"
        global_ranks = [self._global_ranks[rank] for rank in ranks]
        which = "it is" if len(ranks) == 1 else "they are"
        return self._failure(
            f"{late(global_ranks, self._global_size, limit_s)}; {which} {why}", set(ranks)
        )

    def _failure(self, message: str, culprits: set[int]) -> RankError:
        """The error of a failed exchange, with the exchange, the call site and the stacks.

        Several ranks may detect the failure at the same time. The lowest waiting rank reports the
        failure; the other ranks wait `_REPORT_S` seconds, so that the report can be finished.
        """
        cells = self._cells
        n_finished, phase = cells[self._own_line + EXCHANGE], cells[self._own_line]
        signature = cells[self._own_line + SIGNATURE + (n_finished & 1)]
        exchange = f"exchange {n_finished + 1}, {described(signature)}, called at {call_site()}"
        lines = [f"{self._name} is in {exchange}"]
        for rank in sorted(culprits - {self.rank}):
            count = cells[rank * LINE + EXCHANGE]
            if count <= n_finished and cells[rank * LINE] < phase:
                last_exchange = described(cells[rank * LINE + SIGNATURE + ((count - 1) & 1)])
                last_exchange = f", the last one {last_exchange}" if count else ""
                name = f"rank {self._global_ranks[rank]}"
                lines.append(f"{name} has finished {count} exchanges{last_exchange}")
        self._peers.poll()
        for rank in sorted(culprits - {self.rank}):
            self._on_failure(self._global_ranks[rank], rank in self._peers.gone)
        waiting = [r for r in range(self.size) if cells[r * LINE] >= phase]
        if culprits & self._peers.gone and launcher_gathers():
            own_stack_file().request_dump()  # the launcher gathers the stacks
            evidence = ""
        elif self.rank == min(r for r in waiting if r not in self._peers.gone):
            stacks = {self._global_ranks[rank]: file for rank, file in self._stacks.items()}
            evidence = gather_stacks(stacks, sorted(self._global_ranks[rank] for rank in culprits))
            lines += [
                f"rank {self._global_ranks[rank]} called at {site}"
                for rank in sorted((culprits - {self.rank}) & set(waiting))
                if rank in self._stacks and (site := site_in(self._stacks[rank].text()))
            ]
        else:
            time.sleep(_REPORT_S)
            evidence = ""
        return RankError(message + "".join(f"\n  {line}" for line in lines) + evidence)


def pieces(flat: Tensor, n_bytes: int) -> Sequence[Tensor]:
    """Consecutive pieces of at most `n_bytes` bytes."""
    return torch.split(flat, n_bytes // flat.itemsize) if flat.numel() else ()


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _header_bytes(size: int) -> int:
    return -(-size * LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def _total_bytes(size: int) -> int:
    return _header_bytes(size) + 2 * size * SLOT_BYTES


@dataclass(frozen=True)
class _RankInfo:
    """What each rank sends the other ranks to decide whether they share memory.

    Args:
        fd: the descriptor of the memory, on the rank that has created it; otherwise -1.
        token: also written into the memory, to recognise it; "" on the other ranks.
        cores: a hexadecimal mask of the cores that the rank may use.
        stacks_fd: the descriptor of the rank's file of stacks.
    """

    host: str
    pid: int
    fd: int
    token: str
    cores: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")]
    stacks_fd: int

    @classmethod
    def here(cls, host: str, fd: int, token: str) -> "_RankInfo":
        cores = os.sched_getaffinity(0) if _is_supported() else {0}
        mask = sum(1 << core for core in cores)
        return cls(host, os.getpid(), fd, token, f"{mask:x}", record_stacks())

    def gathered(self, comm: Communicator) -> "list[_RankInfo]":
        """The messages of all ranks, by rank.

        Collective: every rank calls it.
        """
        return [self.decode(row) for row in comm.all_gather(self.encode())]

    def encode(self) -> Tensor:
        text = msgspec.json.encode(self).ljust(_INFO_BYTES)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @classmethod
    def decode(cls, row: Tensor) -> "_RankInfo":
        """Raises: RankError if the bytes are not an encoded _RankInfo."""
        try:
            return msgspec.json.decode(row.numpy().tobytes(), type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RankError(
                "a rank has sent an invalid description of its host; check that no other program "
                "uses the address of the ranks"
            ) from error


def _is_supported() -> bool:
    return platform.machine() == "x86_64"


def host_id() -> str:
    """An id that is equal for processes of one kernel and one namespace of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return secrets.token_hex(8)
    return f"{boot} {namespace}"


def _create(n_bytes: int) -> tuple[int, str]:
    """The descriptor and the token of new memory, or -1 and "" if the host does not support it."""
    if not _is_supported():
        return -1, ""
    with suppress(OSError):
        fd = os.memfd_create(_NAME)
        try:
            # Allocated now: a later write to a full file system would kill the rank.
            os.posix_fallocate(fd, 0, n_bytes)
            token = secrets.token_hex(4)
            os.pwrite(fd, token.encode(), _TOKEN_OFFSET)
            return fd, token
        except OSError:
            os.close(fd)
    return -1, ""


def _open(infos: list[_RankInfo], comm: Communicator) -> tuple[mmap.mmap, Peers] | None:
    """The memory of rank 0 and the peers; None if this rank cannot open the memory."""
    first = infos[0]
    if not _is_supported() or first.fd < 0 or {info.host for info in infos} != {first.host}:
        return None
    memory = _map(first.pid, first.fd, first.token, _total_bytes(comm.size))
    if memory is None:
        return None
    try:
        return memory, Peers({r: info.pid for r, info in enumerate(infos) if r != comm.rank})
    except OSError:
        return None


def _map(pid: int, fd: int, token: str, n_bytes: int) -> mmap.mmap | None:
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            return None
        with path.open("r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != n_bytes:
                return None
            memory = mmap.mmap(file.fileno(), n_bytes)
    except OSError:
        return None
    actual = memory[_TOKEN_OFFSET : _TOKEN_OFFSET + 8]
    return memory if actual == token.encode() else None
