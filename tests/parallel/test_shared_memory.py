"""Ranks of one host with shared memory: errors name the rank, and nothing is left behind."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import pytest
import torch
from ranks import SILENCE_S, SOON_S, Ranks, call_late_after
from test_collectives import race

from parallel_llama.parallel import cgroups, shared_memory
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.rank_stacks import STACKS_NAME
from parallel_llama.parallel.shared_memory import SharedMemory, share
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.wait_policy import WaitPolicy
from parallel_llama.parallel.watchdog import Peers


def fault(comm: Communicator, rank: int, number: int) -> tuple[float, str]:
    """One rank sends itself a signal during a run; returns the errors of the others."""
    for exchange in range(1000):
        if exchange == 500:
            comm.barrier()
            started = time.monotonic()
            if comm.rank == rank:
                os.kill(os.getpid(), number)
                time.sleep(1000)
            if number == signal.SIGSTOP:
                call_late_after(comm, 1.5)
        try:
            comm.all_reduce(torch.ones(576))
        except RankError as error:
            return time.monotonic() - started, str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(("size", "rank"), [(3, 1), (2, 0)])
def test_killed_rank_is_promptly_named_by_all_others(size, rank):
    with Ranks(size, shared_memory=True) as pool:
        for other, outcome in enumerate(pool.outcomes(fault, rank, signal.SIGKILL)):
            if other != rank:
                waited, message = outcome
                assert waited < SOON_S
                assert message.startswith(f"rank {rank} of {size} has died")


def test_a_stopped_rank_is_named_as_late_after_the_timeout():
    with Ranks(2, shared_memory=True) as pool:
        first = pool.outcomes(fault, 1, signal.SIGSTOP, lost=[1])[0]
        assert 1.5 <= first[0] < SOON_S
        assert first[1].startswith("rank 1 of 2 is late: no progress for 1.5 s")
        assert "it is stopped by a signal or a debugger\n" in first[1]


def traces(_: Communicator) -> tuple[int, set[str], list[str]]:
    """This process's id, the memory files it maps, and its open files in /dev/shm."""
    mapped = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if "/dev/shm" in line or "parallel_llama (" in line
    }
    held = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return os.getpid(), mapped, [name for name in held if "/dev/shm" in name]


def test_no_name_is_left_in_dev_shm_even_after_sigkill():
    before = set(Path("/dev/shm").iterdir())
    with Ranks(2, shared_memory=True) as pool:
        pool.run(race, 3, 20, 0.0)
        found = pool.run(traces)
    for _, mapped, held in found:
        assert mapped == {"/memfd:parallel_llama (deleted)"}
        assert held == []
    ours = ("parallel_llama", *(str(pid) for pid, _, _ in found))
    new = set(Path("/dev/shm").iterdir()) - before
    assert [path for path in new if any(word in path.name for word in ours)] == []


def test_two_concurrent_groups_do_not_mix(ranks):
    with Ranks(2, shared_memory=True) as other, ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(r.run, race, seed, 500, 0.0) for seed, r in ((1, ranks(2)), (2, other))]
        for run in runs:
            run.result()


def share_again(comm: Communicator, spoiled_rank: int, what: str) -> str:
    """Sets up again with something missing on one rank; returns the kind of group."""
    assert isinstance(comm, SharedMemory)
    monkeypatch = pytest.MonkeyPatch()
    if comm.rank == spoiled_rank:
        spoils = {
            "processor": ("_is_supported", lambda: False),
            "host": ("host_id", lambda: f"host {comm.rank}"),
            "open": ("_map", lambda *_: None),
            "watch": ("Peers", _refuse),
        }
        monkeypatch.setattr(shared_memory, *spoils[what])
    with monkeypatch.context():
        again = share(comm._leave.__self__, Timeouts())
    monkeypatch.undo()
    assert int(again.all_reduce(torch.tensor([comm.rank]))) == sum(range(comm.size))
    return "same" if again is comm._leave.__self__ else type(again).__name__


def share_without(comm: Communicator, limit: int, room: int) -> str:
    """Sets up again with a resource limit of rank 0; returns the kind of group."""
    assert isinstance(comm, SharedMemory)
    soft, hard = resource.getrlimit(limit)
    if comm.rank == 0:
        resource.setrlimit(limit, (room, hard))
    try:
        again = share(comm._leave.__self__, Timeouts())
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert int(again.all_reduce(torch.tensor([comm.rank]))) == sum(range(comm.size))
    return "same" if again is comm._leave.__self__ else type(again).__name__


@pytest.mark.parametrize(
    ("limit", "room"), [(resource.RLIMIT_FSIZE, 1 << 16), (resource.RLIMIT_NOFILE, 0)]
)
def test_all_ranks_use_gloo_if_rank_0_cannot_create_memory(ranks, limit, room):
    """Regression: rank 0 raised an OSError, and the other ranks waited for 60 s."""
    assert ranks(2).run(share_without, limit, room) == ["same", "same"]


