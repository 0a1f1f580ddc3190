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

ENDLESS = ("--prompt=Hello", "--max-tokens=60000")  # runs for minutes unless it is interrupted
LIMIT_S = 200  # each step takes seconds; a hang must fail, a busy machine must not


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_folder(tmp_path_factory.mktemp("models") / "chat")


class Command:
    """One `generate` in a session of its own, as on a separate terminal."""

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
        """Exit code, stdout and stderr of the command, which may leave no rank and no file."""
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
def test_ctrl_c_ends_all_ranks_and_shows_partial_output(start, nproc):
    command = start(nproc)
    command.wait_for_text()
    addresses = addresses_of(command)
    assert (addresses or nproc == 1) and addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    command.press_ctrl_c()
    code, out, err = command.end()
    assert code == 130
    assert "interrupted; the completions so far are above" in err
    assert out and "tokens/s" in err


def test_ctrl_c_while_a_model_is_loaded_ends_the_command(start):
    command = start(2)
    deadline = time.monotonic() + LIMIT_S
    while len(command.ranks) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
        command.find_ranks()
    command.press_ctrl_c()
    code, out, _ = command.end()
    assert (code, out) == (130, "")


def test_repeated_ctrl_c_shows_no_traceback(start):
    """Regression: the second Ctrl-C interrupted Python's cleanup at exit with a traceback."""
    command = start(2)
    command.wait_for_text()
    for _ in range(4):
        command.press_ctrl_c()
        time.sleep(0.1)
    code, _, _ = command.end()
    assert code == 130


def test_closed_stdout_ends_command_and_ranks_without_traceback(start):
    command = start(2)
    command.wait_for_text()
    assert command.process.stdout is not None and command.process.stderr is not None
    command.process.stdout.close()
    err = command.process.stderr.read()
    assert command.process.wait(timeout=LIMIT_S) == 141
    assert "Traceback" not in err and "BrokenPipe" not in err
    assert still_running(command.ranks) == []


def test_ctrl_c_in_reshard_suggests_resume(tmp_path):
    """Regression: reshard ended without a message, as SIGINT still had the default action."""
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


def test_conftest_restores_the_sigint_handler_in_background_jobs():
    """Regression: about two dozen tests failed in background jobs, which ignore SIGINT."""
    program = "import conftest, signal; print(signal.getsignal(signal.SIGINT).__name__)"
    done = run_python(
        "-c",
        program,
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.stdout == "default_int_handler\n", done.stderr
