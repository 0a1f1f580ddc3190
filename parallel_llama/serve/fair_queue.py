"""Fair queueing: `FairQueue` shares work fairly between clients, `Pacer` paces the event loop.

Source: self-clocked and start-time fair queueing (Golestani 1994; Goyal, Vin and Cheng 1996).
"""

import asyncio
import itertools
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

_MAX_CLIENTS = 4096  # with more, idle clients are dropped


class FairQueue(Generic[T]):
    """A queue of items with sizes, in which waiting clients receive equal amounts of work.

    `_now` is the virtual time: the amount of work that each busy client has received. The
    virtual start of an item is the virtual end of its client's previous item, but at least `_now`;
    its virtual end is the start plus its size. The item with the earliest virtual end comes first.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int, T]] = []
        self._numbers = itertools.count()
        self._now = 0
        self._ends: dict[Hashable, int] = {}  # virtual end of each client's last item

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, item: T, size: int, client: Hashable) -> None:
        start = max(self._now, self._ends.get(client, 0))
        self._ends[client] = start + size
        heappush(self._waiting, (start + size, next(self._numbers), start, item))

    def pop(self) -> T:
        _end, _number, start, item = heappop(self._waiting)
        self._now = max(self._now, start)
        if len(self._ends) > _MAX_CLIENTS:
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}
        return item


class Pacer:
    """Starts work of connections in a fair order, one piece in each iteration of the event loop.

    So between two starts the event loop serves running requests, however many connections wait.

    Args:
        gap_s: minimum time between two starts.
    """

    def __init__(self, gap_s: float = 0.0) -> None:
        self._gap_s = gap_s
        self._waiting: FairQueue[Callable[[], None]] = FairQueue()
        self._is_busy = False  # from a start until the gap after it has passed

    def submit(self, begin: Callable[[], None], size: int, client: Hashable) -> None:
        """Calls `begin` immediately, or after the work that comes before it."""
        self._waiting.push(begin, size, client)
        if not self._is_busy:
            self._next()

    async def wait(self, size: int, client: Hashable) -> None:
        """Returns when work of this size may start."""
        may_start = asyncio.Event()
        self.submit(may_start.set, size, client)
        await may_start.wait()

    def _next(self) -> None:
        self._is_busy = len(self._waiting) > 0
        if self._is_busy:
            begin = self._waiting.pop()
            asyncio.get_running_loop().call_later(self._gap_s, self._next)
            begin()
