"""The start and the end of ranks on one host, without torchrun and without torch.

The ranks get torchrun's environment and meet on loopback alone: the parent binds a socket to
127.0.0.1, at which rank 0 listens and nobody else. They inherit a secret in an open file without a
name, by which they tell each other from any other process that reaches the socket. Rank 0 is one of
the processes that `run_ranks` starts, and the parent itself with `LocalRanks`. The one invariant:
when the parent ends, however it ends, no rank is left.
"""

import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from parallel_llama.errors import UsageError
from parallel_llama.parallel.failures import MAX_REPORT_BYTES, RankError, Report, read_report
from parallel_llama.parallel.place import (
    SECRET_BYTES,
    SECRET_FD,
    STORE_FD,
    Place,
    end_with_parent,
    run_in,
)

MAX_RANKS = 1024

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # by a supervisor, and with the terminal

WRONG_USE = 2  # the exit code of a rank whose message is about what was asked, not about the rank

_LOOK_S = 0.02
_TERM_GRACE_S = 1.0
_CTRL_C_LIMIT_S = 4.0  # from the first Ctrl-C to the end of a program that is not interactive


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    report_file: IO[bytes]

    def report(self) -> Report | None:
        return read_report(os.pread(self.report_file.fileno(), MAX_REPORT_BYTES, 0))

    def ending(self) -> str:
        """How its process ended."""
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"died of {signal.Signals(-code).name}"
        except ValueError:
            return f"died of signal {-code}"


@dataclass
class _Asked:
    """What a person or a supervisor has asked of the parent. Units: monotonic seconds."""

    ended_by: int | None = None  # the number of the signal
    interrupted_s: float | None = None

    def deadline(self, interactive: bool) -> float:
        """When everything has to end because of a Ctrl-C."""
        if self.interrupted_s is None or interactive:
            return math.inf
        return self.interrupted_s + _CTRL_C_LIMIT_S


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
    after SIGTERM, 129 after SIGHUP. Rank 0 alone has this process's stdin and stdout, and all have
    the other files that it has inherited. Rank 0 gets Ctrl-C too: what is not `interactive` is over
    4 seconds later; in what is, rank 0 alone decides what Ctrl-C means. The terminal is left as it
    was found.

    Call it from the main thread: signals arrive there, and ranks die with the thread that started
    them.

    Raises: UsageError if nproc is not 1 to MAX_RANKS.
    """
    if not 1 <= nproc <= MAX_RANKS:
        raise UsageError(f"nproc={nproc}: use 1 to {MAX_RANKS} ranks")
    command = [sys.executable, "-m", module, *arguments]
    ranks: list[_Rank] = []
    with _terminal_kept(), _listening_to_signals() as asked, ExitStack() as reports:
        try:
            secret = _secret_file(secrets.token_bytes(SECRET_BYTES))
            with _bound_socket() as store, secret:
                common = _environment(nproc, threads, store.getsockname()[1], secret)
                own, files = store.fileno(), [secret.fileno(), *_inherited_files()]
                first = {**common, STORE_FD: str(own)}
                hears = partial(_before_exec, os.getpid())
                ranks.append(_start(0, command, first, reports, [own, *files], preexec_fn=hears))
                ignores = partial(_before_exec, os.getpid(), ignores_ctrl_c=True)
                how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "preexec_fn": ignores}
                for number in range(1, nproc):
                    ranks.append(_start(number, command, common, reports, files, **how))
            return _watch(ranks, asked, interactive)
        finally:
            _end(ranks, asked.deadline(interactive))


class LocalRanks:
    """Ranks 1 and up of this host, started by the process that is rank 0 itself.

    Each runs `python -m module` and reads `settings`, one line of JSON, from its stdin, which ends
    when this process does. What they print goes to stderr.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], size: int, threads: int) -> None:
        self._reports = ExitStack()
        self._ranks: list[_Rank] = []
        command = [sys.executable, "-m", module]
        try:
            secret = secrets.token_bytes(SECRET_BYTES)
            with _bound_socket() as store, _secret_file(secret) as file:
                port = store.getsockname()[1]
                common = _environment(size, threads, port, file)
                # They run this very package, wherever it was imported from.
                paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
                common["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
                # A session of its own, which no Ctrl-C reaches; no code runs between fork and
                # exec, where the threads of this process are not there.
                how: dict[str, Any] = {"stdin": subprocess.PIPE, "start_new_session": True}
                for number in range(1, size):
                    files = [file.fileno()]
                    rank = _start(number, command, common, self._reports, files, **how)
                    self._ranks.append(rank)
                    assert rank.process.stdin is not None
                    rank.process.stdin.write(json.dumps(settings).encode() + b"\n")
                    rank.process.stdin.flush()
                bound = os.dup(store.fileno())
                self.place = Place(
                    0,
                    size,
                    "127.0.0.1",
                    port,
                    bound=bound,
                    run=run_in({**os.environ, **common}),
                    secret=secret,
                )
        except BaseException:
            self.end()
            raise

    def require_alive(self, within_s: float = 0.0) -> None:
        """Return once this time is over and none has ended.

        Raises: RankError with the reason that the first one gave before it ended.
        """
        deadline = time.monotonic() + within_s
        while True:
            ended = [rank for rank in self._ranks if rank.process.poll() is not None]
            if ended:
                raise RankError(self._verdict(ended))
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_S)

    def _verdict(self, ended: Sequence[_Rank]) -> str:
        reports = _reports(ended)
        silent = [rank for rank in ended if rank.number not in reports]
        if silent:
            return f"rank {silent[0].number} of {self.place.size} {silent[0].ending()}"
        first = next(iter(reports))
        return f"rank {first} of {self.place.size}: {reports[first].message}"

    def pids(self) -> dict[int, int]:
        """Their processes, by rank."""
        return {rank.number: rank.process.pid for rank in self._ranks}

    def end(self) -> None:
        """End them, if they have not ended; it can be called twice."""
        for rank in self._ranks:
            assert rank.process.stdin is not None
            with suppress(OSError):
                rank.process.stdin.close()
        _end(self._ranks, time.monotonic() + _TERM_GRACE_S)
        self._ranks = []
        self._reports.close()


