"""Elastic groups of ranks that rank 0 has started on its host: forms a new group after a loss.

In the new group the lost ranks are missing, or spares replace them. The communicator of a group
with a dead rank is broken, so rank 0 writes its orders to the stdin of the processes, one line of
JSON each. A rank that waits in a collective of the old group leaves it when an order arrives. A
rank that loads its shard for the old group finishes, because the next load copies rows from that
shard; meanwhile it sends keepalives to the new group.
"""

import os
import queue
from dataclasses import dataclass
from threading import Thread
from typing import Annotated

import msgspec

from parallel_llama.parallel.collectives import Communicator, Solo, joined
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.launch import LocalRanks
from parallel_llama.parallel.shared_memory import Region
from parallel_llama.parallel.timeouts import Timeouts

# A line has the process ids of at most `launch.MAX_RANKS` ranks.
MAX_ORDER_BYTES = 1 << 16


@dataclass(frozen=True)
class RegroupOrder:
    """An order to join a new group.

    Args:
        rank: the rank of the receiver in the group.
        pids: the ids of the group's processes, by rank.
        region: the group's shared memory.
        n_threads: the number of threads with which each process computes.
    """

    rank: int
    pids: tuple[int, ...]
    region: Region
    n_threads: Annotated[int, msgspec.Meta(ge=1)]

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


class Orders:
    """Reads orders from a descriptor in a thread, and ends the process at the end of the file.

    The parent's exit closes the other end of the descriptor, so a rank cannot outlive its parent.
    """

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._orders: queue.SimpleQueue[RegroupOrder] = queue.SimpleQueue()
        self._newest: RegroupOrder | None = None
        Thread(target=self._read, name="orders", daemon=True).start()

    def require_no_order(self) -> None:
        """Raises: RankError if an order has arrived, because the current group is then obsolete."""
        if not self._orders.empty():
            raise RankError("rank 0 forms a new group")

    def keepalive(self) -> None:
        """Tells the ranks that wait in the group of a new order that this rank is still working."""
        if self._newest is not None and not self._orders.empty():
            self._newest.region.keepalive(self._newest.rank)

    def latest(self) -> RegroupOrder:
        """Waits for an order, without a time limit. Returns: the newest order."""
        order = self._orders.get()
        while not self._orders.empty():
            order = self._orders.get()
        return order

    def _read(self) -> None:
        # Not from sys.stdin: a thread that holds the lock of its buffer would block the exit.
        unfinished_line = b""
        try:
            while len(unfinished_line) <= MAX_ORDER_BYTES and (
                data := os.read(self._fd, MAX_ORDER_BYTES)
            ):
                *lines, unfinished_line = (unfinished_line + data).split(b"\n")
                for line in lines:
                    self._newest = msgspec.json.decode(line, type=RegroupOrder)
                    self._orders.put(self._newest)
        finally:
            os._exit(1)


def lead_group(ranks: LocalRanks, n_threads: int, timeouts: Timeouts) -> Communicator:
    """On rank 0, orders the other ranks to join a new group, and forms it.

    Args:
        n_threads: as in `RegroupOrder`.

    Raises: RankError if another rank ends meanwhile; OSError if the memory cannot be allocated.
    """
    pids = os.getpid(), *ranks.pids().values()
    if len(pids) == 1:
        return Solo()
    region = Region.create(len(pids))
    try:
        for rank in range(1, len(pids)):
            ranks.send_order(rank, RegroupOrder(rank, pids, region, n_threads).encode())
        return joined(region.group(0, pids, timeouts))
    finally:
        os.close(region.fd)


def join_group(order: RegroupOrder, orders: Orders, timeouts: Timeouts) -> Communicator:
    """Joins the group of an order, on a rank above 0.

    Raises: RankError if another rank has ended, or another order arrives.
    """
    comm = order.region.group(order.rank, order.pids, timeouts)
    comm.on_wait = orders.require_no_order
    # `failures` takes the rank in its messages from RANK; the launcher also uses the new rank.
    os.environ.update(RANK=str(order.rank), WORLD_SIZE=str(comm.size))
    return joined(comm)
