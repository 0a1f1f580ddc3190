"""Collectives of ranks on one host, through memory that they share.

gloo takes 0.4 to 0.9 ms for the few kilobytes that a decode step reduces 61 times; copying them
through shared memory takes some tens of microseconds. It knows nothing of torch.distributed: a
slower communicator sets it up.

The memory never has a name: rank 0 creates it as an anonymous file, the others open it through
/proc while they set up, and it ends with the last rank, however that one ends.

    header   one line per rank: phases published, signatures of its last two collectives,
             keepalives, turns finished
    slots    two per rank, used in turn

A collective is a turn: copy in, publish, wait for all, copy or sum out.

Why two slots need no second wait. A rank fills a slot in turn t + 2 only after its wait in turn
t + 1, so every rank has published turn t + 1 by then. A rank publishes turn t + 1 after it has read
everything it wants from turn t. So nobody reads the slot of turn t any more.

Why plain loads and stores are enough. x86-64 keeps stores in order, loads in order, and a load
before a later store (total store order), so who sees the count sees the data. Other processors
promise less, and there the slower communicator is used.

A turn of `all_reduce` may be taken by a kernel as well: `Turn` is what it has to know.
"""

import functools
import mmap
import operator
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from parallel_llama.parallel.collectives import Communicator, Timeouts
from parallel_llama.parallel.failures import RankError, late
from parallel_llama.parallel.peers import Peers

# One slot: small enough for all slots of some ranks to stay in a core's cache. Larger tensors go
# in pieces.
SLOT_BYTES = 1 << 20

# From here on each of three or more ranks sums a share of the piece, and all copy the sums.
SHARED_SUM_BYTES = 1 << 16

# Cells of 8 bytes in a rank's line of the header: two cache lines, fetched as a pair.
LINE = 16
# Cell 0 counts published phases; cells 1 and 2 hold the signatures of the two slots' turns. TURN
# counts finished turns, and only the rank itself looks there.
SIGNATURE, _KEEPALIVES, TURN = 1, 3, 5
_TOKEN_OFFSET = 32  # bytes: cell 4 of rank 0, read while the ranks set up

# Looks at a count before the core is offered to others: some 0.2 ms.
_SPINS = 4000
_YIELD_S = 0.005
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_IDLE_S, _IDLE_SLEEP_S = 1.0, 5e-3  # who has waited a second has time
# A wait counts no more than this between two looks: this rank itself may have been stopped.
_LONGEST_GAP_S = 0.5

