"""Collectives of torch.distributed: NCCL for GPUs, gloo for CPU ranks that do not share memory.

The errors of NCCL and gloo do not name the rank that failed. So every rank writes heartbeats to the
store; after a failure, the missing heartbeat shows which rank died.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from parallel_llama.errors import ranks_do
from parallel_llama.parallel.collectives import Communicator, is_on_gpu
from parallel_llama.parallel.failures import RankError, first_line, late
from parallel_llama.parallel.rank_stacks import own_evidence, record_stacks
from parallel_llama.parallel.sealed_store import ForgedValue
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.torch_threads import start_thread
from parallel_llama.parallel.watchdog import Watchdog

Result = TypeVar("Result")

# The timeout of a broadcast with `no_timeout`, because its source may wait for user input.
_NO_LIMIT = timedelta(days=365)

_BEAT_S = 0.2
_DEAD_S = 10 * _BEAT_S  # a busy machine may delay a heartbeat for a second
_LOST_S = 5.0  # without a heartbeat, between collectives
_IS_LOST = (
    "has died, is stopped or cannot be reached",
    "have died, are stopped or cannot be reached",
)
_ANSWER_S = 5.0  # a store that works answers in a millisecond
_KEEPALIVE_S, _POLL_S = 1.0, 0.05
_REPORTS_S = 3 * _DEAD_S  # for the other ranks to find the lost ranks, before rank 0 leaves
_WAIT_POLL_S = 0.1

_MAX_DIGITS = 18  # of a count


class EndOnGPU:
    """The end of a collective in the current stream of this thread's GPU.

    NCCL's handle is completed as soon as NCCL has found an error, such as the end of a rank on
    another host, although the kernel still waits for that rank.

    The stream must not be captured, because a captured event cannot be queried. CUDA graphs contain
    no all_gather: `plan.why_unrecorded` excludes the steps that need one.
    """

    def __init__(self, work: dist.Work) -> None:
        work.wait()  # the stream waits, and the host continues
        self._event = torch.cuda.current_stream().record_event()

    def is_completed(self) -> bool:
        return bool(self._event.query())


class ProcessGroup(Communicator):
    """Collectives of a process group of torch, with errors that name the ranks at fault.

    Args:
        group: the ranks in it must have the same numbers as in the world, torch's default group.
        store: the store of the rendezvous.
        leave: called once, by `close`.
        abort: aborts the collectives that are queued on a GPU; None on the CPU, where a collective
            is done when its call returns.
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
        self._last_collective = "no collective"
        self._n_barriers = 0
        self._n_keepalives, self._keepalive_s = 0, 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        with self._named_failures("all_reduce", x):
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel() > 0:
            with self._named_failures("all_gather", x):
                flat = x.contiguous().view(-1)
                work = self._group._allgather_base(gathered.view(-1), flat)
                # Watching all_gathers is enough: each step ends with an all_gather.
                if self._watchdog is not None:
                    self._watchdog.add(EndOnGPU(work) if is_on_gpu(x) else work)
                work.wait()
        return gathered

    def broadcast(self, x: Tensor, src: int = 0, *, no_timeout: bool = False) -> Tensor:
        if not x.is_contiguous():
            return x.copy_(self.broadcast(x.contiguous(), src, no_timeout=no_timeout))
        with self._named_failures("broadcast", x):
            if no_timeout and self.rank != src:
                self._receive(x, src)
            else:
                dist.broadcast(x, src, group=self._group)
        return x

    def barrier(self) -> None:
        """Waits at the store, where keepalives of the other ranks can be read."""
        self._n_barriers += 1
        self._heartbeats.publish(f"barrier {self._n_barriers}", 1)
        keepalives: dict[int, int] = {}
        progress_s = dict.fromkeys(range(self.size), time.monotonic())
        while missing := self._heartbeats.missing(f"barrier {self._n_barriers}"):
            now = time.monotonic()
            for rank in missing:
                count = self._heartbeats.read("keepalive", rank)
                if count > keepalives.setdefault(rank, count):
                    keepalives[rank], progress_s[rank] = count, now
            limit_s = self._timeouts.start_s
            if overdue := [rank for rank in missing if now - progress_s[rank] > limit_s]:
                self._last_collective = f"barrier {self._n_barriers}"
                raise RankError(late(overdue, self.size, limit_s) + self.evidence())
            time.sleep(_POLL_S)

    def keepalive(self) -> None:
        now = time.monotonic()
        if now - self._keepalive_s > _KEEPALIVE_S:
            self._n_keepalives, self._keepalive_s = self._n_keepalives + 1, now
            self._heartbeats.publish("keepalive", self._n_keepalives)

    def require_alive(self) -> None:
        if lost := self._heartbeats.lost_ranks():
            raise RankError(
                f"{ranks_do(lost, *_IS_LOST, self.size)}: no heartbeat for {_LOST_S:g} s"
            )

    def require_not_aborted(self) -> None:
        """Raises: RankError if the watchdog has aborted a collective of the GPU."""
        if self._watchdog is not None:
            self._watchdog.require_not_aborted()

    def close(self) -> None:
        self._heartbeats.end()
        if self._watchdog is not None:
            self._watchdog.end()
        self._leave_group()

    def _leave_group(self) -> None:
        if self._leave is not None:
            leave, self._leave = self._leave, None
            leave()

    def _receive(self, x: Tensor, src: int) -> None:
        """Receives a broadcast without a time limit, until the connection ends."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = src, _NO_LIMIT
        self._group.broadcast([x], options).wait(_NO_LIMIT)

    @contextmanager
    def _named_failures(self, what: str, x: Tensor) -> Iterator[None]:
        self.require_not_aborted()
        self._n_collectives += 1
        self._last_collective = f"{what} of {x.numel()} values of {x.dtype}"
        try:
            yield
        except RuntimeError as error:
            self.require_not_aborted()
            dead, culprits = self._dead_ranks()
            message = (
                f"{what} failed on rank {self.rank} of {self.size}: {culprits} "
                f"({first_line(error, 200)}){self.evidence()}"
            )
            if dead is not None:
                self._exchange_reports(dead)
            raise RankError(message) from error

    def _exchange_reports(self, dead: Sequence[int]) -> None:
        """Reports that this rank has found the lost ranks; rank 0 waits for the other reports.

        Rank 0 may own the store, where the other ranks read heartbeats, so rank 0 waits at most
        `_REPORTS_S` seconds for them. It leaves the group first, so that ranks in a collective
        with rank 0 detect the failure.
        """
        with suppress(RankError):  # the store has ended meanwhile
            self._heartbeats.publish("report", 1)
            if self.rank > 0:
                return
            if self._watchdog is None:
                self._leave_group()
            deadline = time.monotonic() + _REPORTS_S
            while set(self._heartbeats.missing("report")) - set(dead):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)

    def evidence(self, current: str = "") -> str:
        """Message lines with the current collective of this rank, and the folder of its stacks.

        Args:
            current: the collective; by default the last one of this group.
        """
        current = current or f"collective {self._n_collectives}, {self._last_collective}"
        return own_evidence(self.rank, current)

    def culprits(self) -> str:
        """A sentence about the lost ranks; observes heartbeats for `_DEAD_S` seconds."""
        return self._dead_ranks()[1]

    def _dead_ranks(self) -> tuple[list[int] | None, str]:
        """The ranks without a heartbeat in `_DEAD_S` seconds, and the sentence of `culprits`.

        The ranks are None if the store does not answer.
        """
        try:
            dead = self._heartbeats.dead_ranks()
        except RankError as error:
            return None, str(error)
        if dead:
            return dead, ranks_do(dead, *_IS_LOST)
        return [], "every rank is alive, so one is late or in another collective"


class _Heartbeats:
    """Named counts that ranks publish at their store; a thread increments this rank's heartbeat.

    Counts only grow, so a replay of an old count has no effect.

    Raises: RankError from every method, if the store does not answer.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        # By rank: the last heartbeat, and when it was first seen.
        self._last_seen: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        start_thread(self._beat, "heartbeat", self._ended.set)

    def publish(self, what: str, count: int) -> None:
        """Publishes this rank's count with the name `what`."""
        self._query(lambda: self._store.set(f"{what}/{self._rank}", str(count)))

    def read(self, what: str, rank: int) -> int:
        """The last count with the name `what` that a rank has published, or 0."""
        return self._query(lambda: self._count(f"{what}/{rank}"))

    def missing(self, what: str) -> list[int]:
        """The ranks that have not published a count with the name `what`."""
        keys = {rank: f"{what}/{rank}" for rank in range(self._size)}
        return self._query(lambda: [rank for rank, key in keys.items() if not self._count(key)])

    def dead_ranks(self) -> list[int]:
        """The other ranks that send no heartbeat in the next `_DEAD_S` seconds."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        before = {rank: self.read("heartbeat", rank) for rank in others}
        time.sleep(_DEAD_S)
        return [rank for rank in others if self.read("heartbeat", rank) <= before[rank]]

    def lost_ranks(self) -> list[int]:
        """The other ranks for which calls of this method saw no new heartbeat for `_LOST_S`."""
        now = time.monotonic()
        others = [rank for rank in range(self._size) if rank != self._rank]
        for rank in others:
            beat = self.read("heartbeat", rank)
            if rank not in self._last_seen or self._last_seen[rank][0] < beat:
                self._last_seen[rank] = beat, now
        return [rank for rank in others if now - self._last_seen[rank][1] > _LOST_S]

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

    def _count(self, key: str) -> int:
        try:
            value = self._store.get(key) if self._store.check([key]) else b""
        except ForgedValue:  # not written by a rank
            return 0
        return int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else 0

    def _query(self, question: Callable[[], Result]) -> Result:
        try:
            return within(_ANSWER_S, question)
        except (TimeoutError, RuntimeError) as error:
            raise RankError(
                "the store of the ranks does not answer: its owner, rank 0 or torchrun's agent on "
                "its host, has died, is stopped or cannot be reached"
            ) from error


def within(
    limit_s: float, function: Callable[[], Result], on_wait: Callable[[], None] = lambda: None
) -> Result:
    """Calls a function in a thread of its own, with a time limit; returns its result.

    Some calls of torch's store have no time limit, and never return if the owner of the store is
    stopped or cannot be reached. After the limit the function may continue to run.

    Args:
        on_wait: called repeatedly while this waits; it may raise.

    Raises: TimeoutError at the limit; the errors of `function` and `on_wait`.
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
        wait([future], max(0.0, min(_WAIT_POLL_S, deadline - time.monotonic())))
        if not future.done() and time.monotonic() >= deadline:
            raise TimeoutError
        on_wait()
    return future.result()
