"""Two groups of the same ranks: one for tensors on GPUs, and one for tensors on the host.

The tests need no GPU: float64 tensors stand for tensors on GPUs, and use gloo with a watchdog; all
other tensors use shared memory.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from ranks import SOON_S, Ranks
from torch import Tensor
from torch.distributed import PrefixStore

from parallel_llama.parallel import communicators, process_group
from parallel_llama.parallel.collectives import (
    ByDevice,
    Communicator,
    Solo,
    broadcast_bytes,
    is_on_gpu,
)
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.process_group import ProcessGroup
from parallel_llama.parallel.shared_memory import SharedMemory
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.watchdog import Watchdog


def is_float64(x: Tensor) -> bool:
    return x.dtype == torch.float64


class Told(Solo):
    """Forwards every call, and records its name and dtype."""

    def __init__(self, group: Communicator, told: list[tuple[str, torch.dtype]]) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._told = group, told

    def all_reduce(self, x: Tensor) -> Tensor:
        self._told.append(("all_reduce", x.dtype))
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self._told.append(("all_gather", x.dtype))
        return self._group.all_gather(x)

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        self._told.append(("broadcast", x.dtype))
        return self._group.broadcast(x, src, no_timeout=no_timeout)

    def barrier(self) -> None:
        self._told.append(("barrier", torch.bool))
        self._group.barrier()


def queueing(comm: Communicator, limit_s: float, abort: Callable[[], None]) -> ProcessGroup:
    """The gloo group below shared memory, with a watchdog as for a GPU."""
    assert isinstance(comm, SharedMemory)
    gloo = comm._leave.__self__
    assert isinstance(gloo, ProcessGroup)
    store = PrefixStore(f"queueing {limit_s}", gloo._heartbeats._store)
    return ProcessGroup(gloo._group, store, Timeouts(limit_s, 30.0), lambda: None, abort)


def go_both_ways(comm: Communicator) -> list[list[tuple[str, torch.dtype]]]:
    by_host: list[tuple[str, torch.dtype]] = []
    by_gpu: list[tuple[str, torch.dtype]] = []
    aborted: list[str] = []
    gpus = queueing(comm, 20.0, lambda: aborted.append("all"))
    ways = Told(comm, by_host), Told(gpus, by_gpu)
    both = ByDevice(*ways, gpus.require_not_aborted, is_float64)
    assert (both.rank, both.size) == (comm.rank, comm.size)
    total = sum(range(1, comm.size + 1))
    for dtype in (torch.float64, torch.float32):
        mine = torch.full((3, 5), comm.rank + 1, dtype=dtype)
        x = mine.clone()
        assert both.all_reduce(x) is x and bool((x == total).all())
        gathered = both.all_gather(mine.t())
        assert gathered.shape == (comm.size, 5, 3)
        assert [int(part[4, 2]) for part in gathered] == list(range(1, comm.size + 1))
        last = comm.size - 1
        assert bool((both.broadcast(mine.clone(), src=last) == comm.size).all())
    both.keepalive()
    both.barrier()
    order = broadcast_bytes(both, b"a step" if comm.rank == 0 else None, no_timeout=True)
    assert order == b"a step" and aborted == []
    return [by_host, by_gpu]


@pytest.mark.parametrize("size", [2, 3])
def test_gpu_and_host_tensors_use_their_own_communicator(ranks, size):
    """Regression: messages and token ids of a CUDA model went through gloo, 0.4 to 0.9 ms each."""
    kinds = ["all_reduce", "all_gather", "broadcast"]
    for by_host, by_gpu in ranks(size).run(go_both_ways):
        assert by_gpu == [(kind, torch.float64) for kind in kinds]
        told = [*((kind, torch.float32) for kind in kinds), ("barrier", torch.bool)]
        assert by_host == [*told, ("broadcast", torch.int64), ("broadcast", torch.uint8)]


SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (2, 0, 3), (2, 3)]
OF_RANKS = list(product(SHAPES, (torch.float64, torch.bool, torch.bfloat16)))


def gather_shapes(comm: Communicator) -> list[Tensor]:
    gpus = queueing(comm, 20.5, lambda: None)
    return [gpus.all_gather(torch.full(shape, comm.rank, dtype=dtype)) for shape, dtype in OF_RANKS]


@pytest.mark.parametrize("size", [2, 3])
def test_every_shape_is_gathered_into_one_tensor(ranks, size):
    for gathered in ranks(size).run(gather_shapes):
        for (shape, dtype), each in zip(OF_RANKS, gathered, strict=True):
            parts = [torch.full(shape, rank, dtype=dtype) for rank in range(size)]
            assert each.dtype == dtype and torch.equal(each, torch.stack(parts))


def lose_rank_1(comm: Communicator, number: int) -> tuple[float, list[str], list[str]]:
    """The errors of the other ranks, first from the GPUs' group and then from the host's."""
    aborted: list[str] = []
    gpus = queueing(comm, 1.0, lambda: aborted.append("all"))
    both = ByDevice(comm, gpus, gpus.require_not_aborted, is_float64)
    comm.barrier()
    began = time.monotonic()
    if comm.rank == 1:
        os.kill(os.getpid(), number)
        time.sleep(1000)
    gpus._group.set_timeout(timedelta(seconds=4))  # gloo, which stands for a GPU, gives up soon
    heard = []
    for dtype in (torch.float64, torch.float32):
        try:
            both.all_gather(torch.ones(4, dtype=dtype))
        except RankError as error:
            heard.append(str(error))
    return time.monotonic() - began, heard, aborted


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_lost_during_a_gpu_collective_is_named(number):
    """Regression: the GPU waited forever, and torch's watchdog ended the process."""
    with Ranks(3, shared_memory=True) as pool:
        for rank, outcome in enumerate(pool.outcomes(lose_rank_1, number, lost=[1])):
            if rank != 1:
                waited, heard, aborted = outcome
                assert waited < SOON_S
                assert "rank 1 has died, is stopped or cannot be reached" in heard[0]
                if number == signal.SIGSTOP:
                    assert aborted == ["all"] and "(no progress for 1 s)" in heard[0]
                    assert heard[1] == heard[0]  # before the host's group is used


