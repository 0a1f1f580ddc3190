"""Every command answers an unreadable path with a one-line error and exit code 2.

The superuser may read everything, so if these tests run as root, each command runs as another user
(setresuid).
"""

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf_builder
import pytest
import torch
from model_folders import add_manifest
from safetensors.torch import load_file
from tiny_folder import write_chat_folder
from tiny_models import TINY_MODELS, write_hf, write_meta

from parallel_llama import LLM
from parallel_llama.checkpoint.byte_ranges import ByteRanges
from parallel_llama.cli.main import main
from parallel_llama.config.gguf import _rope_factors
from parallel_llama.errors import CheckpointError
from parallel_llama.files.gguf_header import GGUFHeader
from parallel_llama.files.partial_output import whole_lines
from parallel_llama.files.safetensors_header import FileTensor
from parallel_llama.tokenizer import bounded_process

NOBODY = 65534
LONG = "x" * 300

VERBS: dict[str, Callable[[str], list[str]]] = {
    "plan": lambda model: ["plan", "--model", model],
    "generate": lambda model: ["generate", "--model", model, "--prompt=Hi", "--max-tokens=2"],
    "score": lambda model: ["score", "--model", model, "--text-file", "text.txt"],
    "verify": lambda model: ["verify", model],
    "reshard": lambda model: ["reshard", model, "out", "--tp", "1", "--format", "native"],
}


