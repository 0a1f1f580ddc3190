"""Ctrl-C, dead ranks and closed pipes, with real processes of a tiny model.

A command must end with one message, and leave no process and no file behind.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from commands import ROOT, run_python
from tiny_folder import write_endless_folder

ENDLESS = ("--prompt=Hello", "--max-tokens=60000")  # minutes of it, where nobody interrupts
LIMIT_S = 200  # for what takes a second or two: a busy machine is no failure, and a hang is one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_folder(tmp_path_factory.mktemp("models") / "chat")


class Command:
    """One `generate`, alone in a session as on a terminal of its own."""

    def __init__(self, model: Path, nproc: int, *flags: str) -> None:
        argv = ("--model", str(model), "--nproc", str(nproc), *flags)
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self.files_before = set(os.listdir("/dev/shm"))  # noqa: PTH208, names alone
        self.process = subprocess.Popen(
            [sys.executable, "-m", "parallel_llama", "generate", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=clean,
            start_new_session=True,
        )
        self.ranks: list[psutil.Process] = []

    def wait_for_text(self) -> None:
        assert self.process.stdout.read(1), "ended before its first token"
        self.find_ranks()

    def find_ranks(self) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.ranks = sorted(children, key=lambda rank: rank.pid)

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr; nothing may be left of it."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        assert still_running(self.ranks) == []
        assert set(os.listdir("/dev/shm")) <= self.files_before  # noqa: PTH208
        assert "Traceback" not in err
        return self.process.returncode, out, err


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that do not end; a zombie does not count as running."""
    deadline = time.monotonic() + LIMIT_S / 10
    while left := [process for process in processes if runs(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return left


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


Start = Callable[..., Command]


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    commands: list[Command] = []

    def start(nproc: int) -> Command:
        commands.append(Command(model, nproc, *ENDLESS))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
        command.process.wait()
        for stream in (command.process.stdout, command.process.stderr):
            stream.close()


def addresses_of(command: Command) -> set[str]:
    """The local addresses of the sockets of the command and its ranks."""
    processes = [psutil.Process(command.process.pid), *command.ranks]
    return {each.laddr.ip for own in processes for each in own.net_connections("inet")}


@pytest.mark.parametrize("nproc", [1, 3])
def test_ctrl_c_ends_all_ranks_and_shows_what_there_is(start, nproc):
    command = start(nproc)
    command.wait_for_text()
    assert addresses_of(command) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    command.press_ctrl_c()
    code, out, err = command.end()
    assert code == 130
    assert "interrupted; the completions so far are above" in err
    assert out and "tokens/s" in err


def test_ctrl_c_while_a_model_is_loaded_ends_it(start):
    command = start(2)
    deadline = time.monotonic() + LIMIT_S
    while len(command.ranks) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
        command.find_ranks()
    command.press_ctrl_c()
    code, out, _ = command.end()
    assert (code, out) == (130, "")


def test_ctrl_c_pressed_twice_is_no_reason_for_a_traceback(start):
    """The second one met Python's cleaning up at exit, which answered with a traceback."""
    command = start(2)
    command.wait_for_text()
    for _ in range(4):
        command.press_ctrl_c()
        time.sleep(0.1)
    code, _, _ = command.end()
    assert code == 130


def test_a_reader_that_has_enough_ends_the_command_without_a_word(start):
    command = start(2)
    command.wait_for_text()
    assert command.process.stdout is not None and command.process.stderr is not None
    command.process.stdout.close()
    err = command.process.stderr.read()
    assert command.process.wait(timeout=LIMIT_S) == 141
    assert "Traceback" not in err and "BrokenPipe" not in err
    assert still_running(command.ranks) == []


def test_ctrl_c_in_a_reshard_says_how_to_go_on(tmp_path):
    """It ended without a message while Ctrl-C had the system's action until the first token."""
    target = tmp_path / "target"
    process = subprocess.Popen(
        [sys.executable, "-m", "parallel_llama", "reshard", "smollm2", str(target),
         "--tp=1", "--format=native"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / ".target.partial" / "journal.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (130, ""), err
    assert "--resume" in err and "Traceback" not in err
    assert not target.exists()


def test_tests_in_the_background_of_a_shell_hear_ctrl_c_too():
    """Some two dozen failed there, where the system ignores it."""
    program = "import conftest, signal; print(signal.getsignal(signal.SIGINT).__name__)"
    done = run_python(
        "-c",
        program,
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.stdout == "default_int_handler\n", done.stderr