class FakeWork:
    """A collective that completes at check number `done_at`, or never if `done_at` is 0."""

    def __init__(self, done_at: int) -> None:
        self.n_looks, self._done_at = 0, done_at
        self.is_over = threading.Event()

    def is_completed(self) -> bool:
        self.n_looks += 1
        if self.n_looks == self._done_at:
            self.is_over.set()
        return self.is_over.is_set()


def test_watchdog_polls_each_collective_until_it_completes():
    aborted: list[str] = []
    watchdog = Watchdog(30.0, lambda: aborted.append("all"), lambda: "nobody")
    works = [FakeWork(done_at) for done_at in (1, 3, 1, 2)]
    for work in works:
        watchdog.add(work)
    assert works[-1].is_over.wait(SOON_S)
    assert [work.n_looks for work in works] == [1, 3, 1, 2]
    watchdog.require_not_aborted()
    watchdog.end()
    assert aborted == []


def test_watchdog_aborts_a_stuck_collective_only_after_the_limit():
    """The abort lets the host continue, so the failure must be set before the abort."""
    given_up = threading.Event()
    failures: list[str] = []

    def abort() -> None:
        try:
            watchdog.require_not_aborted()
        except RankError as error:
            failures.append(str(error))
        given_up.set()

    watchdog = Watchdog(0.3, abort, lambda: "rank 1 has died")
    began = time.monotonic()
    watchdog.add(FakeWork(1))
    watchdog.add(FakeWork(0))
    watchdog.require_not_aborted()
    assert given_up.wait(SOON_S) and time.monotonic() - began >= 0.3
    assert failures == ["rank 1 has died (no progress for 0.3 s)"]
    with pytest.raises(RankError, match=r"rank 1 has died \(no progress for 0\.3 s\)"):
        watchdog.require_not_aborted()


