"""Measures work on a device, with or without the time that the host needs to launch it.

Measurements except `synchronous_seconds` are repeated, and median, least and largest are kept.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from launch.bench.gpu_steps import Row, Setting

# Repeats of a measurement: as many as fit into the time, within these limits.
_LEAST, _MOST, _REPEAT_S = 3, 20, 0.5

Call = Callable[[], object]


@dataclass(frozen=True)
class Seconds:
    """The median, the least and the largest of several measurements of the same work."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Seconds":
        found = list(seconds)
        return cls(statistics.median(found), min(found), max(found))

    def __truediv__(self, n: float) -> "Seconds":
        return Seconds(self.median / n, self.least / n, self.most / n)


def measured(row: Row, seconds: Seconds, figure: Callable[[float], float], unit: str = "ms") -> Row:
    """The row with the figure of the median, and the figures of the least and the largest."""
    low, high = sorted(map(figure, (seconds.least, seconds.most)))
    return replace(row, value=figure(seconds.median), unit=unit, low=low, high=high)


def in_ms(row: Row, seconds: Seconds) -> Row:
    return measured(row, seconds, lambda s: s * 1e3, "ms")


def in_us(row: Row, seconds: Seconds) -> Row:
    return measured(row, seconds, lambda s: s * 1e6, "us")


def device_seconds(calls: Sequence[Call], setting: Setting) -> Seconds:
    """The mean seconds of a call when all calls are replayed in one CUDA graph.

    If the calls read different memory, larger in total than the GPU's cache, nothing is cached.
    """

    def run() -> None:
        for call in calls:
            call()

    if setting.is_rehearsal:
        return host_seconds(run, setting) / len(calls)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return queued_seconds(graph.replay, setting) / len(calls)


def queued_seconds(call: Call, setting: Setting) -> Seconds:
    """Seconds of a call on the device, launched while the device still runs another such call."""
    if setting.is_rehearsal:
        return host_seconds(call, setting)

    def once() -> float:
        call()
        return _between_events(call)

    call()
    torch.cuda.synchronize()
    return _repeated(once)


def eager_seconds(call: Call, setting: Setting) -> Seconds:
    """Seconds of a call from an idle device to its end, with the time that the host needs."""
    if setting.is_rehearsal:
        return host_seconds(call, setting)
    call()
    torch.cuda.synchronize()
    return _repeated(lambda: _between_events(call))


def host_seconds(call: Call, setting: Setting) -> Seconds:
    """Seconds that the host needs to launch a call on an idle device, without waiting for it."""
    if setting.is_rehearsal:
        return Seconds.of([_on_host(call)])
    call()

    def once() -> float:
        torch.cuda.synchronize()
        return _on_host(call)

    return _repeated(once)


def synchronous_seconds(call: Call, setting: Setting) -> float:
    """Seconds of one call on the host, from an idle device to an idle device."""
    _synchronize(setting)
    started = time.perf_counter()
    call()
    _synchronize(setting)
    return time.perf_counter() - started


def _repeated(measure: Callable[[], float]) -> Seconds:
    started, seconds = time.perf_counter(), list[float]()
    while len(seconds) < _LEAST or (
        len(seconds) < _MOST and time.perf_counter() - started < _REPEAT_S
    ):
        seconds.append(measure())
    return Seconds.of(seconds)


def _synchronize(setting: Setting) -> None:
    if not setting.is_rehearsal:
        torch.cuda.synchronize()


def _on_host(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _between_events(call: Call) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3
