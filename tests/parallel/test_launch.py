"""Launching ranks on one host: environment, exit codes, and no rank outlives its parent."""

import ast
import importlib
import json
import logging
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
from commands import run_python
from torch.distributed import TCPStore

import parallel_llama
from parallel_llama.errors import UsageError
from parallel_llama.parallel import communicators
from parallel_llama.parallel.failures import RankError, Report, read_report, report_error
from parallel_llama.parallel.handshake import RankInfo, require_same
from parallel_llama.parallel.launch import MAX_RANKS, run_ranks, threads_per_rank
from parallel_llama.parallel.rank_env import (
    RankEnv,
    is_started_as_rank,
    local_world,
    rank_env,
    world,
)

ROOT = Path(__file__).parents[2]
LIMIT_S = 200  # for one or two seconds of work: only a hang may fail, not a busy machine
LAUNCH = """
import signal, sys
from parallel_llama.parallel import launch
from parallel_llama.parallel.launch import run_ranks
assert "torch" not in sys.modules
# By default ranks have time to end, and none is killed.
launch._TERM_GRACE_S = 0.1 if sys.argv[2] == "hasty" else 1000.0
launch._CTRL_C_LIMIT_S = 2.0 if sys.argv[2] == "impatient" else 1000.0
code = run_ranks(sys.argv[3:], int(sys.argv[1]), 3, module="rank_programs",
                 interactive=sys.argv[2] == "interactive")
if sys.argv[2] == "late":
    signal.raise_signal(signal.SIGINT)
sys.exit(code)
"""

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *("-m", "rank_programs"),
)

Start = Callable[..., subprocess.Popen[str]]


def environ(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
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
            stream.close()


def said(stderr: str) -> list[dict[str, Any]]:
    """The reports of ranks, in rank order."""
    lines = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line["rank"]))


def messages(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("parallel-llama:")]


def read_pids(process: subprocess.Popen[str], nproc: int) -> list[int]:
    """Waits until every rank has reported its process id."""
    pids: list[int] = []
    while len(pids) < nproc:
        line = process.stderr.readline()
        assert line, "the ranks ended before they were all there"
        if line.startswith("{"):
            pids.append(json.loads(line)["pid"])
    return pids


def all_gone(pids: list[int]) -> bool:
    """Whether all processes end in time."""
    deadline = time.monotonic() + LIMIT_S
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


def test_ranks_get_torchrun_environment_and_rank_0_gets_stdin(start):
    keys = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]
    process = start(3, "environment", *keys, OMP_NUM_THREADS="")
    stdout, stderr = process.communicate("input", timeout=LIMIT_S)
    assert process.returncode == 0
    assert "rank 0 on stdout heard input" in stdout
    assert "rank 1" not in stdout and "rank 1 on stdout" in stderr and "rank 2 on stdout" in stderr
    lines = said(stderr)
    assert len(lines) == 3
    for rank, line in enumerate(lines):
        assert line["world"] == [rank, 3]
        assert not line["torch"]
        assert (line["stdin"] == "/dev/null") == (rank > 0)
        assert line["ignores_ctrl_c"] == (rank > 0)
        assert line["env"] == dict(zip(keys, [str(rank), "3", "0", "127.0.0.1", ""], strict=True))


