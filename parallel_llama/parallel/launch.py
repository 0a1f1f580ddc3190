"""Starts and ends ranks on one host, without torchrun and without torch.

The ranks get torchrun's environment variables and connect on loopback only: the parent binds a
socket to 127.0.0.1, and rank 0 listens on it. The ranks inherit a secret in an open, unnamed file,
which distinguishes them from other processes that connect to the socket. With `run_ranks`, rank 0
is a child process; with `LocalRanks`, it is the parent unless `first` is 0. Invariant: when the
parent ends for any reason, all ranks end.
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
from parallel_llama.parallel.failures import (
    MAX_REPORT_BYTES,
    WRONG_USE,
    RankError,
    Report,
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

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # of a supervisor, and of a closed terminal

_SETTLED_S = 10.0  # a spare that ends sooner may never be able to run
_MAX_UNSETTLED = 3  # such spares in a row

_LOOK_S = 0.02
_TERM_GRACE_S = 1.0
_LAST_WORDS_S = 0.5  # in which the other ranks notice the end of a rank, and report
_CTRL_C_LIMIT_S = 4.0  # from the first Ctrl-C to the end of a program that is not interactive


@dataclass
class _Rank:
    """A process that is a rank, or a spare.

    Args:
        number: its current rank, counted among the ranks that still run.
        place: its rank in the group without losses.
        files: closes the files that were opened for it.
        is_new: whether it is a spare that has been ready, or in its place, for less than
            `_SETTLED_S`.
        ready_s: when it became ready or took its place. Units: monotonic seconds.
    """

    number: int
    process: subprocess.Popen[bytes]
    report_file: IO[bytes]
    stacks: StackFile
    place: int
    files: ExitStack = field(default_factory=ExitStack)
    is_new: bool = False
    ready_s: float = math.inf

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_ready(self) -> bool:
        """Whether the process has written to its stack file, which joining ranks and spares do."""
        return not self.has_ended and self.stacks.n_bytes() > 0

    def report(self) -> Report | None:
        return read_report(os.pread(self.report_file.fileno(), MAX_REPORT_BYTES, 0))

    def ending(self) -> str:
        """How the rank's process ended."""
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"


