"""The Python stacks of ranks, for the report of a failure. This module does not import torch.

A rank that hangs cannot run Python code that prints its stack: it may loop, or wait in C while it
holds the GIL. So every rank registers a signal handler of faulthandler, which writes the stacks of
all threads to an unnamed file without the GIL. The process that reports a failure sends that signal
to the ranks of its host, waits for at most `_WRITE_S`, and copies the files into a folder. A rank
that crashes also writes its stack to this file. Without a failure, no file is left behind.
"""

import faulthandler
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.errors import UnreadableFile, UsageError, named_ranks, printable
from parallel_llama.files.bounded_files import is_folder, names_in

# The environment variable with the descriptor of a rank's stack file, which its launcher reads.
STACKS_FD = "PARALLEL_LLAMA_STACKS_FD"
STACKS_NAME = "parallel_llama_stacks"

_SIGNAL = signal.SIGRTMIN + 7  # programs rarely use it, unlike SIGUSR1
_WRITE_S, _POLL_S = 0.5, 0.01
_MAX_BYTES = 1 << 20  # copied from each file
_N_FRAMES, _MAX_CHARS = 8, 160
_PACKAGE = Path(__file__).parents[1]
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')

_own_fd = -1
_log_dir: str | None = None
_launcher_gathers = False


def record_stacks(log_dir: str | None = None) -> int:
    """The descriptor of this process's file of stacks; the first call registers the handlers.

    Args:
        log_dir: where folders of stacks are made; by default the folder of temporary files.
    """
    global _own_fd, _log_dir
    _log_dir = log_dir or _log_dir
    if _own_fd < 0:
        inherited_fd = os.environ.pop(STACKS_FD, None)
        if inherited_fd is not None:
            leave_to_launcher()
        fd = os.memfd_create(STACKS_NAME) if inherited_fd is None else int(inherited_fd)
        os.set_inheritable(fd, False)
        faulthandler.register(_SIGNAL, file=fd, all_threads=True)
        if not faulthandler.is_enabled():  # a user's program may have chosen another file
            faulthandler.enable(file=fd, all_threads=True)
        os.write(fd, _header(os.getpid()).encode())  # from now on the signal is handled
        _own_fd = fd
    return _own_fd


def _header(pid: int) -> str:
    return f"process {pid}\n"


def leave_to_launcher() -> None:
    """Lets the launcher gather the stacks after a rank has ended without a report."""
    global _launcher_gathers
    _launcher_gathers = True


def launcher_gathers() -> bool:
    return _launcher_gathers


def require_log_dir(path: str | None) -> None:
    """Raises: UsageError if no folder can be made in `path`."""
    if path is not None and not (is_folder(Path(path)) and os.access(path, os.W_OK | os.X_OK)):
        raise UsageError(f"log_dir={path}: use a folder that exists and can be written")


def call_site() -> str:
    """Where the package calls the operator or collective that is running, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_caller(frame.f_code.co_filename):
        frame = frame.f_back
    return _site(frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True)
class StackFile:
    """The file of stacks of one rank of this host, as another process reads it."""

    pid: int
    fd: int

    @classmethod
    def open(cls, pid: int, fd: int) -> "StackFile | None":
        """The file with the descriptor `fd` in the process `pid`; None if it cannot be read."""
        path = Path(f"/proc/{pid}/fd/{fd}")
        with suppress(OSError):
            if STACKS_NAME in str(path.readlink()):
                return cls(pid, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return None

    @classmethod
    def find(cls, pid: int) -> "StackFile | None":
        """The stack file of process `pid`, which may also have those of other ranks open."""
        with suppress(OSError, UnreadableFile):
            for name in names_in(Path(f"/proc/{pid}/fd")):
                file = cls.open(pid, int(name))
                if file is not None and file.text().startswith(_header(pid)):
                    return file
                if file is not None:
                    file.close()
        return None

    def n_bytes(self) -> int:
        return os.fstat(self.fd).st_size

    def text(self, start: int = 0) -> str:
        return os.pread(self.fd, _MAX_BYTES, start).decode("utf-8", "replace")

    def request_dump(self) -> bool:
        """Makes the process write its stacks. Returns: whether it can; writing takes a moment."""
        if not self.n_bytes() or process_state(self.pid) in ("", "Z", "X", "T", "t"):
            return False
        if self.pid == os.getpid():
            faulthandler.dump_traceback(self.fd)
            return True
        with suppress(OSError):
            os.kill(self.pid, _SIGNAL)
            return True
        return False

    def has_crashed_in_dump(self) -> bool:
        """Whether the process crashed while it wrote its stacks because of a signal.

        faulthandler reads the frames of running threads, which rarely crashes the process. In such
        a crash it cannot write stacks once more.
        """
        _, crash, stacks = self.text().partition("Fatal Python error")
        return bool(crash) and not _innermost(stacks)

    def why_no_stack(self) -> str:
        """Why the process cannot write its stacks."""
        state = process_state(self.pid)
        if state in ("", "Z", "X"):
            return "has ended"
        if state in ("T", "t"):
            return "is stopped by a signal or a debugger"
        return "has not written" if self.n_bytes() else "was still starting"

    def close(self) -> None:
        """Closes this process's descriptor of another rank's file."""
        if self.pid != os.getpid():
            os.close(self.fd)


def process_state(pid: int) -> str:
    """The letter of a process's state, as in proc(5); empty if the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The state follows the name, which may contain any characters.
    return stat[stat.rindex(")") + 1 :].split()[0]


