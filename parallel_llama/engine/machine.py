"""Measures memory bandwidth, peak memory, device time, and whether threads share cores."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel_llama.engine.statistics import HostTick, Tick
from parallel_llama.model.huge_pages import huge_pages
from parallel_llama.parallel.collectives import Communicator

# Bytes read by all ranks together; more than the caches of nearly all CPUs.
READ_BYTES = 1 << 30
# At least twice the L2 cache of current GPUs.
_COPIED_BYTES = 1 << 28
_REPEATS = 5
_POLL_S = 1e-4
# Involuntary context switches of a thread per second: 1 to 15 if each thread has a core of its own,
# 85 and more if they share cores.
_MAX_SWITCHES_PER_S = 50.0
_MIN_S = 1.0


class GPUTick:
    """The moment at which this thread's GPU has finished the work queued so far."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_until(self, later: Tick) -> float:
        assert isinstance(later, GPUTick)
        return float(self.event.elapsed_time(later.event)) / 1e3


def tick_of(device: torch.device) -> Callable[[], Tick]:
    return GPUTick if device.type == "cuda" else HostTick


@dataclass(frozen=True)
class Machine:
    """Memory bandwidth of all ranks together, and the largest peaks of memory of any rank.

    `peak_rss_bytes` and `peak_cuda_bytes` may come from different ranks. `peak_cuda_bytes` counts
    tensors on a GPU; it is None on the CPU.
    """

    read_bytes_per_s: float
    peak_rss_bytes: int
    peak_cuda_bytes: int | None = None


def measure(comm: Communicator, device: torch.device) -> Machine:
    """Measure memory bandwidth on all ranks at the same time, and gather their peak memory.

    A CPU reads a large tensor; a GPU copies one, which counts as reading and writing.

    The peaks are taken first, so that they do not include the measurement.

    Collective: 1 + 2 * 5 collectives.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = comm.all_gather(torch.tensor([peak, peak_cuda_bytes(device) or 0]))
    largest, largest_cuda = peaks.amax(0).tolist()
    has_gpu = device.type == "cuda"
    n_bytes, move = _copying(device) if has_gpu else reading(READ_BYTES // comm.size)
    tick = tick_of(device)
    slowest_s = []
    for _ in range(_REPEATS):
        comm.all_reduce(torch.zeros(1))  # aligns ranks better than a barrier
        began = tick()
        move()
        ended = tick()
        while not ended.is_reached():
            time.sleep(_POLL_S)
        elapsed = torch.tensor([began.seconds_until(ended)], dtype=torch.float64)
        slowest_s.append(float(comm.all_gather(elapsed).max()))
    return Machine(n_bytes * comm.size / min(slowest_s), largest, largest_cuda if has_gpu else None)


def peak_cuda_bytes(device: torch.device) -> int | None:
    """The peak memory of this rank's tensors on its GPU; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reading(n_bytes: int) -> tuple[int, Callable[[], object]]:
    """The bytes that a call reads, and the call: a sum over memory allocated like weights."""
    values = huge_pages(n_bytes // 4 * 4).view(torch.float32).fill_(1)
    return values.nbytes, lambda: values.sum().item()


def _copying(device: torch.device) -> tuple[int, Callable[[], object]]:
    """The bytes that a call moves, and the call: a copy on a GPU."""
    source, target = (torch.ones(_COPIED_BYTES // 4, device=device) for _ in range(2))
    return source.nbytes + target.nbytes, lambda: target.copy_(source)


class Interruptions:
    """Counts how often this process's threads were preempted since its creation."""

    def __init__(self) -> None:
        self._began_s, self._before = time.monotonic(), self._count()

    def have_shared_cores(self) -> bool:
        """Whether the threads have shared cores most of the time, over at least a second."""
        elapsed_s = time.monotonic() - self._began_s
        per_thread = (self._count() - self._before) / torch.get_num_threads()
        return elapsed_s >= _MIN_S and per_thread > _MAX_SWITCHES_PER_S * elapsed_s

    @staticmethod
    def _count() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