@dataclass
class _Asked:
    """Signals that the parent has received. Units: monotonic seconds."""

    ended_by: int | None = None  # the number of the signal
    interrupted_s: float | None = None

    def deadline(self, interactive: bool) -> float:
        """The time at which all ranks must have ended because of a Ctrl-C."""
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
        interactive: rank 0 decides what Ctrl-C does; otherwise all ranks end within 4 seconds.
        log_dir: the parent of the folder with the ranks' stacks, made after a failure.

    Raises: UsageError if nproc is not 1 to MAX_RANKS.
    """
    if not 1 <= nproc <= MAX_RANKS:
        raise UsageError(f"nproc={nproc}: use 1 to {MAX_RANKS} ranks")
    command = [sys.executable, "-m", module, *arguments]
    ranks: list[_Rank] = []
    with _terminal_kept(), _listening_to_signals() as asked, ExitStack() as reports:
        try:
            secret = _secret_file(secrets.token_bytes(rank_env.SECRET_BYTES))
            with _bound_socket() as store, secret:
                common = _environment(nproc, threads, store.getsockname()[1], secret)
                own, files = store.fileno(), [secret.fileno(), *_inherited_files()]
                first = {**common, rank_env.STORE_FD: str(own)}
                hears = partial(_before_exec, os.getpid())
                ranks.append(_start(0, command, first, reports, [own, *files], preexec_fn=hears))
                ignores = partial(_before_exec, os.getpid(), ignores_ctrl_c=True)
                how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "preexec_fn": ignores}
                for number in range(1, nproc):
                    ranks.append(_start(number, command, common, reports, files, **how))
            return _watch(ranks, asked, interactive, log_dir)
        finally:
            _end(ranks, asked.deadline(interactive))


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
        self._places = range(first, size)
        self._n_processes = len(self._places) + n_spares
        # How many spares in a row ended before they had settled, and why the last one ended.
        self._n_unsettled, self._why_ended = 0, ""
        leave_to_launcher()
        command = [sys.executable, "-m", module]
        self._spare_command = [*command, *spare_arguments]
        self._settings = json.dumps(settings).encode() + b"\n"
        try:
            secret = secrets.token_bytes(rank_env.SECRET_BYTES)
            with _bound_socket() as store, _secret_file(secret) as file:
                port = store.getsockname()[1]
                common = _environment(size, threads, port, file)
                # The ranks import the package from where this process has imported it.
                paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
                common["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
                for number in self._places:
                    files, own = [file.fileno(), *inherited], common
                    if number == 0:
                        files.append(store.fileno())
                        own = {**common, rank_env.STORE_FD: str(store.fileno())}
                    self._ranks.append(self._start(number, command, own, files))
                bound = os.dup(store.fileno()) if first else None
                self.env = rank_env.RankEnv(
                    0,
                    size,
                    "127.0.0.1",
                    port,
                    bound=bound,
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
        """Returns after `within_s` seconds if no rank has ended.

        Raises: RankError naming a rank that has ended, with its message if it has left one.
        """
        if ended := self._ended(within_s):
            raise RankError(self._verdict(ended))

    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank.number: rank.process.pid for rank in self._ranks}

    def spare_pids(self) -> list[int]:
        """Process ids of the spares."""
        return [spare.process.pid for spare in self._spares]

    def drop_ended(self, within_s: float) -> str | None:
        """Forgets the ranks that have ended and renumbers the others, in their order.

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

        It returns at once; `can_grow` says when a spare is ready.

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
        """Whether a spare is ready to take the place of a lost rank."""
        return len(self._ranks) < len(self._places) and any(s.is_ready for s in self._spares)

    def take_spares(self) -> int:
        """Puts spares that are ready into the places of lost ranks, and renumbers the ranks.

        Returns: the number of places that were taken.
        """
        lost = [n for n in self._places if n not in {rank.place for rank in self._ranks}]
        ready = [spare for spare in self._spares if spare.is_ready]
        taken = list(zip(lost, ready, strict=False))
        for place, spare in taken:
            self._spares.remove(spare)
            spare.place, spare.is_new, spare.ready_s = place, True, time.monotonic()
            self._ranks.append(spare)
        self._renumber()
        return len(taken)

    def await_spares(self, limit_s: float) -> None:
        """Waits until all spares are ready or have ended, at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if all(spare.is_ready or spare.has_ended for spare in self._spares):
                return
            time.sleep(_LOOK_S)

    def order(self, number: int, line: bytes) -> None:
        """Writes a line to the stdin of a rank; one that has ended does not read it."""
        _write(self._ranks[number - 1], line)

    def end(self) -> None:
        """Ends the ranks and spares that still run. It may be called twice."""
        processes = [*self._ranks, *self._spares]
        for each in processes:
            _close_stdin(each)
        _end(processes, time.monotonic() + _TERM_GRACE_S)
        for each in processes:
            each.files.close()
        self._ranks, self._spares = [], []

    def _start(
        self, number: int, command: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> _Rank:
        # No preexec_fn: this process has threads, and code between fork and exec would run without
        # them.
        how = {"stdin": subprocess.PIPE, **rank_env.beyond_ctrl_c()}
        with ExitStack() as opened:
            rank = _start(number, command, env, opened, files, **how)
            rank.files = opened.pop_all()
        _write(rank, self._settings)
        return rank

    def _start_spare(self) -> _Rank:
        number = self._places[-1]  # until it has a place
        spare = self._start(number, self._spare_command, self._spare_env, ())
        spare.is_new = True
        return spare

    def _settle(self, rank: _Rank) -> None:
        """Records when a new rank or spare becomes ready, and whether it has settled since."""
        now = time.monotonic()
        if rank.is_new and rank.ready_s == math.inf and rank.is_ready:
            rank.ready_s = now
        if rank.is_new and now - rank.ready_s > _SETTLED_S:
            rank.is_new, self._n_unsettled = False, 0

    def _forget(self, rank: _Rank) -> None:
        """Closes the files of a rank or spare that has ended."""
        self._settle(rank)
        if rank.is_new:
            report = rank.report()
            self._n_unsettled += 1
            self._why_ended = rank.ending() if report is None else report.message
        _close_stdin(rank)
        rank.files.close()

    def _renumber(self) -> None:
        self._ranks.sort(key=lambda rank: rank.place)
        for number, rank in enumerate(self._ranks, self._places.start):
            rank.number = number
        self.env = replace(self.env, size=self._places.start + len(self._ranks))

    def _ended(self, within_s: float) -> list[_Rank]:
        """The ranks that have ended, as soon as there are any; none after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while True:
            ended = [rank for rank in self._ranks if rank.has_ended]
            if ended or time.monotonic() >= deadline:
                return ended
            time.sleep(_LOOK_S)

    def _verdict(self, ended: Sequence[_Rank], with_stacks: bool = True) -> str:
        reports = _reports(ended)
        silent = [rank for rank in ended if rank.number not in reports]
        if silent:
            first = silent[0]
            stacks = _stacks(self._ranks, [first.number]) if with_stacks else ""
            return f"rank {first.number} of {self.env.size} {first.ending()}{stacks}"
        number = next(iter(reports))
        return f"rank {number} of {self.env.size}: {reports[number].message}"