def threads_per_rank(nproc: int, root: Path = Path("/")) -> int:
    """An equal part of the cores that this process may use, at least one.

    Those are the cores of its affinity, or as many as its container below `root` has time on.
    """
    n_cores = min([len(os.sched_getaffinity(0)), *_quotas(root / "sys" / "fs" / "cgroup")])
    return max(1, int(n_cores) // nproc)


def _quotas(cgroup: Path) -> Iterator[float]:
    """On how many cores a container has time, where it is limited; of versions 2 and 1."""
    v1 = cgroup / "cpu"
    for files in ((cgroup / "cpu.max",), (v1 / "cpu.cfs_quota_us", v1 / "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # no such container, or no limit: "max", or -1
            quota, period = " ".join(file.read_text() for file in files).split()
            if int(quota) > 0:
                yield int(quota) / int(period)


def hear_ctrl_c() -> None:
    """Let a Ctrl-C through that was pressed while rank 0 was starting; its program calls this."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _bound_socket() -> socket.socket:
    """A socket on loopback that nobody can connect to before rank 0 listens at it."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


def _secret_file(secret: bytes) -> IO[bytes]:
    """A file without a name: unlike a variable, nothing that ranks start inherits it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115, the caller closes it
    file.write(secret)
    file.flush()
    return file


def _environment(nproc: int, threads: int, port: int, secret: IO[bytes]) -> dict[str, str]:
    """What all ranks find in their environment; a person's own settings go first."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Of a rank that has died, torch's store warns with a page of its own source.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        SECRET_FD: str(secret.fileno()),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _start(
    number: int,
    command: Sequence[str],
    common: Mapping[str, str],
    reports: ExitStack,
    inherited: Sequence[int] = (),
    **how: Any,
) -> _Rank:
    report = reports.enter_context(tempfile.TemporaryFile())  # noqa: SIM115, closed there
    env = {
        **common,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        # The file has no name of its own, so that nothing is left of it.
        "TORCHELASTIC_ERROR_FILE": f"/dev/fd/{report.fileno()}",
    }
    stdout = None if number == 0 else 2  # stderr's number: stdout belongs to rank 0
    files = [report.fileno(), *inherited]
    process = subprocess.Popen(command, env=env, stdout=stdout, pass_fds=files, **how)
    return _Rank(number, process, report)


def _inherited_files() -> list[int]:
    """Open files that whoever started this process meant for it, such as a shell's <(...)."""
    numbers = []
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the folder itself, which is closed by now
            if int(path.name) > 2 and os.get_inheritable(int(path.name)):
                numbers.append(int(path.name))
    return numbers


def _before_exec(parent: int, ignores_ctrl_c: bool = False) -> None:
    """What a rank does before it becomes Python: from here on it cannot outlive its parent."""
    if ignores_ctrl_c:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:  # held back while Python starts, which would answer with a traceback
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    end_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


@contextmanager
def _terminal_kept() -> Iterator[None]:
    """Gives the terminal its settings back: a rank 0 that is killed at a prompt cannot."""
    try:
        settings = termios.tcgetattr(0)
    except (termios.error, OSError):
        yield
        return
    try:
        yield
    finally:
        # In the background it belongs to another program, and touching it would stop this one.
        with suppress(termios.error, OSError):
            if os.tcgetpgrp(0) == os.getpgrp() and termios.tcgetattr(0) != settings:
                termios.tcsetattr(0, termios.TCSADRAIN, settings)


@contextmanager
def _listening_to_signals() -> Iterator[_Asked]:
    """Notes Ctrl-C and what ends a program instead of dying of them.

    A handler is not inherited by the ranks, but an ignored signal is: where Ctrl-C is ignored, as
    in a shell's background job, or the terminal's end, as with nohup, it stays so. Once a
    Ctrl-C was noted the next ones are too: they would cost this process its exit code.
    """
    asked = _Asked()

    def note(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:
            asked.ended_by = number
        elif asked.interrupted_s is None:
            asked.interrupted_s = time.monotonic()

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, *ENDING_SIGNALS)}
    noted = [n for n, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in noted:
            signal.signal(number, note)
        yield asked
    finally:
        for number in noted:
            if number != signal.SIGINT or asked.interrupted_s is None:
                signal.signal(number, before[number])


def _watch(ranks: list[_Rank], asked: _Asked, interactive: bool) -> int:
    """Wait until all ranks are done, one has failed, or an end is asked for; the exit code."""
    while True:
        running = [rank for rank in ranks if rank.process.poll() is None]
        failed = [rank for rank in ranks if rank.process.returncode not in (None, 0)]
        if asked.ended_by is not None:
            return 128 + asked.ended_by
        if failed:
            return _verdict(ranks, failed, asked)
        if time.monotonic() >= asked.deadline(interactive):
            return 128 + signal.SIGINT
        if not running:
            return 0
        time.sleep(_LOOK_S)


def _verdict(ranks: list[_Rank], failed: list[_Rank], asked: _Asked) -> int:
    """Say once why the ranks failed; the exit code of the one that began it.

    Others fail because the first one did, and may be seen to end before it. A rank that a signal
    ended left no word and is a cause; else the earliest report is.
    """
    codes = {rank.process.returncode for rank in failed}
    if codes & {-signal.SIGINT, 128 + signal.SIGINT} and asked.interrupted_s is not None:
        return 128 + signal.SIGINT
    reports = _reports(ranks)
    silent = [rank for rank in failed if rank.number not in reports]
    if killed := [rank for rank in silent if rank.process.returncode < 0]:
        ending = killed[0].ending()
        hint = "; where nobody did that, the host ran out of memory" if "SIGKILL" in ending else ""
        _say(f"[rank {killed[0].number}] {ending}{hint}")
        return 1
    if not reports:
        first = silent[0]
        if first.number > 0:  # rank 0 speaks for itself
            _say(f"[rank {first.number}] {first.ending()}")
        return first.process.returncode
    number, report = next(iter(reports.items()))
    try:
        code = ranks[number].process.wait(_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        code = 1
    _say(report.message if code == WRONG_USE else f"[rank {number}] {report.message}")
    return code if code > 0 else 1


def _reports(ranks: Sequence[_Rank]) -> dict[int, Report]:
    """What ranks have reported, the earliest first."""
    found = {rank.number: report for rank in ranks if (report := rank.report()) is not None}
    return dict(sorted(found.items(), key=lambda each: each[1].when_ns))


def _say(message: str) -> None:
    sys.stderr.write(f"parallel-llama: {message}\n")
    sys.stderr.flush()


def _end(ranks: list[_Rank], deadline: float) -> None:
    """End what still runs: first politely, and by force at the deadline or a second from now."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
            rank.process.send_signal(signal.SIGCONT)  # a stopped one would not hear of it
    deadline = min(deadline, time.monotonic() + _TERM_GRACE_S)
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()
