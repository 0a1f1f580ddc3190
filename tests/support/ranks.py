"""A pool of rank processes for tests, which stay alive and call functions together.

A function under test is defined in a test module and takes the rank's Communicator as its first
argument. It is called on every rank, and its results are returned in rank order.
"""

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.parallel.communicators import make_communicator
from parallel_llama.parallel.process_group import ProcessGroup
from parallel_llama.parallel.timeouts import Timeouts

SILENCE_S = 200.0  # a rank without an answer for this long fails the test
SOON_S = 60.0  # generous, for a busy machine; it is not a limit of a rank
_GRACE_S = 20.0  # for the other ranks, after one rank has raised
_MAX_POOLS = 4
# A fork server imports these modules once, and every rank is forked from it. The fork server calls
# no function of the modules, so that no thread holds a lock during a fork.
_SLOW_TO_IMPORT = [
    "pytest",
    "transformers.models.llama.modeling_llama",
    "parallel_llama.engine.engine",
    "parallel_llama.parallel.communicators",
]


class RankFailed(Exception):
    """A function raised on some ranks, or a rank died or did not answer; has all tracebacks."""


@dataclass(frozen=True)
class _Raised:
    text: str


class Ranks:
    """`tp_size` processes in one group; used through the fixture `ranks`."""

    def __init__(self, tp_size: int, shared_memory: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_SLOW_TO_IMPORT)
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self.folder.name) / "store")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(tp_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, tp_size, store, shared_memory), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self.alive = True

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(comm, *args) on every rank; returns one result per rank.

        Raises: RankFailed. Unless every rank raised and all still answer, the pool ends and the
        next test gets a new one.
        """
        results = self.outcomes(function, *args)
        raised = {r: out.text for r, out in enumerate(results) if isinstance(out, _Raised)}
        if raised:
            if len(raised) < len(results) or not self._can_talk():
                self.end()
            raise RankFailed("\n".join(f"[rank {r}]\n{text}" for r, text in raised.items()))
        return results

    def _can_talk(self) -> bool:
        return self.alive and not any(isinstance(out, _Raised) for out in self.outcomes(_barrier))

    def outcomes(
        self, function: Callable[..., Any], *args: Any, lost: Collection[int] = ()
    ) -> list[Any]:
        """Like `run`, with a `_Raised` in place of the result of a rank that raised.

        It does not wait for ranks that are `lost` meanwhile; the pool cannot be used afterwards.
        """
        # Pickled here: a Connection would move tensors through files in /dev/shm.
        message = pickle.dumps((function, args))
        for connection in self.connections:
            connection.send_bytes(message)
        results: list[Any] = [None] * len(self.connections)
        waiting = {own: rank for rank, own in enumerate(self.connections) if rank not in lost}
        deadline = time.monotonic() + SILENCE_S
        while waiting:
            found = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            ready = [connection for connection in waiting if connection in found]
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    results[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    results[rank] = _Raised("the process has died")
                    self.alive = False
                if isinstance(results[rank], _Raised):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not ready:
                for rank in waiting.values():
                    results[rank] = _Raised("still silent when the wait for it ended")
                self.end()
                break
        return results

    def end(self) -> None:
        self.alive = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()
        self.folder.cleanup()


class InProcess:
    """One rank in this process."""

    alive = True

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            return [function(Solo(), *args)]
        except Exception as error:
            raise RankFailed(f"[rank 0]\n{traceback.format_exc()}") from error

    def end(self) -> None:
        pass


class Pools:
    """The pools of a test run, started at the first use; the most recent ones stay alive."""

    def __init__(self, begin: Callable[..., None] | None = None) -> None:
        """`begin` is called first on every rank of a new pool."""
        self.begin = begin
        self.pools: dict[tuple[int, bool], Ranks | InProcess] = {}

    def __call__(self, tp_size: int, shared_memory: bool = True) -> Ranks | InProcess:
        key = (tp_size, shared_memory or tp_size == 1)
        pool = self.pools.pop(key, None)
        if pool is None or not pool.alive:
            if pool is not None:
                pool.end()
            while len(self.pools) >= _MAX_POOLS:
                self.pools.pop(next(iter(self.pools))).end()
            pool = InProcess() if tp_size == 1 else Ranks(tp_size, shared_memory)
            if self.begin is not None:
                pool.run(self.begin)
        self.pools[key] = pool  # last, as the most recently used
        return pool

    def end(self) -> None:
        for pool in self.pools.values():
            pool.end()


def call_late_after(comm: Communicator, limit_s: float) -> None:
    """Limits how long this rank waits for another one, from now on.

    Pools have long limits, so that a busy machine makes no rank late. A test of lateness sets a
    short limit only while a rank is really late.
    """
    assert not isinstance(comm, Solo)
    comm._timeouts = Timeouts(limit_s, limit_s)
    if isinstance(comm, ProcessGroup):
        comm._group.set_timeout(timedelta(seconds=limit_s))


def _barrier(comm: Communicator) -> None:
    comm.barrier()


def _end_with_parent() -> None:
    """Ends this rank with a test run that is killed, even in a collective that waits."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(connection: Connection, rank: int, size: int, store: str, shared_memory: bool) -> None:
    """The main loop of a rank: calls functions until the connection or the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the test run, which ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    comm: Communicator = make_communicator(
        rank,
        size,
        FileStore(store, size),
        timeouts=Timeouts(SILENCE_S, SILENCE_S),
        shared_memory=shared_memory,
    )
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        except Exception:
            connection.send_bytes(pickle.dumps(_Raised(traceback.format_exc())))
            continue
        try:
            answer = pickle.dumps(function(comm, *args))
        except BaseException:
            answer = pickle.dumps(_Raised(traceback.format_exc()))
        connection.send_bytes(answer)
