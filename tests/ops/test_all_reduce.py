"""All-reduce by kernels: the same sums as in Python, mixed with ranks in Python, and faults."""

import os
import random
import signal
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from ranks import SOON_S, Ranks, call_late_after
from torch import Tensor

from parallel_llama.ops import CPUOps
from parallel_llama.ops.cpu.jit import openmp
from parallel_llama.ops.cpu.replay import Recording
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.shared_memory import SHARED_SUM_BYTES, SharedMemory
from parallel_llama.parallel.wait_policy import WaitPolicy

pytestmark = pytest.mark.skipif(openmp() is None, reason="kernels need torch's own GNU OpenMP")

# The last size is too large for a kernel.
SIZES = 1, 15, 16, 576, 1001, SHARED_SUM_BYTES // 8 - 1, SHARED_SUM_BYTES // 4


def sum_in_turns(
    comm: Communicator, dtype: torch.dtype, by_python: set[int], most_late_s: float
) -> list[bytes]:
    """Sums tensors of all sizes repeatedly, on some ranks in Python."""
    rng, ops = random.Random(comm.rank), CPUOps(dtype, 4, {1})
    xs = [torch.empty(1, n, dtype=dtype) for n in SIZES]
    if comm.rank not in by_python:
        with ops.recording() as recording:
            for x in xs:
                ops.all_reduce(x, comm)
    results = []
    for turn in range(5):
        torch.manual_seed(100 * turn + comm.rank)
        for x in xs:
            x.normal_()
        time.sleep(rng.random() * most_late_s)
        if comm.rank in by_python:
            for x in xs:
                comm.all_reduce(x)
        else:
            recording.replay()
        comm.barrier()
        results += [x.numpy().tobytes() for x in xs]
    return results


@pytest.mark.parametrize("tp_size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_kernel_sum_is_bitwise_equal_to_python_sum(ranks, tp_size, dtype):
    """All, some or no ranks sum in Python, and some are so late that kernels stop spinning."""
    pool = ranks(tp_size)
    (expected, *others) = pool.run(sum_in_turns, dtype, set(range(tp_size)), 0.0)
    assert others == [expected] * (tp_size - 1)
    for by_python, most_late_s in ((set(), 0.0), (set(), 0.02), ({1}, 0.0), ({0, 2}, 0.005)):
        found = pool.run(sum_in_turns, dtype, by_python, most_late_s)
        assert found == [expected] * tp_size


def many_turns(comm: Communicator) -> bool:
    """Exchanges without a pause, each of which sums the result of the previous one."""
    ops, x = CPUOps(torch.float64, 4, {1}), torch.ones(1, 40, dtype=torch.float64)
    with ops.recording() as recording:
        for _ in range(30):
            ops.all_reduce(x, comm)
    for turn in range(60):
        x.fill_(comm.rank + turn)
        recording.replay()
        total = sum(range(comm.size)) + turn * comm.size
        if not torch.equal(x, torch.full_like(x, total * float(comm.size) ** 29)):
            return False
    return True


@pytest.mark.parametrize("tp_size", [2, 3])
def test_back_to_back_exchanges_do_not_mix(ranks, tp_size):
    assert all(ranks(tp_size).run(many_turns))


def wait_for_rank_1(comm: Communicator, policy: WaitPolicy) -> tuple[float, float, list[float]]:
    """Replays for which rank 1 is late. Returns: the wait, its CPU time, the last sum."""
    assert isinstance(comm, SharedMemory)
    comm._policy = policy
    ops, x = CPUOps(torch.float32, 4, {1}), torch.ones(1, 40)
    with ops.recording() as recording:
        ops.all_reduce(x, comm)
    waited_s = used_s = 0.0
    for _ in range(20):
        x.fill_(comm.rank + 1)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.012)
        before_s, before_used_s = time.monotonic(), time.thread_time()
        recording.replay()
        waited_s += time.monotonic() - before_s
        used_s += time.thread_time() - before_used_s
    return waited_s, used_s, x[0].tolist()


