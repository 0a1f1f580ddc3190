"""One-shot sums equal those of the group, and are used where they are correct and faster."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from thread_ranks import ThreadComm, run_on_threads
from torch import Tensor

from parallel_llama.parallel import one_shot
from parallel_llama.parallel.one_shot import (
    OneShotSums,
    symmetric_memory,
    with_one_shot_sums,
)

CPU = torch.device("cpu")
SIZES = [1 << n for n in range(10, 19, 2)]


class Made:
    """One-shot sums of a group of threads, in rank order."""

    def __init__(self, comm: ThreadComm, wrong_on: int | None = None) -> None:
        self._comm, self._wrong_on = comm, wrong_on
        self.n_shots = 0

    def __call__(self) -> Callable[[Tensor], Tensor]:
        return self.shoot

    def shoot(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32 and x.dim() == 1 and x.is_contiguous()
        self.n_shots += 1
        total = self._comm.all_gather(x).sum(0)
        return total + (self._comm.rank == self._wrong_on)


def none() -> Callable[[Tensor], Tensor]:
    raise RuntimeError("these GPUs cannot read each other's memory")


def faster_up_to(n: int) -> Callable[[Callable[[], object]], float]:
    """A clock that shows one-shot sums to be fast up to a size, and slow above it."""
    times = iter(t for size in SIZES for t in ((0.5, 1.0) if size <= n else (2.0, 1.0)))

    def seconds(call: Callable[[], object]) -> float:
        call()
        return next(times)

    return seconds


@pytest.mark.parametrize("tp_size", [2, 3, 5, 7])
def test_small_sums_use_one_shot_and_other_sums_the_group(tp_size):
    def run(comm: ThreadComm) -> None:
        made = Made(comm)
        group = with_one_shot_sums(comm, CPU, made, faster_up_to(1 << 12))
        assert isinstance(group, OneShotSums) and group.max_elements == 1 << 12
        for shape, dtype, is_shot in (
            ((3, 5), torch.float32, True),
            ((64, 64), torch.bfloat16, True),
            ((65, 64), torch.float32, False),
            ((3, 5), torch.float64, False),
            ((3, 5), torch.int32, False),
            ((3, 5), torch.int64, False),
            ((0, 5), torch.float32, False),
        ):
            before = made.n_shots
            x = torch.full(shape, comm.rank + 1).to(dtype)
            assert group.all_reduce(x) is x
            assert bool((x == math.comb(comm.size + 1, 2)).all()) and x.shape == shape
            assert made.n_shots - before == is_shot
        large = torch.tensor([(1 << 30) - 1 if comm.rank == 0 else 0], dtype=torch.int32)
        assert int(group.all_reduce(large)) == (1 << 30) - 1  # float32 rounds it to 1 << 30
        strided = torch.ones(4, 6)[:, ::2]
        assert group.all_reduce(strided) is strided and bool((strided == comm.size).all())
        assert group.all_gather(torch.ones(2)).shape == (comm.size, 2)
        assert int(group.broadcast(torch.tensor([comm.rank]), src=1)) == 1

    run_on_threads(tp_size, run)


def test_exchanges_are_timed_in_the_dtype_of_the_model():
    """Regression: float32 was timed for a bfloat16 model; its sums have half as many bytes."""

    def run(comm: ThreadComm) -> set[torch.dtype]:
        seen: set[torch.dtype] = set()

        def seconds(call: Callable[[], object]) -> float:
            total = call()
            assert isinstance(total, Tensor)
            seen.add(total.dtype)
            return 1.0

        with_one_shot_sums(comm, CPU, Made(comm), seconds, torch.bfloat16)
        return seen

    assert run_on_threads(3, run) == [{torch.bfloat16}] * 3


@pytest.mark.parametrize("is_captured", [True, False])
def test_timed_call_count_is_equal_with_and_without_a_graph(monkeypatch, is_captured):
    """Regression: calls from Python were timed, which cost more than the exchange itself."""
    n_calls, n_replays = 0, 0

    def call() -> None:
        nonlocal n_calls
        n_calls += 1

    def record(calls: Callable[[], None]) -> tuple[None, Callable[[], None]]:
        calls()
        if not is_captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        return None, replay

    def replay() -> None:
        nonlocal n_replays
        n_replays += 1

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, stop: object) -> float:
            assert stop is not self
            return 2.0

    stream = SimpleNamespace(record_event=lambda event: event)
    monkeypatch.setattr(one_shot, "GraphRecorder", lambda: record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    n_of_one = one_shot._ROUNDS
    assert one_shot.seconds_on_gpu(call) == pytest.approx(2e-3 / n_of_one)
    made = n_calls - n_of_one + n_replays * n_of_one
    assert made == one_shot._REPLAYS * n_of_one and (n_replays > 0) == is_captured


def test_one_shot_is_not_used_if_it_is_never_faster():
    def run(comm: ThreadComm) -> None:
        made = Made(comm)
        assert with_one_shot_sums(comm, CPU, made, faster_up_to(0)) is comm

    run_on_threads(3, run)


def test_slowest_gpu_limits_the_one_shot_size_of_all_ranks():
    def run(comm: ThreadComm) -> None:
        seconds = faster_up_to(1 << 10 if comm.rank == 1 else 1 << 20)
        group = with_one_shot_sums(comm, CPU, Made(comm), seconds)
        assert isinstance(group, OneShotSums) and group.max_elements == 1 << 10

    run_on_threads(3, run)


@pytest.mark.parametrize("wrong_on", [0, 2])
def test_no_rank_uses_one_shot_sums_that_are_wrong_on_one_gpu(wrong_on):
    def run(comm: ThreadComm) -> None:
        made = Made(comm, wrong_on)
        assert with_one_shot_sums(comm, CPU, made, faster_up_to(1 << 20)) is comm

    run_on_threads(3, run)


def test_no_rank_uses_one_shot_if_one_gpu_cannot_read_its_peers():
    def run(comm: ThreadComm) -> None:
        made = Made(comm)
        make = none if comm.rank == 1 else made
        assert with_one_shot_sums(comm, CPU, make, faster_up_to(1 << 20)) is comm
        assert made.n_shots == 0

    run_on_threads(3, run)


@pytest.mark.parametrize(
    ("n_visible", "unreachable"), [(3, (2, 0)), (3, (0, 1)), (2, None)], ids=str
)
def test_symmetric_memory_is_not_allocated_without_peer_access(monkeypatch, n_visible, unreachable):
    """On GPUs without peer access, torch's rendezvous ended the process with SIGFPE."""
    memory = pytest.importorskip("torch.distributed._symmetric_memory")
    allocated: list[object] = []

    def can_access(device: torch.device, other: torch.device) -> bool:
        assert device.index != other.index
        return (device.index, other.index) != unreachable

    monkeypatch.setattr(one_shot, "gpu_id", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_visible)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    monkeypatch.setattr(memory, "empty", lambda *_, **__: allocated.append(None))

    def run(comm: ThreadComm) -> None:
        own = torch.device("cpu", comm.rank)
        group = SimpleNamespace(group_name="0")
        make = partial(symmetric_memory, comm, group, own)
        assert with_one_shot_sums(comm, own, make, faster_up_to(1 << 20)) is comm

    run_on_threads(3, run)
    assert not allocated


def test_symmetric_memory_is_allocated_if_every_gpu_can_access_every_other(monkeypatch):
    memory = pytest.importorskip("torch.distributed._symmetric_memory")
    joined: list[object] = []
    monkeypatch.setattr(one_shot, "gpu_id", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(memory, "empty", lambda n, **_: torch.empty(n))
    monkeypatch.setattr(memory, "rendezvous", lambda _, group: joined.append(group))

    def run(comm: ThreadComm) -> None:
        own, group = torch.device("cpu", comm.rank), SimpleNamespace(group_name="0")
        with suppress(AttributeError):  # torch for the CPU may have no such operator
            symmetric_memory(comm, group, own)

    run_on_threads(3, run)
    assert len(joined) == 3
