"""The soak test of linked hosts, with few requests, and with planted faults."""

import pytest

from launch.soak import host_faults, hosts


def run_on_two_hosts(
    capsys: pytest.CaptureFixture[str], command: str = "answers"
) -> tuple[int, str]:
    """The exit code and the output of a few requests to a tiny model."""
    flags = "--model=tiny", "--hosts=1+1", "--requests=8", "--delay-us=500", "--loss=0.001"
    code = hosts.main([command, *flags])
    said = capsys.readouterr()
    if code == 2:
        pytest.skip(said.err)
    return code, said.out


@pytest.mark.slow
def test_linked_hosts_give_the_same_answers_as_one_rank(capsys):
    code, said = run_on_two_hosts(capsys)
    assert code == 0
    assert "1+1: 8 of 8 answers are equal" in said
    assert "1 layouts passed, 0 failed, " in said


@pytest.mark.slow
def test_linked_hosts_print_the_same_lines_as_one_rank(capsys):
    code, said = run_on_two_hosts(capsys, "commands")
    assert code == 0
    assert "score, 1+1: 8 of 8 lines are equal" in said
    assert "2 commands passed, 0 failed, " in said


def test_lines_that_differ_fail_the_soak_test(capsys, monkeypatch):
    monkeypatch.setattr(hosts, "printed", lambda _, layout, __: [{"tokens": layout}])
    code, said = run_on_two_hosts(capsys, "commands")
    assert code == 1
    assert "FAILED generate, 1+1: 0 of 1 lines are equal" in said


@pytest.mark.slow
def test_hosts_without_exact_sums_fail_the_soak_test(capsys, monkeypatch):
    monkeypatch.setattr(hosts, "SERVE", ("serve", "--no-exact", *hosts.SERVE[2:]))
    code, said = run_on_two_hosts(capsys)
    assert code == 1
    assert "FAILED 1+1" in said


def test_answers_that_did_not_cross_the_link_fail_the_soak_test(capsys, monkeypatch):
    answer = [{"tokens": 3, "text": "abc"}]
    monkeypatch.setattr(hosts, "answered", lambda *_: ([answer], [0, 0]))
    code = hosts.main(["answers", "--model=tiny", "--hosts=1+1", "--requests=1"])
    assert code == 1
    line = "FAILED 1+1: 1 of 1 answers are equal; KiB received for each new token: 0.0, 0.0"
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_run_on_two_hosts_ends_in_time_after_a_fault(capsys, monkeypatch):
    kept = {kind: host_faults.FAULTS[kind] for kind in ("cut off", "killed")}
    monkeypatch.setattr(host_faults, "FAULTS", kept)
    code = hosts.main(["faults", "--hosts=1+1", "--runs=2"])
    said = capsys.readouterr()
    if code == 2:
        pytest.skip(said.err)
    assert code == 0, said.out
    assert "2 faults passed, 0 failed, " in said.out


def test_wrong_ends_after_a_fault_are_found():
    run = host_faults.Run([2, 1], victim=1, elastic=False, wait_s=0)
    says = ["rank 2 of 3 is late: no progress for 2 s", "rank 2 has died, is stopped"]

    def faults(codes=(1, 1, None), ended_s=(3.0, 3.0, None), says=says):
        return host_faults.faults_of_ends(run, codes, ended_s, [*says, ""])

    assert faults() == []
    assert faults(codes=(1, 0, None)) == [f"rank 1 has exit code 0: {says[1]}"]
    assert faults(ended_s=(3.0, None, None)) == [f"rank 1 ended too late: {says[1]}"]
    assert faults(says=[says[0], "ranks 0, 2 have died, are stopped or cannot be reached"]) == []
    unnamed = faults(says=["rank 1 of 3 is late", says[1]])
    assert unnamed == ["rank 0 does not name a rank of the host: rank 1 of 3 is late"]


def test_non_root_user_gets_one_line_error(capsys, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert hosts.main(["answers"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
