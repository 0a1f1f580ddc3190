"""Spare processes that replace lost ranks: when they are started, and how often."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel_llama.parallel.launch import LocalRanks

# Ranks wait for the end of their stdin. A spare does so too, unless it cannot run.
PROGRAM = """
import sys
from parallel_llama.parallel.failures import report_error
from parallel_llama.parallel.rank_stacks import record_stacks
sys.stdin.readline()
if sys.argv[1:] == ["broken"]:
    report_error("no memory is left")
    sys.exit(1)
record_stacks()
sys.stdin.read()
"""


@contextmanager
def started(folder: Path, spare: str, n_spares: int) -> Iterator[LocalRanks]:
    (folder / "spare_program.py").write_text(PROGRAM)
    ranks = LocalRanks("spare_program", {}, 4, 1, n_spares=n_spares, spare_arguments=[spare])
    try:
        yield ranks
    finally:
        ranks.end()


def wait_for(what: Callable[[], bool]) -> None:
    stop_s = time.monotonic() + 60
    while not what():
        assert time.monotonic() < stop_s
        time.sleep(0.01)


def n_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def importable(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def test_spare_replaces_the_lost_rank_and_others_keep_their_rank(tmp_path):
    with started(tmp_path, "idle", 1) as ranks:
        first, lost, last = ranks.pids().values()
        (spare,) = ranks.spare_pids()
        ranks.await_spares(60)
        assert not ranks.can_grow()
        os.kill(lost, signal.SIGKILL)
        assert "rank 2 of 4 was killed by SIGKILL" in ranks.drop_ended(60)
        assert ranks.pids() == {1: first, 2: last} and ranks.env.size == 3
        assert ranks.can_grow() and ranks.take_spares() == 1
        assert ranks.pids() == {1: first, 2: spare, 3: last} and ranks.env.size == 4
        assert ranks.keep_spares() is None
        assert len(ranks.spare_pids()) == 1


def test_failing_spares_start_three_times_and_leave_no_file_open(tmp_path):
    with started(tmp_path, "broken", 0) as ranks:
        os.kill(ranks.pids()[1], signal.SIGKILL)
        before = n_files()
        ranks.drop_ended(60)
        n_left, seen, said = n_files(), set[int](), list[str]()

        def has_said() -> bool:
            said.extend(filter(None, [ranks.keep_spares()]))
            seen.update(ranks.spare_pids())
            return bool(said)

        wait_for(has_said)
        assert said == ["no memory is left"] and len(seen) == 3
        assert ranks.keep_spares() is None and not ranks.spare_pids()
        assert n_files() == n_left < before


def test_spare_reports_its_error_if_stdin_is_closed(tmp_path):
    """Regression: its report was lost, because its file had the descriptor of stdin."""
    stdin = os.dup(0)
    os.close(0)
    try:
        said: list[str] = []
        with started(tmp_path, "broken", 1) as ranks:
            wait_for(lambda: bool(said.extend(filter(None, [ranks.keep_spares()])) or said))
        assert said == ["no memory is left"]
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