def threads_per_rank(nproc: int, root: Path = Path("/")) -> int:
    """The cores that this process may use divided by `nproc`, at least 1."""
    return max(1, int(cpu_cores(root)) // nproc)


def hear_ctrl_c() -> None:
    """Unblocks Ctrl-C, which is blocked while rank 0 starts; the program of rank 0 calls this."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _bound_socket() -> socket.socket:
    """A socket on loopback that refuses connections until rank 0 listens at it."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


def _secret_file(secret: bytes) -> IO[bytes]:
    """The secret in an unnamed file. A variable would also reach processes that ranks start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115, the caller closes it
    file.write(secret)
    file.flush()
    return file


def _environment(nproc: int, threads: int, port: int, secret: IO[bytes]) -> dict[str, str]:
    """The environment of all ranks; OMP_NUM_THREADS and the log level may be overridden."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # When a rank has died, torch's store prints a warning with a stack trace.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
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
    reports: ExitStack,
    inherited: Sequence[int] = (),
    **how: Any,
) -> _Rank:
    report = reports.enter_context(tempfile.TemporaryFile())  # noqa: SIM115, closed there
    stacks = os.memfd_create(STACKS_NAME)
    reports.callback(os.close, stacks)
    env = {
        **common,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        STACKS_FD: str(stacks),
        # The file is unnamed, so it disappears with its last descriptor.
        "TORCHELASTIC_ERROR_FILE": f"/dev/fd/{report.fileno()}",
    }
    stdout = None if number == 0 else 2  # the descriptor of stderr
    files = [report.fileno(), stacks, *inherited]
    process = subprocess.Popen(command, env=env, stdout=stdout, pass_fds=files, **how)
    return _Rank(number, process, report, StackFile(process.pid, stacks), number)


def _inherited_files() -> list[int]:
    """Inheritable files that the parent of this process has opened, such as <(...) of a shell."""
    numbers = []
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the descriptor of the folder, which is closed
            if int(path.name) > 2 and os.get_inheritable(int(path.name)):
                numbers.append(int(path.name))
    return numbers


def _before_exec(parent: int, ignores_ctrl_c: bool = False) -> None:
    """Runs in a rank between fork and exec, so that the rank cannot outlive its parent."""
    if ignores_ctrl_c:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:  # blocked: while Python starts, it would print a traceback
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    rank_env.end_with_parent()
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


