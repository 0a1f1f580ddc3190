"""Collectives by torch.distributed, for GPUs and for CPU ranks that do not share memory.

CPU tensors use gloo, and CUDA tensors use NCCL. Their errors do not name the rank that failed.
Therefore ranks write heartbeats to the store; after a failure the missing heartbeat shows which
rank died.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from parallel_llama.errors import listed_ranks
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import RankError, first_line, late
from parallel_llama.parallel.rank_stacks import own_evidence, record_stacks
from parallel_llama.parallel.sealed_store import ForgedValue
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.torch_threads import start_thread
from parallel_llama.parallel.watchdog import Watchdog

Result = TypeVar("Result")

# The limit of a broadcast without timeout: its source may wait for user input.
_IDLE_LIMIT = timedelta(days=365)

_BEAT_S = 0.2
_LISTEN_S = 10 * _BEAT_S  # a busy machine may delay a heartbeat for a second
_LOST_S = 5.0  # without a heartbeat, between collectives
_ANSWER_S = 5.0  # a store that works answers in a millisecond
_KEEPALIVE_S, _POLL_S = 1.0, 0.05
_LOOK_S = 0.1

_MAX_DIGITS = 18  # of a count


class ProcessGroup(Communicator):
    """Collectives of a process group of torch, with errors that name the ranks at fault.

    Args:
        group: its rank numbers must equal those of the world.
        store: the store at which the ranks connected.
        leave: called once, by `close`.
        abort: aborts the collectives that are queued on a GPU; None if a collective is done when
            its call returns.
        use_device: as in `Watchdog`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        timeouts: Timeouts,
        leave: Callable[[], None],
        abort: Callable[[], None] | None = None,
        use_device: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._timeouts = group, timeouts
        self._leave: Callable[[], None] | None = leave
        self._heartbeats = _Heartbeats(store, self.rank, self.size)
        record_stacks()
        self._watchdog = abort and Watchdog(
            timeouts.step_s, abort, self.culprits, evidence=self.evidence, use_device=use_device
        )
        self._n_collectives = 0
        self._last = "no collective"
        self._n_barriers = 0
        self._n_keepalives, self._keepalive_s = 0, 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        with self._naming_culprits("all_reduce", x):
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel() > 0:
            with self._naming_culprits("all_gather", x):
                own = x.contiguous().view(-1)
                work = self._group._allgather_base(gathered.view(-1), own)
                # Watching all_gathers is enough: each step ends with an all_gather.
                if self._watchdog is not None:
                    self._watchdog.add(work)
                work.wait()
        return gathered

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.broadcast(x.contiguous(), src, no_timeout=no_timeout))
        with self._naming_culprits("broadcast", x):
            if no_timeout and self.rank != src:
                self._receive(x, src)
            else:
                dist.broadcast(x, src, group=self._group)
        return x

    def barrier(self) -> None:
        """Waits at the store, where keepalives of the other ranks can be read."""
        self._n_barriers += 1
        self._heartbeats.give(f"barrier {self._n_barriers}", 1)
        keepalives: dict[int, int] = {}
        heard_s = dict.fromkeys(range(self.size), time.monotonic())
        while missing := self._heartbeats.missing(f"barrier {self._n_barriers}"):
            now = time.monotonic()
            for rank in missing:
                count = self._heartbeats.seen("keepalive", rank)
                if count > keepalives.setdefault(rank, count):
                    keepalives[rank], heard_s[rank] = count, now
            limit_s = self._timeouts.start_s
            if overdue := [rank for rank in missing if now - heard_s[rank] > limit_s]:
                self._last = f"barrier {self._n_barriers}"
                raise RankError(late(overdue, self.size, limit_s) + self.evidence())
            time.sleep(_POLL_S)

    def keepalive(self) -> None:
        now = time.monotonic()
        if now - self._keepalive_s > _KEEPALIVE_S:
            self._n_keepalives, self._keepalive_s = self._n_keepalives + 1, now
            self._heartbeats.give("keepalive", self._n_keepalives)

    def require_alive(self) -> None:
        if lost := self._heartbeats.lost_ranks():
            raise RankError(
                f"rank {listed_ranks(lost)} of {self.size} has died, is stopped or cannot be "
                f"reached: no heartbeat for {_LOST_S:g} s"
            )

    def require_whole(self) -> None:
        """Raises: RankError if the watchdog has aborted a collective of the GPU."""
        if self._watchdog is not None:
            self._watchdog.require_whole()

    def close(self) -> None:
        if self._leave is not None:
            leave, self._leave = self._leave, None
            self._heartbeats.end()
            if self._watchdog is not None:
                self._watchdog.end()
            leave()

    def _receive(self, x: Tensor, src: int) -> None:
        """Receives a broadcast without a time limit, until the connection ends."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = src, _IDLE_LIMIT
        self._group.broadcast([x], options).wait(_IDLE_LIMIT)

    @contextmanager
    def _naming_culprits(self, what: str, x: Tensor) -> Iterator[None]:
        self.require_whole()
        self._n_collectives += 1
        self._last = f"{what} of {x.numel()} values of {x.dtype}"
        try:
            yield
        except RuntimeError as error:
            self.require_whole()
            raise RankError(
                f"{what} failed on rank {self.rank} of {self.size}: {self.culprits()} "
                f"({first_line(error, 200)}){self.evidence()}"
            ) from error

    def evidence(self, current: str = "") -> str:
        """Lines with the current collective of this rank, and the folder of its stacks.

        Args:
            current: the collective; by default the last one of this group.
        """
        current = current or f"collective {self._n_collectives}, {self._last}"
        return own_evidence(self.rank, current)

    def culprits(self) -> str:
        """Which ranks are lost, in words; listens for heartbeats for `_LISTEN_S` seconds."""
        try:
            dead = self._heartbeats.dead_ranks()
        except RankError as error:
            return str(error)
        if dead:
            return f"rank {listed_ranks(dead)} has died, is stopped or cannot be reached"
        return "every rank is alive, so one is late or in another collective"


class _Heartbeats:
    """Counts that ranks publish at their store; a thread increments this rank's heartbeat.

    Counts only grow, so another process that writes an old count again has no effect.

    Raises: RankError from every method, if the store does not answer.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        # By rank: the last heartbeat, and when it was first seen.
        self._heard: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        start_thread(self._beat, "heartbeat", self._ended.set)

    def give(self, what: str, count: int) -> None:
        """Publishes a count of this rank."""
        self._ask(lambda: self._store.set(f"{what}/{self._rank}", str(count)))

    def seen(self, what: str, rank: int) -> int:
        """The last count that a rank has published, or 0."""
        return self._ask(lambda: self._read(f"{what}/{rank}"))

    def missing(self, what: str) -> list[int]:
        """The ranks that have not published a count of this name."""
        keys = {rank: f"{what}/{rank}" for rank in range(self._size)}
        return self._ask(lambda: [rank for rank, key in keys.items() if not self._read(key)])

    def dead_ranks(self) -> list[int]:
        """The other ranks without a heartbeat during the next `_LISTEN_S` seconds."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        before = {rank: self.seen("heartbeat", rank) for rank in others}
        time.sleep(_LISTEN_S)
        return [rank for rank in others if self.seen("heartbeat", rank) <= before[rank]]

    def lost_ranks(self) -> list[int]:
        """The other ranks for which these calls saw no new heartbeat for `_LOST_S` seconds."""
        now = time.monotonic()
        others = [rank for rank in range(self._size) if rank != self._rank]
        for rank in others:
            beat = self.seen("heartbeat", rank)
            if rank not in self._heard or self._heard[rank][0] < beat:
                self._heard[rank] = beat, now
        return [rank for rank in others if now - self._heard[rank][1] > _LOST_S]

    def end(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        n_beats = 0
        try:
            while not self._ended.wait(_BEAT_S):
                n_beats += 1
                self._store.set(f"heartbeat/{self._rank}", str(n_beats))
        except RuntimeError:  # the store has ended with its owner
            pass

    def _read(self, key: str) -> int:
        try:
            value = self._store.get(key) if self._store.check([key]) else b""
        except ForgedValue:  # not written by a rank
            return 0
        return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else 0

    def _ask(self, question: Callable[[], Result]) -> Result:
        try:
            return within(_ANSWER_S, question)
        except (TimeoutError, RuntimeError) as error:
            raise RankError(
                "the store of the ranks does not answer: its owner, rank 0 or torchrun's agent on "
                "its host, has died, is stopped or cannot be reached"
            ) from error


def within(
    limit_s: float, function: Callable[[], Result], look: Callable[[], None] = lambda: None
) -> Result:
    """The result of a function that runs in its own thread, with a time limit.

    Some calls of torch's store have no time limit, and never return if the owner of the store is
    stopped or cannot be reached. After the limit the function may continue to run.

    Args:
        look: called repeatedly while this waits.

    Raises: TimeoutError at the limit; whatever `function` or `look` raises.
    """
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    deadline = time.monotonic() + limit_s
    start_thread(run, "within")
    while not future.done():
        wait([future], max(0.0, min(_LOOK_S, deadline - time.monotonic())))
        if not future.done() and time.monotonic() >= deadline:
            raise TimeoutError
        look()
    return future.result()
