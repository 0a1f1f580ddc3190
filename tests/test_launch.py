"""Starting ranks on one host: what they find, how they end, and that nobody outlives the parent."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from parallel_llama import parallel
from parallel_llama.errors import UsageError
from parallel_llama.parallel.failures import Report, read_report, report_error
from parallel_llama.parallel.launch import MAX_RANKS, run_ranks, world

TESTS = Path(__file__).parent
LAUNCH = """
import sys
from parallel_llama.parallel.launch import run_ranks
assert "torch" not in sys.modules
sys.exit(run_ranks(sys.argv[3:], int(sys.argv[1]), 3, module="rank_programs",
                   interactive=sys.argv[2] == "interactive"))
"""

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *("-m", "rank_programs"),
)

Start = Callable[..., subprocess.Popen[str]]


def environ(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return {**clean, "PYTHONPATH": paths, **more}


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a parent with ranks as a terminal would: one foreground process group."""
    started = []

    def start(nproc: int, *program: str, mode: str = "", **more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(nproc), mode, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ(**more),
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def said(stderr: str) -> list[dict[str, Any]]:
    """What ranks said, in rank order."""
    lines = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line["rank"]))


def messages(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("parallel-llama:")]


def read_pids(process: subprocess.Popen[str], nproc: int) -> list[int]:
    """Wait until every rank has said that it is there."""
    assert process.stderr is not None
    pids: list[int] = []
    while len(pids) < nproc:
        line = process.stderr.readline()
        assert line, "the ranks ended before they were all there"
        if line.startswith("{"):
            pids.append(json.loads(line)["pid"])
    return pids


def all_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) and not is_zombie(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_ranks_find_torchruns_environment_and_rank_0_the_terminal(start):
    keys = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]
    process = start(3, "environment", *keys, OMP_NUM_THREADS="")
    stdout, stderr = process.communicate("input", timeout=30)
    assert process.returncode == 0
    assert "rank 0 on stdout heard input" in stdout
    assert "rank 1" not in stdout and "rank 1 on stdout" in stderr and "rank 2 on stdout" in stderr
    for rank, line in enumerate(said(stderr)):
        assert line["world"] == [rank, 3]
        assert not line["torch"]
        assert (line["stdin"] == "/dev/null") == (rank > 0)
        assert line["ignores_ctrl_c"] == (rank > 0)
        assert line["env"] == dict(zip(keys, [str(rank), "3", "0", "127.0.0.1", ""], strict=True))


