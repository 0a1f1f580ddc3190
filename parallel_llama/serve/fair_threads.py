"""Threads for the work of many clients: none of them holds up the others.

Source: self-clocked and start-time fair queueing (Golestani 1994; Goyal, Vin and Cheng 1996).
"""

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from typing import TypeVar

T = TypeVar("T")

LARGE_WORK = 64 << 10  # bytes of a body: more takes milliseconds and runs in the thread for that
_NICE = 10  # of threads that yield: they get a tenth of a core that others want
MAX_LARGE_WAITING = 4 << 20  # bytes of large work that waits or runs; more bodies are not read
_MAX_CLIENTS = 4096  # whose last work is remembered


class FairThreads:
    """Runs small work in some threads, and large work and templates in a thread of their own each.

    Clients share the threads by the size of what they ask for, and small work goes first.
    """

    def __init__(self, n_threads: int = 4) -> None:
        self._small = _Lane(n_threads - 2, "small")
        self._large = _Lane(1, "large", yields=True)
        self._templates = _Lane(1, "templates", yields=True)  # one process renders them all

    async def run(
        self,
        work: Callable[[], T],
        size: int,
        client: str,
        wait_s: float | None = None,
        *,
        renders: bool = False,
    ) -> T:
        """Run some work of a client in a thread; `renders` says that it renders a chat template.

        Units of size: about a byte of a body.

        Raises: TimeoutError if it has not begun within `wait_s`; what the work raises.
        """
        lane = self._templates if renders else self._small
        if size > LARGE_WORK:
            lane = self._large
        return await lane.run(work, size, client, wait_s)

    async def room_for_large(self, wait_s: float) -> None:
        """Wait until less than MAX_LARGE_WAITING of large work waits or runs.

        Raises: TimeoutError.
        """
        async with asyncio.timeout(wait_s):
            while self._large.size >= MAX_LARGE_WAITING:
                await self._large.next_end()


def yield_cores() -> None:
    """Let threads of normal priority have the core of this one, and of the processes it starts.

    The threads of a step wait for each other hundreds of times, each time for as long as another
    thread keeps a core from one of them.
    """
    if sys.platform == "linux":  # elsewhere a priority is that of the process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _Lane:
    """Threads, and the work that waits for them.

    `_now` is the virtual time: the size of what each busy client has been given. Work starts in it
    when the client's former work ends; what ends first in it runs first.
    """

    def __init__(self, n_threads: int, name: str, *, yields: bool = False) -> None:
        self._threads = ThreadPoolExecutor(n_threads, name, yield_cores if yields else None)
        self._n_free = n_threads
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._now = 0
        self._ends: dict[str, int] = {}  # of each client's last work
        self.size = 0  # of the work that waits or runs
        self._ended: asyncio.Future[None] | None = None  # done when the next work ends

    async def run(self, work: Callable[[], T], size: int, client: str, wait_s: float | None) -> T:
        self.size += size
        try:
            return await self._run(work, size, client, wait_s)
        finally:
            self.size -= size
            if self._ended is not None:
                self._ended.set_result(None)
                self._ended = None

    async def next_end(self) -> None:
        """Wait until some work has ended, or waits no more."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._ended)

    async def _run(self, work: Callable[[], T], size: int, client: str, wait_s: float | None) -> T:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        start = max(self._now, self._ends.get(client, 0))
        self._ends[client] = start + size
        heappush(self._waiting, (start + size, next(self._numbers), start, turn))
        self._give_turns()
        try:
            await asyncio.wait((turn,), timeout=wait_s)
        except BaseException:
            if not turn.cancel():  # it had its turn in the same moment
                self._free()
            raise
        if turn.cancel():
            raise TimeoutError
        running = self._threads.submit(work)
        # Also where nobody waits for the work any more, the thread is free only after it.
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free))
        return await asyncio.wrap_future(running)

    def _free(self) -> None:
        self._n_free += 1
        self._give_turns()

    def _give_turns(self) -> None:
        while self._n_free and self._waiting:
            _end, _number, start, turn = heappop(self._waiting)
            if not turn.done():  # nobody waits for the others
                self._now = max(self._now, start)
                self._n_free -= 1
                turn.set_result(None)
        if len(self._ends) > _MAX_CLIENTS:
            self._ends = {who: end for who, end in self._ends.items() if end > self._now}
