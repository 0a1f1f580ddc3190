"""`chat` on a terminal: the real program on a pseudo-terminal, with typed input."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
PAUSE_S = 0.2  # Python shows its prompt a moment before it handles signals


class Terminal:
    """`chat` in a session of its own, on a pseudo-terminal at which the test types."""

    def __init__(self, model: Path, nproc: int) -> None:
        self._ours, self._theirs = pty.openpty()
        self.settings = termios.tcgetattr(self._theirs)
        argv = ["--model", str(model), "--nproc", str(nproc), "--max-tokens", "8", "--seed", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "parallel_llama", "chat", *argv],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
            # A terminal that a session leader opens becomes its controlling terminal.
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
            start_new_session=True,
        )
        self.shown = ""
        self._poll = select.poll()
        self._poll.register(self._ours, select.POLLIN)

    def type(self, text: str) -> None:
        time.sleep(PAUSE_S)
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, n_times: int = 1) -> str:
        """What was shown since the last call, up to the text's n-th occurrence."""
        deadline = time.monotonic() + LIMIT_S
        while self.shown.count(text) < n_times:
            left_ms = max(0, deadline - time.monotonic()) * 1e3
            ready = self._poll.poll(left_ms)
            assert ready, f"no {text!r} in {self.shown!r}"
            self.shown += os.read(self._ours, 4096).decode("utf-8", "replace")
        parts = self.shown.split(text, n_times)
        self.shown = parts[-1]
        return text.join(parts[:-1])

    def end(self) -> int:
        """The exit code of the chat; the terminal's settings must be as before it."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.05)[0]:  # else writes of the chat would block
                self.shown += os.read(self._ours, 4096).decode("utf-8", "replace")
        code = self.process.wait(timeout=LIMIT_S)
        assert termios.tcgetattr(self._theirs) == self.settings
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


Open = Callable[[int], Terminal]


@pytest.fixture
def open_chat(model: Path) -> Iterator[Open]:
    terminals: list[Terminal] = []

    def open_chat(nproc: int) -> Terminal:
        terminals.append(Terminal(model, nproc))
        terminals[-1].wait_for("> ")
        return terminals[-1]

    yield open_chat
    for terminal in terminals:
        terminal.close()


def test_ctrl_c_at_the_prompt_clears_the_line_and_says_how_to_leave(open_chat, tmp_path):
    """Regression: two Ctrl-C within a second ended the chat and left the terminal without echo."""
    chat = open_chat(2)
    chat.type("Hello\n")
    chat.wait_for("tokens")
    chat.wait_for("> ")
    chat.type("never sent")
    for pressed in ("\x03", "\x03", "\x03\x03"):
        chat.type(pressed)
        chat.wait_for("Ctrl-D or /exit leaves")
        chat.wait_for("> ")
    chat.type(f"/save {tmp_path / 'talk.jsonl'}\n")
    chat.wait_for("2 messages in")
    chat.type("\x04")
    assert chat.end() == 0
    (line,) = (tmp_path / "talk.jsonl").read_text().splitlines()
    assert [each["role"] for each in json.loads(line)["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize(("nproc", "number"), [(1, signal.SIGHUP), (2, signal.SIGTERM)])
def test_chat_ended_by_a_signal_restores_the_terminal(open_chat, nproc, number):
    chat = open_chat(nproc)
    time.sleep(PAUSE_S)
    os.kill(chat.process.pid, number)
    assert chat.end() == 128 + number