def own_stack_file() -> StackFile:
    return StackFile(os.getpid(), record_stacks())


def gather_stacks(
    files: Mapping[int, StackFile], culprits: Collection[int], log_dir: str | None = None
) -> str:
    """Gathers the stacks of ranks in a folder, in at most about `_WRITE_S` seconds.

    Returns: message lines with the stacks of the culprits and the path of the folder.

    Args:
        files: the stack files, by rank.
    """
    start = {rank: file.n_bytes() for rank, file in files.items()}
    signalled = [rank for rank, file in files.items() if file.request_dump()]
    _await_writing(files, start, signalled)
    lines = []
    for rank in culprits:
        if rank in files:
            lines += _stack_of(rank, files[rank], start[rank])
    folder = _copy(files, log_dir or _log_dir)
    if folder is None:
        lines.append("the stacks could not be written to a folder")
    else:
        where = f"{folder} on {socket.gethostname()}"
        lines.append(f"the stacks of all threads of {named_ranks(files)} are in {where}")
    return "".join(f"\n  {line}" for line in lines)


def own_evidence(rank: int, current: str) -> str:
    """Message lines with this rank's collective, its call site, and the folder of its stacks."""
    file = own_stack_file()
    start = file.n_bytes()
    stacks = gather_stacks({rank: file}, [rank])
    # A site in the stacks is preferred: the watchdog calls this outside the collective's thread.
    site = site_in(file.text(start)) or call_site()
    return f"\n  rank {rank} is in {current}, called at {site}{stacks}"


def _await_writing(
    files: Mapping[int, StackFile], start: Mapping[int, int], signalled: Collection[int]
) -> None:
    """Waits until the files of the signalled ranks have grown and no longer grow."""
    deadline, sizes = time.monotonic() + _WRITE_S, dict(start)
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        last_sizes, sizes = sizes, {rank: file.n_bytes() for rank, file in files.items()}
        if sizes == last_sizes and all(sizes[rank] > start[rank] for rank in signalled):
            return


def _stack_of(rank: int, file: StackFile, start: int) -> list[str]:
    """The innermost frames of a rank, from what it wrote since `start` or when it crashed."""
    text = file.text()
    crash = text.find("Fatal Python error")
    written = text[crash:] if crash >= 0 else file.text(start)
    frames = _without_report(_innermost(written))
    if not frames:
        return [f"rank {rank} {file.why_no_stack()}, so its stack is unknown"]
    shown = [printable(frame.strip(), _MAX_CHARS) for frame in frames[:_N_FRAMES]]
    return [f"rank {rank}, most recent call first:", *(f"  {frame}" for frame in shown)]


def _without_report(frames: list[str]) -> list[str]:
    """The frames without the frames of this file, if the rank itself reports the failure.

    The calls of this file are deep enough to hide the frames of the collective.
    """
    own_frames = [index for index, frame in enumerate(frames) if f'"{__file__}"' in frame]
    return frames[own_frames[-1] + 1 :] if own_frames else frames


def _innermost(text: str) -> list[str]:
    """The frames of the main thread, or of another thread if only that one runs the package's code.

    faulthandler labels one thread "Current": the main thread if the process received the signal, or
    the thread that called `request_dump` for its own process.
    """
    threads = re.split(r"^(?=Thread 0x|Current thread 0x)", text, flags=re.MULTILINE)
    threads.sort(key=lambda thread: not thread.startswith("Current"))
    stacks = [[line for line in thread.splitlines() if _FRAME.match(line)] for thread in threads]
    stacks = [frames for frames in stacks if frames]
    in_package = [frames for frames in stacks if any(map(_is_in_package, frames))]
    return next(iter(in_package or stacks), [])


def site_in(text: str) -> str | None:
    """Like `call_site`, from a stack that faulthandler has written."""
    for match in map(_FRAME.match, _innermost(text)):
        if match is not None and _is_caller(match["file"]):
            return _site(match["file"], int(match["line"]))
    return None


def _copy(files: Mapping[int, StackFile], log_dir: str | None) -> str | None:
    try:
        folder = tempfile.mkdtemp(prefix="parallel-llama-", dir=log_dir)
        for rank, file in files.items():
            Path(folder, f"rank-{rank}.txt").write_text(file.text(), encoding="utf-8")
    except OSError:
        return None
    return folder


def _is_in_package(frame: str) -> bool:
    match = _FRAME.match(frame)
    return match is not None and _is_caller(match["file"])


def _is_caller(file: str) -> bool:
    """Whether a source file belongs to the package, but not to `ops` or `parallel`."""
    path = Path(file)
    lower_layers = _PACKAGE / "parallel", _PACKAGE / "ops"
    return _PACKAGE in path.parents and not any(folder in path.parents for folder in lower_layers)


def _site(file: str, line: int) -> str:
    path = Path(file)
    name = path.relative_to(_PACKAGE.parent) if _PACKAGE in path.parents else path.name
    return f"{name}:{line}"
