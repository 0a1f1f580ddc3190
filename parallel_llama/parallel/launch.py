"""The start and the end of ranks on one host, without torchrun and without torch.

The ranks get torchrun's environment and meet on loopback alone: the parent binds and listens on
127.0.0.1, rank 0 inherits that socket under the number in STORE_FD, and nothing else listens. The
parent does no rank's work. Its one invariant: when it ends, however it ends, no rank is left.
"""

import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import IO

from parallel_llama.errors import UsageError
from parallel_llama.parallel.failures import MAX_REPORT_BYTES, Report, read_report
from parallel_llama.parallel.failures import report_error as report_error

# Rendezvous data for rank 0 alone: the number of the inherited socket that listens at MASTER_PORT.
STORE_FD = "PARALLEL_LLAMA_STORE_FD"

MAX_RANKS = 1024

_LOOK_S = 0.02
_TERM_GRACE_S = 2.0
_CTRL_C_LIMIT_S = 4.0  # from the first Ctrl-C to the end of a program that is not interactive
_TWICE_S = 2.0  # two Ctrl-C within this time mean an end in any case
_TWICE_GRACE_S = 1.0  # which rank 0 may still make in its own way
_PR_SET_PDEATHSIG = 1


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    report_file: IO[bytes]

    def report(self) -> Report | None:
        data = os.pread(self.report_file.fileno(), MAX_REPORT_BYTES, 0)
        return read_report(data)


@dataclass
class _Asked:
    """What a person or a supervisor has asked of the parent. Units: monotonic seconds."""

    is_terminated: bool = False
    interrupts: list[float] = field(default_factory=list)

    def deadline(self, interactive: bool) -> float:
        """When Ctrl-C has been pressed long or often enough to end everything."""
        pressed = self.interrupts
        limits = [
            second + _TWICE_GRACE_S
            for first, second in pairwise(pressed)
            if second - first <= _TWICE_S
        ]
        if pressed and not interactive:
            limits.append(pressed[0] + _CTRL_C_LIMIT_S)
        return min(limits, default=math.inf)


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks, from torchrun's environment; (0, 1) without.

    Raises: UsageError if RANK and WORLD_SIZE are not a rank and a number of ranks.
    """
    texts = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if texts == (None, None):
        return 0, 1
    rank, size = (int(t) if t and t.isascii() and t.isdigit() else -1 for t in texts)
    if not 0 <= rank < size:
        raise UsageError(
            f"RANK={texts[0]!r} and WORLD_SIZE={texts[1]!r}: need integers, "
            "0 <= RANK < WORLD_SIZE; start with torchrun, or unset both"
        )
    return rank, size


def run_ranks(
    arguments: Sequence[str],
    nproc: int,
    threads: int,
    *,
    module: str = "parallel_llama",
    interactive: bool = False,
) -> int:
    """Run `python -m module *arguments` as `nproc` ranks of this host and return the exit code.

    The code is that of the rank that failed first, 1 if a signal ended it, 130 after Ctrl-C, 143
    after SIGTERM. Rank 0 alone has this process's stdin and stdout. It gets Ctrl-C too: what is not
    `interactive` is over 4 seconds later; in what is, rank 0 decides what Ctrl-C means, and a
    second one within 2 seconds ends everything.

    Call it from the main thread: signals arrive there, and ranks die with the thread that started
    them.

    Raises: UsageError if nproc is not 1 to MAX_RANKS.
    """
    if not 1 <= nproc <= MAX_RANKS:
        raise UsageError(f"nproc={nproc}: use 1 to {MAX_RANKS} ranks")
    command = [sys.executable, "-m", module, *arguments]
    ranks: list[_Rank] = []
    with _listening_to_signals() as asked, ExitStack() as reports:
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=max(nproc, 128)) as store:
                common = _environment(nproc, threads, store.getsockname()[1])
                for number in range(nproc):
                    report = reports.enter_context(tempfile.TemporaryFile())
                    ranks.append(_start(command, number, common, store, report))
            return _watch(ranks, asked, interactive)
        finally:
            _end(ranks, asked.deadline(interactive))


def hear_ctrl_c() -> None:
    """Let a Ctrl-C through that was pressed while rank 0 was starting; its program calls this."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _environment(nproc: int, threads: int, port: int) -> dict[str, str]:
    """What all ranks find in their environment."""
    return {
        "OMP_NUM_THREADS": str(threads),  # a person's own setting goes first
        **os.environ,
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        # The store is there already: torch must not open one of its own, which listens everywhere.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _start(
    command: list[str],
    number: int,
    common: dict[str, str],
    store: socket.socket,
    report: IO[bytes],
) -> _Rank:
    env = {
        **common,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        # The file has no name of its own, so that nothing is left of it.
        "TORCHELASTIC_ERROR_FILE": f"/dev/fd/{report.fileno()}",
    }
    inherited = [report.fileno()]
    if number == 0:
        env[STORE_FD] = str(store.fileno())
        inherited.append(store.fileno())
    process = subprocess.Popen(
        command,
        env=env,
        stdin=None if number == 0 else subprocess.DEVNULL,
        stdout=None if number == 0 else 2,  # stderr's number: stdout belongs to rank 0
        pass_fds=inherited,
        preexec_fn=_before_exec(ignores_ctrl_c=number > 0),
    )
    return _Rank(number, process, report)