@pytest.mark.parametrize(("own", "expected"), [(None, "3"), ("5", "5")])
def test_launcher_sets_omp_num_threads_unless_the_user_did(start, monkeypatch, own, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    process = start(
        1, "environment", "OMP_NUM_THREADS", **({"OMP_NUM_THREADS": own} if own else {})
    )
    _, stderr = process.communicate("", timeout=LIMIT_S)
    assert said(stderr)[0]["env"] == {"OMP_NUM_THREADS": expected}


@pytest.mark.parametrize(
    ("n", "program", "code", "message"),
    [
        (3, "fail 1 7", 7, "[rank 1] the cause of it all"),
        # Other ranks fail because of the first report, and end before that rank.
        (2, "fail_first 1 7 {}", 7, "[rank 1] the cause of it all"),
        (3, "fail_alike 2", 2, "the same mistake on every rank"),
        (2, "end_with 3", 3, None),
    ],
)
def test_the_rank_that_failed_first_gives_message_and_code(
    start, tmp_path, n, program, code, message
):
    process = start(n, *program.format(tmp_path / "reported").split())
    _, stderr = process.communicate("", timeout=LIMIT_S)
    assert process.returncode == code
    expected = [] if message is None else [f"parallel-llama: {message}"]
    assert messages(stderr) == expected


@pytest.mark.parametrize(("rank", "name"), [(1, "SIGKILL"), (0, "SIGSEGV")])
def test_rank_killed_by_a_signal_is_named_with_the_signal(start, rank, name):
    process = start(2, "die", str(rank), str(int(signal.Signals[name])))
    _, stderr = process.communicate("", timeout=LIMIT_S)
    assert process.returncode == 1
    (message,) = messages(stderr)
    assert message.startswith(f"parallel-llama: [rank {rank}] was killed by {name}")


def test_rank_that_crashes_while_it_writes_its_stacks_is_not_the_cause(start):
    """Regression: the launcher named the crashed rank instead of the rank with a report."""
    process = start(2, "crash_in_dump", "0.2")
    _, stderr = process.communicate("", timeout=LIMIT_S)
    assert messages(stderr) == ["parallel-llama: [rank 0] the ranks called different collectives"]


def test_launcher_waits_for_reports_of_the_remaining_ranks(start):
    """Regression: the launcher read the reports once, before other ranks noticed the lost rank."""
    process = start(2, "die_then_report", "0.2")
    _, stderr = process.communicate("", timeout=LIMIT_S)
    (message,) = messages(stderr)
    assert message.startswith("parallel-llama: [rank 1] was killed by SIGKILL")
    assert "\n  rank 0 is in exchange 5\n  rank 1 has ended, so its stack is unknown\n" in stderr


def test_report_and_exit_code_do_not_wait_for_a_slow_exit(start, tmp_path):
    """A process with torch takes up to a second to exit on a busy machine."""
    process = start(1, "end_slowly", str(tmp_path / "ended"), mode="hasty")
    assert process.stderr.readline() == "parallel-llama: the cause of it all\n"
    assert process.wait(LIMIT_S) == 2
    assert not (tmp_path / "ended").exists()


def test_a_traceback_names_its_rank_in_the_first_line(start):
    process = start(2, "crash", "1")
    _, stderr = process.communicate("", timeout=LIMIT_S)
    assert process.returncode == 1
    assert "[rank 1]\nTraceback (most recent call last):\n" in stderr
    (message,) = messages(stderr)
    assert "[rank 1] ZeroDivisionError: " in message


@pytest.mark.parametrize("mode", ["", "interactive", "late"])
def test_ctrl_c_ends_all_ranks_with_exit_code_130(start, mode):
    process = start(3, "sleep", mode=mode)
    pids = read_pids(process, 3)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate("", timeout=LIMIT_S)
    assert process.returncode == 130
    assert messages(stderr) == [] and "Traceback" not in stderr
    assert all_gone(pids)


IN_BACKGROUND = """
import os, subprocess, sys, termios
from parallel_llama.parallel.rank_env import beyond_ctrl_c
own = termios.tcgetattr(0)
own[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, own)
says = "from parallel_llama.parallel import rank_env; rank_env.write_in_background(); print(1)"
child = subprocess.Popen([sys.executable, "-c", says], **beyond_ctrl_c())
_, status = os.waitpid(child.pid, os.WUNTRACED)
child.kill()
os._exit(status)
"""


def test_background_rank_can_write_to_a_terminal_with_tostop():
    """With `stty tostop`, SIGTTOU would stop such a rank."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [sys.executable, "-c", IN_BACKGROUND], environ())
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(terminal, 4096) == b"1\r\n"
    os.close(terminal)


def test_end_with_parent_works_in_any_thread():
    """Regression: an LLM in a thread under torchrun failed, as it cannot set a signal handler."""
    text = "import threading as t, parallel_llama.parallel.rank_env as r\n"
    text += "thread = t.Thread(target=r.end_with_parent); thread.start(); thread.join()"
    done = run_python("-c", text, env=environ())
    assert (done.returncode, done.stderr) == (0, "")


def test_rank_0_that_ignores_ctrl_c_is_ended_after_the_limit(start):
    process = start(2, "sleep", "deaf", mode="impatient")
    pids = read_pids(process, 2)
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=LIMIT_S) == 130
    assert time.monotonic() - pressed >= 2
    assert all_gone(pids)


def test_repeated_ctrl_c_does_not_end_an_interactive_program(start):
    """Regression: two presses within a second ended the chat, but only rank 0 may decide that."""
    process = start(2, "sleep", "listening", mode="interactive")
    read_pids(process, 2)
    for _ in range(4):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert process.wait(timeout=LIMIT_S) == 7


def test_sigterm_to_the_parent_ends_all_ranks(start):
    process = start(2, "sleep", "deaf")
    pids = read_pids(process, 2)
    process.terminate()
    assert process.wait(timeout=LIMIT_S) == 143
    assert all_gone(pids)


def test_no_rank_outlives_a_killed_parent(start):
    process = start(3, "sleep", "deaf")
    pids = read_pids(process, 3)
    process.kill()
    assert all_gone(pids)


def test_ranks_listen_only_on_loopback_and_die_with_their_parent(start):
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
    assert all_gone(pids)


def test_joined_ranks_sum_in_shared_memory_and_cannot_join_twice(start):
    process = start(3, "reduce", "twice")
    stdout, stderr = process.communicate("", timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    assert stdout == "total 6\n"
    found = said(stderr)
    assert [line["total"] for line in found if "total" in line] == [6, 6, 6]
    assert {line["kind"] for line in found if "kind" in line} == {"SharedMemory"}
    assert all("already" in line["error"] for line in found if "error" in line)
    assert len([line for line in found if "error" in line]) == 3


def test_concurrent_launches_do_not_join_each_other(start):
    runs = [start(2, "reduce"), start(3, "reduce")]
    assert [run.communicate("", timeout=LIMIT_S)[0] for run in runs] == ["total 3\n", "total 6\n"]


@pytest.mark.parametrize(
    ("program", "code", "stdout", "stderr"),
    [("reduce", 0, "total 3\n" * 2, ""), ("fail_alike 2", 1, "", "the same mistake on every rank")],
)
def test_the_real_torchrun_joins_ranks_and_shows_a_report(program, code, stdout, stderr):
    env = environ(GLOO_SOCKET_IFNAME="lo")
    command = [*TORCHRUN, *program.split()]
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S)
    assert (run.returncode, run.stdout) == (code, stdout), run.stderr
    assert stderr in run.stderr


Meet = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Starts processes by hand, as (RANK, WORLD_SIZE, color), and returns their outcomes."""
    processes: list[subprocess.Popen[str]] = []
    # Bound during the whole test, so that no other process gets the port; rank 0 may bind it too.
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = str(kept.getsockname()[1])

    def start(rank: int, size: int, color: str, timeout_s: float, **own: str) -> None:
        more = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": port}
        more = {"GLOO_SOCKET_IFNAME": "lo", **more, **own}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "rank_programs", "meet", str(timeout_s), color],
                stderr=subprocess.PIPE,
                text=True,
                env=environ(MASTER_ADDR="127.0.0.1", **more),
            )
        )

    def meet(
        *ranks: tuple[int, int, str],
        timeout_s: float = LIMIT_S,
        rank_0_s: float | None = None,
        own: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
    ) -> list[dict[str, Any]]:
        """`own` has environment variables of single ranks.

        With `rank_0_s`, rank 0 starts after the ranks before it have begun to wait.
        """
        for rank, size, color in ranks:
            if rank == 0 and rank_0_s is not None:
                for process in processes:
                    read_pids(process, 1)
            limit_s = timeout_s if rank or rank_0_s is None else rank_0_s
            start(rank, size, color, limit_s, **own.get(rank, {}))
        return [
            next(
                line for line in said(process.communicate(timeout=LIMIT_S)[1]) if "outcome" in line
            )
            for process in processes
        ]

    yield meet
    kept.close()
    for process in processes:
        process.kill()
        process.wait()


