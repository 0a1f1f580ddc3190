"""What the machine gives: how fast its memory is read, and what the ranks hold of it."""

import resource
import sys
import time
from dataclasses import dataclass

import torch

from parallel_llama.parallel import Communicator

# Together larger than any cache that the ranks have to themselves.
_TOTAL_BYTES = 1 << 30
_REPEATS = 5


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
