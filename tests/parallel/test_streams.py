"""Closed or full standard streams: output is not lost without an error."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shell(model: Path, command: str, redirection: str) -> "subprocess.CompletedProcess[str]":
    line = f"{sys.executable} -m parallel_llama {command.format(model=model)} {redirection}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=250
    )


COMMANDS = [
    "generate --model {model} --prompt Hi --max-tokens 2",
    "generate --model {model} --prompt Hi --max-tokens 2 --nproc 2 --json",
    "plan --model {model}",
    "--help",
    "generate --help",
    "--version",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stdout_is_an_error(model, command):
    """Regression: the exit code was 0, and the output was lost."""
    done = shell(model, command, ">&-")
    assert done.returncode == 1
    assert done.stderr == ("parallel-llama: stdout is closed; send it to a file, or to /dev/null\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_closed_stderr_is_an_error_reported_on_stdout(model, command):
    """Regression: the exit code was 1, without a message."""
    done = shell(model, command, "2>&-")
    assert done.returncode == 1
    assert done.stdout == "parallel-llama: stderr is closed; send it to a file, or to /dev/null\n"


def test_closed_stdout_and_stderr_give_exit_code_1(model):
    assert shell(model, COMMANDS[0], ">&- 2>&-").returncode == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_full_stdout_is_reported_in_one_line(model, command):
    """Regression: a traceback, or exit code 120 and two lines that Python prints at exit."""
    done = shell(model, command, ">/dev/full")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("parallel-llama")]
    assert len(said) == 1 and "stdout cannot be written: No space left on device" in said[0]
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_full_stderr_gives_exit_code_1(model, command):
    assert shell(model, command, "2>/dev/full").returncode == 1


@pytest.mark.parametrize("command", ["plan --model {model} --nproc 1-9", "generate --help"])
def test_closed_pipe_gives_exit_code_141_and_no_message(model, command):
    done = shell(model, command, "| true; exit ${PIPESTATUS[0]}")
    assert done.returncode == 141 and done.stderr == ""


def test_ranks_join_if_stdin_is_closed(model):
    """Regression: the file of the secret had the descriptor of stdin, and no rank joined."""
    done = shell(model, f"{COMMANDS[1]} --start-timeout 60", "<&-")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")
