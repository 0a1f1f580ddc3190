"""Starts ranks as processes of this host, watches them and ends them. Does not import torch.

`run_ranks` is a launcher like torchrun: all ranks are child processes. A process that usually is
rank 0 itself starts the other ranks with `LocalRanks`, which also starts spares: idle processes
that replace lost ranks. When the starting process ends for any reason, all its ranks end.

The ranks get torchrun's environment variables. They connect on loopback only: the starting process
binds a socket to 127.0.0.1, and rank 0 listens on it. They inherit the secret of the run in an
open, unnamed file; they refuse values that a process without the secret has written to the store.
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from parallel_llama.errors import UsageError
from parallel_llama.parallel import rank_env
from parallel_llama.parallel.cgroups import cpu_cores
from parallel_llama.parallel.child_process import module_command, python_path, starting
from parallel_llama.parallel.failures import (
    MAX_REPORT_BYTES,
    WRONG_USE,
    RankError,
    Report,
    open_stdin,
    read_report,
)
from parallel_llama.parallel.rank_stacks import (
    STACKS_FD,
    STACKS_NAME,
    StackFile,
    gather_stacks,
    leave_to_launcher,
    own_stack_file,
)

MAX_RANKS = 1024

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # from a supervisor, and from a closed terminal

_SETTLED_S = 10.0  # a spare that ends sooner probably cannot run on this host
_MAX_UNSETTLED = 3  # after this many such spares in a row, no spare is started

_POLL_S = 0.02
_TERM_GRACE_S = 1.0
_LAST_REPORTS_S = 0.5  # for the other ranks to detect the end of a rank and report it
_CTRL_C_LIMIT_S = 4.0  # from the first Ctrl-C to the end of a program that is not interactive


@dataclass
class _Rank:
    """A process that is a rank, or a spare.

    Args:
        number: its current rank, counted among the ranks that still run.
        full_rank: its rank in the full group, before any rank was lost.
        files: closes the files that were opened for it.
        is_unsettled: it is or was a spare, and `_SETTLED_S` have not passed since `ready_s`.
        ready_s: when it became ready or replaced a rank, in monotonic seconds; infinite before.
    """

    number: int
    process: subprocess.Popen[bytes]
    report_file: IO[bytes]
    stacks: StackFile
    full_rank: int
    files: ExitStack = field(default_factory=ExitStack)
    is_unsettled: bool = False
    ready_s: float = math.inf

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_ready(self) -> bool:
        """Whether the process runs and has written to its stack file.

        A rank writes to it when it joins, and a spare when it waits for an order.
        """
        return not self.has_ended and self.stacks.n_bytes() > 0

    def report(self) -> Report | None:
        return read_report(os.pread(self.report_file.fileno(), MAX_REPORT_BYTES, 0))

    def ending(self) -> str:
        """How the process ended, as the end of a sentence about the rank."""
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"


@dataclass
class _Signals:
    """The signals that this process has received.

    Args:
        ended_by: the number of the last ending signal.
        interrupted_s: the time of the first Ctrl-C, in monotonic seconds.
    """

    ended_by: int | None = None
    interrupted_s: float | None = None

    def deadline(self, interactive: bool) -> float:
        """When all ranks must have ended because of a Ctrl-C, in monotonic seconds."""
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
    log_dir: str | None = None,
) -> int:
    """Runs `python -m module *arguments` as `nproc` ranks of this host; returns the exit code.

    The exit code is that of the rank that failed first, 1 if a signal killed that rank, 130 after
    Ctrl-C, 143 after SIGTERM and 129 after SIGHUP. Only rank 0 has the stdin and stdout of this
    process; all ranks inherit its other inheritable files. The settings of the terminal are
    restored. It must be called from the main thread, which receives signals; if that thread ends,
    the ranks are killed.

    Args:
        threads: OMP_NUM_THREADS of each rank, unless the environment sets it.
        interactive: rank 0 decides what Ctrl-C does; otherwise all ranks end within 4 s of it.
        log_dir: the parent of the folder with the ranks' stacks, made after a failure.

    Raises: UsageError if nproc is not 1 to MAX_RANKS; RankError if the system cannot start ranks.
    """
    if not 1 <= nproc <= MAX_RANKS:
        raise UsageError(f"nproc={nproc}: use 1 to {MAX_RANKS} ranks")
    command = module_command(module, *arguments)
    ranks: list[_Rank] = []
    with _terminal_restored(), _recorded_signals() as signals, ExitStack() as reports:
        try:
            token = secrets.token_bytes(rank_env.SECRET_BYTES)
            with starting("ranks"), _loopback_socket() as store, _secret_file(token) as secret:
                common = _environment(nproc, threads, store.getsockname()[1], secret)
                store_fd, inherited = store.fileno(), [secret.fileno(), *_inherited_files()]
                env = {**common, rank_env.STORE_FD: str(store_fd)}
                options: dict[str, Any] = {"preexec_fn": partial(_before_exec, os.getpid())}
                ranks.append(_start(0, command, env, reports, [store_fd, *inherited], **options))
                before_exec = partial(_before_exec, os.getpid(), ignores_ctrl_c=True)
                options = {"stdin": subprocess.DEVNULL, "preexec_fn": before_exec}
                for number in range(1, nproc):
                    ranks.append(_start(number, command, common, reports, inherited, **options))
            return _watch(ranks, signals, interactive, log_dir)
        finally:
            _end(ranks, signals.deadline(interactive))


class LocalRanks:
    """Ranks that a running process starts on its host; by default the process itself is rank 0.

    Each rank runs `python -m module` and reads `settings`, one line of JSON, from its stdin, which
    is closed when this process ends; further lines are orders (see `regroup`). The output of the
    ranks goes to stderr, except that of rank 0.

    Spares are idle processes. A spare gets an order when it replaces a lost rank.

    Args:
        first: the first rank to start; 0 if this process is not a rank.
        inherited: other files that the ranks inherit.
        n_spares: how many spares are started with the ranks.
        spare_arguments: arguments of the module by which a spare knows that it is a spare.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        size: int,
        threads: int,
        *,
        first: int = 1,
        inherited: Sequence[int] = (),
        n_spares: int = 0,
        spare_arguments: Sequence[str] = (),
    ) -> None:
        self._ranks: list[_Rank] = []
        self._spares: list[_Rank] = []
        self._full_ranks = range(first, size)
        self._n_processes = len(self._full_ranks) + n_spares
        # How many spares in a row ended before they had settled, and why the last one ended.
        self._n_unsettled, self._why_ended = 0, ""
        leave_to_launcher()
        open_stdin()
        command = module_command(module)
        self._spare_command = [*command, *spare_arguments]
        self._settings = json.dumps(settings).encode() + b"\n"
        try:
            secret = secrets.token_bytes(rank_env.SECRET_BYTES)
            with _loopback_socket() as store, _secret_file(secret) as file:
                port = store.getsockname()[1]
                common = _environment(size, threads, port, file)
                for number in self._full_ranks:
                    files, env = [file.fileno(), *inherited], common
                    if number == 0:
                        files.append(store.fileno())
                        env = {**common, rank_env.STORE_FD: str(store.fileno())}
                    self._ranks.append(self._start(number, command, env, files))
                listen_fd = os.dup(store.fileno()) if first else None
                self.env = rank_env.RankEnv(
                    0,
                    size,
                    "127.0.0.1",
                    port,
                    listen_fd=listen_fd,
                    run=rank_env.run_in({**os.environ, **common}),
                    secret=secret,
                )
                # Spares do not connect to the store.
                self._spare_env = {k: v for k, v in common.items() if k != rank_env.SECRET_FD}
            if n_spares:
                self.keep_spares()
        except BaseException:
            self.end()
            raise

    def require_alive(self, within_s: float = 0.0) -> None:
        """Waits `within_s` seconds; returns if no rank ends meanwhile.

        Raises: RankError naming a rank that has ended, with its message if it has left one. A rank
            that crashed while it wrote its stacks is not named, because it wrote them for a report
            that another rank has caused.
        """
        ended = [rank for rank in self._ended(within_s) if not rank.stacks.has_crashed_in_dump()]
        if ended:
            raise RankError(self._verdict(ended))

    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank.number: rank.process.pid for rank in self._ranks}

    def spare_pids(self) -> list[int]:
        """Process ids of the spares."""
        return [spare.process.pid for spare in self._spares]

    def drop_ended(self, within_s: float) -> str | None:
        """Removes the ranks that have ended, and renumbers the other ranks in order.

        Args:
            within_s: how long to wait for a rank to end, in seconds.

        Returns: why the ranks have ended; None if all are alive.
        """
        ended = self._ended(within_s)
        if not ended:
            return None
        why = "; ".join(self._verdict([rank], with_stacks=False) for rank in ended)
        for rank in ended:
            self._ranks.remove(rank)
            self._forget(rank)
        self._renumber()
        return why

    def keep_spares(self) -> str | None:
        """Starts a spare for every rank that is lost and every spare that has ended.

        It returns immediately; `can_grow` says when a spare is ready.

        Returns: normally None. No more spares are started after _MAX_UNSETTLED in a row could not
            be started or ended before they had settled; then one call returns why the last failed.
        """
        for rank in [*self._ranks, *self._spares]:
            self._settle(rank)
        for spare in [spare for spare in self._spares if spare.has_ended]:
            self._spares.remove(spare)
            self._forget(spare)
        while self._n_unsettled < _MAX_UNSETTLED and self._n_missing() > 0:
            try:
                self._spares.append(self._start_spare())
            except OSError as error:
                self._n_unsettled, self._why_ended = self._n_unsettled + 1, str(error)
        if self._n_unsettled < _MAX_UNSETTLED or not self._n_missing():
            return None
        why, self._why_ended = self._why_ended, ""
        return why or None

    def _n_missing(self) -> int:
        return self._n_processes - len(self._ranks) - len(self._spares)

    def can_grow(self) -> bool:
        """Whether a spare is ready to replace a lost rank."""
        return len(self._ranks) < len(self._full_ranks) and any(s.is_ready for s in self._spares)

    def take_spares(self) -> int:
        """Replaces lost ranks by spares that are ready, and renumbers the ranks.

        Returns: the number of ranks that were replaced.
        """
        lost_ranks = [
            n for n in self._full_ranks if n not in {rank.full_rank for rank in self._ranks}
        ]
        ready_spares = [spare for spare in self._spares if spare.is_ready]
        replacements = list(zip(lost_ranks, ready_spares, strict=False))
        for full_rank, spare in replacements:
            self._spares.remove(spare)
            spare.full_rank, spare.is_unsettled, spare.ready_s = full_rank, True, time.monotonic()
            self._ranks.append(spare)
        self._renumber()
        return len(replacements)

    def await_spares(self, limit_s: float) -> None:
        """Waits until all spares are ready or have ended, at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if all(spare.is_ready or spare.has_ended for spare in self._spares):
                return
            time.sleep(_POLL_S)

    def send_order(self, rank: int, line: bytes) -> None:
        """Writes an order to the stdin of a rank. No-op if the rank has ended."""
        _write(self._ranks[rank - 1], line)

    def end(self) -> None:
        """Ends the ranks and spares that still run. It may be called twice."""
        processes = [*self._ranks, *self._spares]
        for process in processes:
            _close_stdin(process)
        _end(processes, time.monotonic() + _TERM_GRACE_S)
        for process in processes:
            process.files.close()
        self._ranks, self._spares = [], []

    def _start(
        self, number: int, command: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> _Rank:
        # No preexec_fn: this process has threads, and code between fork and exec would run without
        # them.
        options = {"stdin": subprocess.PIPE, **rank_env.beyond_ctrl_c()}
        with ExitStack() as opened:
            rank = _start(number, command, env, opened, files, **options)
            rank.files = opened.pop_all()
        _write(rank, self._settings)
        return rank

    def _start_spare(self) -> _Rank:
        number = self._full_ranks[-1]  # until it replaces a rank
        spare = self._start(number, self._spare_command, self._spare_env, ())
        spare.is_unsettled = True
        return spare

    def _settle(self, rank: _Rank) -> None:
        """Updates `ready_s` and `is_unsettled` of a rank or spare."""
        now = time.monotonic()
        if rank.is_unsettled and rank.ready_s == math.inf and rank.is_ready:
            rank.ready_s = now
        if rank.is_unsettled and now - rank.ready_s > _SETTLED_S:
            rank.is_unsettled, self._n_unsettled = False, 0

    def _forget(self, rank: _Rank) -> None:
        """Closes the files of a rank or spare that has ended."""
        self._settle(rank)
        if rank.is_unsettled:
            report = rank.report()
            self._n_unsettled += 1
            self._why_ended = rank.ending() if report is None else report.message
        _close_stdin(rank)
        rank.files.close()

    def _renumber(self) -> None:
        self._ranks.sort(key=lambda rank: rank.full_rank)
        for number, rank in enumerate(self._ranks, self._full_ranks.start):
            rank.number = number
        self.env = replace(self.env, size=self._full_ranks.start + len(self._ranks))

    def _ended(self, within_s: float) -> list[_Rank]:
        """Waits up to `within_s` seconds for a rank to end. Returns: the ranks that have ended."""
        deadline = time.monotonic() + within_s
        while True:
            ended = [rank for rank in self._ranks if rank.has_ended]
            if ended or time.monotonic() >= deadline:
                return ended
            time.sleep(_POLL_S)

    def _verdict(self, ended: Sequence[_Rank], with_stacks: bool = True) -> str:
        reports = _reports(ended)
        without_report = [rank for rank in ended if rank.number not in reports]
        if without_report:
            first = without_report[0]
            stacks = _stacks(self._ranks, [first.number]) if with_stacks else ""
            return f"rank {first.number} of {self.env.size} {first.ending()}{stacks}"
        number = next(iter(reports))
        return f"rank {number} of {self.env.size}: {reports[number].message}"


def threads_per_rank(nproc: int, root: Path = Path("/")) -> int:
    """The cores that this process may use divided by `nproc`, at least 1."""
    return max(1, int(cpu_cores(root)) // nproc)


def unblock_ctrl_c() -> None:
    """Unblocks SIGINT, which the launcher blocks while rank 0 starts. Rank 0 must call it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _loopback_socket() -> socket.socket:
    """A socket on loopback that refuses connections until rank 0 listens at it."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


def _secret_file(secret: bytes) -> IO[bytes]:
    """An unnamed file with the secret.

    An environment variable would also be inherited by the processes that ranks start.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115, the caller closes it
    file.write(secret)
    file.flush()
    return file