def test_ranks_started_by_hand_complete_the_rendezvous(meet):
    assert [line["outcome"] for line in meet((0, 2, ""), (1, 2, ""))] == ["met"] * 2


def test_missing_ranks_are_named_after_the_start_timeout(meet):
    """Regression: rank 0 waited for 300 s, and no flag changed this limit."""
    (line,) = meet((0, 3, ""), timeout_s=2)
    assert line["outcome"].startswith("ranks 1, 2 of 3 never joined within 2 s")
    assert line["seconds"] < 60
    assert line["awaited"][-1] == [1, 2]


def test_missing_rank_0_is_named_with_its_address(meet):
    (line,) = meet((1, 2, ""), timeout_s=2)
    assert line["outcome"].startswith(
        "rank 1 of 2 found no other rank: rank 0 of 2 did not answer at MASTER_ADDR=127.0.0.1"
    )
    assert line["seconds"] < 60


def test_other_ranks_report_why_rank_0_gave_up(meet):
    """Regression: the store ended with rank 0, so other ranks could not name the missing rank."""
    left, given_up = meet((1, 3, ""), (0, 3, ""), rank_0_s=3)
    assert given_up["outcome"].startswith("rank 2 of 3 never joined within 3 s")
    assert left["outcome"] == given_up["outcome"]


