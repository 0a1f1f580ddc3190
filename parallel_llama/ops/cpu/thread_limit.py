"""A limit on the number of threads of a kernel while other programs need the cores.

The threads of a kernel wait for each other at its end, and a step calls hundreds of kernels. So a
thread that waits for a core delays all other threads, at each kernel by up to a time slice of the
other program; a kernel with one thread fewer is then faster. Results do not depend on the number
of threads.

Source: Linux, Documentation/scheduler/sched-stats.rst, section "/proc/<pid>/schedstat".
"""

import math
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

SAMPLE_S = 0.03  # time in kernels after which the waiting times of threads are read
MEAN_S = 0.25  # time over which waiting is averaged, so that short bursts of work change nothing
HOLD_S = 1.0  # how long a limit holds

# If one of n threads waits for a core during a fraction f of the time, n (1 - f) threads that each
# have a core are as fast, so n - 1 threads are faster if n f > 1. The margin is for noise.
_LEAST_LOSS = 1.2


class ThreadLimit:
    """The limit for kernels that one thread of this process calls.

    Args:
        waited_s: Returns how long the threads of kernels have waited for a core, in total and in
            seconds; NaN if unknown.
        clock_s: Returns the time in seconds.
    """

    def __init__(
        self, waited_s: Callable[[], float], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._waited_s, self._clock_s = waited_s, clock_s
        self._limit = sys.maxsize
        self._until_s = 0.0
        self._kernels_s, self._before_s = 0.0, math.nan
        self._mean = 0.0

    def run(self, n_threads: int, kernel: Callable[[int], object]) -> None:
        """Call a kernel with `n_threads` threads, or with fewer while the limit holds."""
        start_s = self._clock_s()
        if n_threads > self._limit and start_s >= self._until_s:
            self._limit = sys.maxsize
            self._kernels_s, self._before_s = 0.0, self._waited_s()
        n_used = min(n_threads, self._limit)
        kernel(n_used)
        if n_used > 1:
            now_s = self._clock_s()
            self._kernels_s += now_s - start_s
            if self._kernels_s >= SAMPLE_S:
                self._update(now_s, n_used)

    def _update(self, now_s: float, n_threads: int) -> None:
        waited_s, kernels_s = self._waited_s(), self._kernels_s
        n_waiting = (waited_s - self._before_s) / kernels_s  # the average number of threads
        self._kernels_s, self._before_s = 0.0, waited_s
        if math.isnan(n_waiting):
            return
        self._mean += (n_waiting - self._mean) * min(1, kernels_s / MEAN_S)
        if n_threads * min(n_waiting, self._mean) > _LEAST_LOSS:
            self._limit, self._until_s = n_threads - 1, now_s + HOLD_S


def run_delay_s(thread_ids: Collection[int]) -> float:
    """How long threads of this process have waited for a core, in total since they began.

    Returns: NaN if a thread has ended or the system does not count it.
    """
    total_ns = 0
    try:
        for thread_id in thread_ids:
            path = Path(f"/proc/self/task/{thread_id}/schedstat")
            total_ns += int(path.read_bytes().split()[1])
    except (OSError, IndexError):
        return math.nan
    return total_ns / 1e9
