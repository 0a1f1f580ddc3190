"""Measures work on a device without the time that the host needs to launch it."""

import time
from collections.abc import Callable, Sequence

import torch

from launch.bench.gpu_steps import Setting

_REPEATS = 5

Call = Callable[[], object]


def device_seconds(calls: Sequence[Call], setting: Setting) -> float:
    """The mean seconds of a call when all calls are replayed in one CUDA graph; the best of 5.

    If the calls read different memory, larger in total than the GPU's cache, nothing is cached.
    """
    if setting.is_rehearsal:
        return host_seconds(calls)
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _between_events(graph.replay) / len(calls)


def eager_seconds(call: Call, setting: Setting) -> float:
    """Seconds of a call from its launches to its end; the best of 5."""
    if setting.is_rehearsal:
        return host_seconds([call])
    call()
    return _between_events(call)


def synchronous_seconds(call: Call, setting: Setting) -> float:
    """Seconds of one call on the host, from an idle device to an idle device."""
    _synchronize(setting)
    started = time.perf_counter()
    call()
    _synchronize(setting)
    return time.perf_counter() - started


def _synchronize(setting: Setting) -> None:
    if not setting.is_rehearsal:
        torch.cuda.synchronize()


def host_seconds(calls: Sequence[Call]) -> float:
    """The mean seconds of a call on the host; the best of 2."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        for call in calls:
            call()
        seconds.append((time.perf_counter() - started) / len(calls))
    return min(seconds)


def _between_events(call: Call) -> float:
    call()
    seconds = []
    for _ in range(_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return min(seconds)