def test_ranks_report_different_world_sizes(meet):
    """Regression: the ranks waited for each other, or for a rank that was never started."""
    for line in meet((0, 2, ""), (1, 3, "")):
        assert re.fullmatch(
            r"rank (0|1) \(process \d+ on \S+\) is one of (2|3) ranks and rank (0|1) "
            r"\(process \d+ on \S+\) one of (2|3); give all ranks the same WORLD_SIZE",
            line["outcome"],
        )
        assert line["seconds"] < LIMIT_S / 2


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_with_the_same_rank_are_both_named(meet, rank):
    others = [(0, 3, "")] if rank else []
    for line in meet(*others, (rank, 3, ""), (rank, 3, "")):
        assert re.fullmatch(
            rf"two processes are rank {rank} of 3: process \d+ on \S+ and process \d+ on \S+; "
            "give each process a RANK of its own",
            line["outcome"],
        )
        assert line["seconds"] < LIMIT_S / 2


def test_ranks_with_different_facts_report_the_difference(meet):
    for line in meet((0, 3, "red"), (1, 3, "blue"), (2, 3, "red")):
        assert "color: rank 1 of 3 has blue and rank 0 has red" in line["outcome"]


def secret_file(path: Path, secret: str, mode: int = 0o600) -> dict[str, str]:
    path.write_text(secret + "\n")
    path.chmod(mode)
    return {"PARALLEL_LLAMA_SECRET_FILE": str(path)}


def test_ranks_with_the_same_secret_file_join(meet, tmp_path):
    files = {rank: secret_file(tmp_path / f"{rank}", "s" * 64) for rank in range(3)}
    lines = meet(*((rank, 3, "") for rank in range(3)), own=files)
    assert [line["outcome"] for line in lines] == ["met"] * 3


def test_rank_with_another_secret_cannot_join(meet, tmp_path):
    files = {rank: secret_file(tmp_path / f"{rank}", f"{rank > 1}" * 16) for rank in range(3)}
    *known, stranger = meet(*((rank, 3, "") for rank in range(3)), own=files, timeout_s=6)
    for line in known:
        assert line["outcome"].startswith("rank 2 of 3 never joined within 6 s")
        assert "was started with the same secret file" in line["outcome"]
    # The store may end with rank 0 before the limit of rank 2.
    assert re.search(
        "ranks 0, 1 (of 3 never joined within 6 s|had not joined)", stranger["outcome"]
    )


