"""The errors and exit codes of ranks, and how a failed rank reports to its launcher. No torch.

A rank of torchrun or of `launch` writes one message to the file that TORCHELASTIC_ERROR_FILE names,
which is torchrun's convention. The launcher shows the first message.
"""

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.errors import (
    CheckpointError,
    DamagedWeights,
    NumericalError,
    OutOfMemory,
    UsageError,
    WriteError,
    named_ranks,
    ranks_do,
)
from parallel_llama.parallel.rank_env import is_watched, world

DONE, FAILED, WRONG_USE = 0, 1, 2
INTERRUPTED, READER_GONE = 128 + signal.SIGINT, 128 + signal.SIGPIPE

# The size limit of an error file; a longer file was not written by `report_error`.
MAX_REPORT_BYTES = 1 << 16


class RankError(RuntimeError):
    """Another rank has died, is late, did not start, or has called a different collective."""


class IntegrityError(RankError):
    """Weights or KV cache have changed in memory, or ranks differ in results that must be equal."""


def late(ranks: Iterable[int], size: int, limit_s: float) -> str:
    return f"{ranks_do(ranks, 'is', 'are', size)} late: no progress for {limit_s:g} s"


def differing_ranks(values: Sequence[Hashable]) -> str | None:
    """Names the ranks whose value differs, given one value per rank; None if all are equal."""
    ((common, n_equal), *others) = Counter(values).most_common()
    if not others:
        return None
    if n_equal > len(values) // 2:
        ranks = [rank for rank, value in enumerate(values) if value != common]
        return f"{ranks_do(ranks, 'differs', 'differ', len(values))} from the others"
    return f"{named_ranks(range(len(values)))} differ from each other"


def first_line(error: Exception, limit: int) -> str:
    """The first line of an error's message; torch appends a C++ stack trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:limit]


@dataclass(frozen=True)
class Report:
    """The message of a failed rank.

    Args:
        when_ns: the host's monotonic clock in nanoseconds.
        code: the exit code with which the rank is about to end.
    """

    message: str
    when_ns: int
    code: int = FAILED


def report_error(message: str, code: int = FAILED) -> None:
    """Writes a message to the launcher's error file, or to stderr if no launcher started this rank.

    If stderr is closed, the message goes to stdout. A message that cannot be written is dropped.

    Args:
        code: the exit code with which this rank is about to end.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        if (stream := sys.stderr or sys.stdout) is not None:
            with suppress(OSError):
                stream.write(f"parallel-llama: {message}\n")
                stream.flush()
        return
    # torchrun reads message and timestamp; `launch` orders reports by the finer clock.
    when = {"timestamp": int(time.time()), "monotonic_ns": time.monotonic_ns()}
    body = {"message": message, "code": code, **when}
    data = json.dumps(body).encode()[:MAX_REPORT_BYTES]
    if path.startswith("/dev/fd/"):  # an open file of `launch`
        Path(path).write_bytes(data)
        return
    # torchrun may kill this rank during the write, and it cannot read half a file.
    temporary = Path(f"{path}.part")
    temporary.write_bytes(data)
    temporary.replace(path)


def report_crash(error: BaseException) -> None:
    """Prints the traceback of an unexpected error and reports its last line.

    The traceback is one write with the rank as its header, so that ranks' lines do not mix.
    """
    rank = os.environ.get("RANK")
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    with suppress(OSError):
        sys.stderr.write(lines if rank is None else f"[rank {rank}]\n{lines}")
        sys.stderr.flush()
    if rank is not None:
        (summary, *_) = traceback.format_exception_only(type(error), error)
        report_error(f"{summary.strip()[:1000]} (its traceback is above)")


def read_report(data: bytes) -> Report | None:
    """The report in the content of an error file; None if it does not hold one."""
    try:
        body = json.loads(data[:MAX_REPORT_BYTES])
        return Report(
            str(body["message"]), int(body["monotonic_ns"]), int(body.get("code", FAILED))
        )
    except (ValueError, TypeError, KeyError):
        return None


_NO_MEMORY = "no memory is left for this process; free some, or raise its limit"
# The errors of a write to stdout. Without a file name, other errors are those of other calls.
_WRITE_ERRNOS = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}


def exit_code(run: Callable[[], int], give_up: Callable[[str], None]) -> int:
    """Runs a program, reports its error, and returns its exit code.

    0: done. 1: failed while running. 2: wrong use. 130: interrupted. 141: the reader of the output
    pipe has exited, as for a program that is ended by SIGPIPE.

    Args:
        give_up: sends the other ranks the reason, so that they do not wait for this rank.
    """

    def inform_ranks(error: Exception) -> None:
        with suppress(UsageError):  # the launcher's variables are invalid
            if world()[1] > 1 and not is_watched():
                give_up(str(error) or type(error).__name__)

    try:
        _require_streams()
        open_stdin()
        code = run()
        sys.stdout.flush()
        return code
    except (DamagedWeights, NumericalError, OutOfMemory, WriteError, RankError) as error:
        report_error(str(error))
        inform_ranks(error)
        return FAILED
    except (UsageError, CheckpointError) as error:
        report_error(str(error), WRONG_USE)
        inform_ranks(error)
        return WRONG_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return READER_GONE
    except MemoryError:
        report_error(_NO_MEMORY)
        return FAILED
    except OSError as error:
        if error.errno == errno.ENOMEM:
            report_error(_NO_MEMORY)
        elif _is_of_stdout(error):
            _discard_stdout()
            report_error(f"stdout cannot be written: {error.strerror}; answers may be lost")
        else:
            report_crash(error)
        return FAILED
    except Exception as error:
        report_crash(error)
        inform_ranks(error)
        return FAILED


def _require_streams() -> None:
    """Raises: WriteError if stdout or stderr is closed.

    Otherwise the next file to be opened would get the descriptor, and the output would be written
    to that file.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            raise WriteError(f"{name} is closed; send it to a file, or to /dev/null")


def open_stdin() -> None:
    """Opens /dev/null as descriptor 0 if stdin is closed; `sys.stdin` stays None.

    Otherwise the next file to be opened would get that descriptor. In a child process that inherits
    the file, the child's stdin would replace the file.
    """
    try:
        os.fstat(0)
    except OSError:
        os.open(os.devnull, os.O_RDONLY)  # gets the lowest descriptor that is free


def _is_of_stdout(error: OSError) -> bool:
    """Whether an error comes from a write to stdout."""
    # Only a buffered write to a file that does not block knows how much it has written.
    is_short_write = hasattr(error, "characters_written")
    return error.filename is None and (error.errno in _WRITE_ERRNOS or is_short_write)


def _discard_stdout() -> None:
    """Redirects stdout to /dev/null; otherwise Python raises again when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