def _environment(nproc: int, threads: int, port: int, secret: IO[bytes]) -> dict[str, str]:
    """The environment of all ranks; OMP_NUM_THREADS and the log level of this process are kept."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # When a rank has died, torch's store prints a warning with a stack trace.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "PYTHONPATH": python_path(),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        rank_env.SECRET_FD: str(secret.fileno()),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _start(
    number: int,
    command: Sequence[str],
    common: Mapping[str, str],
    opened_files: ExitStack,
    inherited: Sequence[int] = (),
    **popen_options: Any,
) -> _Rank:
    report = opened_files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115, closed there
    stacks = os.memfd_create(STACKS_NAME)
    opened_files.callback(os.close, stacks)
    env = {
        **common,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        STACKS_FD: str(stacks),
        # The file is unnamed, so it disappears with its last descriptor.
        "TORCHELASTIC_ERROR_FILE": f"/dev/fd/{report.fileno()}",
    }
    stdout = None if number == 0 else 2  # the descriptor of stderr
    passed_fds = [report.fileno(), stacks, *inherited]
    process = subprocess.Popen(
        command, env=env, stdout=stdout, pass_fds=passed_fds, **popen_options
    )
    return _Rank(number, process, report, StackFile(process.pid, stacks), number)


def _inherited_files() -> list[int]:
    """Inheritable descriptors from the parent of this process, such as a shell's <(...)."""
    fds = []
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the descriptor of the folder, which is closed
            if int(path.name) > 2 and os.get_inheritable(int(path.name)):
                fds.append(int(path.name))
    return fds


