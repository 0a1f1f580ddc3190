"""Starts, connects and ends the engine's process, and reads its error report."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from parallel_llama.parallel.child_process import module_command, python_path, starting
from parallel_llama.parallel.failures import MAX_REPORT_BYTES, read_report
from parallel_llama.parallel.rank_env import beyond_ctrl_c

_TERM_GRACE_S = 2.0
_POLL_S = 0.02


class EngineChild:
    """The process of an engine. It does not receive Ctrl-C, and ends with the starting thread.

    Args:
        module: the module to run, with a socket's descriptor and `log_format` as arguments.
        settings: an LLMConfig as JSON, which the process reads from stdin.
        log_format: text or json.

    Raises: RankError if the system cannot start the process.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], log_format: str) -> None:
        with starting("the engine"):
            self.socket, child_socket = socket.socketpair()
            self._report: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed in `end`
            env = {
                **os.environ,
                "PYTHONPATH": python_path(),
                "TORCHELASTIC_ERROR_FILE": f"/dev/fd/{self._report.fileno()}",
            }
            with child_socket:
                self._process = subprocess.Popen(
                    module_command(module, str(child_socket.fileno()), log_format),
                    stdin=subprocess.PIPE,
                    stdout=2,  # to stderr
                    env=env,
                    pass_fds=[child_socket.fileno(), self._report.fileno()],
                    **beyond_ctrl_c(),
                )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self, grace_s: float = _TERM_GRACE_S) -> tuple[int, str]:
        """Ends the process. Returns: its exit code, and why it ended.

        Closes the socket, sends SIGTERM after `grace_s`, and SIGKILL after `grace_s` more.
        """
        self.socket.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = asyncio.get_running_loop().time() + grace_s
            while self._process.poll() is None:
                if asyncio.get_running_loop().time() >= deadline:
                    self._process.send_signal(number)
                    break
                await asyncio.sleep(_POLL_S)
        code = self._process.wait()
        report = read_report(os.pread(self._report.fileno(), MAX_REPORT_BYTES, 0))
        self._report.close()
        return code, report.message if report else _ending(code)


class AttachedEngine:
    """An engine that another program, such as torchrun, starts and restarts."""

    def __init__(self, engine_socket: socket.socket) -> None:
        self.socket = engine_socket

    async def end(self, _grace_s: float = 0.0) -> tuple[int, str]:
        """Closes the socket, which ends the engine; the engine reports its errors itself."""
        self.socket.close()
        return 1, "the engine has ended"


def _ending(code: int) -> str:
    if code >= 0:
        return f"the engine ended with exit code {code}"
    return f"the engine was killed by {signal.Signals(-code).name}"