@pytest.fixture(scope="module")
def good() -> Iterator[Path]:
    """Models in a folder that every user may enter, unlike pytest's own folders."""
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    home.chmod(0o777)
    write_chat_folder(home / "hf")
    shutil.copytree(home / "hf", home / "indexed")
    _write_index(home / "indexed", {"a": f"{LONG}.safetensors"})
    shutil.copytree(home / "hf", home / "bin")
    torch.save(load_file(home / "hf" / "model.safetensors"), home / "bin" / "pytorch_model.bin")
    (home / "bin" / "model.safetensors").unlink()
    write_meta(TINY_MODELS["9/3"], write_hf(TINY_MODELS["9/3"], home / "x"), home / "meta", 1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(home / "hf" / name, home / "meta")
    shutil.copytree(home / "hf", home / "listed")
    add_manifest(home / "listed")
    (home / "gguf").mkdir()
    (home / "gguf" / "m.gguf").write_bytes(gguf_builder.GGUF().to_bytes())
    (home / "text.txt").write_text("some text")
    for path in home.rglob("*"):  # some writers create files that only their owner may read
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield home
    shutil.rmtree(home)


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@contextmanager
def powerless() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    gc.collect()  # ends processes of other tests, which only this user may end
    with pytest.MonkeyPatch.context() as monkeypatch:
        # The interpreter may be in a folder that other users cannot enter.
        monkeypatch.setattr(bounded_process.subprocess, "Popen", _with_power(subprocess.Popen))
        monkeypatch.setattr(bounded_process, "_end", _with_power(bounded_process._end))
        os.setresuid(NOBODY, NOBODY, 0)
        try:
            yield
        finally:
            os.setresuid(0, 0, 0)


def _with_power(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        was = os.getresuid()
        os.setresuid(0, 0, 0)
        try:
            return function(*args, **more)
        finally:
            os.setresuid(*was)

    return call


@contextmanager
def locked(path: Path, mode: int = 0) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def outcome(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    capsys.readouterr()
    with powerless():
        code = main(argv)
    return code, capsys.readouterr().err.splitlines()


Refuses = Callable[[str, str], str]


@pytest.fixture
def refuses(
    good: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refuses:
    """Runs a command on a model, asserts exit code 2 and a message of one line, and returns it."""
    monkeypatch.chdir(good)

    def refuses(verb: str, model: str) -> str:
        code, lines = outcome(VERBS[verb](model), capsys)
        said = [line for line in lines if line.startswith("parallel-llama:")]
        assert (code, len(said)) == (2, 1), "\n".join(lines)
        assert "Traceback" not in "".join(lines)
        assert len(said[0]) < 1000
        return said[0]

    return refuses


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_unreadable_folder_exits_2_with_permission_denied(good, refuses, verb, mode):
    """The modes allow nothing, only listing the folder, and only entering it."""
    with locked(good / "hf", mode):
        assert "hf" in (said := refuses(verb, "hf"))
        assert "Permission denied" in said


# Files of a model, and the commands that do not read them.
FILES = [
    ("hf", "config.json", []),
    ("hf", "model.safetensors", ["plan"]),
    ("hf", "tokenizer.json", ["plan", "verify", "reshard"]),
    ("hf", "generation_config.json", ["plan", "verify", "score"]),
    ("hf", "tokenizer_config.json", ["plan", "verify", "reshard"]),
    ("bin", "pytorch_model.bin", ["plan"]),
    ("meta", "params.json", []),
    ("meta", "consolidated.00.pth", ["plan"]),
    ("listed", "manifest.json", ["plan", "generate", "score", "reshard"]),
    ("indexed", "model.safetensors.index.json", []),
    ("gguf/m.gguf", "", []),
]


@pytest.mark.parametrize(
    ("verb", "model", "file"),
    [(verb, model, file) for model, file, spared in FILES for verb in VERBS if verb not in spared],
)
def test_unreadable_file_exits_2_with_permission_denied(good, refuses, verb, model, file):
    path = good / model / file
    with locked(path):
        said = refuses(verb, model)
        assert f"{path.relative_to(good)}: cannot be read: Permission denied" in said


@pytest.mark.parametrize(("model", "file"), [own[:2] for own in FILES if "plan" in own[2]])
def test_plan_does_not_read_weights_or_tokenizer(good, capsys, model, file):
    with locked(good / model / file):
        assert outcome(VERBS["plan"](str(good / model)), capsys)[0] == 0


@pytest.mark.parametrize("file", ["manifest.json", "tokenizer.json", "model.safetensors"])
def test_verify_flag_refuses_unreadable_file(good, capsys, file):
    """Regression: an unreadable file counted as damaged, although its content is unknown."""
    argv = ["generate", "--model", str(good / "listed"), "--prompt=Hi", "--max-tokens=2"]
    assert main([*argv, "--verify"]) == 0
    with locked(good / "listed" / file):
        code, lines = outcome([*argv, "--verify"], capsys)
    assert code == 2
    assert f"listed/{file}: cannot be read: Permission denied" in lines[-1]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", [LONG, f"{LONG}/m.gguf", f"hf/{LONG}", "a/" * 2500])
def test_too_long_path_exits_2_with_one_line(refuses, verb, name):
    refuses(verb, name)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "verify"])
def test_too_long_file_name_in_index_counts_as_missing(refuses, verb):
    assert "1 of the 1 files" in refuses(verb, "indexed")


def test_verify_reports_too_long_file_name_in_index_as_missing(good, capsys):
    """A missing file is damage, which verify reports with exit code 1."""
    assert main(["verify", str(good / "indexed")]) == 1
    assert "1 of the 1 files" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["loop", "loop/m.gguf", "loop.gguf"])
def test_loop_of_links_is_refused(good, refuses, verb, name):
    links = [good / "loop", good / "loop.gguf"]
    for link in links:
        link.symlink_to(link.name)
    try:
        assert "Too many levels of symbolic links" in refuses(verb, name)
    finally:
        for link in links:
            link.unlink()


@pytest.mark.parametrize(
    ("verb", "file"),
    [
        *((verb, "config.json") for verb in VERBS),
        *((verb, "model.safetensors") for verb in VERBS if verb != "plan"),
        *((verb, "tokenizer.json") for verb in VERBS if verb != "plan"),
    ],
)
def test_model_file_that_links_to_itself_is_refused(good, refuses, verb, file):
    path = good / "hf" / file
    path.rename(good / "away")
    path.symlink_to(path.name)
    try:
        assert file in refuses(verb, "hf")
    finally:
        path.unlink()
        (good / "away").rename(path)


@pytest.mark.parametrize(
    "target", [LONG, f"hf/{LONG}/new", "closed/new", "closed/in/new", "y" * 250]
)
def test_unwritable_reshard_target_exits_2_with_one_line(good, capsys, monkeypatch, target):
    monkeypatch.chdir(good)
    closed = good / "closed"
    closed.mkdir(exist_ok=True)
    with locked(closed):
        argv = ["reshard", "hf", target, "--tp", "1", "--format", "native"]
        code, lines = outcome(argv, capsys)
    assert (code, len(lines)) == (2, 1), lines
    assert len(lines[0]) < 1000


FLAGS = [
    ("score", "--text-file"),
    ("score", "--tokens-file"),
    ("generate", "--prompts"),
    ("generate", "--output"),
    ("generate", "--json-schema"),
    ("generate", "--grammar"),
]


@pytest.mark.parametrize(("verb", "flag"), FLAGS)
@pytest.mark.parametrize("path", ["closed/file", "closed.txt", "loop", "loop/file", LONG])
def test_inaccessible_file_of_flag_exits_2(good, capsys, monkeypatch, verb, flag, path):
    monkeypatch.chdir(good)
    (good / "closed").mkdir(exist_ok=True)
    (good / "closed.txt").write_text("{}")
    (good / "loop").symlink_to("loop")
    argv = [verb, "--model", "hf", flag, path]
    if verb == "generate" and flag != "--prompts":
        argv += ["--prompt", "Hi", "--max-tokens", "2"]
    try:
        with locked(good / "closed"), locked(good / "closed.txt"):
            code, lines = outcome(argv, capsys)
    finally:
        (good / "loop").unlink()
    assert (code, len(lines)) == (2, 1), "\n".join(lines)
    assert len(lines[0]) < 1000


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"waits for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(path.parent)
        server.bind(path.name)


SPECIAL: dict[str, Callable[[Path], None]] = {
    ": a named pipe, not a regular file": lambda path: os.mkfifo(path, 0o666),
    ": a device": lambda path: path.symlink_to("/dev/zero"),
    ": a folder": lambda path: path.mkdir(0o755),
    ": No such device": _socket,
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("hf", "model.safetensors"),
        ("hf", "tokenizer_config.json"),
        ("bin", "pytorch_model.bin"),
        ("meta", "consolidated.00.pth"),
        ("indexed", "model.safetensors.index.json"),
    ],
)
def test_a_file_that_is_not_regular_is_refused_at_once(good, refuses, model, file, kind):
    """Regression: a named pipe in a model's folder made the command hang."""
    path = good / model / file
    path.rename(good / "away")
    try:
        SPECIAL[kind](path)
        with within(30):
            said = refuses("generate", model)
        assert f"{file}: cannot be read{kind}" in said
    finally:
        (path.rmdir if kind == ": a folder" else path.unlink)()
        (good / "away").rename(path)