def _before_exec(parent: int, ignores_ctrl_c: bool = False) -> None:
    """Runs in a rank between fork and exec; makes the rank end with its parent."""
    if ignores_ctrl_c:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:  # blocked, because a Ctrl-C while Python starts would print a traceback
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    rank_env.end_with_parent()
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """Restores the terminal's settings, because a rank 0 killed at a prompt cannot restore them."""
    try:
        settings = termios.tcgetattr(0)
    except (termios.error, OSError):
        yield
        return
    try:
        yield
    finally:
        # A background process that changes the terminal would be stopped.
        with suppress(termios.error, OSError):
            if os.tcgetpgrp(0) == os.getpgrp() and termios.tcgetattr(0) != settings:
                termios.tcsetattr(0, termios.TCSADRAIN, settings)


@contextmanager
def _recorded_signals() -> Iterator[_Signals]:
    """Records Ctrl-C and the ending signals, so that they do not end this process.

    A signal that is ignored at the start stays ignored, such as Ctrl-C in a shell's background job
    or SIGHUP under nohup. The handler stays after the first Ctrl-C, because a second one would
    otherwise change the exit code of this process.
    """
    signals = _Signals()

    def record(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:
            signals.ended_by = number
        elif signals.interrupted_s is None:
            signals.interrupted_s = time.monotonic()

    old_handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, *ENDING_SIGNALS)}
    handled = [n for n, handler in old_handlers.items() if handler is not signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, record)
        yield signals
    finally:
        for number in handled:
            if number != signal.SIGINT or signals.interrupted_s is None:
                signal.signal(number, old_handlers[number])


