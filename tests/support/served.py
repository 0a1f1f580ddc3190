"""A server started by its command, and plain requests to it."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 250.0
# The environment of the only rank of a launcher.
ONLY_RANK = {
    **os.environ,
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",
}


class Served:
    """`parallel-llama serve` on a free port, from its first line to its end.

    `command` is another command that serves.
    """

    def __init__(
        self,
        *arguments: str,
        launcher: tuple[str, ...] = (),
        command: Sequence[str] = (),
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        program = [sys.executable, *launcher, "-m", "parallel_llama"]
        self.process = subprocess.Popen(
            command or [*program, "serve", "--port=0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=env,
        )
        self.lines: list[str] = []
        self.url = ""
        self._is_told = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_told.wait(START_LIMIT_S) or not self.url:
            self.stop()
            raise AssertionError(f"no server: {self.stderr}")

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"serving .* at (http://\S+)", line):
                self.url = found[1]
                self._is_told.set()
        self._is_told.set()

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM, limit_s: float = 60) -> int:
        """Ends the server with a signal. Returns: its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join()
        return code

    def connect(self, timeout_s: float = 120) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and body of one request; a body is sent as bytes or as JSON."""
        connection = self.connect()
        given = {} if body is None else {"content-type": "application/json"}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {**given, **(headers or {})})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, _, body = self.send("GET", path)
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, **fields: Any) -> Any:
        """The JSON of a successful reply."""
        status, _, body = self.send("POST", path, fields)
        assert status == 200, body
        return json.loads(body)

    def events(self, path: str, **fields: Any) -> Iterator[Any]:
        """The bodies of a stream's events, up to [DONE]."""
        connection = self.connect()
        try:
            data = json.dumps({**fields, "stream": True}).encode()
            connection.request("POST", path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            while line := response.readline():
                assert line.startswith(b"data: ") and response.readline() == b"\n", line
                if line == b"data: [DONE]\n":
                    assert response.read() == b""
                    return
                yield json.loads(line.removeprefix(b"data: "))
            raise AssertionError("the stream has no [DONE]")
        finally:
            connection.close()
