"""However a reshard ends, the target is missing or complete, and --resume continues it."""

import errno
import fcntl
import multiprocessing
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_samples import weights_of
from reshard_samples import hashes_of, model_of, write, write_model

from parallel_llama.checkpoint.verify import verify
from parallel_llama.errors import UsageError, WriteError
from parallel_llama.files.model_files import find_model
from parallel_llama.reshard import tensor_writer
from parallel_llama.reshard.reshard import reshard
from parallel_llama.reshard.safetensors_layout import NativeLayout
from parallel_llama.reshard.target_folder import PartialFolder, partial_path
from parallel_llama.reshard.tensor_writer import DirectFile

pytestmark = pytest.mark.slow

FLUSHED_AT_ONCE = 4 << 20


@pytest.fixture(autouse=True)
def frequent_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_writer, "FLUSH_BYTES", FLUSHED_AT_ONCE)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "hf", model_of(100 << 20))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small") / "hf", model_of(20 << 20))


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose HF form has queries, keys and values in one tensor, group by group."""
    args = replace(
        model_of(20 << 20),
        family="falcon",
        norm="layer",
        norm_bias=True,
        activation="gelu",
        gated=False,
        parallel_block=True,
    )
    weights = weights_of(args, torch.bfloat16)
    layout = NativeLayout(args, dict.fromkeys(weights, torch.bfloat16), 1)
    return write(layout, args, weights, tmp_path_factory.mktemp("falcon") / "native")


def moved(source: Path, target: Path, resume: bool = False, layout: str = "native") -> int:
    """The bytes that this run wrote."""
    sizes: list[int] = []
    reshard(
        find_model(str(source)),
        target,
        layout=layout,
        n_parts=3,
        resume=resume,
        on_bytes=sizes.append,
    )
    return sum(sizes)


def run_alone(source: Path, target: Path, resume: bool, layout: str) -> None:
    """The work of the process that is killed."""
    tensor_writer.FLUSH_BYTES = FLUSHED_AT_ONCE
    moved(source, target, resume, layout)


@pytest.fixture(scope="module")
def start() -> Callable[..., multiprocessing.Process]:
    """Starts a process that has torch loaded already, so that a kill interrupts the reshard."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallel_llama.reshard.reshard", "reshard_samples"])

    def started(*arguments: object) -> multiprocessing.Process:
        process = context.Process(target=run_alone, args=arguments)
        process.start()
        return process

    return started


@pytest.mark.parametrize(("layout", "n_kills"), [("native", 10), ("meta", 4)])
def test_kill_at_any_time_leaves_no_target_or_a_complete_one(
    layout, n_kills, source, start, tmp_path
):
    """The kills are distributed over the duration of a whole run.

    Each run resumes the killed run before it; after every second kill, the run is completed.
    """
    whole = tmp_path / "whole"
    moved(source, whole, layout=layout)
    expected = hashes_of(whole)
    warm = start(source, tmp_path / "warm", False, layout)
    warm.join()
    began = time.monotonic()
    timed = start(source, tmp_path / "timed", False, layout)
    timed.join()
    length = time.monotonic() - began
    rng = random.Random(layout)
    target = tmp_path / "target"
    n_killed = 0
    while n_killed < n_kills:
        began, is_whole = time.monotonic(), not partial_path(target).exists()
        process = start(source, target, True, layout)
        process.join(rng.uniform(0, length))
        if process.exitcode == 0 and is_whole:
            length = time.monotonic() - began
        process.kill()
        process.join()
        n_killed += process.exitcode == -9
        if target.exists():
            assert hashes_of(target) == expected
            shutil.rmtree(target)
        elif n_killed % 2:
            moved(source, target, resume=True, layout=layout)
            assert hashes_of(target) == expected
            shutil.rmtree(target)


@pytest.mark.parametrize(
    ("source", "layout"),
    [("small", "native"), ("small", "hf"), ("small", "meta"), ("falcon", "hf")],
)
@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_resume_continues_where_an_error_stopped_the_run(
    source, layout, share, tmp_path, monkeypatch, request
):
    small = request.getfixturevalue(source)
    expected = tmp_path / "expected"
    total = moved(small, expected, layout=layout)
    target, left = tmp_path / "target", [int(total * share)]
    real = DirectFile.write

    def full(self, data, offset):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data, offset)

    monkeypatch.setattr(DirectFile, "write", full)
    with pytest.raises(WriteError, match="free space and run again with --resume"):
        moved(small, target, layout=layout)
    monkeypatch.undo()
    assert not target.exists()
    with pytest.raises(UsageError, match="continue it with --resume, or remove the folder"):
        moved(small, target, layout=layout)
    again = moved(small, target, resume=True, layout=layout)
    # In addition to the last batch, at most one layer was in flight.
    assert again <= total * (1 - share) + 2 * FLUSHED_AT_ONCE + (8 << 20)
    assert hashes_of(target) == hashes_of(expected)
    assert not verify(str(target)).problems
    assert not partial_path(target).exists()