def _before_exec(ignores_ctrl_c: bool) -> Callable[[], None]:
    """What a rank does before it becomes Python: from here on it cannot outlive its parent."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if ignores_ctrl_c:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:  # held back while Python starts, which would answer with a traceback
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


@contextmanager
def _listening_to_signals() -> Iterator[_Asked]:
    """Notes SIGINT and SIGTERM instead of dying of them.

    A handler is not inherited by the ranks, but an ignored signal is: where Ctrl-C is ignored, as
    in a shell's background job, it stays so.
    """
    asked = _Asked()

    def note(number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:
            asked.is_terminated = True
        else:
            asked.interrupts.append(time.monotonic())

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    noted = [n for n, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in noted:
            signal.signal(number, note)
        yield asked
    finally:
        for number in noted:
            signal.signal(number, before[number])


def _watch(ranks: list[_Rank], asked: _Asked, interactive: bool) -> int:
    """Wait until all ranks are done, one has failed, or an end is asked for; the exit code."""
    running = ranks
    while running:
        running = [rank for rank in ranks if rank.process.poll() is None]
        failed = [rank for rank in ranks if rank.process.returncode not in (None, 0)]
        if asked.is_terminated:
            return 128 + signal.SIGTERM
        if failed:
            return _verdict(ranks, failed, asked)
        if time.monotonic() >= asked.deadline(interactive):
            return 128 + signal.SIGINT
        if running:
            time.sleep(_LOOK_S)
    return 0


def _verdict(ranks: list[_Rank], failed: list[_Rank], asked: _Asked) -> int:
    """Say once why the ranks failed; the exit code of the one that began it.

    Others fail because the first one did, and may be seen to end before it. A rank that a signal
    ended left no word and is a cause; else the earliest report is.
    """
    codes = {rank.process.returncode for rank in failed}
    if codes & {-signal.SIGINT, 128 + signal.SIGINT} and asked.interrupts:
        return 128 + signal.SIGINT
    reports = {rank.number: report for rank in ranks if (report := rank.report()) is not None}
    silent = [rank for rank in failed if rank.number not in reports]
    killed = [rank for rank in silent if rank.process.returncode < 0]
    if killed:
        first = killed[0]
        name = _signal_name(-first.process.returncode)
        _say(first, f"died of {name}" + (_MEMORY_HINT if name == "SIGKILL" else ""))
        return 1
    if not reports:
        first = silent[0]
        if first.number > 0:  # rank 0 speaks for itself
            _say(first, f"ended with exit code {first.process.returncode}")
        return first.process.returncode
    first = min(
        (rank for rank in ranks if rank.number in reports),
        key=lambda rank: reports[rank.number].when_ns,
    )
    _say(first, reports[first.number].message)
    try:
        code = first.process.wait(_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        return 1
    return code if code > 0 else 1


_MEMORY_HINT = "; where nobody did that, the host ran out of memory"


def _say(rank: _Rank, message: str) -> None:
    sys.stderr.write(f"parallel-llama: [rank {rank.number}] {message}\n")
    sys.stderr.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end(ranks: list[_Rank], deadline: float) -> None:
    """End what still runs: first politely, and by force at the deadline or 2 seconds from now."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
    deadline = min(deadline, time.monotonic() + _TERM_GRACE_S)
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()
