"""Thread pools for work on requests, whose time is divided fairly between clients."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from parallel_llama.serve.fair_queue import FairQueue, Pacer

T = TypeVar("T")

LARGE_WORK = 64 << 10  # bytes of a body; a larger body takes milliseconds, in the large lane
MAX_LARGE_WAITING = 4 << 20  # total bytes of large work; above it, no large body is read
# Large work takes the interpreter lock from the event loop, and a core from the engine, for
# milliseconds at a time. Without rests, many large bodies made a small request four times slower.
_LARGE_REST_FACTOR = 3.0  # as a multiple of the work's time
_MAX_REST_S = 0.3
_NICE = 10  # of low-priority threads: they get a tenth of a contended core


class FairThreads:
    """Runs work in three lanes: small work, large work, and small chat templates.

    Small work has several threads; the other two lanes have one. Each lane divides the time of its
    threads between clients, by the size of their work. After large work, including a large chat
    template, the large lane rests.
    """

    def __init__(self, n_threads: int = 4) -> None:
        self._small = _Lane(n_threads - 2, "small")
        self._large = _Lane(1, "large", is_low_priority=True, rest=_LARGE_REST_FACTOR)
        # One thread, because one process renders all templates.
        self._templates = _Lane(1, "templates", is_low_priority=True)
        self._reads = Pacer()

    async def run(
        self,
        work: Callable[[], T],
        size: int,
        client: str,
        wait_s: float | None = None,
        *,
        renders: bool = False,
    ) -> T:
        """Runs a client's work in a thread.

        Args:
            size: the cost of the work, as the bytes of a body that takes the same time to read.
            renders: whether the work renders a chat template.

        Raises: TimeoutError if the work has not started within `wait_s`; any error of the work.
        """
        lane = self._templates if renders else self._small
        if size > LARGE_WORK:
            lane = self._large
        return await lane.run(work, size, client, wait_s)

    async def wait_for_large(self, n_bytes: int, client: str, wait_s: float) -> None:
        """Waits until less than MAX_LARGE_WAITING of large work is queued or running.

        Also lets only one client at a time continue: reading pieces of many large bodies in one
        iteration of the event loop would take tens of milliseconds.

        Args:
            n_bytes: size of the last piece that the client has sent.

        Raises: TimeoutError.
        """
        deadline_s = time.monotonic() + wait_s
        while self._large.size >= MAX_LARGE_WAITING:
            await self._large.wait_for_end(deadline_s - time.monotonic())
        await self._reads.wait(n_bytes, client)


def yield_cores() -> None:
    """Lowers the priority of this thread and of the processes that it starts.

    Otherwise this thread could take the core of an engine thread, for which all other engine
    threads would then wait at each of the hundreds of barriers in a step.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _Lane:
    """Threads for one kind of work, with a fair queue.

    Args:
        is_low_priority: whether the threads run at low priority.
        rest: time for which a thread rests after some work, as a multiple of the work's time.
    """

    def __init__(
        self, n_threads: int, name: str, *, is_low_priority: bool = False, rest: float = 0.0
    ) -> None:
        self._rest = rest
        self._threads = ThreadPoolExecutor(
            n_threads, name, yield_cores if is_low_priority else None
        )
        self._n_free = n_threads
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self.size = 0  # of queued and running work
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

    async def wait_for_end(self, wait_s: float) -> None:
        """Waits until some work has ended or left the queue.

        Raises: TimeoutError.
        """
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        ended, _ = await asyncio.wait((self._ended,), timeout=max(0.0, wait_s))
        if not ended:
            raise TimeoutError

    async def _run(self, work: Callable[[], T], size: int, client: str, wait_s: float | None) -> T:
        loop = asyncio.get_running_loop()
        assigned: asyncio.Future[None] = loop.create_future()
        self._waiting.push(assigned, size, client)
        self._assign_threads()
        try:
            await asyncio.wait((assigned,), timeout=wait_s)
        except BaseException:
            if not assigned.cancel():  # a thread was assigned at the same moment
                self._free_thread()
            raise
        if assigned.cancel():
            raise TimeoutError
        started_s = time.monotonic()

        def rest() -> None:
            duration_s = time.monotonic() - started_s
            loop.call_later(min(self._rest * duration_s, _MAX_REST_S), self._free_thread)

        running = self._threads.submit(work)
        # If the caller is cancelled, the thread is still busy until the work ends.
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(rest))
        return await asyncio.wrap_future(running)

    def _free_thread(self) -> None:
        self._n_free += 1
        self._assign_threads()

    def _assign_threads(self) -> None:
        while self._n_free and self._waiting:
            assigned = self._waiting.pop()
            if not assigned.done():  # otherwise the caller was cancelled or timed out
                self._n_free -= 1
                assigned.set_result(None)