@contextmanager
def _terminal_kept() -> Iterator[None]:
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
def _listening_to_signals() -> Iterator[_Asked]:
    """Records Ctrl-C and the ending signals, so that they do not end this process.

    A signal that is ignored at the start stays ignored, such as Ctrl-C in a shell's background job
    or SIGHUP under nohup. The handler stays after the first Ctrl-C, because a second one would
    otherwise change the exit code of this process.
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


def _watch(ranks: list[_Rank], asked: _Asked, interactive: bool, log_dir: str | None) -> int:
    """Waits for the end of all ranks, for a failure or for a signal; returns the exit code."""
    while True:
        # Read the reports before polling the processes: a process that ends may be the cause of a
        # report, and then must not be missed.
        has_report = any(rank.report() is not None for rank in ranks)
        running = [rank for rank in ranks if rank.process.poll() is None]
        failed = [rank for rank in ranks if rank.process.returncode not in (None, 0)]
        if asked.ended_by is not None:
            return 128 + asked.ended_by
        # A rank takes some time to end after its report. After a Ctrl-C its exit code counts.
        if failed or (has_report and asked.interrupted_s is None):
            return _verdict(ranks, failed, asked, log_dir)
        if time.monotonic() >= asked.deadline(interactive):
            return 128 + signal.SIGINT
        if not running:
            return 0
        time.sleep(_LOOK_S)


def _verdict(ranks: list[_Rank], failed: list[_Rank], asked: _Asked, log_dir: str | None) -> int:
    """Prints why the ranks failed, and returns the exit code of the rank that failed first.

    The first failure makes the other ranks fail too, and these may end earlier. If a signal killed
    a rank without a report, that rank is the cause; otherwise the rank with the earliest report is.
    """
    codes = {rank.process.returncode for rank in failed}
    if codes & {-signal.SIGINT, 128 + signal.SIGINT} and asked.interrupted_s is not None:
        return 128 + signal.SIGINT
    reports = _reports(ranks)
    silent = [rank for rank in failed if rank.number not in reports]
    if killed := [rank for rank in silent if rank.process.returncode < 0]:
        ending = killed[0].ending()
        hint = "; the host may have run out of memory" if "SIGKILL" in ending else ""
        stacks = _stacks(ranks, [killed[0].number], log_dir)
        # Ranks that have not joined do not notice the end of another rank.
        where = _awaited_exchange(ranks) if stacks else ""
        _say(f"[rank {killed[0].number}] {ending}{hint}{where}{stacks}")
        return 1
    if not reports:
        first = silent[0]
        if first.number > 0:  # rank 0 prints its own message
            stacks = _stacks(ranks, [first.number], log_dir)
            _say(f"[rank {first.number}] {first.ending()}{stacks}")
        return first.process.returncode
    number, report = next(iter(reports.items()))
    # The message of a usage error does not name the rank.
    is_usage = report.code == WRONG_USE
    _say(report.message if is_usage else f"[rank {number}] {report.message}")
    try:
        code = ranks[number].process.wait(_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        code = 0
    return code if code > 0 else report.code


def _stacks(ranks: Sequence[_Rank], culprits: Sequence[int], log_dir: str | None = None) -> str:
    """Lines with the stacks of ranks that ended without a report; empty if none had joined."""
    files = {rank.number: rank.stacks for rank in ranks}
    if not any(file.n_bytes() for file in files.values()):
        return ""
    if 0 not in files:  # this process
        files[0] = own_stack_file()
    return gather_stacks(files, culprits, log_dir)


def _awaited_exchange(ranks: Sequence[_Rank]) -> str:
    """The line of the first report that says in which exchange its rank was; empty without one.

    Takes at most _LAST_WORDS_S seconds.
    """
    deadline = time.monotonic() + _LAST_WORDS_S
    while True:
        is_last = time.monotonic() >= deadline or all(r.process.poll() is not None for r in ranks)
        for report in _reports(ranks).values():
            if len(lines := report.message.split("\n")) > 1:
                return f"\n{lines[1]}"
        if is_last:
            return ""
        time.sleep(_LOOK_S)


def _reports(ranks: Sequence[_Rank]) -> dict[int, Report]:
    """Reports by rank, the earliest first."""
    found = {rank.number: report for rank in ranks if (report := rank.report()) is not None}
    return dict(sorted(found.items(), key=lambda each: each[1].when_ns))


def _say(message: str) -> None:
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
    """Terminates the ranks, and kills those that still run at the deadline or after a second."""
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