def test_sleeping_wait_uses_little_cpu_time(ranks):
    """Spinning would use up the CPU quota of a container."""
    (waited_s, used_s, total), (*_, other) = ranks(2).run(wait_for_rank_1, WaitPolicy.SLEEP)
    assert total == other == [3.0] * 40
    assert waited_s > 20 * 0.01 and used_s < waited_s / 4


def record_around(comm: Communicator, x: Tensor, middle: Callable[[], None]) -> Recording:
    """Records exchanges of x, a Python function, and more exchanges."""
    ops = CPUOps(x.dtype, 4, {1})
    with ops.recording() as recording:
        for number in range(8):
            if number == 4:
                recording.host_call(middle)
            ops.all_reduce(x, comm)
    return recording


def fault(comm: Communicator, rank: int, number: int) -> tuple[float, str]:
    """One rank sends itself a signal during a replay. Returns: what the other ranks report."""
    started, x = 0.0, torch.ones(1, 64)

    def strike() -> None:
        nonlocal started
        started = time.monotonic()
        if comm.rank == rank:
            os.kill(os.getpid(), number)
            time.sleep(1000)
        if number == signal.SIGSTOP:
            call_late_after(comm, 1.5)

    recording = record_around(comm, x, strike)
    try:
        recording.replay()
    except RankError as error:
        return time.monotonic() - started, str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank"), [(3, 1), (2, 0)])
def test_other_ranks_name_a_rank_that_dies_during_replay(size, rank):
    with Ranks(size, shared_memory=True) as pool:
        for other, outcome in enumerate(pool.outcomes(fault, rank, signal.SIGKILL)):
            if other != rank:
                waited_s, message = outcome
                assert waited_s < SOON_S
                assert message.startswith(f"rank {rank} of {size} has died")


@pytest.mark.slow
def test_rank_stopped_during_replay_is_named_after_timeout():
    with Ranks(2, shared_memory=True) as pool:
        pool.run(many_turns)  # so that all kernels are compiled
        waited_s, message = pool.outcomes(fault, 1, signal.SIGSTOP, lost=[1])[0]
        assert 1.5 <= waited_s < SOON_S
        assert message.startswith("rank 1 of 2 is late: no progress for 1.5 s")
        first, *_ = message.splitlines()
        assert first.endswith("it is stopped by a signal or a debugger")


def go_different_ways(comm: Communicator) -> str:
    ops = CPUOps(torch.float32, 4, {1})
    x = torch.ones(1, 10 + comm.rank)
    with ops.recording() as recording:
        ops.all_reduce(x, comm)
    try:
        recording.replay()
    except RankError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_ranks_with_different_recordings_report_the_mismatch():
    with Ranks(2, shared_memory=True) as pool:
        first, second = pool.run(go_different_ways)
    assert "rank 1 is in all_reduce of 11 values" in first
    assert "rank 0 is in all_reduce of 10 values" in second


class Pressed(Exception):
    pass


def interrupt_the_wait(comm: Communicator) -> tuple[float, str]:
    assert isinstance(comm, SharedMemory)
    if comm.rank == 1:
        return 0.0, ""

    def press(_: int, __: FrameType | None) -> None:
        raise Pressed

    x = torch.ones(1, 64)
    recording = record_around(comm, x, lambda: None)
    signal.signal(signal.SIGALRM, press)
    started = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        recording.replay()
    except Pressed:
        waited_s = time.monotonic() - started
    try:
        comm.all_reduce(torch.ones(1))
    except RankError as error:
        return waited_s, str(error)
    raise AssertionError("a group that is out of step went on")


@pytest.mark.slow
def test_interrupted_replay_ends_soon_and_later_collectives_fail():
    with Ranks(2, shared_memory=True) as pool:
        waited_s, message = pool.run(interrupt_the_wait)[0]
    assert waited_s < SOON_S
    assert message.startswith("rank 0 left a collective unfinished")
