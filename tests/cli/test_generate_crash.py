"""`generate --output`, killed at random instants and resumed until its output is complete."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_folder import write_endless_folder

from parallel_llama.cli.main import main

ROOT = Path(__file__).parents[2]
N_PROMPTS = 40


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{i} is", "max_tokens": 2 + 6 * i} for i in range(N_PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def flags(model: Path, prompts: Path, output: Path) -> tuple[str, ...]:
    files = ("--model", str(model), "--prompts", str(prompts), "--output", str(output))
    return (*files, "--temperature", "1", "--seed", "3", "--dtype", "float64")


def start(model: Path, prompts: Path, output: Path, *more: str) -> "subprocess.Popen[str]":
    argv = (*flags(model, prompts, output), *more)
    return subprocess.Popen(
        [sys.executable, "-m", "parallel_llama", "generate", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def n_lines(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def wait_for_lines(process: "subprocess.Popen[str]", output: Path, n: int) -> None:
    deadline = time.monotonic() + 200
    while n_lines(output) < n and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def completions(output: Path) -> list[tuple[int, str]]:
    """Index and text of each line, which must equal those of an unbroken run."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return sorted((line["index"], line["text"]) for line in lines)


def test_output_is_complete_after_repeated_kills_and_resumes(model, prompts, tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert main(["generate", *flags(model, prompts, whole)]) == 0
    chance = random.Random(2)
    n_kills = 0
    while n_kills < 2:
        process = start(model, prompts, broken, "--resume", "--nproc=2")
        wait_for_lines(process, broken, n_lines(broken) + chance.randint(1, 8))
        time.sleep(chance.uniform(0, 0.02))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if n_lines(broken) == N_PROMPTS:  # the run ended before the kill, on a busy machine
            for left in tmp_path.glob("broken.jsonl*"):
                left.unlink()
            n_kills = 0
            continue
        assert n_lines(broken) > 0
        n_kills += 1
    with broken.open("a") as file:
        file.write('{"index": 39, "text": "')
    _, err = start(model, prompts, broken, "--resume", "--nproc=2").communicate(timeout=200)
    assert f"{N_PROMPTS} completions in {broken}" in err
    assert completions(broken) == completions(whole)
    assert not (tmp_path / "broken.jsonl.run").exists()
    # Regression: rank 0 ended alone, and the other ranks failed after --start-timeout.
    process = start(model, prompts, broken, "--resume", "--nproc=2", "--start-timeout=10")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0 and "nothing to do" in err


def test_ctrl_c_keeps_finished_completions_and_suggests_resume(prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    lines = prompts.read_text().splitlines()
    lines[-1] = json.dumps({"prompt": "on and", "max_tokens": 60_000})  # Ctrl-C ends it
    prompts.write_text("\n".join(lines) + "\n")
    endless = write_endless_folder(tmp_path / "endless")
    process = start(endless, prompts, output, "--nproc=2")
    wait_for_lines(process, output, 3)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "interrupted; the same command with --resume continues" in err
    n = n_lines(output)
    assert 3 <= n < N_PROMPTS and f"{n} of {N_PROMPTS} completions in {output}" in err
    assert len(completions(output)) == n  # every line is complete
