"""The soak test of killed ranks, with one run, and with planted faults."""

import math
import os
import subprocess

import pytest

from launch.soak import kills

ANSWER = kills.Answer([5, 6], [(5, -0.5, []), (6, -0.25, [])], "ab")


@pytest.mark.slow
def test_run_survives_ranks_killed_under_load(capsys):
    assert kills.main(["--runs=1"]) == 0
    said = capsys.readouterr().out
    assert "1 runs passed, 0 failed, 3 kills " in said


def test_wrong_bit_and_replaced_rank_are_reported_as_faults():
    wrong = kills.Answer([5, 6], [(5, -0.5, []), (6, math.nextafter(-0.25, 0), [])], "ab")
    report = kills.Report([ANSWER, wrong], {5: 1.0, 2: 2.0}, 3.0, 0)
    (fault,) = kills.faults_of(report, [ANSWER] * 2, 2)
    assert fault == "stream 1 differs from the undisturbed run at token 1"
    report = kills.Report([ANSWER], {5: 1.0, 3: 2.0}, 3.0, 1)
    assert kills.faults_of(report, [ANSWER], 2) == ["groups of [5, 3] ranks, 1 replaced"]


def test_leftover_process_and_file_are_reported(tmp_path):
    (tmp_path / "part").touch()
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env=own) as process:
        try:
            found = kills.left_behind(str(tmp_path), kills.names_in("/dev/shm"))
        finally:
            process.kill()
    assert found == [f"process {process.pid} is left", "temporary file part is left"]