@pytest.mark.parametrize(("own", "expected"), [(None, "3"), ("5", "5")])
def test_the_number_of_threads_is_given_unless_the_person_set_one(
    start, monkeypatch, own, expected
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    process = start(
        1, "environment", "OMP_NUM_THREADS", **({"OMP_NUM_THREADS": own} if own else {})
    )
    _, stderr = process.communicate("", timeout=30)
    assert said(stderr)[0]["env"] == {"OMP_NUM_THREADS": expected}


def test_a_failed_rank_ends_the_others_and_gives_its_message_and_code(start):
    process = start(3, "fail", "1", "7", "0")
    _, stderr = process.communicate("", timeout=20)
    assert process.returncode == 7
    assert messages(stderr) == ["parallel-llama: [rank 1] the cause of it all"]


def test_the_first_report_counts_and_not_the_first_end(start):
    """Other ranks fail because of the first, and a slow exit lets them be seen before it."""
    process = start(2, "fail", "1", "7", "0.5")
    _, stderr = process.communicate("", timeout=20)
    assert process.returncode == 7
    assert messages(stderr) == ["parallel-llama: [rank 1] the cause of it all"]


def test_the_same_error_on_every_rank_is_shown_once(start):
    process = start(3, "fail_alike", "2")
    _, stderr = process.communicate("", timeout=20)
    assert process.returncode == 2
    (message,) = messages(stderr)
    assert message.endswith("the same mistake on every rank")


@pytest.mark.parametrize(("rank", "name"), [(1, "SIGKILL"), (0, "SIGSEGV")])
def test_a_rank_that_dies_of_a_signal_is_named_with_it(start, rank, name):
    process = start(2, "die", str(rank), str(int(signal.Signals[name])))
    _, stderr = process.communicate("", timeout=20)
    assert process.returncode == 1
    (message,) = messages(stderr)
    assert message.startswith(f"parallel-llama: [rank {rank}] died of {name}")


def test_a_traceback_names_its_rank_in_the_first_line(start):
    process = start(2, "crash", "1")
    _, stderr = process.communicate("", timeout=20)
    assert process.returncode == 1
    assert "[rank 1]\nTraceback (most recent call last):\n" in stderr
    (message,) = messages(stderr)
    assert "[rank 1] ZeroDivisionError: " in message


def test_an_exit_code_alone_is_passed_on(start):
    process = start(2, "end_with", "3")
    assert process.wait(timeout=20) == 3


@pytest.mark.parametrize("mode", ["", "interactive"])
def test_ctrl_c_ends_everything_within_five_seconds(start, mode):
    process = start(3, "sleep", mode=mode)
    pids = read_pids(process, 3)
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate("", timeout=20)
    assert time.monotonic() - pressed < 5
    assert process.returncode == 130
    assert messages(stderr) == [] and "Traceback" not in stderr
    assert all_gone(pids, 1)


def test_a_rank_0_that_does_not_hear_ctrl_c_is_ended_too(start):
    process = start(2, "sleep", "deaf")
    pids = read_pids(process, 2)
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert 3 < time.monotonic() - pressed < 5
    assert all_gone(pids, 1)


def test_a_second_ctrl_c_frees_a_person_from_an_interactive_program(start):
    process = start(2, "sleep", "deaf", mode="interactive")
    pids = read_pids(process, 2)
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - pressed < 3
    assert all_gone(pids, 1)


def test_an_interactive_program_may_go_on_after_ctrl_c(start):
    """Rank 0 uses it to stop an answer, and ends 3 seconds later with a code of its own."""
    process = start(2, "sleep", "listening", mode="interactive")
    read_pids(process, 2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 7


def test_sigterm_to_the_parent_ends_all_ranks(start):
    process = start(2, "sleep", "deaf")
    pids = read_pids(process, 2)
    process.terminate()
    assert process.wait(timeout=5) == 143
    assert all_gone(pids, 1)


def test_no_rank_outlives_a_killed_parent(start):
    process = start(3, "sleep", "deaf")
    pids = read_pids(process, 3)
    process.kill()
    assert all_gone(pids, 2)


def test_ranks_meet_on_loopback_alone_and_die_with_their_parent(start):
    """A store that torch opens itself listens on every interface, without any authorisation."""
    process = start(2, "reduce", "stay")
    pids = read_pids(process, 2)
    listening = [
        connection.laddr.ip
        for pid in (process.pid, *pids)
        for connection in psutil.Process(pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {ip for ip in listening if not ip.startswith("127.") and ip != "::1"} == set()
    process.kill()
    assert all_gone(pids, 2)


def test_ranks_that_joined_compute_together(start):
    process = start(3, "reduce", "twice")
    stdout, stderr = process.communicate("", timeout=60)
    assert process.returncode == 0, stderr
    assert stdout == "total 6\n"
    found = said(stderr)
    assert [line["total"] for line in found if "total" in line] == [6, 6, 6]
    assert {line["kind"] for line in found if "kind" in line} == {"SharedMemory"}
    assert all("already" in line["error"] for line in found if "error" in line)
    assert len([line for line in found if "error" in line]) == 3


def test_two_launches_at_once_do_not_meet(start):
    runs = [start(2, "reduce"), start(3, "reduce")]
    assert [run.communicate("", timeout=60)[0] for run in runs] == ["total 3\n", "total 6\n"]


def test_ranks_of_the_real_torchrun_join_too():
    run = subprocess.run(
        [*TORCHRUN, "reduce"],
        capture_output=True,
        text=True,
        env=environ(GLOO_SOCKET_IFNAME="lo"),
        timeout=90,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "total 3\n" * 2


def test_torchrun_shows_a_report():
    run = subprocess.run(
        [*TORCHRUN, "fail_alike", "2"],
        capture_output=True,
        text=True,
        env=environ(),
        timeout=90,
        check=False,
    )
    assert run.returncode == 1
    assert "the same mistake on every rank" in run.stderr


@pytest.mark.parametrize("nproc", [0, -1, MAX_RANKS + 1])
def test_an_impossible_number_of_ranks_is_refused(nproc):
    with pytest.raises(UsageError, match=f"nproc={nproc}: use 1 to {MAX_RANKS} ranks"):
        run_ranks([], nproc, 1)


@pytest.mark.parametrize(
    ("rank", "size"),
    [("2", "2"), ("-1", "2"), ("0", None), (None, "2"), ("a", "2"), ("0", "0"), ("1e0", "2")],
)
def test_an_environment_that_makes_no_sense_is_refused(monkeypatch, rank, size):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"need integers, 0 <= RANK < WORLD_SIZE"):
        world()


def test_the_environment_says_rank_and_size(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert world() == (3, 7)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert world() == (0, 1)


@pytest.mark.parametrize(("host", "port"), [("", "29500"), ("127.0.0.1", "0"), ("127.0.0.1", "x")])
def test_joining_without_an_address_is_refused(monkeypatch, host, port):
    """Ranks that were told port 0, as by `torchrun --master-port 0`, waited for 5 minutes."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UsageError, match=f"MASTER_ADDR='{host}', MASTER_PORT='{port}'"):
        parallel.join()


def test_a_report_goes_to_the_file_that_the_starter_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "report"))
    report_error("no room")
    assert capsys.readouterr().err == ""
    report = read_report((tmp_path / "report").read_bytes())
    assert report is not None and report.message == "no room"


def test_without_a_starter_a_report_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_error("no room")
    assert capsys.readouterr().err == "parallel-llama: no room\n"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"{", b"\xff", b'{"message": 1}', b'{"monotonic_ns": "x"}', b"3"]
)
def test_an_error_file_of_another_kind_is_no_report(data):
    assert read_report(data) is None


def test_a_report_needs_no_more_than_its_two_keys():
    assert read_report(b'{"message": "m", "monotonic_ns": 5}') == Report("m", 5)


def test_the_lazy_names_and_their_types_agree():
    stub = ast.parse(Path(parallel.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    typed = [a.name for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names]
    assert sorted(typed) == sorted(parallel.__all__)
    assert all(hasattr(parallel, name) for name in typed)