def _refuse(_: dict[int, int]) -> Peers:
    raise PermissionError("not here")


@pytest.mark.parametrize("spoiled_rank", [0, 1])
@pytest.mark.parametrize("what", ["processor", "host", "open", "watch"])
def test_all_ranks_use_gloo_if_one_rank_cannot_share_memory(ranks, spoiled_rank, what):
    """If only that rank used gloo, ranks of the two kinds would wait for each other forever."""
    assert ranks(2).run(share_again, spoiled_rank, what) == ["same", "same"]


def test_ranks_that_can_share_memory_use_it(ranks):
    assert ranks(2).run(share_again, 5, "open") == ["SharedMemory", "SharedMemory"]


def map_with_another_token(_: Communicator) -> bool:
    fd, _ = shared_memory._create(shared_memory._total_bytes(2))
    host = shared_memory._RankInfo.here("here", fd, "an offer")
    refused = (
        shared_memory._map(host.pid, host.fd, host.token, shared_memory._total_bytes(2)) is None
    )
    os.pwrite(fd, b"an offer", shared_memory._TOKEN_OFFSET)
    accepted = (
        shared_memory._map(host.pid, host.fd, host.token, shared_memory._total_bytes(2)) is not None
    )
    too_short = (
        shared_memory._map(host.pid, host.fd, host.token, shared_memory._total_bytes(3)) is None
    )
    os.close(fd)
    return refused and accepted and too_short


def test_only_the_memory_that_rank_0_offered_is_mapped(ranks):
    assert ranks(2).run(map_with_another_token) == [True, True]


def policy(comm: Communicator, cores: list[set[int]], quota: float) -> WaitPolicy:
    assert isinstance(comm, SharedMemory)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores[comm.rank])
        monkeypatch.setattr(cgroups, "_cpu_quotas", lambda _: [quota])
        again = share(comm._leave.__self__, Timeouts())
    assert isinstance(again, SharedMemory)
    return again._policy


@pytest.mark.parametrize(
    ("cores", "quota", "expected"),
    [
        ([{0, 1}, {0, 1}], 2.0, WaitPolicy.SPIN),
        ([{0}, {700}], 1.0, WaitPolicy.SPIN),
        ([{3}, {3}], 8.0, WaitPolicy.YIELD),
        ([{0, 1}, {0, 1}], 1.5, WaitPolicy.SLEEP),
        ([{0}, {1}], 0.5, WaitPolicy.SLEEP),
    ],
)
def test_ranks_spin_only_where_each_has_a_core(ranks, cores, quota, expected):
    """Two ranks pinned to a core each see one core, and still have two together."""
    assert ranks(2).run(policy, cores, quota) == [expected] * 2


class Pressed(Exception):
    pass


def interrupt_the_wait(comm: Communicator) -> tuple[float, str]:
    if comm.rank == 1:
        return 0.0, ""

    def press(_: int, __: FrameType | None) -> None:
        raise Pressed

    signal.signal(signal.SIGALRM, press)
    started = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        comm.all_reduce(torch.ones(1))
    except Pressed:
        waited = time.monotonic() - started
    try:
        comm.all_reduce(torch.ones(1))
    except RankError as error:
        return waited, str(error)
    raise AssertionError("a group that is out of step went on")


def test_wait_is_interruptible_and_leaves_the_group_unusable():
    with Ranks(2, shared_memory=True) as pool:
        waited, message = pool.run(interrupt_the_wait)[0]
    assert waited < SOON_S
    assert message.startswith("rank 0 left a collective unfinished")


