"""The embedded chat model, run by commands."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def parallel_llama(*arguments: str, launcher: tuple[str, ...] = ()) -> list[dict]:
    """The JSON lines that a command prints."""
    command = [sys.executable, *launcher, "-m", "parallel_llama", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CAPITAL = (
    "generate",
    "--model=smollm2",
    "--chat",
    "--prompt=What is the capital of France?",
    "--temperature=0",
    "--max-tokens=24",
    "--dtype=float32",
)
