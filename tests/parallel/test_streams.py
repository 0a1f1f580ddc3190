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
    """Exit code 0, and the answers were gone."""
    done = shell(model, command, ">&-")
    assert done.returncode == 1
    assert done.stderr == ("parallel-llama: stdout is closed; send it to a file, or to /dev/null\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stderr_is_an_error_that_stdout_tells_of(model, command):
    """Exit code 1, and silence."""
    done = shell(model, command, "2>&-")
    assert done.returncode == 1
    assert done.stdout == "parallel-llama: stderr is closed; send it to a file, or to /dev/null\n"


def test_where_both_are_closed_the_exit_code_says_it(model):
    assert shell(model, COMMANDS[0], ">&- 2>&-").returncode == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_stdout_is_told_of_in_one_line(model, command):
    """A traceback, or exit code 120 and two lines from Python's own end."""
    done = shell(model, command, ">/dev/full")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("parallel-llama")]
    assert len(said) == 1 and "stdout cannot be written: No space left on device" in said[0]
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_a_full_stderr_ends_with_1(model, command):
    assert shell(model, command, "2>/dev/full").returncode == 1


@pytest.mark.parametrize("command", ["plan --model {model} --nproc 1-9", "generate --help"])
def test_a_reader_that_has_gone_is_no_error_to_speak_of(model, command):
    done = shell(model, command, "| true; exit ${PIPESTATUS[0]}")
    assert done.returncode == 141 and done.stderr == ""