@pytest.mark.parametrize(
    ("secret", "mode", "says"),
    [("s" * 31, 0o600, "has 31 bytes; use 32 to 4096"), ("s" * 64, 0o644, "run: chmod 600")],
)
def test_secret_that_is_short_or_readable_by_others_is_refused(put, tmp_path, secret, mode, says):
    env = {**PMI, "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    put({**env, **secret_file(tmp_path / "secret", secret, mode)})
    with pytest.raises(UsageError, match=says):
        rank_env()


def test_rank_0_refuses_a_port_that_another_program_uses():
    """Regression: rank 0 waited for the start timeout, and reported that it did not answer."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = RankEnv(0, 2, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(RankError, match="another program uses this port; give all ranks"):
            communicators._open_store(env, 4.0)


def test_rank_0_refuses_the_store_of_another_run():
    """Regression: all ranks met at that store, and were lost when the other run ended."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        own = RankEnv(0, 2, "127.0.0.1", bound.getsockname()[1])
        fd = os.dup(bound.fileno())
    other = communicators._open_store(replace(own, run="another", listen_fd=fd), 60.0)
    other.set("info/0", "")
    with pytest.raises(RankError, match="another program uses this port"):
        communicators._open_store(own, 4.0)


def store_address(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> str:
    """Where rank 0 listens if MASTER_ADDR is a name with these addresses."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with socket.socket(fileno=communicators._bound_socket(RankEnv(0, 2, "host0", 0))) as sock:
        return sock.getsockname()[0]


def test_rank_0_prefers_an_address_that_other_hosts_can_reach(monkeypatch):
    every = "0.0.0.0"  # stands for an address in a network
    assert store_address(monkeypatch, "127.0.1.1", every) == every


@pytest.mark.parametrize(
    ("env", "is_warned"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host0"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.1.1"}, False),
    ],
)
def test_rank_0_warns_if_other_hosts_cannot_reach_its_address(
    put, monkeypatch, caplog, env, is_warned
):
    """Regression: the other ranks said that rank 0 did not answer, and rank 0 gave no reason."""
    put(env)
    with caplog.at_level(logging.WARNING, logger="parallel_llama"):
        assert store_address(monkeypatch, "127.0.1.1") == "127.0.1.1"
    assert ("MASTER_ADDR=host0 is 127.0.1.1 on rank 0's host" in caplog.text) == is_warned


def test_two_hosts_connect_on_the_network_of_master_addr(hosts):
    """Regression: gloo took the address of the host's name, which other hosts cannot reach."""
    n = 3  # ranks 1 and 2 are on one host
    more = {"WORLD_SIZE": str(n), "MASTER_ADDR": "10.231.0.1", "MASTER_PORT": "29500"}
    env = environ(**more)
    env.pop("GLOO_SOCKET_IFNAME", None)
    program = sys.executable, "-m", "rank_programs", "meet", "50"
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", hosts[min(rank, 1)], *program],
            stderr=subprocess.PIPE,
            text=True,
            env={**env, "RANK": str(rank)},
        )
        for rank in range(n)
    ]
    try:
        for rank in ranks:
            _, stderr = rank.communicate(timeout=LIMIT_S)
            assert [line["outcome"] for line in said(stderr) if "outcome" in line] == ["met"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("lost", [0, 1])
def test_all_ranks_promptly_report_a_rank_that_cannot_connect(meet, lost):
    """Regression: only that rank reported the error, and the others waited until --timeout."""
    ranks = [(rank, 3, "") for rank in range(3)]
    for line in meet(*ranks, own={lost: {"GLOO_SOCKET_IFNAME": "nosuch0"}}, timeout_s=90):
        assert line["outcome"].startswith(f"rank {lost} of 3 cannot connect to the other ranks: ")
        assert line["seconds"] < 60


@pytest.mark.parametrize(
    ("colors", "difference"),
    [
        (["a", "a", "a"], ""),
        (["a", "b"], "rank 1 of 2 has b and rank 0 has a"),
        (["a", "b", "b"], "rank 0 of 3 has a and rank 1 has b"),
        (
            ["a", None, "a", None, "a"],
            "rank 1 of 5 has nothing and rank 0 has a; 1 more rank differs",
        ),
        (["a" * 64, "b" * 64], "rank 1 of 2 differs from rank 0"),
    ],
)
def test_require_same_names_the_rank_that_differs(colors, difference):
    infos = [
        RankInfo(rank, len(colors), {} if color is None else {"color": color}, "here", rank, "")
        for rank, color in enumerate(colors)
    ]
    if not difference:
        require_same(infos)
        return
    with pytest.raises(RankError, match=f"color: {re.escape(difference)}"):
        require_same(infos)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_stopped_before_the_rendezvous_is_reported(start, rank):
    """The store of torch waits without limit for an owner that does not answer."""
    process = start(2, "meet", "3", "", str(rank))
    pids = read_pids(process, 2)
    told: dict[str, Any] = {}
    while "outcome" not in told:
        line = process.stderr.readline()
        told = json.loads(line) if line.startswith("{") else {}
    assert told["seconds"] < 60
    says = "rank 1 of 2 never joined" if rank else "rank 1 of 2 found no other rank"
    assert told["outcome"].startswith(says)
    process.terminate()
    assert process.wait(timeout=LIMIT_S) == 143
    assert all_gone(pids)


def outcomes(process: subprocess.Popen[str], n: int) -> list[str]:
    """The outcomes of the first n ranks that report one."""
    found: list[str] = []
    while len(found) < n:
        line = process.stderr.readline()
        assert line, "the ranks ended before they said anything"
        if line.startswith("{") and "outcome" in (told := json.loads(line)):
            found.append(told["outcome"])
    return found


def store_of(pids: list[int]) -> TCPStore:
    """Connects to the store of starting ranks, as any process of the host can."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for pid in pids:
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    return TCPStore("127.0.0.1", connection.laddr.port, wait_for_workers=False)
        time.sleep(0.01)
    raise AssertionError("no rank listens")


def test_store_entries_of_a_foreign_process_are_ignored(start):
    """Regression: a foreign process joined as the last rank, or ended the start with its own text.

    Such a text could contain terminal escapes.
    """
    n = 3
    process = start(n, "meet", "6", "", str(n - 1))
    store = store_of(read_pids(process, n))
    info = RankInfo(n - 1, n, {"color": "red"}, "elsewhere", 1, "").encode()
    for prefix in ("", "start 0/"):
        store.set(f"{prefix}objection", "\x1b[2J")
        store.set(f"{prefix}info/{n - 1}", info)
    for said in outcomes(process, n - 1):
        assert said.startswith(f"rank {n - 1} of {n} never joined within 6 s")


@pytest.mark.parametrize(("n", "key"), [(2, "info"), (3, "objection")])
def test_forged_store_entry_is_reported_and_not_believed(start, n, key):
    """The forger finds the prefix of the run in the list of keys.

    Regression: 100,000 brackets caused a RecursionError.
    """
    process = start(n, "meet", str(LIMIT_S), "", str(n - 1))
    store = store_of(read_pids(process, n))
    while not (keys := store.list_keys()):
        time.sleep(0.01)
    name = f"info/{n - 1}" if key == "info" else "objection"
    store.set(f"{keys[0].split('/')[0]}/{name}", "[" * 100_000)
    every, named = outcomes(process, n - 1), f"another process has written {name!r} to the store"
    assert any(said.startswith(named) for said in every)
    for said in every:  # rank 0 may end the store before another rank has read the forgery
        assert said.isprintable() and (said.startswith(named) or "store ended with it" in said)


@pytest.mark.parametrize(
    ("kind", "cause", "frames"),
    [
        ("SIGSTOP", "rank 1 of 3 is late: no progress for 2 s; it is stopped by a signal", None),
        ("SIGSEGV", "[rank 1] was killed by SIGSEGV", "in string_at"),
        ("c", "rank 1 of 3 is late: no progress for 2 s; it is alive", "in sleep_with_the_gil"),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named_with_its_stack(start, kind, cause, frames):
    """A signal handler writes the stacks, because no thread of such a rank can run Python."""
    process = start(3, "fault", "1", kind)
    pids = read_pids(process, 3)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and len(messages(stderr)) == 1
    report = stderr[stderr.index("parallel-llama:") :]
    assert cause in report
    assert "is in exchange 2, all_reduce of 5 values of torch.float32, called at " in report
    folder = re.search(r"the stacks of all threads of ranks 0, 1, 2 are in (\S+) on ", report)[1]
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    stacks = [Path(folder, f"rank-{rank}.txt").read_text() for rank in range(3)]
    assert "in all_reduce" in stacks[0]
    if frames is None:
        assert "rank 1 is stopped by a signal or a debugger, so its stack is unknown" in report
    else:
        assert frames in stacks[1] and (frames in report.partition("most recent call first")[2])
    assert all_gone(pids)


def test_a_rank_0_that_hangs_in_a_step_is_named_with_its_stack(start, model):
    """Regression: the others waited forever, because rank 0 may wait for a user between steps."""
    process = start(2, "hang_in_step", str(model))
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    (message,) = messages(stderr)
    assert message.startswith("parallel-llama: [rank 1] rank 0 of 2 is late: no progress for 2 s")
    assert "in spin" in stderr.partition("rank 0, most recent call first")[2]


@pytest.mark.parametrize("late", ["", "0", "2"])
def test_ranks_in_different_collectives_are_named_with_their_stacks(start, late):
    """Regression: a rank that waited for the late rank did not compare the collectives.

    That rank reported only after rank 1 had left.
    """
    process = start(3, "fault", "1", "mismatch", late)
    pids = read_pids(process, 3)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and len(messages(stderr)) == 1
    report = stderr[stderr.index("parallel-llama:") :]
    assert re.search("rank 1 (is )?in barrier", report)
    assert re.search("rank [02] (is )?in all_reduce of 5 values of torch.float32", report)
    folder = re.search(r"the stacks of all threads of ranks 0, 1, 2 are in (\S+) on ", report)[1]
    assert "in barrier" in Path(folder, "rank-1.txt").read_text()
    assert "in barrier" in report.partition("rank 1, most recent call first")[2]
    assert all_gone(pids)


LOOKING = """
from threading import Event
from torch.distributed import HashStore
from parallel_llama.parallel.torch_threads import exit_process, start_thread
store, ended = HashStore(), Event()
def look():
    while not ended.is_set():
        store.check(["key"])
"""


def test_thread_that_reads_a_store_does_not_abort_process_exit():
    """Regression: a rank that gave up waiting died of SIGABRT, before other ranks could report."""
    code = LOOKING + 'start_thread(look, "look", ended.set)'
    run = subprocess.run([sys.executable, "-c", code], env=environ(), timeout=LIMIT_S)
    assert run.returncode == 0


def test_thread_that_does_not_end_changes_neither_output_nor_exit_code():
    """Regression: over a link with 200 ms of delay, a failed rank died of SIGABRT."""
    code = LOOKING + 'start_thread(look, "look"); print("said"); exit_process(3)'
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environ(), timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
    assert (run.returncode, run.stdout) == (3, "said\n")


def test_run_secret_is_not_in_environment_or_command_line(start):
    process = start(2, "sleep")
    secrets = set()
    for pid in read_pids(process, 2):
        found = psutil.Process(pid)
        number = found.environ()["PARALLEL_LLAMA_SECRET_FD"]
        secret = Path(f"/proc/{pid}/fd/{number}").read_bytes()
        secrets.add(secret)
        shown = f"{found.environ()}{found.cmdline()}"
        assert len(secret) == 32 and secret.hex() not in shown and str(secret) not in shown
    assert len(secrets) == 1


def test_silent_stdout_drops_the_output_of_libraries(capfd):
    """Regression: with torch 2.10, lines of gloo appeared between the lines of --json."""
    print("before")
    with communicators._silent_stdout():
        print("fairscale's")
        os.write(1, b"gloo's\n")
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_ranks_end_when_torchrun_is_killed():
    """Regression: ranks kept running after torchrun was killed."""
    process = subprocess.Popen(
        [*TORCHRUN, "reduce", "stay"], stderr=subprocess.PIPE, text=True, env=environ()
    )
    try:
        pids = read_pids(process, 2)
        process.kill()
        assert all_gone(pids)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("nproc", [0, -1, MAX_RANKS + 1])
def test_an_impossible_number_of_ranks_is_refused(nproc):
    with pytest.raises(UsageError, match=f"nproc={nproc}: use 1 to {MAX_RANKS} ranks"):
        run_ranks([], nproc, 1)


@pytest.mark.parametrize(
    ("rank", "size"),
    [("2", "2"), ("-1", "2"), ("0", None), (None, "2"), ("a", "2"), ("0", "0"), ("1e0", "2")],
)
def test_invalid_rank_or_world_size_is_refused(put, rank, size):
    put({name: value for name, value in (("RANK", rank), ("WORLD_SIZE", size)) if value})
    with pytest.raises(UsageError, match=r"use integers with 0 <= RANK < WORLD_SIZE"):
        world()


def test_world_reads_rank_and_world_size(put):
    assert world() == (0, 1)
    put({"RANK": "3", "WORLD_SIZE": "7"})
    assert world() == (3, 7)


SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
PMI2 = {**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3"}  # of srun --mpi=pmi2
ALONE = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
SHELL = {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "5"}  # of salloc


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (SRUN, ((2, 3), (0, 1))),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ((1, 2), (1, 2))),
        (MPIRUN, ((4, 5), (1, 2))),
        (PMI, ((1, 3), (0, 1))),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}, ((2, 3), (0, 2))),
        # torchrun within srun, and mpirun within a job of Slurm
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "2"}, ((0, 2), (0, 2))),
        ({**SRUN, **MPIRUN}, ((4, 5), (1, 2))),
        (PMI2, ((2, 3), (0, 1))),
        # mpiexec within a task or a batch script of Slurm, also without local ranks
        ({**SRUN, **PMI}, ((1, 3), (0, 1))),
        ({**ALONE, "PMI_RANK": "1", "PMI_SIZE": "3"}, ((1, 3), (1, 3))),
        (
            {**SHELL, "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
            | {"PMI_RANK": "0", "PMI_SIZE": "8"},
            ((0, 8), (0, 8)),
        ),
    ],
)
def test_tasks_of_slurm_and_mpi_know_their_rank(put, env, expected):
    """Regression: each task ran alone with the same prompt, and all ended with exit code 0."""
    put(env)
    assert (world(), local_world(3)) == expected
    assert is_started_as_rank()


@pytest.mark.parametrize(
    "env",
    [
        ALONE,
        SHELL,
        {**SHELL, "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # sbatch
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {**SHELL, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_single_task_or_slurm_shell_is_not_started_as_a_rank(put, env):
    put(env)
    assert world() == (0, 1) and local_world(3) == (0, 3)
    assert not is_started_as_rank()


def test_inherited_secret_that_is_short_is_refused(put):
    """Regression: ranks with different secrets waited for each other."""
    fd = os.open(os.devnull, os.O_RDONLY)
    env = {**PMI, "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    put({**env, "PARALLEL_LLAMA_SECRET_FD": str(fd)})
    with pytest.raises(UsageError, match=f"SECRET_FD={fd}: this file has 0 of the 32 bytes"):
        rank_env()


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (SRUN, "export MASTER_PORT=29500 MASTER_ADDR=$(scontrol show hostnames "),
        (MPIRUN, "-x MASTER_ADDR=HOST -x MASTER_PORT=29500"),
        (PMI, "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500"),
        (PMI2, "export MASTER_PORT=29500 MASTER_ADDR=$(scontrol show hostnames "),
    ],
)
def test_missing_master_addr_error_has_a_line_for_the_launcher(put, env, line):
    put(env)
    with pytest.raises(UsageError, match=re.escape(line)):
        communicators.join()
    put({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert (rank_env().rank, rank_env().host) == (world()[0], "node1")


@pytest.mark.parametrize(("host", "port"), [("", "29500"), ("127.0.0.1", "0"), ("127.0.0.1", "x")])
def test_join_with_invalid_address_or_port_is_refused(put, host, port):
    """Regression: with port 0, as set by `torchrun --master-port 0`, ranks waited for 5 minutes."""
    put({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port})
    with pytest.raises(UsageError, match=f"MASTER_ADDR='{host}', MASTER_PORT='{port}'"):
        communicators.join()


def test_report_goes_to_the_torchelastic_error_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "report"))
    report_error("no room")
    assert capsys.readouterr().err == ""
    report = read_report((tmp_path / "report").read_bytes())
    assert report is not None and report.message == "no room"


def test_error_file_of_a_rank_that_is_killed_during_the_write_does_not_exist(monkeypatch, tmp_path):
    def write_and_die(path: Path, _data: bytes) -> None:
        path.touch()
        raise SystemExit

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "report"))
    monkeypatch.setattr(Path, "write_bytes", write_and_die)
    with pytest.raises(SystemExit):
        report_error("no room")
    assert not (tmp_path / "report").exists()


def test_report_without_an_error_file_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_error("no room")
    assert capsys.readouterr().err == "parallel-llama: no room\n"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"{", b"\xff", b'{"message": 1}', b'{"monotonic_ns": "x"}', b"3"]
)
def test_read_report_ignores_invalid_error_files(data):
    assert read_report(data) is None


def test_report_needs_only_message_and_monotonic_ns():
    assert read_report(b'{"message": "m", "monotonic_ns": 5}') == Report("m", 5)


def test_lazy_exports_equal_the_names_for_type_checkers():
    """Editors see the imports under TYPE_CHECKING, and programs see the names of __getattr__."""
    package = parallel_llama
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(checked.test) == "TYPE_CHECKING"
    imported = [a.name for node in checked.body for a in node.names]
    assert sorted(imported) == sorted(package.__all__) == sorted(package._MODULE_OF)
    for node in checked.body:
        for alias in node.names:
            home = importlib.import_module(node.module)
            assert getattr(package, alias.name) is getattr(home, alias.name)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "600000 100000\n"}, 6),
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu.max": "?"}, 8),
    ],
)
def test_threads_per_rank_obey_the_cgroup_cpu_quota(tmp_path, monkeypatch, files, cores):
    """Regression: a container with a quota of 2 of 64 cores started 64 threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    expected = [max(1, cores // n) for n in (1, 2, 3, 9)]
    assert [threads_per_rank(n, tmp_path) for n in (1, 2, 3, 9)] == expected