@pytest.mark.parametrize("is_heard", [True, False])
def test_process_ends_unless_the_host_notices_the_abort(is_heard):
    """A kernel that waits for a lost GPU blocks the host that waits for the kernel."""
    given_up, ended = threading.Event(), threading.Event()
    said: list[str] = []

    def end(why: str) -> None:
        said.append(why)
        ended.set()

    heard_s = 1000.0 if is_heard else 0.1
    watchdog = Watchdog(0.1, given_up.set, lambda: "rank 1 has died", heard_s, end)
    watchdog.add(FakeWork(0))
    assert given_up.wait(SOON_S)
    if is_heard:
        with pytest.raises(RankError):
            watchdog.require_not_aborted()
        watchdog.end()
    assert ended.wait(0.3 if is_heard else SOON_S) is not is_heard
    assert said == ([] if is_heard else ["rank 1 has died (no progress for 0.1 s)"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", ["blocks", "raises", "returns late"])
def test_process_ends_even_if_abort_blocks_or_raises(way):
    """Regression: NCCL's abort can wait for the lost GPU, and then the process never ended."""
    released, ended = threading.Event(), threading.Event()

    def abort() -> None:
        if way == "raises":
            raise RuntimeError("ncclCommAbort failed")
        released.wait(None if way == "blocks" else 0.5)

    watchdog = Watchdog(0.1, abort, lambda: "rank 1 has died", 0.1, lambda _: ended.set())
    watchdog.add(FakeWork(0))
    try:
        assert ended.wait(SOON_S)
    finally:
        released.set()


def test_the_threads_of_a_watchdog_use_the_gpu_of_their_rank():
    """Regression: polling a collective created a context of half a gigabyte on GPU 0."""
    users: dict[str, bool] = {}
    own = threading.local()
    aborted = threading.Event()

    class Asked(FakeWork):
        def is_completed(self) -> bool:
            users["watchdog"] = getattr(own, "is_set", False)
            return super().is_completed()

    def abort() -> None:
        users["abort"] = getattr(own, "is_set", False)
        aborted.set()

    watchdog = Watchdog(
        0.05, abort, lambda: "rank 1", use_device=lambda: setattr(own, "is_set", True)
    )
    watchdog.add(Asked(0))
    assert aborted.wait(SOON_S)
    watchdog.end()
    assert users == {"watchdog": True, "abort": True}


def test_ended_watchdog_has_no_thread():
    before = set(threading.enumerate())
    watchdog = Watchdog(30.0, lambda: None, lambda: "")
    (thread,) = set(threading.enumerate()) - before
    watchdog.end()
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_gpu_communicator_closes_before_the_host_communicator():
    """The shutdown of NCCL may still need the host communicator."""
    left: list[str] = []

    class Leaving(Solo):
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            left.append(self.name)

    ByDevice(Leaving("host"), Leaving("gpus"), lambda: None).close()
    assert left == ["gpus", "host"]


@pytest.mark.parametrize("before", [None, "1"])
def test_nccl_watchdog_variable_is_restored_and_user_value_kept(monkeypatch, before):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:  # the user has set it
        monkeypatch.setenv(name, before)
    with communicators._nccl_leaves_errors_to_us():
        assert os.environ[name] == (before or "0")
    assert os.environ.get(name) == before


def test_cpu_and_meta_tensors_are_not_on_a_gpu():
    assert not is_on_gpu(torch.ones(1)) and not is_on_gpu(torch.ones(1, device="meta"))


def wait_for_kernel(comm: Communicator) -> str:
    """The error of a rank whose kernel ends only if the watchdog aborts it."""
    is_ended = threading.Event()
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=is_ended.is_set))
    gpus = queueing(comm, 0.5, is_ended.set)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "is_on_gpu", is_float64)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        gpus.all_gather(torch.ones(4, dtype=torch.float64))
    is_ended.wait(10.0)
    try:
        gpus.require_not_aborted()
    except RankError as error:
        return str(error)
    finally:
        gpus.close()
    return "no error"


def test_collective_is_watched_until_its_kernel_ends(ranks):
    """NCCL's handle is completed after an error, and a rank waited forever for the kernel."""
    for heard in ranks(2).run(wait_for_kernel):
        assert "(no progress for 0.5 s)" in heard
