"""Child processes that run modules: what they import, and failures to start them."""

import asyncio
import errno
import json
import os
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from parallel_llama.cli.main import main
from parallel_llama.llm import LLM
from parallel_llama.parallel import failures, launch
from parallel_llama.parallel.child_process import module_command, python_path
from parallel_llama.parallel.failures import RankError, exit_code
from parallel_llama.parallel.launch import LocalRanks, run_ranks
from parallel_llama.serve.engine_child import EngineChild

ROOT = Path(__file__).parents[2]
LIMIT_S = 60
PROGRAM = """
import colorsys, json, os, sys
from pathlib import Path
import parallel_llama
found = {
    "arguments": sys.argv[1:], "name": __name__, "path": sys.path, "colorsys": colorsys.__file__,
    "version": parallel_llama.__version__, "package": parallel_llama.__file__,
}
file = Path(__file__).with_name(os.environ.get("RANK", "engine"))
file.with_suffix(".part").write_text(json.dumps(found))
file.with_suffix(".part").rename(file)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `child_program`; the current folder has modules that a child must not run."""
    here, folder = tmp_path / "here", tmp_path / "programs"
    (here / "parallel_llama").mkdir(parents=True)
    (here / "colorsys.py").write_text("raise SystemExit('code of the current folder has run')")
    folder.mkdir()
    (folder / "child_program.py").write_text(PROGRAM)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def run_with_launcher() -> None:
    assert run_ranks(["a", "b"], 1, 1, module="child_program") == 0


def run_local_rank() -> None:
    ranks = LocalRanks("child_program", {}, 1, 1, first=0)
    try:
        assert ranks.drop_ended(LIMIT_S) == "rank 0 of 1 ended with exit code 0"
    finally:
        ranks.end()


def run_engine() -> None:
    child = EngineChild("child_program", {}, "text")
    assert asyncio.run(child.end(LIMIT_S))[0] == 0


@pytest.mark.parametrize("run", [run_with_launcher, run_local_rank, run_engine])
def test_child_does_not_import_from_the_current_folder(programs, run):
    """Regression: a model's folder as the current folder could run its code in the ranks."""
    run()
    found = json.loads((programs / ("engine" if run is run_engine else "0")).read_text())
    assert "" not in found["path"] and str(Path.cwd()) not in found["path"]
    assert not found["colorsys"].startswith(str(Path.cwd()))
    assert found["package"] == str(ROOT / "parallel_llama" / "__init__.py")


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_module_command_runs_a_module_as_main_with_its_arguments(programs, monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    command = module_command("child_program", "-m", "b c")
    monkeypatch.undo()
    assert " -m child_program -m b c" in " ".join(command)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(programs)])}
    env.pop("RANK", None)
    subprocess.run(command, check=True, env=env, cwd=programs.parent / "here")
    found = json.loads((programs / "engine").read_text())
    assert (found["arguments"], found["name"]) == (["-m", "b c"], "__main__")
    assert str(programs.parent / "here") not in found["path"] and "" not in found["path"]


def test_python_path_has_the_package_before_the_folders_of_the_user(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    assert python_path() == f"{ROOT}:/a:/b"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == str(ROOT)
    # Before the standard library, site-packages would hide its modules.
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(ROOT)])
    assert python_path() == ""
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    assert python_path() == "/a:/b"


# Failures to start.


def refuse(*_: Any, **__: Any) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def no_folder(*_: Any, **__: Any) -> None:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")


@pytest.mark.parametrize(
    ("where", "name", "error", "reason"),
    [
        (launch, "_start", refuse, "Resource temporarily unavailable"),
        (tempfile, "TemporaryFile", no_folder, "No usable temporary directory found in ['/tmp']"),
    ],
)
def test_failure_to_start_ranks_is_named_with_a_remedy(
    model, monkeypatch, capsys, where, name, error, reason
):
    """Regression: the message said that stdout cannot be written."""
    monkeypatch.setattr(where, name, error)
    assert main(["generate", "--model", str(model), "--prompt", "a", "--nproc", "2"]) == 1
    said = f"ranks cannot be started: {reason}; parallel-llama doctor shows the limits of "
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "started" in text]
    assert line.startswith(f"parallel-llama: {said}")
    with pytest.raises(RankError) as caught:
        LLM(str(model), tp_size=2)
    assert str(caught.value).startswith(said)


def test_failure_to_start_the_engine_is_named(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(RankError, match="the engine cannot be started: Resource temporarily"):
        EngineChild("child_program", {}, "text")


def test_missing_python_is_named_if_ranks_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RankError, match=r"ranks cannot be started: .*/nowhere/python"):
        run_ranks([], 1, 1)


@pytest.mark.parametrize(
    ("error", "is_of_stdout"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 5), True),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (OSError(errno.ENOSPC, "No space left on device", "file"), False),
    ],
    ids=str,
)
def test_only_errors_of_writes_are_reported_as_errors_of_stdout(
    monkeypatch, capsys, error, is_of_stdout
):
    def fail() -> int:
        raise error

    monkeypatch.setattr(failures, "_discard_stdout", lambda: None)
    assert exit_code(fail, lambda _: None) == 1
    said = capsys.readouterr().err
    assert ("stdout cannot be written" in said) == is_of_stdout
    assert ("in fail" in said) != is_of_stdout  # the traceback
