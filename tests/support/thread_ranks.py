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


class ThreadComm(Solo):
    """One thread's handle on the group; it counts its collectives.

    Other methods do what they do for a single rank.
    """

    def __init__(self, rank: int, barrier: threading.Barrier, shelf: list[Tensor]) -> None:
        self.rank, self.size = rank, barrier.parties
        self.counts: Counter[str] = Counter()
        self._barrier, self._shelf = barrier, shelf

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
    barrier = threading.Barrier(size, timeout=200)
    shelf = [torch.empty(0)] * size
    comms = [ThreadComm(rank, barrier, shelf) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(step, comm, *args, **kwargs) for comm in comms]
        errors = []
        for future in as_completed(futures):
            error = future.exception()
            if error is not None:
                barrier.abort()
                errors.append(error)
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
