"""What the engines run on: the processor, the cores they may use, how fast memory is read."""

import os
import platform
from pathlib import Path

import torch

from parallel_llama.machine import measure
from parallel_llama.parallel import join


def usable_cores() -> tuple[int, ...]:
    """The cores that this process and what it starts may use; `taskset` narrows them."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_bytes_per_s(n_threads: int) -> float:
    """How fast that many threads together read memory."""
    torch.set_num_threads(n_threads)
    comm = join("cpu")
    try:
        return measure(comm, torch.device("cpu")).read_bytes_per_s
    finally:
        comm.close()