def test_file_size_limit_is_reported_and_the_run_can_resume(small, tmp_path):
    target = tmp_path / "target"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(WriteError, match="no space"):
            moved(small, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    moved(small, target, resume=True)
    assert not verify(str(target)).problems


class Now:
    """Replaces the executor: a submitted call has run when `submit` returns."""

    def submit(self, call: Callable[..., None], *arguments: object) -> Future[None]:
        call(*arguments)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def shutdown(self) -> None:
        pass


def test_journal_records_only_data_that_is_synced(small, tmp_path, monkeypatch):
    """A loss of power keeps only synced data, so the journal must not name any other data."""
    dirty: set[DirectFile] = set()
    n_records = 0
    real_write, real_sync, real_record = DirectFile.write, DirectFile.sync, PartialFolder.record

    def write(self, data, offset):
        dirty.add(self)
        real_write(self, data, offset)

    def sync(self):
        dirty.discard(self)
        real_sync(self)

    def record(self, lines):
        nonlocal n_records
        n_records += 1
        assert not dirty
        real_record(self, lines)

    monkeypatch.setattr(tensor_writer, "started_thread", Now)
    monkeypatch.setattr(DirectFile, "write", write)
    monkeypatch.setattr(DirectFile, "sync", sync)
    monkeypatch.setattr(PartialFolder, "record", record)
    moved(small, tmp_path / "target")
    assert n_records > 3


def test_resume_refuses_an_unfinished_run_with_another_layout(small, tmp_path):
    target = tmp_path / "target"
    begun = PartialFolder(target, {"layout": "hf"}, resume=False)
    begun.close()
    with pytest.raises(UsageError, match="unfinished run had layout hf, and this one has native"):
        moved(small, target, resume=True)


def fail(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_resume_names_a_source_file_that_changed(small, tmp_path, monkeypatch):
    source = shutil.copytree(small, tmp_path / "hf")
    target = tmp_path / "target"
    monkeypatch.setattr(DirectFile, "write", fail)
    with pytest.raises(WriteError, match="cannot be written: Input/output error"):
        moved(source, target)
    monkeypatch.undo()
    os.utime(source / "model.safetensors", (1, 1))
    with pytest.raises(UsageError, match=r"had source model\.safetensors .* and this one has"):
        moved(source, target, resume=True)


def test_second_writer_is_refused_with_the_process_of_the_first(small, tmp_path):
    target = tmp_path / "target"
    code = (
        "import sys; from pathlib import Path; "
        "from parallel_llama.reshard.target_folder import PartialFolder; "
        "PartialFolder(Path(sys.argv[1]), {}, False); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, **pipes, text=True, cwd=root) as holder:
        assert holder.stdout.readline() == "held\n"
        expected = f"written by process {holder.pid} on {socket.gethostname()} since "
        with pytest.raises(UsageError, match=expected):
            moved(small, target, resume=True)
        holder.kill()
    # The lock of a dead process is free.
    shutil.rmtree(partial_path(target) / "files")
    moved(small, target)
    assert not verify(str(target)).problems


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_written_with_a_warning(tmp_path, monkeypatch, caplog, code):
    """Regression: the run ended with `No locks available`, and so did each run with --resume."""

    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    target = tmp_path / "target"
    begun = PartialFolder(target, {"a": 1}, resume=False)
    begun.record([{"name": "x"}])
    begun.close()
    again = PartialFolder(target, {"a": 1}, resume=True)
    assert again.done == [{"name": "x"}]
    again.commit()
    again.close()
    assert target.is_dir() and not partial_path(target).exists()
    assert caplog.text.count(f"written without a lock ({os.strerror(code)})") == 2


def test_torn_last_line_of_the_journal_is_dropped(tmp_path):
    target = tmp_path / "target"
    begun = PartialFolder(target, {"a": 1}, resume=False)
    begun.record([{"name": "x"}, {"name": "y"}])
    begun.close()
    journal = partial_path(target) / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-4])
    again = PartialFolder(target, {"a": 1}, resume=True)
    assert again.done == [{"name": "x"}]
    again.record([{"name": "z"}])
    again.close()
    assert journal.read_text().splitlines()[1:] == ['{"name": "x"}', '{"name": "z"}']


@pytest.mark.parametrize("is_there", [False, True])
def test_resume_refuses_partial_files_that_were_removed_or_cut(
    is_there, small, tmp_path, monkeypatch
):
    """Regression: the file was created again, with zeros for the tensors that the journal names."""
    target = tmp_path / "target"

    def commit(_):
        raise OSError(errno.EIO, "a fault")

    with monkeypatch.context() as patch:
        patch.setattr(PartialFolder, "commit", commit)
        with pytest.raises(WriteError, match="a fault"):
            moved(small, target)
    path = next((partial_path(target) / "files").glob("*-00002-of-*.safetensors"))
    if is_there:
        os.truncate(path, 1000)
    else:
        path.unlink()
    with pytest.raises(UsageError, match=rf"{path.name}: has {1000 * is_there} bytes, .*; remove"):
        moved(small, target, resume=True)
    assert not target.exists()


@pytest.mark.parametrize("line", ["[1]", "5", "{"])
def test_journal_with_invalid_lines_is_refused(line, tmp_path):
    """Regression: a line of JSON that is not an object raised a TypeError."""
    target = tmp_path / "target"
    PartialFolder(target, {"a": 1}, resume=False).close()
    (partial_path(target) / "journal.jsonl").write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"journal\.jsonl: .*; remove .*\.target\.partial"):
        PartialFolder(target, {"a": 1}, resume=True)


def test_a_file_with_the_name_of_the_partial_folder_is_refused(tmp_path):
    target = tmp_path / "target"
    partial_path(target).write_text("")
    with pytest.raises(UsageError, match="is not a folder; move it away, because"):
        PartialFolder(target, {"a": 1}, resume=False)


def test_target_created_during_the_run_is_not_touched(small, tmp_path, monkeypatch):
    target = tmp_path / "target"
    real = PartialFolder.commit

    def commit(self):
        target.mkdir()
        real(self)

    monkeypatch.setattr(PartialFolder, "commit", commit)
    with pytest.raises(WriteError, match="was created meanwhile"):
        moved(small, target)
    assert list(target.iterdir()) == []
    monkeypatch.undo()
    target.rmdir()
    assert moved(small, target, resume=True) == 0
    assert not verify(str(target)).problems
