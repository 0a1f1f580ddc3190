"""Runs work on untrusted input in a separate process, within limits that the kernel enforces.

Limits inside the process are not enough: a tracing function or signal handler of Python runs only
between two byte codes, and one call into C or Rust (such as a backtracking regular expression) may
take hours and all memory, or crash the process.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel_llama.errors import CheckpointError

START_LIMIT_S = 30.0
# Wall time limits, for a process that is stopped or gets no CPU time on a busy machine.
WALL_BASE_S = 30.0
WALL_PER_CPU_S = 20.0
MAX_REPLY_BYTES = 16 << 20
MAX_REPLY_PER_BYTE = 8  # added for each byte of the request
_SANDBOX = Path(__file__).with_name("sandbox_main.py")


class Stopped(Exception):
    """The process exceeded a limit, or died; the message says which."""


class OutOfTime(Stopped):
    """The process exceeded its CPU time, or did not answer in time."""


class _Ended(Exception):
    """The process has ended."""


@dataclass(frozen=True)
class JobRequest:
    """JSON fields and bytes for a job, and the CPU time that the job may take."""

    cpu_s: float
    cpu_s_per_byte: float  # added for each byte of the request
    fields: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""


class BoundedProcess:
    """Runs one kind of job in a limited process, one request at a time. Thread-safe.

    The process is started on demand, in about 0.1 s, and again after it was stopped.

    Args:
        job: file of the module that does the work, or its name if it is beside `sandbox_main.py`.
        max_extra_bytes: memory that the process may allocate after its start.
    """

    def __init__(self, job: str, max_extra_bytes: int) -> None:
        module = (_SANDBOX.parent / job).with_suffix(".py")
        self._command = [str(_SANDBOX), str(module), str(max_extra_bytes)]
        self._max_extra_bytes = max_extra_bytes
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._opening: JobRequest | None = None

    def ask(self, request: JobRequest) -> dict[str, Any]:
        """The job's reply.

        Raises: Stopped.
        """
        with self._lock:
            child = self._child
            if child is None or not child.is_ready():
                child = self._start()
            return self._exchange(child, request)

    def open(self, request: JobRequest) -> dict[str, Any]:
        """Starts a process, and sends this request to it and to every process that replaces it."""
        with self._lock:
            self._opening = None
            child = self._start()
            self._opening = request
            return self._exchange(child, request)

    def close(self) -> None:
        """Ends the process; the next request starts it again."""
        with self._lock:
            self._drop()

    def _start(self) -> "_Child":
        self._drop()
        child = _Child(self._command)
        if self._opening is not None:
            self._exchange(child, self._opening)
        self._child = child  # last, because a signal handler may raise at any line
        return child

    def _exchange(self, child: "_Child", request: JobRequest) -> dict[str, Any]:
        body = json.dumps(request.fields).encode() + b"\n" + request.data
        cpu_s = request.cpu_s + request.cpu_s_per_byte * len(body)
        limit_s = WALL_BASE_S + WALL_PER_CPU_S * cpu_s
        head = json.dumps({"n_bytes": len(request.data), "cpu_s": cpu_s}).encode() + b"\n"
        try:
            return child.exchange(head + body, limit_s)
        except _Ended as error:
            if child.end() == -signal.SIGPROF:
                raise OutOfTime(f"it takes more than {cpu_s:.3g} s of CPU time") from error
            raise Stopped(
                f"it needs more than {self._max_extra_bytes >> 20} MiB of memory, or crashes its "
                "process"
            ) from error
        finally:
            if not child.is_idle:  # after Ctrl-C, a late reply would answer the next request
                child.end()

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """A running process and its pipes."""

    def __init__(self, script: list[str]) -> None:
        command = [sys.executable, *script]
        try:
            # A new session: Ctrl-C in the terminal must reach the parent only.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except TimeoutError:  # of a signal handler
            raise
        except OSError as error:
            raise _not_started(command, error.strerror or str(error)) from error
        self.end = weakref.finalize(self, _end, self._process)
        self.is_idle = False
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        try:
            self.exchange(b"", START_LIMIT_S)
        except (OutOfTime, _Ended) as error:
            self.end()
            reason = "check that all dependencies of parallel_llama are installed"
            raise _not_started(command, reason) from error

    def is_ready(self) -> bool:
        """Whether it has replied to all requests, and has not ended."""
        return self.is_idle and self._process.poll() is None

    def exchange(self, message: bytes, limit_s: float) -> dict[str, Any]:
        """Sends a message and waits for the line of its reply.

        Raises: OutOfTime at the limit; Stopped for a reply that is too long; _Ended if the process
        ends. A signal handler may raise any other exception, such as TimeoutError.
        """
        self.is_idle = False
        deadline = time.monotonic() + limit_s
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        unsent, reply = memoryview(message), bytearray()
        max_reply_bytes = MAX_REPLY_BYTES + MAX_REPLY_PER_BYTE * len(message)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if unsent:
                selector.register(stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    raise OutOfTime(f"it does not end within {limit_s:.3g} s")
                for key, _ in ready:
                    if key.fileobj is stdout:
                        reply += _read(stdout.fileno())
                        continue
                    unsent = unsent[_write(stdin.fileno(), unsent) :]
                    if not unsent:
                        selector.unregister(stdin)
                if len(reply) > max_reply_bytes:
                    raise Stopped("its result is too long")
        value: dict[str, Any] = json.loads(reply)
        self.is_idle = True
        return value


def _not_started(command: list[str], reason: str) -> CheckpointError:
    return CheckpointError(f"a process did not start: {' '.join(command)}; {reason}")


def _read(descriptor: int) -> bytes:
    data = os.read(descriptor, 1 << 16)
    if not data:
        raise _Ended
    return data


def _write(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data[: 1 << 16])
    except BrokenPipeError as error:
        raise _Ended from error


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kills a running process. Returns: its exit code."""
    process.kill()
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return code