_NAME = "parallel_llama"
_HOST_BYTES = 4096  # of what a rank says of its host; Linux knows 8192 cores, in 2048 digits
_DTYPES = (
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_HALVES = (torch.float16, torch.bfloat16)
_SUMMED = _DTYPES[1:]
_KINDS = ("barrier", "all_reduce", "all_gather", "broadcast")
_BARRIER, _ALL_REDUCE, _ALL_GATHER, _BROADCAST = range(4)
_NOTHING = torch.zeros(1, dtype=torch.uint8)  # what goes through a barrier

# Views of slots that are kept: a decode step uses a handful, every prefill length brings one more.
_MAX_VIEWS = 256


# Whether a rank that is awaited has shown since the last time that it gets on.
_IsExempt = Callable[[int], bool]


def _never_exempt(_: int) -> bool:
    return False


def share(group: Communicator, timeouts: Timeouts) -> Communicator:
    """The same group through shared memory where all its ranks can, else `group` itself.

    Collective: every rank calls it; all get the same kind.
    """
    fd = _create(group.size) if group.rank == 0 else -1
    token = secrets.token_hex(4)
    try:
        if fd >= 0:
            os.pwrite(fd, token.encode(), _TOKEN_OFFSET)
        hosts = [_Host.decode(row) for row in group.all_gather(_Host.here(fd, token).encode())]
        opened = _open(hosts, group)
        ready = group.all_gather(torch.tensor([opened is not None]))
    finally:
        if fd >= 0:
            os.close(fd)
    if opened is None:
        return group
    memory, peers = opened
    if not bool(ready.all()):
        peers.close()
        return group
    cores = functools.reduce(operator.or_, (int(host.cores, 16) for host in hosts))
    # Spinning helps who waits for a rank on another core, and robs one that shares the core.
    spins = _SPINS if cores.bit_count() >= group.size else 0
    return SharedMemory(group, memory, peers, spins, timeouts)


class SharedMemory(Communicator):
    """The ranks of one host; sums in rank order, half types in float32.

    `group` is closed with it. A rank that ends without leaving is named by all that wait for it.
    """

    def __init__(
        self, group: Communicator, memory: mmap.mmap, peers: Peers, spins: int, timeouts: Timeouts
    ) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._peers = group, peers
        self._spins, self._timeouts = spins, timeouts
        self._memory = memory
        self._cells = memoryview(memory).cast("q")
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._own = self.rank * LINE
        self._others = [rank * LINE for rank in range(self.size) if rank != self.rank]
        self._busy = False
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in _SUMMED:
            raise TypeError(f"all_reduce of {x.dtype}; use one of {', '.join(map(str, _SUMMED))}")
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        for piece, slots in self._turns(x.view(-1)):
            slots[self.rank].copy_(piece)
            self._meet(_ALL_REDUCE, piece)
            if self.size > 2 and piece.nbytes >= SHARED_SUM_BYTES:
                self._sum_shares(slots, piece)
            else:
                _sum(slots, piece)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel() == 0:
            return gathered
        parts = torch.split(_as_bytes(gathered).view(self.size, -1), SLOT_BYTES, dim=1)
        turns = self._turns(_as_bytes(x.contiguous()))
        for (piece, slots), part in zip(turns, parts, strict=True):
            slots[self.rank].copy_(piece)
            self._meet(_ALL_GATHER, piece)
            for row, slot in zip(part, slots, strict=True):
                row.copy_(slot)
        return gathered

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.broadcast(x.contiguous(), src, no_timeout=no_timeout))
        is_exempt = self._is_running if no_timeout and self.rank != src else _never_exempt
        for piece, slots in self._turns(_as_bytes(x)):
            if self.rank == src:
                slots[src].copy_(piece)
            self._meet(_BROADCAST, piece, is_exempt)
            if self.rank != src:
                piece.copy_(slots[src])
        return x

    def barrier(self) -> None:
        counts = [self._cells[rank * LINE + _KEEPALIVES] for rank in range(self.size)]

        def sent_keepalive(rank: int) -> bool:
            before, counts[rank] = counts[rank], self._cells[rank * LINE + _KEEPALIVES]
            return counts[rank] != before

        for piece, _ in self._turns(_NOTHING):
            self._meet(_BARRIER, piece, sent_keepalive, self._timeouts.start_s)

    def keepalive(self) -> None:
        self._cells[self._own + _KEEPALIVES] += 1

    def require_alive(self) -> None:
        self._peers.look()
        if self._peers.gone:
            raise RankError(f"rank {min(self._peers.gone)} of {self.size} has died or left early")

    def close(self) -> None:
        # The memory itself ends when the last view of it does.
        self._peers.close()
        self._views.clear()
        self._busy = True
        self._group.close()

    def turn_of(self, x: Tensor) -> "Turn | None":
        """What a kernel needs to reduce tensors like x; None where they are not for one thread."""
        if x.nbytes >= SHARED_SUM_BYTES or not x.numel():
            return None
        slots = self._address + _header_bytes(self.size)
        own = self.rank, self.size, _signature(_ALL_REDUCE, x), self._spins
        return Turn(self._address, slots, *own, self._finish)

    def _finish(self, x: Tensor) -> None:
        """The rest of a turn of all_reduce that a kernel has published."""
        self._busy = True
        signature = _signature(_ALL_REDUCE, x)
        self._await_all(signature, 0, _never_exempt, self._timeouts.step_s)
        _sum(self._slots(x), x.view(-1))
        self._cells[self._own + TURN] += 1
        self._busy = False

    def _turns(self, flat: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """A turn for each piece of a tensor, with every rank's slot of it as a tensor like it.

        A turn that breaks off leaves this rank out of step with the others, for good.
        """
        if self._busy:
            raise RankError(
                f"rank {self.rank} left a collective unfinished, or has closed its group: "
                "it cannot take part in another"
            )
        self._busy = True
        for piece in torch.split(flat, SLOT_BYTES // flat.itemsize) if flat.numel() else ():
            yield piece, self._slots(piece)
            self._cells[self._own + TURN] += 1
        self._busy = False

    def _sum_shares(self, slots: list[Tensor], piece: Tensor) -> None:
        """Sum this rank's share, put it where this rank's values were, and copy all shares.

        Nobody else reads this rank's share of any slot before it is published.
        """
        bounds = [piece.numel() * rank // self.size for rank in range(self.size + 1)]
        shares = list(pairwise(bounds))
        start, stop = shares[self.rank]
        _sum([slot[start:stop] for slot in slots], piece[start:stop])
        slots[self.rank][start:stop].copy_(piece[start:stop])
        self._meet(_ALL_REDUCE, piece)
        for rank, (start, stop) in enumerate(shares):
            if rank != self.rank:
                piece[start:stop].copy_(slots[rank][start:stop])

    def _slots(self, piece: Tensor) -> list[Tensor]:
        parity = self._cells[self._own + TURN] & 1
        key = (parity, piece.dtype, piece.numel())
        slots = self._views.get(key)
        if slots is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            # A tensor that is born in inference mode could not be written outside it.
            with torch.inference_mode(False):
                slots = [
                    torch.frombuffer(
                        self._memory,
                        dtype=piece.dtype,
                        count=piece.numel(),
                        offset=_header_bytes(self.size) + (2 * rank + parity) * SLOT_BYTES,
                    )
                    for rank in range(self.size)
                ]
            self._views[key] = slots
        return slots

    def _meet(
        self,
        kind: int,
        piece: Tensor,
        is_exempt: _IsExempt = _never_exempt,
        limit_s: float | None = None,
    ) -> None:
        """Publish this rank's part of a phase and wait for everybody's."""
        signature, cells, own = _signature(kind, piece), self._cells, self._own
        cells[own + SIGNATURE + (cells[own + TURN] & 1)] = signature
        cells[own] += 1
        self._await_all(signature, self._spins, is_exempt, limit_s or self._timeouts.step_s)

    def _await_all(self, signature: int, spins: int, is_exempt: _IsExempt, limit_s: float) -> None:
        """Wait until all ranks have published the phase that this one has."""
        cells, phase = self._cells, self._cells[self._own]
        signed = SIGNATURE + (cells[self._own + TURN] & 1)
        for line in self._others:
            while cells[line] < phase:
                spins -= 1
                if spins < 0:
                    self._wait(phase, is_exempt, limit_s)
            if cells[line + signed] != signature:
                raise RankError(
                    f"rank {line // LINE} is in {_described(cells[line + signed])} and rank "
                    f"{self.rank} in {_described(signature)}: the ranks have gone different ways"
                )

    def _wait(self, phase: int, is_exempt: _IsExempt, limit_s: float) -> None:
        """Wait for all ranks to publish this phase, giving the core to whoever wants it.

        A rank is late once it has gone without an is_exempt for `limit_s`.
        """
        seen_s = time.monotonic()
        waited_s = 0.0
        counted_s = dict.fromkeys(self._others, 0.0)
        pause = _SHORTEST_SLEEP_S
        while behind := [line for line in self._others if self._cells[line] < phase]:
            gap_s = min(time.monotonic() - seen_s, _LONGEST_GAP_S)
            seen_s = time.monotonic()
            waited_s += gap_s
            if waited_s < _YIELD_S:
                os.sched_yield()
                continue
            self._require_alive(behind, phase)
            for line in behind:
                counted_s[line] += gap_s
                # An is_exempt is not asked for at every look: it may cost a read of a file.
                if counted_s[line] > min(limit_s, 1.0) and is_exempt(line // LINE):
                    counted_s[line] = 0.0
            if overdue := [line for line in behind if counted_s[line] > limit_s]:
                raise self._late([line // LINE for line in overdue], limit_s)
            time.sleep(pause)
            pause = min(2 * pause, _IDLE_SLEEP_S if waited_s > _IDLE_S else _LONGEST_SLEEP_S)

    def _require_alive(self, lines: Sequence[int], phase: int) -> None:
        self._peers.look()
        for line in lines:
            # What a dead rank has published is final, so it is looked at once more.
            if line // LINE in self._peers.gone and self._cells[line] < phase:
                raise RankError(
                    f"rank {line // LINE} of {self.size} has died or left early; "
                    f"rank {self.rank} was waiting for it"
                )

    def _is_running(self, rank: int) -> bool:
        return not self._peers.is_stopped(rank)

    def _late(self, ranks: Sequence[int], limit_s: float) -> RankError:
        if all(self._peers.is_stopped(rank) for rank in ranks):
            why = "stopped by a signal or a debugger"
        else:
            why = "alive, and swapping, starved of its core, or in another collective"
        return RankError(f"{late(ranks, self.size, limit_s)}; it is {why}")


@dataclass(frozen=True)
class Turn:
    """A turn of all_reduce, for a kernel in this rank's process.

    `header` and `slots` are addresses: of rank 0's line, and of its first slot. A kernel that has
    looked `n_looks` times in vain, or found another signature, leaves the rest to `finish`.
    """

    header: int
    slots: int
    rank: int
    size: int
    signature: int
    n_looks: int
    finish: Callable[[Tensor], None]


def _signature(kind: int, piece: Tensor) -> int:
    return (kind << 60) | (_DTYPES.index(piece.dtype) << 52) | piece.numel()


def _sum(slots: Sequence[Tensor], out: Tensor) -> None:
    """Sum in rank order, so that the rounding is the same on every rank."""
    if out.dtype in _HALVES:
        total = slots[0].to(torch.float32)
        for slot in slots[1:]:
            total.add_(slot)
        out.copy_(total)
        return
    torch.add(slots[0], slots[1], out=out)
    for slot in slots[2:]:
        out.add_(slot)


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _described(signature: int) -> str:
    kind, dtype = _KINDS[signature >> 60 & 3], _DTYPES[(signature >> 52 & 255) % len(_DTYPES)]
    n_values = signature & ((1 << 52) - 1)
    return kind if kind == "barrier" else f"{kind} of {n_values} values of {dtype}"


def _header_bytes(size: int) -> int:
    return -(-size * LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def _total_bytes(size: int) -> int:
    return _header_bytes(size) + 2 * size * SLOT_BYTES


@dataclass(frozen=True)
class _Host:
    """What the ranks must know of each other to decide whether they share a memory.

    `fd` is the memory's on rank 0, and -1 where there is none; `token` is written into it, so that
    nobody takes another file for it. `cores` has a bit for each core that the rank may use, in
    hexadecimal digits.
    """

    host: str
    pid: int
    fd: int
    token: str
    cores: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")]

    @classmethod
    def here(cls, fd: int, token: str) -> "_Host":
        cores = os.sched_getaffinity(0) if _is_supported() else {0}
        mask = sum(1 << core for core in cores)
        return cls(_host_id(), os.getpid(), fd, token, f"{mask:x}")

    def encode(self) -> Tensor:
        text = msgspec.json.encode(self).ljust(_HOST_BYTES)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @classmethod
    def decode(cls, row: Tensor) -> "_Host":
        """Raises: RankError for bytes that no rank has sent."""
        try:
            return msgspec.json.decode(row.numpy().tobytes(), type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RankError(
                "a rank has sent something else than what ranks say of their hosts; is another "
                "program connected to the ranks?"
            ) from error


def _is_supported() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _host_id() -> str:
    """A name that two processes share if they run on one kernel and see each other's ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return secrets.token_hex(8)
    return f"{boot} {namespace}"


def _create(size: int) -> int:
    """The file descriptor of a new nameless memory, or -1 where the host has no such thing."""
    if not _is_supported():
        return -1
    with suppress(OSError):
        fd = os.memfd_create(_NAME)
        try:
            # Taken now: a host that is full would end a rank that touches it later.
            os.posix_fallocate(fd, 0, _total_bytes(size))
            return fd
        except OSError:
            os.close(fd)
    return -1


def _open(hosts: list[_Host], group: Communicator) -> tuple[mmap.mmap, Peers] | None:
    """Rank 0's memory and a watch on the other ranks, or None where this rank cannot."""
    first = hosts[0]
    if not _is_supported() or first.fd < 0 or {host.host for host in hosts} != {first.host}:
        return None
    memory = _map(first, _total_bytes(group.size))
    if memory is None:
        return None
    try:
        return memory, Peers({r: host.pid for r, host in enumerate(hosts) if r != group.rank})
    except OSError:
        return None


def _map(first: _Host, n_bytes: int) -> mmap.mmap | None:
    path = Path(f"/proc/{first.pid}/fd/{first.fd}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            return None
        with path.open("r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != n_bytes:
                return None
            memory = mmap.mmap(file.fileno(), n_bytes)
    except OSError:
        return None
    token = memory[_TOKEN_OFFSET : _TOKEN_OFFSET + 8]
    return memory if token == first.token.encode() else None
