"""The embedded chat model, run by commands."""

import json

from commands import run_python


def parallel_llama(*arguments: str, launcher: tuple[str, ...] = ()) -> list[dict]:
    """The JSON lines that a command prints."""
    done = run_python(*launcher, "-m", "parallel_llama", *arguments, "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CAPITAL = (
    "generate",
    "--model=smollm2",
    "--chat",
    "--prompt=What is the capital of France?",
    "--temperature=0",
    "--max-tokens=24",
)