@pytest.mark.parametrize("file", ["model.gguf", "adapter_config.json", "adapter_model.safetensors"])
def test_named_pipe_as_gguf_file_or_adapter_is_refused(good, capsys, monkeypatch, tmp_path, file):
    """Regression: the command hung on a named pipe."""
    monkeypatch.chdir(good)
    os.mkfifo(tmp_path / file)
    argv = ["generate", "--model", "hf", "--adapter", f"a={tmp_path}"]
    if file == "model.gguf":
        argv = ["generate", "--model", str(tmp_path / file)]
    elif file == "adapter_model.safetensors":
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with within(30):
        assert main([*argv, "--prompt", "Hi", "--max-tokens", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert file in line


@pytest.mark.parametrize("file", ["rope_freqs", "weights", "journal"])
def test_opening_a_file_that_became_a_pipe_is_refused(tmp_path, file):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    opens: dict[str, Callable[[], object]] = {
        "rope_freqs": lambda: _rope_factors(
            GGUFHeader({}, {"freqs": FileTensor("freqs", "F32", (2,), 0, 8)}, {"freqs": path}),
            "freqs",
        ),
        "weights": lambda: ByteRanges(path),
        "journal": lambda: list(whole_lines(path)),
    }
    with within(10), pytest.raises(CheckpointError, match="a named pipe, not a regular file"):
        opens[file]()


@pytest.mark.parametrize(
    ("verb", "flag"),
    [flag for flag in FLAGS if "--output" not in flag] + [("serve", "--api-key-file")],
)
def test_named_pipe_for_flag_is_refused_at_once(good, capsys, monkeypatch, tmp_path, verb, flag):
    """Regression: the command hung on a named pipe."""
    monkeypatch.chdir(good)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    argv = [verb, "--model", "hf", flag, str(path)]
    if verb == "generate" and flag != "--prompts":
        argv += ["--prompt", "Hi", "--max-tokens", "2"]
    with within(30):
        assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and ("regular file" in lines[0]), lines


def test_process_substitution_is_read_as_text_file(good, capsys, monkeypatch):
    """As in --text-file <(command)."""
    monkeypatch.chdir(good)
    assert main(["score", "--model", "hf", "--text-file", "text.txt", "--json"]) == 0
    expected = capsys.readouterr().out
    reader, writer = os.pipe()
    os.write(writer, (good / "text.txt").read_bytes())
    os.close(writer)
    with within(60):
        assert main(["score", "--model", "hf", "--text-file", f"/dev/fd/{reader}", "--json"]) == 0
    os.close(reader)
    assert capsys.readouterr().out == expected


def test_python_api_raises_error_for_unreadable_file(good):
    refused = pytest.raises(CheckpointError, match=r"config\.json: cannot be read: Permission")
    with locked(good / "hf" / "config.json"), powerless(), refused:
        LLM(str(good / "hf"))
