"""Ranks with different settings or files end before they load, and name the rank that differs."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_llama.files.model_files import TOKENIZER_FILES, find_model, fingerprint

ROOT = Path(__file__).parents[2]
GENERATE = ("generate", "--prompt", "Hello", "--max-tokens", "4", "--json")


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    return Path(shutil.copytree(model, tmp_path / "other"))


Run = Callable[..., list[tuple[int, str, str]]]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs one command per rank, as on several hosts; returns exit codes, stdout and stderr."""
    processes: list[subprocess.Popen[str]] = []
    # Bound during the whole test, so that no other process gets the port; rank 0 may bind it too.
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = str(kept.getsockname()[1])

    def run(*commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
        for rank, argv in enumerate(commands):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "parallel_llama", *argv]
            pipe = subprocess.PIPE
            processes.append(
                subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=env)
            )
        ends = [process.communicate(timeout=200) for process in processes]
        return [(p.returncode, *end) for p, end in zip(processes, ends, strict=True)]

    yield run
    kept.close()
    for process in processes:
        process.kill()
        process.wait()


def test_ranks_with_equal_files_in_different_folders_run(model, other, run):
    first, second = run((*GENERATE, "--model", str(model)), (*GENERATE, "--model", str(other)))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert json.loads(first[1])["tokens"] and not second[1]


DIFFERENT = [
    (("--max-seq-len", "100"), "max_seq_len: rank 1 of 2 has 100 and rank 0 has 512"),
    (("--kv-cache-bytes", "1MB"), "kv_cache_bytes: rank 1 of 2 has 1000000 and rank 0 has None"),
    (("--random-weights", "1"), "random_weights: rank 1 of 2 has 1 and rank 0 has None"),
    (("--start-timeout", "50"), "start_timeout_s: rank 1 of 2 has 50.0 and rank 0 has 60.0"),
]


@pytest.mark.parametrize(("flags", "says"), DIFFERENT, ids=lambda case: str(case)[:30])
def test_setting_that_differs_between_ranks_is_named(model, run, flags, says):
    """Regression: the ranks hung, or ended with exit code 0 and wrong tokens."""
    command = (*GENERATE, "--model", str(model))
    for code, out, err in run(command, (*command, *flags)):
        assert (code, out) == (1, "")
        assert says in err and "Traceback" not in err


def change_weights(folder: Path) -> str:
    """Other values of equal shape and type, so that names, sizes and headers are equal."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: torch.randn_like(t) for name, t in tensors.items()}, path, {"format": "pt"})
    return "file model.safetensors: rank 1 of 2 differs from rank 0"


def change_tokenizer(folder: Path) -> str:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|turn|>", "<|turm|>"))
    return "file tokenizer.json: rank 1 of 2 differs from rank 0"


def change_config(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    return "model's arguments: rank 1 of 2 differs from rank 0"


def add_a_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("{}")
    return "file manifest.json: rank 1 of 2 differs from rank 0"


@pytest.mark.parametrize(
    "change", [change_weights, change_tokenizer, change_config, add_a_manifest]
)
def test_file_that_differs_between_ranks_is_named(model, other, run, change):
    """Regression: two checkpoints of the same shape gave wrong tokens and exit code 0."""
    says = change(other)
    for code, out, err in run(
        (*GENERATE, "--model", str(model)), (*GENERATE, "--model", str(other))
    ):
        assert (code, out) == (1, "")
        assert says in err and "Traceback" not in err


def test_command_that_differs_between_ranks_is_named(model, run):
    bench = ("bench", "--model", str(model), "--prompt-tokens", "8", "--max-tokens", "4")
    for code, _, err in run((*GENERATE, "--model", str(model)), bench):
        assert code == 1
        assert "command: rank 1 of 2 has bench and rank 0 has generate" in err


def test_rank_that_differs_from_two_others_is_named(model, run):
    command = (*GENERATE, "--model", str(model))
    for code, _, err in run((*command, "--block-size", "8"), command, command):
        assert code == 1
        assert "block_size: rank 0 of 3 has 8 and rank 1 has 16" in err


def test_fingerprint_depends_on_content_and_not_on_the_path(model, other):
    before = fingerprint(find_model(str(model)))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= before.keys()
    assert fingerprint(find_model(str(other))) == before
    path = other / "model.safetensors"
    data = bytearray(path.read_bytes())
    for at in (0, len(data) - 1):
        data[at] ^= 1
        path.write_bytes(data)
        changed = fingerprint(find_model(str(other)))
        assert {name for name in before if before[name] != changed[name]} == {path.name}
        data[at] ^= 1


def test_fingerprint_covers_every_tokenizer_file(tmp_path, model):
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    for name in TOKENIZER_FILES:
        (folder / name).write_text("{}")
    before = fingerprint(find_model(str(folder)))
    for name in TOKENIZER_FILES:
        (folder / name).write_text("[]")
        assert fingerprint(find_model(str(folder)))[name] != before[name]


def test_fingerprint_of_large_weights_detects_a_2_mib_change(tmp_path, model):
    folder = Path(shutil.copytree(model, tmp_path / "large"))
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(64 << 20)
    before = fingerprint(find_model(str(folder)))
    with path.open("r+b") as file:  # longer than the distance between samples
        file.seek(40 << 20)
        file.write(b"x" * (2 << 20))
    assert fingerprint(find_model(str(folder)))[path.name] != before[path.name]


@pytest.mark.parametrize(("n", "failed"), [(2, 1), (3, 0)])
def test_all_ranks_report_a_rank_that_fails_before_it_joins(model, run, n, failed):
    """Regression: the other ranks waited a minute, and reported only that the rank never joined."""
    command = (*GENERATE, "--model", str(model), "--start-timeout", "150")
    commands = [command] * n
    commands[failed] = (*command, "--temperature", "hot")
    started = time.monotonic()
    for rank, (code, out, err) in enumerate(run(*commands)):
        assert out == "" and "--temperature" in err and "hot" in err
        assert code == (2 if rank == failed else 1)
        assert rank == failed or f"rank {failed} of {n}: " in err
        assert "Traceback" not in err and "[W" not in err
    assert time.monotonic() - started < 100


def test_usage_error_on_all_ranks_ends_each_with_exit_code_2(model, run):
    command = (*GENERATE, "--model", str(model), "--temperature", "hot")
    for code, out, err in run(command, command, command):
        assert (code, out) == (2, "") and err.count("--temperature") == 1
