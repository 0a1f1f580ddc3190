"""Detects late collectives on a GPU (`Watchdog`), and dead ranks of this host (`Peers`).

A call of NCCL returns when its collective is queued. If a rank is lost, the GPU waits forever, and
so does the host when it reads the result. A watchdog thread checks queued collectives and aborts a
collective that exceeds the limit. The host then continues with invalid results, so the next use of
the group raises an error before those results leave this rank. A one-shot kernel cannot be aborted;
if the group is not used within a further limit, the process ends.
"""

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from parallel_llama.parallel.failures import FAILED, RankError, report_error
from parallel_llama.parallel.rank_stacks import process_state
from parallel_llama.parallel.torch_threads import start_thread

_POLL_S = 0.02
_EVIDENCE_S = 2.0  # the time limit of `evidence`
_NOTICE_S = 10.0  # for the host to use the group after an abort, and so notice it


class Work(Protocol):
    """A collective in flight: torch's handle, or its end on a GPU."""

    def is_completed(self) -> bool: ...


def end_process(why: str) -> None:
    """Reports `why` and ends this process immediately, even if its threads are stuck."""
    report_error(why)
    os._exit(FAILED)


class Watchdog:
    """Checks collectives in the order in which they were queued.

    Args:
        limit_s: how long a collective may take, in seconds.
        abort: aborts the group. It runs in its own thread, because it may never return.
        explain: returns why a collective may be late.
        notice_s: `end` is called if `require_not_aborted` is not called within this time after an
            abort, in seconds.
        end: ends the process, given the reason.
        evidence: returns text that is appended to the message, such as stacks.
        use_device: called first in each thread that uses the GPU. Without it, the thread would
            create a context of half a gigabyte on GPU 0, which may belong to another rank.
    """

    def __init__(
        self,
        limit_s: float,
        abort: Callable[[], None],
        explain: Callable[[], str],
        notice_s: float = _NOTICE_S,
        end: Callable[[str], None] = end_process,
        evidence: Callable[[], str] = lambda: "",
        use_device: Callable[[], None] = lambda: None,
    ) -> None:
        self._limit_s, self._abort, self._explain = limit_s, abort, explain
        self._evidence, self._use_device = evidence, use_device
        self._notice_s, self._end, self._is_noticed = notice_s, end, threading.Event()
        self._queued: queue.SimpleQueue[tuple[Work, float] | None] = queue.SimpleQueue()
        self._failure: str | None = None
        start_thread(self._watch, "watchdog", self.end)

    def add(self, work: Work) -> None:
        """Starts the time limit of a collective that has just been queued."""
        self._queued.put((work, time.monotonic()))

    def require_not_aborted(self) -> None:
        """Raises: RankError if a collective has been aborted."""
        if self._failure is not None:
            self._is_noticed.set()
            raise RankError(self._failure)

    def end(self) -> None:
        self._is_noticed.set()
        self._queued.put(None)

    def _watch(self) -> None:
        self._use_device()
        while (queued := self._queued.get()) is not None:
            if not is_done(*queued, self._limit_s):
                why = self._explain()
                # Set before the abort, which lets the host continue.
                self._failure = (
                    f"{why} (no progress for {self._limit_s:g} s){self._gathered_evidence()}"
                )
                # NCCL's abort may block or raise, and neither may prevent the end of the process.
                threading.Thread(target=self._abort_on_device, name="abort", daemon=True).start()
                if not self._is_noticed.wait(self._notice_s):
                    self._end(self._failure)
                return

    def _abort_on_device(self) -> None:
        self._use_device()
        self._abort()

    def _gathered_evidence(self) -> str:
        """The evidence; empty after `_EVIDENCE_S`, because nothing may prevent the abort."""
        results: list[str] = []
        thread = threading.Thread(target=lambda: results.append(self._evidence()), daemon=True)
        thread.start()
        thread.join(_EVIDENCE_S)
        return results[0] if results else ""


def is_done(work: Work, began_s: float, limit_s: float) -> bool:
    """Waits for a collective until `limit_s` after `began_s`; returns whether it is done."""
    while not work.is_completed():
        if time.monotonic() - began_s > limit_s:
            return False
        time.sleep(_POLL_S)
    return True


class Peers:
    """Watches processes through pidfds, which are not confused by zombies or reused process ids.

    `gone` holds the ranks whose processes have ended; it only grows.

    Args:
        pids: process ids by rank.

    Raises: OSError if a process cannot be watched.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.gone: set[int] = set()
        self._pids = dict(pids)
        self._ranks: dict[int, int] = {}
        self._poller = select.poll()
        try:
            for rank, pid in pids.items():
                fd = os.pidfd_open(pid)
                self._ranks[fd] = rank
                self._poller.register(fd, select.POLLIN)
        except OSError:
            self.close()
            raise

    def poll(self) -> None:
        """Updates `gone`."""
        for fd, _ in self._poller.poll(0):
            self._poller.unregister(fd)
            self.gone.add(self._ranks.pop(fd))
            os.close(fd)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal or a debugger has stopped the process of a rank."""
        return process_state(self._pids[rank]) in ("T", "t")

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()
        self._poller = select.poll()
