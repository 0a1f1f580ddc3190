"""Counts the rounds of a soak test, prints one line for each, and gives the exit code."""

import sys
import time
from pathlib import Path

# Soak tests use the models, servers and oracles of the tests.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))


class Tally:
    """Rounds that passed and rounds that failed.

    Args:
        what: what a round is, in the plural, for the closing line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._n_passed = self._n_failed = 0
        self._started = time.monotonic()

    def add(self, passed: bool, line: str) -> None:
        """Counts a round and prints its line."""
        self._n_passed += passed
        self._n_failed += not passed
        print("ok    " if passed else "FAILED", line, flush=True)

    def close(self, *figures: str) -> int:
        """Prints the totals and `figures`. Returns: the exit code, 1 if a round failed."""
        minutes = (time.monotonic() - self._started) / 60
        total = f"{self._n_passed} {self._what} passed, {self._n_failed} failed"
        print(", ".join([total, *figures, f"{minutes:.1f} minutes"]), flush=True)
        return min(1, self._n_failed)
