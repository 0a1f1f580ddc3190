"""Figures of a GPU, measured without a GPU: step times, memory, and memory bandwidth."""

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from thread_ranks import run_on_threads

from parallel_llama.engine import machine
from parallel_llama.engine.machine import GPUTick, measure, peak_cuda_bytes, tick_of
from parallel_llama.engine.statistics import HostTick, StepClock, StepTimes
from parallel_llama.parallel.collectives import Communicator, Solo

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeEvent:
    """An event that the GPU reaches at a known time."""

    now_ms = 0.0
    recorded: ClassVar[deque[float]] = deque()  # when the GPU reaches the next events

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = self.recorded.popleft()

    def query(self) -> bool:
        return self.at_ms <= FakeEvent.now_ms

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert self.query() and later.query()  # else CUDA raises
        return later.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    monkeypatch.setattr(machine.torch.cuda, "Event", FakeEvent)
    FakeEvent.recorded.clear()
    FakeEvent.now_ms = 0.0
    return FakeEvent


def step(clock: StepClock) -> None:
    clock.begin()
    for name in ("forward_s", "sample_s", "forward_s", "sample_s"):
        clock.lap(name)
    clock.end()


def test_gpu_step_times_are_added_once_the_gpu_has_finished(gpu):
    """Regression: launches return at once, so all time counted where a result was read first."""
    times = StepTimes()
    clock = StepClock(times, tick_of(GPU))
    gpu.recorded.extend([1000, 1004, 1005, 1025, 1026])
    step(clock)
    assert (times.forward_s, times.sample_s) == (0.0, 0.0)  # the GPU is not there yet
    gpu.now_ms = 1026.0
    gpu.recorded.extend([2000, 2001, 2002, 2003, 2004])
    step(clock)
    assert (times.forward_s, times.sample_s) == pytest.approx((0.024, 0.002))
    gpu.now_ms = 9999.0
    gpu.recorded.extend([9990, 9990, 9990, 9990, 9990])
    step(clock)
    assert (times.forward_s, times.sample_s) == pytest.approx((0.026, 0.004))


def test_interrupted_step_adds_no_time(gpu):
    times = StepTimes()
    clock = StepClock(times, tick_of(GPU))
    gpu.recorded.extend([0, 500, 1000, 1001, 1002, 1003, 1004])
    gpu.now_ms = 9999.0
    clock.begin()
    clock.lap("forward_s")
    step(clock)
    assert (times.forward_s, times.sample_s) == pytest.approx((0.002, 0.002))


def test_step_times_on_the_cpu_are_those_of_the_host_clock(monkeypatch):
    now = iter([10.0, 12.0, 12.5, 13.0, 14.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(now))
    times = StepTimes()
    step(StepClock(times, tick_of(CPU)))
    assert (times.forward_s, times.sample_s) == (2.5, 1.5)
    assert (tick_of(CPU), tick_of(GPU)) == (HostTick, GPUTick)


@dataclass
class FakeTick:
    """A tick that the GPU has reached at the third query, at the time `s`."""

    s: float
    n_looks: int = field(default=0)

    def is_reached(self) -> bool:
        self.n_looks += 1
        return self.n_looks >= 3

    def seconds_until(self, later: "FakeTick") -> float:
        assert later.n_looks >= 3
        return later.s - self.s


def measure_as_on_gpus(comm: Communicator) -> machine.Machine:
    return measure(comm, torch.device("cuda", comm.rank))


def test_gpu_bandwidth_and_peak_memory_are_measured_on_the_gpu(monkeypatch):
    """The slower of two GPUs determines each of five rounds, and the best round counts."""
    copied: list[int] = []
    # Each round of each rank has a start and an end.
    seconds = {0: [4.0, 2.0, 3.0, 4.0, 5.0], 1: [1.0, 2.5, 9.0, 9.0, 9.0]}
    ticks = {rank: iter([s for each in own for s in (0.0, each)]) for rank, own in seconds.items()}

    def tick_of_gpu(device: torch.device) -> object:
        return lambda: FakeTick(next(ticks[device.index]))

    monkeypatch.setattr(machine, "tick_of", tick_of_gpu)
    monkeypatch.setattr(machine, "_copying", lambda device: (100, lambda: copied.append(device)))
    peaks = {0: 7 << 30, 1: 9 << 30}
    monkeypatch.setattr(
        machine.torch.cuda, "max_memory_allocated", lambda device: peaks[device.index]
    )
    for found in run_on_threads(2, measure_as_on_gpus):
        assert found.read_bytes_per_s == pytest.approx(2 * 100 / 2.5)
        assert found.peak_cuda_bytes == 9 << 30 and found.peak_rss_bytes > 1 << 20
    assert len(copied) == 2 * 5


def test_a_copy_reads_and_writes_every_byte(monkeypatch):
    monkeypatch.setattr(machine, "_COPIED_BYTES", 4096)
    n_bytes, copy = machine._copying(CPU)
    target = copy()
    assert n_bytes == 2 * 4096
    assert isinstance(target, torch.Tensor) and target.nbytes == 4096 and bool((target == 1).all())


def test_cpu_reports_no_peak_gpu_memory(monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    assert peak_cuda_bytes(CPU) is None
    found = measure(Solo(), CPU)
    assert found.peak_cuda_bytes is None and found.read_bytes_per_s > 0
