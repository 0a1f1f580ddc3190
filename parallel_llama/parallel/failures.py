"""Reports the failure of a rank to the launcher that started it. Imports no torch.

A rank of torchrun or of `launch` writes one message to the file that TORCHELASTIC_ERROR_FILE names,
which is torchrun's convention. The launcher shows the first message.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.errors import listed_ranks

# A report is one message. More bytes than this were not written by `report_error`.
MAX_REPORT_BYTES = 1 << 16


class RankError(RuntimeError):
    """Another rank has died, is late, or has called another collective."""


def late(ranks: Iterable[int], size: int, limit_s: float) -> str:
    return f"rank {listed_ranks(ranks)} of {size} is late: no progress for {limit_s:g} s"


def first_line(error: Exception, limit: int) -> str:
    """The first line of an error's message; torch appends a C++ stack trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:limit]


@dataclass(frozen=True)
class Report:
    """The message of a failed rank. `when_ns` is the host's monotonic clock in nanoseconds."""

    message: str
    when_ns: int


def report_error(message: str) -> None:
    """Writes a message to the launcher's error file, or to stderr if no launcher started this rank.

    If stderr is closed, the message goes to stdout; if neither can be written, it is dropped.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        if (stream := sys.stderr or sys.stdout) is not None:
            with suppress(OSError):
                stream.write(f"parallel-llama: {message}\n")
                stream.flush()
        return
    # torchrun reads message and timestamp; `launch` orders reports by the finer clock.
    body = {"message": message, "timestamp": int(time.time()), "monotonic_ns": time.monotonic_ns()}
    Path(path).write_bytes(json.dumps(body).encode()[:MAX_REPORT_BYTES])


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
        return Report(str(body["message"]), int(body["monotonic_ns"]))
    except (ValueError, TypeError, KeyError):
        return None