def meet_and_leave(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 0:
        os._exit(0)
    try:
        comm.barrier()
    except RankError as error:
        assert str(error).startswith("rank 0 of 2 has died or left")
    else:
        raise AssertionError("nobody was there")


def test_barrier_completes_although_a_rank_exits_right_after_it():
    with Ranks(2, shared_memory=True) as pool:
        assert pool.outcomes(meet_and_leave)[1] is None


def stop_itself(_: Communicator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def compute_for_long(comm: Communicator) -> None:
    with comm.computing():
        time.sleep(SILENCE_S)


def compute_and_idle(comm: Communicator) -> None:
    with comm.computing():
        pass
    time.sleep(4)


def overlap_and_idle(comm: Communicator) -> None:
    """As two threads: the context that was entered first is left first."""
    with ExitStack() as second, comm.computing():
        second.enter_context(comm.computing())
    time.sleep(4)


def idle_and_compute(comm: Communicator) -> None:
    time.sleep(1.95)
    with comm.computing():
        time.sleep(0.65)


def step_and_hang(comm: Communicator) -> None:
    with comm.computing():
        with comm.computing():
            comm.broadcast(torch.zeros(1), no_timeout=True)
        time.sleep(SILENCE_S)


def wait_for_rank_0(comm: Communicator, what_it_does: Callable[[Communicator], None]) -> str:
    comm.barrier()
    if comm.rank == 0:
        what_it_does(comm)
    call_late_after(comm, 1.5)
    try:
        if what_it_does is step_and_hang:
            comm.broadcast(torch.zeros(1), no_timeout=True)
        comm.broadcast(torch.zeros(1), no_timeout=True)
    except RankError as error:
        return str(error)
    return "it came"


def test_stopped_rank_is_late_even_without_timeout():
    """Rank 0 may wait for a user for hours, but its process must not be stopped."""
    with Ranks(2, shared_memory=True) as pool:
        message = pool.outcomes(wait_for_rank_0, stop_itself, lost=[0])[1]
        assert message.startswith("rank 0 of 2 is late") and "stopped by a signal" in message


@pytest.mark.parametrize(
    ("what_it_does", "lost", "outcome"),
    [
        (compute_for_long, [0], "rank 0 of 2 is late: no progress for 1.5 s"),
        (compute_and_idle, [], "it came"),
        (overlap_and_idle, [], "it came"),
        (idle_and_compute, [], "it came"),
        (step_and_hang, [0], "rank 0 of 2 is late: no progress for 1.5 s"),
    ],
)
def test_no_timeout_wait_limits_computing_but_not_idling(what_it_does, lost, outcome):
    """Regression: after two contexts that overlapped, an idle rank was late.

    Up to a second of idling counted, so a rank that then computed was late too early.
    """
    with Ranks(2, shared_memory=True) as pool:
        assert pool.outcomes(wait_for_rank_0, what_it_does, lost=lost)[1].startswith(outcome)


def sleep_through_a_stop(comm: Communicator, seconds: float) -> str:
    """Rank 1 waits for rank 0; meanwhile both are stopped for longer than the timeout."""
    comm.barrier()
    call_late_after(comm, 3)
    if comm.rank == 0:
        time.sleep(seconds)
    comm.barrier()
    return "both went on"


def test_stopping_all_ranks_makes_no_rank_late():
    """Regression: the time between Ctrl-Z and fg counted as waiting, and ended the chat."""
    with Ranks(2, shared_memory=True) as pool, ThreadPoolExecutor(1) as thread:
        running = thread.submit(pool.outcomes, sleep_through_a_stop, 1.0)
        time.sleep(0.5)
        for number, pause_s in ((signal.SIGSTOP, 4.0), (signal.SIGCONT, 0.0)):
            for process in pool.processes:
                os.kill(process.pid, number)
            time.sleep(pause_s)
        assert running.result() == ["both went on"] * 2


def reduce_many_sizes(comm: Communicator) -> int:
    assert isinstance(comm, SharedMemory)
    for n in range(1, 400):
        comm.all_reduce(torch.ones(n))
    return len(comm._views)


def test_number_of_cached_slot_views_is_bounded(ranks):
    assert all(0 < n <= shared_memory.MAX_VIEWS < 399 for n in ranks(2).run(reduce_many_sizes))


def n_stack_files() -> int:
    """The open descriptors of files of stacks."""
    links = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum(STACKS_NAME in str(link) for link in links)


def use_after_close(comm: Communicator) -> None:
    assert isinstance(comm, SharedMemory)
    before = n_stack_files()
    again = share(comm._leave.__self__, Timeouts())
    assert isinstance(again, SharedMemory)
    again._leave = lambda: None  # the pool's own group stays open
    again.close()
    again.close()
    assert n_stack_files() == before
    with pytest.raises(RankError, match="has closed its group"):
        again.barrier()


def test_a_closed_group_refuses_further_collectives(ranks):
    ranks(2).run(use_after_close)


def test_peers_report_a_dead_process_before_it_is_reaped():
    """os.kill(pid, 0) succeeds for a zombie process."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = Peers({4: child.pid})
    peers.poll()
    assert peers.gone == set()
    child.kill()
    deadline = time.monotonic() + SOON_S
    while not peers.gone and time.monotonic() < deadline:
        peers.poll()
    assert peers.gone == {4}
    os.kill(child.pid, 0)
    child.wait()
    peers.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 4096,
        b"{}",
        b'{"host":"h","pid":"../1","fd":3,"token":"t","cores":"f"}',
        b'{"host":"h","pid":1,"fd":3,"token":"t","cores":"0x"}',
        b"\xff",
    ],
)
def test_invalid_host_description_of_a_rank_is_refused(sent):
    """Regression: brackets caused a RecursionError, and a process id could be any path."""
    row = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    with pytest.raises(RankError, match="invalid description of its host"):
        shared_memory._RankInfo.decode(row)
