"""The soak test of linked hosts, with few requests, and with planted faults."""

import pytest

from launch.soak import hosts


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


def test_non_root_user_gets_one_line_error(capsys, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert hosts.main(["answers"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
