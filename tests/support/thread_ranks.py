"""Ranks as threads of one process: any tp_size in milliseconds, for tests of arithmetic.

A collective is a barrier and a list. Other tests cover the communication of processes.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from parallel_llama.parallel.collectives import Solo

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Meeting:
    """What the threads of a group share; `part` are the groups of some of its ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=200)
        self.shelf = [torch.empty(0)] * size
        self._parts: dict[range, Meeting] = {}
        self._lock = threading.Lock()

    def part(self, ranks: range) -> "Meeting":
        with self._lock:
            return self._parts.setdefault(ranks, Meeting(len(ranks)))

    def abort(self) -> None:
        self.barrier.abort()
        with self._lock:
            for part in self._parts.values():
                part.abort()


class ThreadComm(Solo):
    """One thread's handle on the group; it counts its collectives.

    All other methods work as for a single rank.
    """

    def __init__(self, rank: int, meeting: "Meeting") -> None:
        self.rank, self.size = rank, meeting.size
        self.counts: Counter[str] = Counter()
        self._meeting, self._barrier, self._shelf = meeting, meeting.barrier, meeting.shelf

    def part(self, ranks: range) -> "ThreadComm":
        """This rank's handle on the group of some of the ranks, this one included."""
        return ThreadComm(self.rank - ranks.start, self._meeting.part(ranks))

    def all_reduce(self, x: Tensor) -> Tensor:
        self.counts["all_reduce"] += 1
        return x.copy_(self._exchange(x).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        self.counts["all_gather"] += 1
        return self._exchange(x)

    def broadcast(
        self,
        x: Tensor,
        src: int = 0,
        *,
        no_timeout: bool = False,  # noqa: ARG002, a thread waits anyhow
    ) -> Tensor:
        self.counts["broadcast"] += 1
        return x.copy_(self._exchange(x)[src])

    def barrier(self) -> None:
        self.counts["barrier"] += 1
        self._barrier.wait()

    def _exchange(self, x: Tensor) -> Tensor:
        """The tensors of all ranks. Shapes: [size, *x.shape]."""
        self._shelf[self.rank] = x
        self._barrier.wait()
        everything = torch.stack(self._shelf)
        self._barrier.wait()  # no rank writes its next tensor before all have read this one
        return everything


def run_on_threads(
    size: int,
    step: Callable[Concatenate[ThreadComm, Params], Result],
    *args: Params.args,
    **kwargs: Params.kwargs,
) -> list[Result]:
    """Calls `step` on every rank of a group of threads; returns one result per rank.

    Raises: the error of the first rank that failed; the other ranks stop waiting.
    """
    meeting = Meeting(size)
    comms = [ThreadComm(rank, meeting) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(step, comm, *args, **kwargs) for comm in comms]
        errors = []
        for future in as_completed(futures):
            error = future.exception()
            if error is not None:
                meeting.abort()
                errors.append(error)
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
