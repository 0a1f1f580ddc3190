"""How the failure of a rank reaches the person who started it. Imports no torch.

A rank that torchrun or `launch` started leaves one message in the file that
TORCHELASTIC_ERROR_FILE names, torchrun's own convention; whoever started it shows the first.
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

# A report is one message to a person; more than this in the file was not written by `report_error`.
MAX_REPORT_BYTES = 1 << 16


class RankError(RuntimeError):
    """A rank that the others need has died, is late, or has gone another way."""


def late(ranks: Iterable[int], size: int, limit_s: float) -> str:
    return f"rank {listed_ranks(ranks)} of {size} is late: nothing heard of it for {limit_s:g} s"


def first_line(error: Exception, limit: int) -> str:
    """What torch says of an error, without its page of C++."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:limit]


@dataclass(frozen=True)
class Report:
    """What a failed rank had to say. Units: nanoseconds of the host's clock since boot."""

    message: str
    when_ns: int


def report_error(message: str) -> None:
    """Tell the person what went wrong: through whoever started this rank, else on stderr.

    Where stderr is closed it is said on stdout, and where neither can be written, not at all.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        if (stream := sys.stderr or sys.stdout) is not None:
            with suppress(OSError):
                stream.write(f"parallel-llama: {message}\n")
                stream.flush()
        return
    # torchrun reads message and timestamp; the launcher orders reports by the finer clock.
    body = {"message": message, "timestamp": int(time.time()), "monotonic_ns": time.monotonic_ns()}
    Path(path).write_bytes(json.dumps(body).encode()[:MAX_REPORT_BYTES])


def report_crash(error: BaseException) -> None:
    """Show the traceback of an error that nobody expected, and report it in one line.

    One write, headed by the rank: lines of several ranks do not mix.
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
    """The report in an error file's content; None for an empty file or one of another kind."""
    try:
        body = json.loads(data[:MAX_REPORT_BYTES])
        return Report(str(body["message"]), int(body["monotonic_ns"]))
    except (ValueError, TypeError, KeyError):
        return None
