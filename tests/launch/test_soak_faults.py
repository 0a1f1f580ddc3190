"""The soak tests of hangs and of flipped bits, with their smallest numbers of runs."""

import pytest

from launch.soak import flips, hangs


def closing_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_a_report(capsys, monkeypatch):
    monkeypatch.setattr(hangs, "MORE_S", 200.0)  # a busy machine is not a failure
    assert hangs.main(["--runs=1"]) == 0
    assert closing_line(capsys).startswith("1 faults passed, 0 failed, at most ")


REPORT = """\
parallel-llama: [rank 0] rank 1 of 2 is late: no progress for 2 s; it is alive, but swapping
  rank 1, most recent call first:
    File "/launch/soak/faulty_rank.py", line 23 in loop_in_python
    File "/parallel_llama/engine/engine.py", line 299 in _step
  the stacks of all threads of ranks 0, 1 are in {folder} on here
"""


@pytest.mark.parametrize(
    ("kind", "rank", "n_lacks"),
    [("loop in Python", 1, 0), ("loop in C", 1, 1), ("SIGKILL", 1, 1), ("loop in Python", 0, 3)],
)
def test_a_report_that_names_another_rank_or_fault_fails(tmp_path, kind, rank, n_lacks):
    folder = tmp_path / "parallel-llama-0"
    folder.mkdir()
    (folder / "rank-1.txt").touch()
    report = REPORT.format(folder=folder)
    assert len(hangs.faults_of_report(report, kind, 2, rank, tmp_path)) == n_lacks


@pytest.mark.slow
def test_flipped_bits_and_wrong_products_are_found(capsys):
    assert flips.main(["--runs=3"]) == 0
    line = closing_line(capsys)
    assert line.startswith("3 faults passed, 0 failed, found 3 of 3, at most ")
    assert all(f"({kind})" in line for kind in flips.KINDS)


@pytest.mark.parametrize(
    "seen",
    [
        flips.Found("^rank 1 of 3: block 2 ", 20),
        flips.Found("^rank 1 of 3: block 2 ", 20, 24, "rank 0 of 3: block 2 of its KV cache"),
    ],
    ids=["not found", "another rank"],
)
def test_missed_or_misnamed_fault_fails_the_soak_test(capsys, monkeypatch, seen):
    monkeypatch.setattr(flips, "run", lambda _: seen)
    monkeypatch.setattr(flips, "undisturbed", lambda _: ())
    assert flips.main(["--runs=1"]) == 1
    assert closing_line(capsys).startswith("0 faults passed, 1 failed, found ")
