"""Downloads at the command line: the question on a terminal, and the ranks of a host."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from commands import run_command, run_python
from hub_server import Hub, hub_server

from parallel_llama.files.hub_cache import hub_folder

ROOT = Path(__file__).parents[2]
NAME = "some-org/Some.Model_1"
QUESTION = "[y/N] "
LIMIT_S = 60


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub for the processes that a test starts, and an empty cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    files = {path.name: path.read_bytes() for path in model.iterdir()} | {"model.py": b"0"}
    with hub_server(NAME, files) as server:
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        yield server


def needed(hub: Hub) -> list[str]:
    return sorted(name for name in hub.files if name != "model.py")


def typed(answer: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code of `plan`, and what it showed on a terminal where an answer was typed."""
    ours, theirs = pty.openpty()
    size = struct.pack("HHHH", 24, 100, 0, 0)  # without a width, no bar is drawn
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    process = subprocess.Popen(
        [sys.executable, "-m", "parallel_llama", "plan", NAME],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    os.close(theirs)
    shown, n_answers = "", 0
    try:
        while piece := os.read(ours, 4096):
            shown += piece.decode()
            if QUESTION in shown and n_answers == 0:
                n_answers = os.write(ours, answer.encode())
    except OSError:  # the other side was closed
        pass
    finally:
        code = process.wait(LIMIT_S)
        os.close(ours)
    return code, shown


def test_terminal_asks_and_yes_downloads_the_model(hub):
    code, shown = typed("yes\n", {})
    question = f"{NAME} is not a path that exists. Download the model of this name from {hub.url}?"
    assert code == 0 and f"{question} {QUESTION}" in shown
    assert hub.fetched() == needed(hub)
    assert "model.safetensors: 100%|" in shown  # a progress bar
    assert typed("", {}) == (0, "")


@pytest.mark.parametrize(
    ("answer", "environment", "is_asked"),
    [
        ("\n", {}, True),
        ("", {"RANK": "0", "WORLD_SIZE": "1"}, False),
        ("", {"HF_HUB_OFFLINE": "1"}, False),
    ],
)
def test_without_a_yes_nothing_is_downloaded(hub, answer, environment, is_asked):
    code, shown = typed(answer, environment)
    assert (code, QUESTION in shown) == (2, is_asked)
    assert "add --download, or run: hf download" in shown
    assert hub.requests == []


def test_command_downloads_the_model_once_for_its_ranks(hub):
    argv = ["--prompt", "Hi", "--max-tokens", "3", "--temperature", "0", "--json"]
    done = run_command("generate", "--model", NAME, "--download", "--nproc", "3", *argv)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 3
    assert hub.fetched() == needed(hub)
    assert "%" not in done.stderr  # no progress bar without a terminal


def test_one_rank_of_a_host_downloads_for_all(hub):
    """The ranks are those of torchrun, which download before they connect to each other."""
    code = (
        "from parallel_llama.engine.model_download import require_downloaded as require\n"
        "from parallel_llama.files.model_files import find_model\n"
        f"require({NAME!r}, {LIMIT_S}, print); print(find_model({NAME!r}).path.name)"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(4 + rank), "WORLD_SIZE": "7"}
            | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"},
        )
        for rank in (2, 1, 0)
    ]
    shown = [rank.communicate(timeout=LIMIT_S)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert [len(lines) for lines in shown] == [1, 1, 2]  # only the first rank announces
    assert hub.fetched() == needed(hub)
    snapshots = hub_folder(NAME) / "snapshots"
    assert {lines[-1] for lines in shown} == {path.name for path in snapshots.iterdir()}


def test_rank_on_an_unknown_host_downloads_the_model_itself(hub, monkeypatch):
    """Regression: rank 1 waited for rank 0, which may be on another host."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    code = "from parallel_llama.engine.model_download import require_downloaded as require\n"
    done = run_python("-c", f"{code}require({NAME!r}, 1)")
    assert done.returncode == 0, done.stderr
    assert hub.fetched() == needed(hub)
