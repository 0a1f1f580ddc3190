"""Rendering of a model's own chat template, which is untrusted code, within hard limits.

The template runs in a process of its own that is killed at the deadline. Nothing less stops all of
them: a tracing function or a signal handler of Python runs only between two byte codes, and one
call into C (the comparison of a list with 2**40 leaves, a filter over a huge range) may not return
for hours while it takes all memory. A process can also be bounded in memory by the kernel. It is
started once, in about 0.1 s, and then renders in about a millisecond; it ends with its parent,
whose end closes its input.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel_llama.errors import CheckpointError, UsageError

RENDER_LIMIT_S = 1.5
START_LIMIT_S = 30.0
MAX_REPLY_BYTES = 16 << 20  # 1 Mi characters, each at most 12 bytes in JSON
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateRenderer:
    """Renders templates for any thread, one after the other, in a process started when needed."""

    def __init__(self, limit_s: float = RENDER_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def render(self, template: str, context: Mapping[str, Any], source: str) -> str:
        """The text of a template, given the names it may use.

        Raises: UsageError if the template refuses the messages or cannot render them,
        CheckpointError if it is no template or goes beyond the limits. Both name `source`.
        """
        request = {"template": template, "context": context, "limit_s": self._limit_s}
        with self._lock:
            reply = self._exchange(json.dumps(request).encode() + b"\n", source)
        failure, message = reply.get("failure"), reply.get("message")
        if failure is None:
            return str(reply["text"])
        if failure == "refused":
            raise UsageError(f"the model's chat template refuses the messages: {message}")
        if failure == "error":
            raise UsageError(f"{source}: the chat template cannot render the messages: {message}")
        if failure == "syntax":
            raise CheckpointError(f"{source}: the chat template does not parse: {message}")
        raise CheckpointError(f"{source}: the chat template is stopped: {message}")

    def close(self) -> None:
        """End the process; it starts again when needed."""
        with self._lock:
            self._drop()

    def _exchange(self, request: bytes, source: str) -> dict[str, Any]:
        process = self._running()
        try:
            return process.exchange(request, self._limit_s)
        except TimeoutError as error:
            self._drop()
            raise CheckpointError(
                f"{source}: the chat template is stopped: it takes more than {self._limit_s} s"
            ) from error
        except EOFError as error:
            self._drop()
            raise CheckpointError(
                f"{source}: the chat template is stopped: it ended the process that renders it"
            ) from error

    def _running(self) -> "_Process":
        if self._process is None or not self._process.is_alive():
            self._drop()
            self._process = _Process()
        return self._process

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One rendering process and its two pipes."""

    def __init__(self) -> None:
        # A session of its own, so that Ctrl-C at the terminal reaches the parent alone.
        self._child = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.end = weakref.finalize(self, _end, self._child)
        for pipe in (self._child.stdin, self._child.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        try:
            self.exchange(b"", START_LIMIT_S)
        except (TimeoutError, EOFError) as error:
            self.end()
            raise CheckpointError(
                f"the process that renders chat templates did not start: {sys.executable} "
                f"{_WORKER.name}; is jinja2 installed for it"
            ) from error

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def exchange(self, request: bytes, limit_s: float) -> dict[str, Any]:
        """Send a line and wait for the line that answers it.

        Raises: TimeoutError at the limit, EOFError if the process ends or says too much.
        """
        deadline = time.monotonic() + limit_s
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None
        reply = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if request:
                selector.register(stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is stdout:
                        reply += _read(stdout.fileno(), len(reply))
                        continue
                    request = request[_write(stdin.fileno(), request) :]
                    if not request:
                        selector.unregister(stdin)
        value: dict[str, Any] = json.loads(reply)
        return value


def _read(descriptor: int, n_before: int) -> bytes:
    data = os.read(descriptor, 1 << 16)
    if not data or n_before + len(data) > MAX_REPLY_BYTES:
        raise EOFError
    return data


def _write(descriptor: int, data: bytes) -> int:
    try:
        return os.write(descriptor, data[: 1 << 16])
    except BrokenPipeError as error:
        raise EOFError from error


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
