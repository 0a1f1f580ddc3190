"""Runs commands of this package, and other Python programs, as a shell in the checkout does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_python(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 250, **options}
    return subprocess.run([sys.executable, *argv], **given)


def run_command(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`parallel-llama` with these arguments."""
    return run_python("-m", "parallel_llama", *argv, **options)
