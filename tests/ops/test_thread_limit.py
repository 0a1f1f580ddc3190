"""Kernels use fewer threads while other programs need the cores, and compute the same bits."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Generic

import pytest
import torch
from llvmlite import ir

from parallel_llama.ops.cpu import jit
from parallel_llama.ops.cpu.arguments import Integer, Integers, T
from parallel_llama.ops.cpu.ir import Thread, Value
from parallel_llama.ops.cpu.jit import CompiledKernel, openmp
from parallel_llama.ops.cpu.thread_limit import HOLD_S, MEAN_S, SAMPLE_S, ThreadLimit, run_delay_s


class Cores:
    """A clock and the waiting time of threads, both of which tests set."""

    def __init__(self, n_threads: int = 2) -> None:
        self.now_s, self.waited_s, self.n_threads = 0.0, 0.0, n_threads
        self.limit = ThreadLimit(lambda: self.waited_s, lambda: self.now_s)
        self.threads_of(SAMPLE_S)

    def threads_of(self, seconds: float, n_waiting: float = 0.0) -> int:
        """The threads of a kernel that runs this long, while so many threads wait on average."""
        used: list[int] = []

        def kernel(n_threads: int) -> None:
            used.append(n_threads)
            self.now_s += seconds
            self.waited_s += seconds * n_waiting

        self.limit.run(self.n_threads, kernel)
        return used[0]


def test_limit_drops_by_one_while_a_thread_waits_for_a_core():
    cores = Cores()
    assert cores.threads_of(MEAN_S, n_waiting=0.8) == 2
    assert cores.threads_of(HOLD_S) == 1
    assert cores.threads_of(SAMPLE_S) == 2, "a limit holds for a while"


def test_all_threads_are_retried_and_kept_if_none_waits():
    cores = Cores()
    cores.threads_of(MEAN_S, n_waiting=0.8)
    cores.threads_of(HOLD_S)
    assert cores.threads_of(SAMPLE_S, n_waiting=0.8) == 2
    assert cores.threads_of(HOLD_S) == 1
    assert [cores.threads_of(SAMPLE_S) for _ in range(9)] == [2] * 9


def test_limit_drops_only_if_fewer_threads_are_faster():
    """Two threads are as fast as one thread if one of the two waits half of the time."""
    for n_threads, n_waiting, then in [(2, 0.5, 2), (16, 0.05, 16), (16, 0.1, 15)]:
        cores = Cores(n_threads)
        cores.threads_of(MEAN_S, n_waiting)
        assert cores.threads_of(SAMPLE_S) == then


def test_the_limit_falls_thread_by_thread_to_one():
    cores = Cores(4)
    found = [cores.threads_of(MEAN_S / 2, n_waiting=2) for _ in range(5)]
    assert found == [4, 3, 2, 1, 1]


def test_short_bursts_of_other_work_change_nothing():
    cores = Cores()
    for _ in range(20):
        assert cores.threads_of(SAMPLE_S, n_waiting=1.5) == 2
        assert cores.threads_of(5 * SAMPLE_S) == 2


def test_time_between_kernels_does_not_count():
    cores = Cores()
    for _ in range(20):
        cores.threads_of(SAMPLE_S, n_waiting=0.8)
        cores.now_s += SAMPLE_S
    assert cores.threads_of(SAMPLE_S) == 1


def test_an_unknown_waiting_time_limits_nothing():
    cores = Cores()
    cores.waited_s = math.nan
    assert [cores.threads_of(MEAN_S) for _ in range(3)] == [2] * 3
    cores.waited_s = 100.0
    assert [cores.threads_of(MEAN_S) for _ in range(3)] == [2] * 3


@dataclass(slots=True, kw_only=True)
class _Arguments(Generic[T]):
    n_threads: Integers[T]
    ignored: Integer[T]


def _count(_b: ir.IRBuilder, thread: Thread, args: _Arguments[Value]) -> None:
    args.n_threads[thread.number] = thread.count


class _Fixed(ThreadLimit):
    """Limits that follow each other, one for each kernel."""

    def __init__(self, *limits: int) -> None:
        super().__init__(lambda: 0.0)
        self._limits = cycle(limits)

    def run(self, n_threads: int, kernel: Callable[[int], object]) -> None:
        kernel(min(n_threads, next(self._limits)))


needs_openmp = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")


@needs_openmp
def test_kernels_use_no_more_threads_than_the_limit(monkeypatch):
    kernel, found = CompiledKernel(_Arguments[float], _count), torch.zeros(3, dtype=torch.int64)
    arguments = _Arguments(n_threads=found.data_ptr(), ignored=0)
    monkeypatch.setattr(jit._TEAM, "limit", _Fixed(3))
    kernel(3, arguments)
    assert found.tolist() == [3, 3, 3]
    monkeypatch.setattr(jit._TEAM, "limit", _Fixed(2))
    kernel(3, arguments)
    assert found.tolist() == [2, 2, 3]


@needs_openmp
def test_team_ids_are_live_threads_of_this_process():
    ids = jit._team_ids()
    assert threading.get_native_id() in ids and len(ids) == torch.get_num_threads()
    assert ids <= {int(each.name) for each in Path("/proc/self/task").iterdir()}
    assert run_delay_s(ids) >= 0


def test_run_delay_of_missing_thread_is_nan():
    assert math.isnan(run_delay_s({0}))
