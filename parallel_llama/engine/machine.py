"""What the machine gives: how fast its memory is read, what ranks hold of it, and its cores."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel_llama.engine.step_clock import tick_of
from parallel_llama.model.huge_pages import huge_pages
from parallel_llama.parallel.collectives import Communicator

# Together larger than any cache that the ranks have to themselves.
READ_BYTES = 1 << 30
# Five times what the largest card keeps in its cache.
_COPIED_BYTES = 1 << 28
_REPEATS = 5
_LOOK_S = 1e-4
# Of a thread in a second, by other programs or by threads of its own rank: 1 to 15 where each has a
# core, 85 and more where they share.
_CROWDED = 50.0
_LEAST_S = 1.0


@dataclass(frozen=True)
class Machine:
    """Bytes per second that all ranks together read at once, and the largest rank's peak memory.

    `peak_cuda_bytes` are those of its card, None on the CPU.
    """

    read_bytes_per_s: float
    peak_rss_bytes: int
    peak_cuda_bytes: int | None = None


def measure(comm: Communicator, device: torch.device) -> Machine:
    """Move a large tensor on every rank at the same time, and ask each for its peak memory.

    A CPU reads it, and a card copies it, which is reading and writing at once.

    The peaks are taken first, so that they are the model's and not those of the measurement.

    Collective: 1 + 2 * 5 collectives.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks = comm.all_gather(torch.tensor([peak, peak_cuda_bytes(device) or 0]))
    largest, largest_cuda = peaks.amax(0).tolist()
    has_card = device.type == "cuda"
    n_bytes, move = _copying(device) if has_card else reading(READ_BYTES // comm.size)
    tick = tick_of(device)
    slowest_s = []
    for _ in range(_REPEATS):
        comm.all_reduce(torch.zeros(1))  # tighter than a barrier: all begin at once
        began = tick()
        move()
        ended = tick()
        while not ended.has_come():
            time.sleep(_LOOK_S)
        elapsed = torch.tensor([began.seconds_until(ended)], dtype=torch.float64)
        slowest_s.append(float(comm.all_gather(elapsed).max()))
    return Machine(
        n_bytes * comm.size / min(slowest_s), largest, largest_cuda if has_card else None
    )


def peak_cuda_bytes(device: torch.device) -> int | None:
    """The most that this rank's tensors have taken of its card; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reading(n_bytes: int) -> tuple[int, Callable[[], object]]:
    """A sum of numbers that lie as weights do, and the bytes that it reads."""
    values = huge_pages(n_bytes // 4 * 4).view(torch.float32).fill_(1)
    return values.nbytes, lambda: values.sum().item()


def _copying(device: torch.device) -> tuple[int, Callable[[], object]]:
    """A copy inside a card, and the bytes that it moves."""
    source, target = (torch.ones(_COPIED_BYTES // 4, device=device) for _ in range(2))
    return source.nbytes + target.nbytes, lambda: target.copy_(source)


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
