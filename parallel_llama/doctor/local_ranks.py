"""Starts the ranks of this host for the rank checks, and outlives the ranks. No torch.

The ranks may crash, hang or be killed, because the checks look for such faults. So this process is
not a rank: it reads the results of rank 0 from a pipe, and detects ranks that have ended, are
stopped or send nothing.
"""

import json
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

import msgspec

from parallel_llama.doctor.check import CHECKS, Check
from parallel_llama.errors import ranks_do
from parallel_llama.parallel.failures import RankError
from parallel_llama.parallel.launch import LocalRanks
from parallel_llama.parallel.timeouts import Timeouts
from parallel_llama.parallel.watchdog import Peers

_MODULE = "parallel_llama.doctor.rank"
_POLL_S = 0.1
_STOPPED_S = 2.0  # a rank that is stopped for longer is reported
_LAST_REPORT_S = 2.0
_MAX_LINE_BYTES = 1 << 16
# The time that ranks may take in addition to waiting for each other: to load torch and kernels,
# and to compute the checks.
_WORK_S = 60.0


class _Results:
    """Parses the lines of rank 0, and passes each check on once; `explain` may replace a check."""

    def __init__(self, on_check: Callable[[Check], None], on_begin: Callable[[str], None]) -> None:
        self._on_check, self._on_begin = on_check, on_begin
        self.explain: Callable[[Check], Check] = lambda check: check
        self.passed_on: set[str] = set()
        self.current, self.is_done, self.last_data_s = "start", False, time.monotonic()
        self._unfinished_line = b""

    def take(self, data: bytes) -> None:
        self.last_data_s = time.monotonic()
        *lines, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
        for line in lines:
            body = json.loads(line)
            if "check" in body:
                self.pass_on(self.explain(msgspec.convert(body["check"], Check)))
            elif body.get("now") in CHECKS:
                self.current = body["now"]
                self._on_begin(self.current)
            self.is_done = self.is_done or "done" in body
        assert len(self._unfinished_line) < _MAX_LINE_BYTES

    def pass_on(self, check: Check) -> None:
        if check.id not in self.passed_on:
            self.passed_on.add(check.id)
            self._on_check(check)


def examine_here(
    size: int,
    threads: int,
    model: str | None,
    timeouts: Timeouts,
    on_check: Callable[[Check], None],
    on_begin: Callable[[str], None],
) -> None:
    """Starts `size` ranks and passes on their results; a rank that fails does not raise here.

    Args:
        model: a model with weights, or None.
        timeouts: how long a rank waits for another.
    """
    results = _Results(on_check, on_begin)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        settings = {"model": model, **asdict(timeouts), "results": writer}
        ranks = LocalRanks(_MODULE, settings, size, threads, first=0, inherited=[writer])
    except OSError as error:
        os.close(reader)
        os.close(writer)
        seen = f"ranks cannot be started: {error.strerror or error}"
        results.pass_on(Check("start", "fail", seen, "see the other checks that have failed"))
        return
    os.close(writer)
    peers = Peers(ranks.pids())
    results.explain = partial(_with_message_of_rank, ranks)
    try:
        failure = _watch(ranks, peers, reader, results, timeouts)
        if failure is not None:
            results.pass_on(failure)
    finally:
        peers.close()
        ranks.end()
        os.close(reader)


def _watch(
    ranks: LocalRanks, peers: Peers, reader: int, results: _Results, timeouts: Timeouts
) -> Check | None:
    """Reads until rank 0 is done, or ranks end, stop or hang. Returns: the failed check, if any."""
    stopped_s: dict[int, float] = {}
    pids, limit_s = ranks.pids(), max(timeouts.step_s, timeouts.start_s) + _WORK_S
    while True:
        _read(reader, results, _POLL_S)
        if results.is_done:
            return None
        now_s = time.monotonic()
        stopped = [rank for rank in pids if peers.is_stopped(rank)]
        stopped_s = {rank: stopped_s.get(rank, now_s) for rank in stopped}
        long_stopped = [rank for rank, since_s in stopped_s.items() if now_s - since_s > _STOPPED_S]
        if long_stopped:
            seen = f"{ranks_do(long_stopped, 'is', 'are')} stopped by a signal"
            remedy = f"kill -CONT {' '.join(str(pids[rank]) for rank in long_stopped)}"
            return Check(results.current, "fail", seen, remedy)
        try:
            ranks.require_alive()
        except RankError as error:
            deadline = time.monotonic() + _LAST_REPORT_S
            while not results.is_done and time.monotonic() < deadline:
                _read(reader, results, _POLL_S)
            if results.is_done:
                return None
            seen = str(error).partition("\n")[0]  # without the stacks
            return Check(results.current, "fail", seen, _remedy_for_end(seen))
        if now_s - results.last_data_s > limit_s:
            seen = f"{ranks_do(pids, 'has', 'have')} been silent for {limit_s:g} s"
            return Check(
                results.current, "fail", seen, "ps -eo pid,stat,wchan,args | grep doctor.rank"
            )


def _with_message_of_rank(ranks: LocalRanks, check: Check) -> Check:
    """If a check reports a dead rank, gives it that rank's own error message, if any."""
    if check.status == "fail" and "died" in check.seen:
        try:
            ranks.require_alive(_LAST_REPORT_S)
        except RankError as error:
            return replace(check, seen=str(error), remedy=_remedy_for_end(str(error)))
    return check


def _read(reader: int, results: _Results, wait_s: float) -> None:
    if select.select([reader], [], [], wait_s)[0]:
        with suppress(BlockingIOError):
            data = os.read(reader, 1 << 16)
            if data:
                results.take(data)
            else:  # all ranks have ended
                time.sleep(wait_s)


def _remedy_for_end(message: str) -> str:
    if "SIGKILL" in message:
        return "sudo dmesg | grep -i 'killed process' (free memory, or use fewer ranks)"
    if "SIGILL" in message or "SIGSEGV" in message:
        folder = '"${XDG_CACHE_HOME:-$HOME/.cache}"/parallel_llama/kernels'
        return f"rm -r {folder} (and run doctor again)"
    return "see the message of that rank, and docs/operations.md"
