"""A limit for what waits on a card, where nobody else sets one.

A collective of NCCL is only queued when its call returns. Where a rank is lost the card waits for
it without an end, and with it the host, as soon as it reads a result. So a thread looks at what was
queued; what is not done at the limit is given up, which lets the host go on, with numbers that are
none. Whoever uses the group next hears of it before they reach anybody. A kernel that waits for
other cards by itself cannot be given up: where nobody hears of it, the process ends.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from parallel_llama.parallel.failures import RankError

_LOOK_S = 0.02
_HEARD_S = 10.0  # for a host that has been let go, and says so to whoever asked it


class Work(Protocol):
    """What torch gives for a collective that is under way."""

    def is_completed(self) -> bool: ...


def end_process(why: str) -> None:
    """End this process at once, for a thread of it can never go on."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(1)


class Watchdog:
    """Looks at works in the order in which they were queued, each for `limit_s` at the most.

    What is late is given up by `abort`, in its own thread, since it may never return; `explain`
    says why the work may be late. Where nobody asks within `heard_s` whether the group is whole,
    `end` is told. Units: seconds.
    """

    def __init__(
        self,
        limit_s: float,
        abort: Callable[[], None],
        explain: Callable[[], str],
        heard_s: float = _HEARD_S,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self._limit_s, self._abort, self._explain = limit_s, abort, explain
        self._heard_s, self._end, self._heard = heard_s, end, threading.Event()
        self._works: queue.SimpleQueue[tuple[Work, float] | None] = queue.SimpleQueue()
        self._failure: str | None = None
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def add(self, work: Work) -> None:
        """Watchdog a work that has been queued just now."""
        self._works.put((work, time.monotonic()))

    def require_whole(self) -> None:
        """Raises: RankError once a work has been given up."""
        if self._failure is not None:
            self._heard.set()
            raise RankError(self._failure)

    def end(self) -> None:
        self._heard.set()
        self._works.put(None)

    def _look(self) -> None:
        while (queued := self._works.get()) is not None:
            if not is_done(*queued, self._limit_s):
                why = self._explain()
                # Before the card is let go, and the host with it.
                self._failure = f"{why} (nothing came for {self._limit_s:g} s)"
                # NCCL's abort may block or raise; neither may keep the process from its end.
                threading.Thread(target=self._abort, name="abort", daemon=True).start()
                if not self._heard.wait(self._heard_s):
                    self._end(self._failure)
                return


def is_done(work: Work, began_s: float, limit_s: float) -> bool:
    """Whether a work is done so long after it began; returns as soon as it is."""
    while not work.is_completed():
        if time.monotonic() - began_s > limit_s:
            return False
        time.sleep(_LOOK_S)
    return True