def _watch(ranks: list[_Rank], signals: _Signals, interactive: bool, log_dir: str | None) -> int:
    """Waits for the end of all ranks, for a failure or for a signal; returns the exit code."""
    while True:
        # The reports are read before the processes are polled. A rank may report that another rank
        # has ended; if the processes were polled first, that rank could seem to run.
        has_report = any(rank.report() is not None for rank in ranks)
        running = [rank for rank in ranks if rank.process.poll() is None]
        failed = [rank for rank in ranks if rank.process.returncode not in (None, 0)]
        if signals.ended_by is not None:
            return 128 + signals.ended_by
        # A rank takes some time to end after its report. After a Ctrl-C its exit code counts.
        if failed or (has_report and signals.interrupted_s is None):
            return _verdict(ranks, failed, signals, log_dir)
        if time.monotonic() >= signals.deadline(interactive):
            return 128 + signal.SIGINT
        if not running:
            return 0
        time.sleep(_POLL_S)


def _verdict(
    ranks: list[_Rank], failed: list[_Rank], signals: _Signals, log_dir: str | None
) -> int:
    """Prints why the ranks failed, and returns the exit code of the rank that failed first.

    The first failure makes the other ranks fail too, and these may end before the rank that failed
    first. If a signal killed a rank without a report, that rank is the cause, unless it crashed
    while it wrote its stacks for the report of another rank. Otherwise the rank with the earliest
    report is.
    """
    codes = {rank.process.returncode for rank in failed}
    if codes & {-signal.SIGINT, 128 + signal.SIGINT} and signals.interrupted_s is not None:
        return 128 + signal.SIGINT
    causes = [rank for rank in failed if not rank.stacks.has_crashed_in_dump()]
    reports = _reports(ranks) if causes else _await_reports(ranks)
    if reports:
        failed = causes
    without_report = [rank for rank in failed if rank.number not in reports]
    if killed := [rank for rank in without_report if rank.process.returncode < 0]:
        ending = killed[0].ending()
        hint = "; the host may have run out of memory" if "SIGKILL" in ending else ""
        stacks = _stacks(ranks, [killed[0].number], log_dir)
        # Ranks that have not joined do not notice the end of another rank.
        exchange = _awaited_exchange(ranks) if stacks else ""
        _print_message(f"[rank {killed[0].number}] {ending}{hint}{exchange}{stacks}")
        return 1
    if not reports:
        first = without_report[0]
        if first.number > 0:  # rank 0 prints its own message
            stacks = _stacks(ranks, [first.number], log_dir)
            _print_message(f"[rank {first.number}] {first.ending()}{stacks}")
        return first.process.returncode
    number, report = next(iter(reports.items()))
    # The message of a usage error does not name the rank.
    is_usage = report.code == WRONG_USE
    _print_message(report.message if is_usage else f"[rank {number}] {report.message}")
    try:
        code = ranks[number].process.wait(_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        code = 0
    return code if code > 0 else report.code


def _stacks(ranks: Sequence[_Rank], culprits: Sequence[int], log_dir: str | None = None) -> str:
    """Message lines with the stacks of the culprits; empty if no rank had joined."""
    files = {rank.number: rank.stacks for rank in ranks}
    if not any(file.n_bytes() for file in files.values()):
        return ""
    if 0 not in files:  # rank 0 is this process
        files[0] = own_stack_file()
    return gather_stacks(files, culprits, log_dir)


def _awaited_exchange(ranks: Sequence[_Rank]) -> str:
    """A message line with the exchange that another rank reports; empty if no rank reports one.

    Takes at most _LAST_REPORTS_S seconds.
    """
    deadline = time.monotonic() + _LAST_REPORTS_S
    while True:
        is_last = time.monotonic() >= deadline or all(r.process.poll() is not None for r in ranks)
        for report in _reports(ranks).values():
            if len(lines := report.message.split("\n")) > 1:
                return f"\n{lines[1]}"
        if is_last:
            return ""
        time.sleep(_POLL_S)


def _await_reports(ranks: Sequence[_Rank]) -> dict[int, Report]:
    """As `_reports`, after a wait of at most `_TERM_GRACE_S` seconds for the first report."""
    deadline = time.monotonic() + _TERM_GRACE_S
    while not (reports := _reports(ranks)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return reports


def _reports(ranks: Sequence[_Rank]) -> dict[int, Report]:
    """Reports by rank, the earliest first."""
    reports = {rank.number: report for rank in ranks if (report := rank.report()) is not None}
    return dict(sorted(reports.items(), key=lambda item: item[1].when_ns))


def _print_message(message: str) -> None:
    sys.stderr.write(f"parallel-llama: {message}\n")
    sys.stderr.flush()


def _write(rank: _Rank, line: bytes) -> None:
    """Writes a line to the stdin of a rank, unless it has ended."""
    assert rank.process.stdin is not None
    with suppress(BrokenPipeError):
        rank.process.stdin.write(line)
        rank.process.stdin.flush()


def _close_stdin(rank: _Rank) -> None:
    assert rank.process.stdin is not None
    with suppress(OSError):  # it may hold an order that was not read
        rank.process.stdin.close()


def _end(ranks: Sequence[_Rank], deadline: float) -> None:
    """Terminates the ranks, and kills those that still run after a second.

    If the deadline is earlier than that, it kills them at the deadline.
    """
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
            rank.process.send_signal(signal.SIGCONT)  # a stopped process would not receive it
    deadline = min(deadline, time.monotonic() + _TERM_GRACE_S)
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()
