"""Models found by their hub names in the download cache, compared with huggingface_hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from parallel_llama.cli.main import main
from parallel_llama.errors import UnreadableFile, UsageError
from parallel_llama.files.hub_cache import hub_folder, parse_hub_name
from parallel_llama.files.model_files import find_model

NAME = "some-org/Some.Model_1"
MAIN, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, isolated from this machine's own cache."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def download(cache: Path, model: Path, revision: str, refs: bool = True) -> Path:
    """Creates the files of the hub's tools: blobs, links to the blobs, and a ref."""
    folder = cache / "models--some-org--Some.Model_1"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(sorted(model.iterdir())):
        blob = folder / "blobs" / f"{number}-{revision[:4]}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if refs:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
    return snapshot


def test_model_is_found_where_huggingface_hub_finds_it(cache, model):
    download(cache, model, OTHER)
    snapshot = download(cache, model, MAIN)
    assert find_model(NAME).path == snapshot
    theirs = snapshot_download(NAME, cache_dir=cache, local_files_only=True)
    assert Path(theirs) == snapshot


@pytest.mark.slow
def test_commands_accept_a_hub_name(cache, model, capsys):
    download(cache, model, MAIN)
    for argv in (
        ["plan", "--model", NAME],
        ["generate", "--model", NAME, "--prompt", "Hi", "--max-tokens", "2"],
        ["verify", NAME],
        ["verify", str(model), "--against", NAME],
        ["reshard", NAME, "native", "--tp", "1", "--format", "native"],
        ["generate", "--model", "native", "--prompt", "Hi", "--max-tokens", "2", "--verify"],
    ):
        assert main(argv) == 0, capsys.readouterr()
    capsys.readouterr()


def test_snapshot_without_ref_is_not_the_main_branch(cache, model):
    """Regression: a commit that was downloaded by its name was run as the main branch."""
    snapshot = download(cache, model, OTHER, refs=False)
    assert find_model(f"{NAME}@{OTHER}").path == snapshot
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download(NAME, cache_dir=cache, local_files_only=True)
    with pytest.raises(UsageError, match=r"was not downloaded from the hub .* add --download"):
        find_model(NAME)


def test_ref_to_missing_snapshot_is_refused(cache, model):
    snapshot = download(cache, model, MAIN)
    snapshot.rename(snapshot.with_name(OTHER))
    with pytest.raises(UsageError, match=rf"names '{MAIN}', a snapshot .* run: hf download"):
        find_model(NAME)
    shutil.rmtree(snapshot.with_name(OTHER))
    with pytest.raises(UsageError, match="a snapshot that is not downloaded"):
        find_model(NAME)


@pytest.mark.parametrize("text", ["", "..", "../../x", "/etc", "a/b", "a\0b", "\xff", "x" * 300])
def test_invalid_ref_is_refused(cache, model, text):
    main_ref = download(cache, model, MAIN).parents[1] / "refs" / "main"
    main_ref.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"not a revision|larger than 256 bytes"):
        find_model(NAME)


def test_error_for_missing_model_says_how_to_download_it(cache, capsys):
    (cache.parent / "some-org").mkdir()
    (cache.parent / "some-org" / "Some.Model_2").mkdir()
    for argv in (["plan", "--model", NAME], ["verify", NAME]):
        assert main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "'some-org/Some.Model_1' is not a path that exists" in line
        assert f"from the hub to {cache}/models--some-org--Some.Model_1;" in line
        assert "add --download, or run: hf download some-org/Some.Model_1;" in line
        assert "did you mean 'some-org/Some.Model_2'" in line


def test_local_path_takes_precedence_over_hub_name(cache, model, monkeypatch):
    download(cache, model, MAIN)
    monkeypatch.chdir(cache.parent)
    local = shutil.copytree(model, Path(NAME))
    assert find_model(NAME).path == local


def test_error_for_incomplete_download_names_missing_weights(cache, model):
    (download(cache, model, MAIN) / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no weights \(model\.safetensors"):
        find_model(NAME)


def test_error_for_unreadable_cache_names_its_folder(cache):
    cache.symlink_to("hub")
    with pytest.raises(UnreadableFile, match=r"models--some-org--Some\.Model_1"):
        find_model(NAME)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"XDG_CACHE_HOME": "~/x", "HF_HOME": "~/hf"},
        {"HF_HOME": "$HOME/hf", "HF_HUB_CACHE": "~/$USER_OF_TEST/hub"},
        {"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/older"},
        {"HUGGINGFACE_HUB_CACHE": "/older", "HF_HUB_CACHE": "relative"},
        {"HF_HUB_CACHE": "~nobody-of-this-name/hub"},
    ],
    ids=str,
)
def test_cache_folder_matches_huggingface_hub(monkeypatch, variables):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("USER_OF_TEST", "somebody")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = (
        "from huggingface_hub import constants, file_download as f;"
        f"n = f.repo_folder_name(repo_id={NAME!r}, repo_type='model');"
        "print(f'{constants.HF_HUB_CACHE}/{n}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(hub_folder(NAME)) == done.stdout.strip()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("a/b", True),
        ("a", False),
        ("a/b/c", False),
        ("./b", False),
        ("a/.b", False),
        ("-a/b", False),
        ("a--b/c", False),
        ("a/b..c", False),
        ("~a/b", False),
        ("a/b@main", True),
        ("a/b@v1/x", True),
        ("a/b/c.gguf@v1", True),
        ("a/b@v1..x", False),
        ("a/b@", False),
        ("a/b/../c.gguf", False),
        (f"a/{'b' * 97}", False),
        ("a/b\n", False),
        ("ä/b", False),
    ],
)
def test_hub_names_are_recognised(name, is_one):
    assert (parse_hub_name(name) is not None) is is_one


def test_find_model_uses_neither_huggingface_hub_nor_network(cache, model):
    download(cache, model, MAIN)
    code = (
        "import json, socket, sys\n"
        "def refuse(*_): raise AssertionError('a socket')\n"
        "socket.socket = refuse\n"
        "from parallel_llama.files.model_files import find_model\n"
        f"find_model({NAME!r})\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('huggingface')]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(done.stdout) == []
