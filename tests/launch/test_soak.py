"""The soak tests of launch/soak, each with its smallest number of rounds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run_soak(name: str, *flags: str) -> tuple[int, list[str]]:
    """Runs a soak test. Returns: its exit code and its lines."""
    command = [sys.executable, "-m", f"launch.soak.{name}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_random_mixes_run():
    code, lines = run_soak("mixes", "--mixes", "2", "--families", "qwen3")
    assert code == 0
    assert lines[0] == "ok     qwen3 0, tp 1, mixes 0 to 1"
    assert lines[-1].startswith("1 batches of mixes passed, 0 failed")


def test_planned_memory_is_compared_with_the_peak():
    flags = "--families", "qwen3", "--formats", "int4", "--nproc", "1", "2", "--limit", "15"
    code, lines = run_soak("memory", *flags)
    assert code == 0, lines
    assert lines[0].startswith("ok     qwen3 (8/2 qwen3), int4, tp 1: peaks of ")
    assert lines[-1].startswith("2 runs passed, 0 failed, planned ")


def test_damaged_folders_are_refused():
    code, lines = run_soak("damage", "--rounds", "3", "--formats", "hf")
    assert code == 0
    assert lines[-1].startswith("3 rounds passed, 0 failed, ")


def test_quantised_folders_match_their_dequantised_values():
    code, lines = run_soak(
        "formats", "--layers", "1", "--ranks", "1", "2", "--formats", "fp8", "int channel"
    )
    assert code == 0
    assert lines[-3].startswith("ok     fp8: ")
    assert lines[-1].startswith("2 formats passed, 0 failed, ")
