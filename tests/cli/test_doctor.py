"""The command `doctor` as a user runs it, and the warnings of other commands before they start."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import psutil
import pytest
from commands import ROOT, run_command

from parallel_llama.cli.arguments import parse_flags
from parallel_llama.cli.main import load_verb
from parallel_llama.doctor.check import CHECKS, SCHEMA
from parallel_llama.parallel.rank_env import SECRET_FD

LIMIT_S = 200


def test_no_check_fails_on_two_ranks_with_a_model():
    done = run_command("doctor", "--nproc", "2", "--model", "smollm2", "--json")
    report = json.loads(done.stdout)
    jsonschema.validate(report, SCHEMA)
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    assert not failed and report["ok"] and done.returncode == 0, failed or done.stderr
    assert [check["id"] for check in report["checks"]] == list(CHECKS)
    status = {check["id"]: check["status"] for check in report["checks"]}
    for name in ("start", "collectives", "tensor-parallel", "files", "layers"):
        assert status[name] == "pass"


@pytest.mark.parametrize(
    ("sent", "seen", "remedy"),
    [
        (signal.SIGSTOP, "rank 1 is stopped by a signal", "kill -CONT {}"),
        (signal.SIGKILL, "rank 1 of 2 was killed by SIGKILL", "sudo dmesg"),
    ],
    ids=["stopped", "killed"],
)
def test_stopped_or_killed_rank_is_named_in_the_table(sent, seen, remedy):
    command = [sys.executable, "-m", "parallel_llama", "doctor", "--nproc", "2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        deadline, ranks = time.monotonic() + LIMIT_S, {}
        while 1 not in ranks and time.monotonic() < deadline:
            time.sleep(0.01)
            children = psutil.Process(process.pid).children()
            ranks = {int(child.environ().get("RANK", -1)): child for child in children}
        ranks[1].send_signal(sent)
        lines = process.communicate(timeout=LIMIT_S)[0].splitlines()
    assert process.returncode == 1
    (failed,) = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
    assert seen in lines[failed]
    assert f"remedy: {remedy.format(ranks[1].pid)}" in "".join(lines[failed : failed + 3])
    assert lines[-1].startswith("1 failed (start)")
    assert not psutil.pid_exists(ranks[1].pid)


def by_hand(folders: Sequence[Path], *flags: Sequence[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of `doctor` on each rank, which has its own source and flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank, folder in enumerate(folders):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(folder),
        }  # fmt: skip
        own = flags[rank] if flags else ()
        command = [sys.executable, "-m", "parallel_llama", "doctor", "--json", *own]
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)
        )
    printed = [process.communicate(timeout=LIMIT_S) for process in processes]
    return [(each.returncode, *own) for each, own in zip(processes, printed, strict=True)]


def test_other_source_on_a_rank_of_another_launcher_is_reported(tmp_path):
    """The ranks start as torchrun would start ranks, and rank 1 has another source."""
    other = tmp_path / "parallel_llama"
    other.mkdir()
    for path in (ROOT / "parallel_llama").iterdir():
        (other / path.name).symlink_to(path)
    (other / "lm_eval.py").unlink()
    (code, printed, _), (_, nothing, _) = by_hand([ROOT, tmp_path])
    assert nothing == "" and code == 1
    checks = {check["id"]: check for check in json.loads(printed)["checks"]}
    assert "source of parallel_llama: rank 1 has" in checks["versions"]["seen"]
    assert checks["arithmetic"]["status"] == "skip" and "versions" in checks["arithmetic"]["seen"]


@pytest.mark.parametrize("others", ["s" * 64, "t" * 64], ids=["same", "different"])
def test_ranks_connect_only_with_the_same_secret_file(tmp_path, others):
    flags = []
    for rank, secret in enumerate(("s" * 64, others)):
        (tmp_path / f"{rank}").write_text(secret)
        (tmp_path / f"{rank}").chmod(0o600)
        flags.append(["--secret-file", str(tmp_path / f"{rank}"), "--start-timeout=8"])
    (_, printed, errors), _ = by_hand([ROOT, ROOT], *flags)
    (status,) = (each["status"] for each in json.loads(printed)["checks"] if each["id"] == "start")
    is_same = others == "s" * 64
    assert status == ("pass" if is_same else "fail"), errors + printed
    assert ("secret" in errors + printed) is not is_same


@pytest.mark.parametrize("name", ["generate", "serve"])
def test_command_warns_of_low_open_files_limit_at_start(model: Path, monkeypatch, capsys, name):
    own = ["--prompt", "a"] if name == "generate" else ["--port", "0"]
    verb = load_verb(name)
    arguments = parse_flags(verb, ["--model", str(model), "--nproc", "2", *own])
    verb.prepare(arguments)
    assert "open-files" not in capsys.readouterr().err
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    verb.prepare(arguments)
    said = capsys.readouterr().err
    assert said.count("open-files: limit 100 (hard limit 100); a rank needs 128; try: sudo") == 1
    monkeypatch.setenv(SECRET_FD, "3")  # a rank that this program has started
    verb.prepare(arguments)
    assert "open-files" not in capsys.readouterr().err
