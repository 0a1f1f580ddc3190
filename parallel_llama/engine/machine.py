"""What the machine gives: how fast its memory is read, what ranks hold of it, and its cores."""

import resource
import sys
import time
from dataclasses import dataclass

import torch

from parallel_llama.parallel.collectives import Communicator

# Together larger than any cache that the ranks have to themselves.
_TOTAL_BYTES = 1 << 30
_REPEATS = 5
# Of a thread in a second, by other programs or by threads of its own rank: 1 to 15 where each has a
# core, 85 and more where they share.
_CROWDED = 50.0
_LEAST_S = 1.0


@dataclass(frozen=True)
class Machine:
    """Bytes per second that all ranks together read at once, and the largest rank's peak memory."""

    read_bytes_per_s: float
    peak_rss_bytes: int


def measure(comm: Communicator, device: torch.device) -> Machine:
    """Read a large tensor on every rank at the same time, and ask each for its peak memory.

    The peak is taken first, so that it is the model's and not that of the measurement.

    Collective: 1 + 2 * 5 collectives.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks = comm.all_gather(torch.tensor([peak]))
    values = torch.ones(_TOTAL_BYTES // comm.size // 4, device=device)
    slowest_s = []
    for _ in range(_REPEATS):
        comm.all_reduce(torch.zeros(1))  # tighter than a barrier: all begin at once
        started = time.perf_counter()
        values.sum().item()
        elapsed = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        slowest_s.append(float(comm.all_gather(elapsed).max()))
    n_bytes = values.nbytes * comm.size
    return Machine(n_bytes / min(slowest_s), int(peaks.max()))


class Interruptions:
    """How often the system takes the cores from this process's threads, from here on."""

    def __init__(self) -> None:
        self._began_s, self._before = time.monotonic(), self._count()

    def are_crowded(self) -> bool:
        """Whether the threads have shared their cores for most of the time, a second at least."""
        elapsed_s = time.monotonic() - self._began_s
        per_thread = (self._count() - self._before) / torch.get_num_threads()
        return elapsed_s >= _LEAST_S and per_thread > _CROWDED * elapsed_s

    @staticmethod
    def _count() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
