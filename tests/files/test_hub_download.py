"""Downloads from a local hub: which files are fetched, resumed and selected, and the errors."""

import errno
import io
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import checkpoint_samples
import pytest
from hub_server import COMMIT, Hub, hub_server
from huggingface_hub import constants, snapshot_download
from safetensors.torch import load_file

from parallel_llama import LLM, SamplingParams
from parallel_llama.cli.main import main
from parallel_llama.engine.model_download import require_downloaded
from parallel_llama.errors import UsageError
from parallel_llama.files import hub_download
from parallel_llama.files.hub_cache import HubName, parse_hub_name
from parallel_llama.files.hub_download import download_model, select_files
from parallel_llama.files.model_files import find_model, missing_from_hub
from parallel_llama.files.partial_output import take_lock

NAME = "some-org/Some.Model_1"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
SMALL = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json",
]  # fmt: skip
NEEDED = sorted([*SMALL, INDEX, *SHARDS])
# Other files of repositories: code, other formats, and a copy of the weights in each format.
OTHERS = (
    "README.md", ".gitattributes", "modeling_llama.py", "tokenizer.model", "pytorch_model.bin",
    "model.fp16.safetensors", "tf_model.h5", "onnx/model.onnx", "original/consolidated.00.pth",
    "original/params.json", "some-model.Q8_0.gguf", "consolidated.safetensors",
    "model-00001-of-00009.safetensors", "vocab.json", "training_args.bin",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The chat model in three files of weights, and the OTHERS."""
    folder = tmp_path_factory.mktemp("sharded")
    for path in model.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, folder)
    checkpoint_samples.write_safetensors(folder, load_file(model / "model.safetensors"), 3)
    own = {path.name: path.read_bytes() for path in folder.iterdir()}
    return own | {name: name.encode() for name in OTHERS}


@pytest.fixture
def hub(
    files: Mapping[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A hub that huggingface_hub uses in this process, and an empty cache.

    huggingface_hub reads its variables when it is imported.
    """
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server(NAME, dict(files)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


def download(name: str = NAME) -> list[str]:
    """Downloads the missing files of a model. Returns: the announced lines."""
    lines: list[str] = []
    require_downloaded(name, 60, lines.append)
    return lines


def refused(name: str = NAME) -> str:
    with pytest.raises(UsageError) as caught:
        download(name)
    return str(caught.value)


def test_exactly_the_needed_files_are_downloaded(hub, tmp_path):
    lines = download()
    size = f"{sum(len(hub.files[name]) for name in SHARDS) / 1e6:.1f} MB"
    (line,) = lines
    assert line == f"downloading the weights of {NAME}: 3 files, {size}, commit {COMMIT}"
    assert hub.fetched() == NEEDED
    snapshot = find_model(NAME).path
    held = {path.name: path.read_bytes() for path in snapshot.rglob("*")}
    assert held == {name: hub.files[name] for name in NEEDED}
    theirs = snapshot_download(NAME, cache_dir=tmp_path / "hub", local_files_only=True)
    assert Path(theirs) == snapshot

    before = len(hub.requests)
    assert download() == [] and len(hub.requests) == before


@pytest.mark.slow
def test_a_downloaded_model_generates(hub, capsys):
    with LLM(NAME, download=True) as llm:
        (first,) = llm.generate(["Hi"], SamplingParams(max_tokens=3, temperature=0))
    assert hub.fetched() == NEEDED
    argv = ["--model", NAME, "--prompt", "Hi", "--max-tokens", "3", "--temperature", "0", "--json"]
    assert main(["generate", *argv]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == list(first.tokens)
    assert hub.fetched() == NEEDED


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", NAME],
        ["generate", "--model", NAME, "--prompt", "Hi"],
        ["score", "--model", f"{NAME}@v1.0", "--text-file", __file__],
        ["reshard", NAME, "native", "--tp", "1", "--format", "native"],
        ["verify", NAME],
        ["doctor", "--model", NAME],
    ],
    ids=lambda argv: argv[0],
)
def test_nothing_is_downloaded_without_download_flag(hub, argv, capsys, monkeypatch):
    """stdin is a terminal here, but the question would go to a file."""
    typed = io.StringIO("y\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "add --download, or run: hf download some-org/Some.Model_1" in line
    assert hub.requests == []


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([INDEX, "model.safetensors"], "model.safetensors"),
        (["pytorch_model.bin", INDEX], INDEX),
        (["pytorch_model.bin"], "pytorch_model.bin"),
        (["pytorch_model.bin.index.json"], "pytorch_model.bin.index.json"),
        (["params.json", "consolidated.safetensors"], "consolidated.safetensors"),
        (["params.json", "consolidated.safetensors", INDEX], INDEX),
    ],
)
def test_pickles_are_downloaded_only_without_safetensors(held, expected):
    small, first = select_files(HubName(NAME), ["config.json", *held])
    assert first == expected
    assert small == ["config.json", *(["params.json"] if "params.json" in held else [])]


def test_repository_without_hf_weights_suggests_gguf_file():
    with pytest.raises(UsageError, match=rf"no config\.json with weights.*use --model {NAME}/a/b"):
        select_files(HubName(NAME), ["config.json", "a/b.gguf", "z.gguf", "model.py"])


def test_only_the_tokenizer_that_is_read_is_downloaded():
    names = ["model.safetensors", "config.json", "tokenizer.model", "tekken.json"]
    names += ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "code.py"]
    small, _ = select_files(HubName(NAME), names)
    assert sorted(small) == sorted([*names[1:2], *names[3:6]])


def test_tokenizer_model_is_downloaded_beside_tokenizer_json_for_gguf_files():
    """Regression: reshard --format gguf --download refused Llama 2 after fetching its weights."""
    names = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "merges.txt"]
    assert select_files(HubName(NAME), names)[0] == names[1:4]


def test_tekken_file_is_downloaded_beside_tokenizer_json_whose_split_it_corrects():
    names = ["model.safetensors", "config.json", "tokenizer.json", "tekken.json", "vocab.json"]
    assert select_files(HubName(NAME), names)[0] == names[1:4]


def test_all_parts_of_a_named_split_gguf_file_are_downloaded(hub):
    parts = [f"q4/m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    hub.files = {**hub.files, **{part: part.encode() for part in parts}}
    name = f"{NAME}/{parts[1]}"
    for part in parts[:2]:
        download_model(parse_hub_name(f"{NAME}/{part}"), lambda _: None)
    assert hub.fetched() == parts
    assert [path.read_bytes().decode() for path in find_model(name).weights] == parts
    find_model(name).weights[2].unlink()
    with pytest.raises(
        UsageError, match=r"1 of the 3 parts .* are missing.*--download, or run: hf "
    ):
        find_model(name)
    assert missing_from_hub(name) is not None


def test_a_named_gguf_file_is_downloaded_alone(hub):
    name = f"{NAME}/some-model.Q8_0.gguf@v1.0"
    download(name)
    assert hub.fetched() == ["some-model.Q8_0.gguf"]
    files = find_model(name)
    assert (files.kind, files.path.read_bytes()) == ("gguf", b"some-model.Q8_0.gguf")
    assert missing_from_hub(NAME) == HubName(NAME)


def test_a_cut_connection_is_resumed_at_its_last_complete_chunk(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)
    hub.cut = {SHARDS[1]: 1000}
    download()
    ranges = [asked for method, _, asked in hub.requests if method == "GET" and asked]
    assert ranges == ["bytes=768-"]
    assert (find_model(NAME).path / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]


def test_failed_download_keeps_complete_files_but_is_not_usable(hub, tmp_path):
    hub.broken = {SHARDS[1]: 500}
    assert f"answered with status 500 for {NAME}; try later" in refused()
    with pytest.raises(UsageError, match="was not downloaded from the hub"):
        find_model(NAME)
    assert not (tmp_path / "hub" / f"models--{NAME.replace('/', '--')}" / "refs").exists()
    hub.broken, hub.requests = {}, []
    (line,) = download()
    assert line.startswith(f"downloading the weights of {NAME}: 2 files")
    assert hub.fetched() == SHARDS[1:]
    assert find_model(NAME).weights[0].name == SHARDS[0]


def test_update_selects_new_snapshot_only_when_complete(hub):
    download()
    old = find_model(NAME).path
    hub.commits["main"], hub.broken = "c" * 40, {SHARDS[2]: 500}
    hub.files = hub.files | {SHARDS[2]: b"new"}
    with pytest.raises(UsageError, match="status 500"):
        download_model(HubName(NAME), print)
    assert find_model(NAME).path == old
    hub.broken = {}
    download_model(HubName(NAME), print)
    assert find_model(NAME).path == old.with_name("c" * 40)


def test_files_of_an_older_commit_need_neither_disk_space_nor_a_download(
    hub, monkeypatch, tmp_path
):
    """Regression: an update was refused, although most of its files only needed a link."""
    download()
    hub.commits["main"], hub.requests = "c" * 40, []
    hub.files = hub.files | {SHARDS[2]: b"new"}
    usage = shutil.disk_usage(tmp_path)._replace(free=len(b"new"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    lines: list[str] = []
    download_model(HubName(NAME), lines.append)
    assert lines == [f"downloading the weights of {NAME}: 1 file, 0.0 MB, commit {'c' * 40}"]
    assert hub.fetched() == [SHARDS[2]]
    snapshot = find_model(NAME).path
    assert snapshot.name == "c" * 40
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == {
        name: hub.files[name] for name in NEEDED
    }


def test_all_files_are_those_of_one_commit(hub):
    """The branch moves between the requests for the list of files and for the first file."""
    hub.on_info = lambda: hub.commits.update({"main": "c" * 40})
    hub.commits["old"] = COMMIT
    download()
    commits = {path.split("/")[4] for _, path, _ in hub.requests if "/resolve/" in path}
    assert commits == {COMMIT}
    assert find_model(NAME).path.name == COMMIT


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("revision", "commit"),
    [("v1.0", "a" * 40), ("refs/pr/1", "b" * 40), ("a" * 40, "a" * 40), ("main", COMMIT)],
)
def test_a_revision_is_pinned_to_its_commit(tmp_path, revision, commit):
    name = f"{NAME}@{revision}"
    download(name)
    assert find_model(name).path.name == commit
    theirs = snapshot_download(
        NAME, revision=revision, cache_dir=tmp_path / "hub", local_files_only=True
    )
    assert Path(theirs) == find_model(name).path
    if revision != "main":  # main was not downloaded, and is not this commit
        assert missing_from_hub(NAME) == HubName(NAME)


def test_a_token_reaches_the_hub_and_not_its_storage(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_test")
    download()
    assert (hub.tokens, hub.storage_tokens) == ({"Bearer hf_of_test"}, {""})


LOGIN = r"log in with `hf auth login`, or set HF_TOKEN"
GATED = 403, "GatedRepo", "Access to model is restricted"


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("some-org/other", {}, rf"some-org/other is not a model at .*check the name.*{LOGIN}"),
        (NAME, {"refused": (401, "RepoNotFound", "")}, rf"not a model at .*private.*{LOGIN}"),
        (NAME, {"refused": (401, "", "Invalid credentials in Authorization header")}, LOGIN),
        (NAME, {"files_refused": GATED}, rf"is gated: accept its licence at .*/{NAME}, .*{LOGIN}"),
        (NAME, {"files_refused": (401, *GATED[1:])}, rf"is gated: accept .*/{NAME}, .*{LOGIN}"),
        (NAME, {"files_refused": (403, "", "Forbidden")}, "refuses access to .*a token that may"),
        (NAME, {"refused": (503, "", "")}, "answered with status 503 .*try later"),
        (f"{NAME}@v9", {}, rf"has no revision 'v9'; .*/{NAME}/tree/main lists"),
        (f"{NAME}/x.gguf", {}, rf"does not have x\.gguf; .*/{NAME} lists its files"),
        (f"{NAME}/x-00001-of-00002.gguf", {}, r"does not have x-00001-of-00002\.gguf, x-00002-of"),
        (NAME, {"commits": {"main": "../.."}}, r"'\.\./\.\.', which is not 40 hex.*; try later"),
    ],
)
def test_a_refusal_is_one_line_with_a_remedy(hub, capsys, name, fault, message):
    for attribute, value in fault.items():
        setattr(hub, attribute, value)
    assert main(["plan", "--model", name, "--download"]) == 2
    text, log = capsys.readouterr()
    (line,) = log.splitlines()
    assert text == ""
    assert re.search(message, line), line
    assert len(line) < 400
    assert missing_from_hub(name) is not None
    assert hub.fetched() == []


def test_index_listing_missing_or_outside_files_is_refused(hub):
    hub.files = hub.files | {INDEX: b'{"weight_map": {"a": "gone.safetensors"}}'}
    assert "the repository does not have gone.safetensors" in refused()
    hub.commits["main"] = "c" * 40
    hub.files = hub.files | {INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}
    assert "which is outside the folder" in refused()
    assert hub.fetched().count(INDEX) == 2


@pytest.mark.usefixtures("hub")
def test_network_error_names_address_and_remedy(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refused()
    assert f"{NAME} was not downloaded from http://127.0.0.1:9: " in message
    assert "check the network and HF_ENDPOINT" in message


@pytest.mark.usefixtures("hub")
def test_unresponsive_hub_times_out(monkeypatch):
    """huggingface_hub's own request for the list of files has no time limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
        assert "timed out; check the network" in refused()


def test_no_request_is_made_in_offline_mode(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it" in refused()
    assert hub.requests == []


def test_lack_of_disk_space_is_reported_before_weights_download(hub, monkeypatch, tmp_path):
    small = sum(len(hub.files[name]) for name in [*SMALL, INDEX])
    usage = shutil.disk_usage(tmp_path)._replace(free=small)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert f"GB more in {tmp_path / 'hub'}, where 0.00 GB are free; free some" in refused()
    assert hub.fetched() == sorted([*SMALL, INDEX])


@pytest.mark.usefixtures("hub")
def test_disk_filled_during_download_is_named(monkeypatch, tmp_path):
    def write(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub_download, "hf_hub_download", write)
    assert f"the disk of {tmp_path / 'hub'}/models--" in (message := refused())
    assert message.endswith("is full; free some space, or set HF_HOME")


@pytest.mark.usefixtures("hub")
def test_unwritable_cache_is_refused_with_remedy(tmp_path):
    (tmp_path / "hub").write_text("a file")
    assert refused().endswith("Not a directory; make it writable, or set HF_HOME")


def test_hub_names_are_parsed_or_rejected():
    for repo in (NAME, "a/b"):
        for file in ("", "/x.gguf", "/a/b/x--y.gguf"):
            for revision in ("", "@v1.0", "@refs/pr/1", "@" + "f" * 40):
                name = parse_hub_name(f"{repo}{file}{revision}")
                expected = repo, file[1:], revision[1:] or "main"
                assert name is not None and (name.repo, name.file, name.revision) == expected
    for bad in ("a/b@", "a/b@../x", "a/b@/x", "a/b@x/", "a/b/../x.gguf", "a/b/x.py", "a/b@x y"):
        assert parse_hub_name(bad) is None


def set_second_rank_of_three(monkeypatch):
    """Sets the variables that torchrun gives to the second of three ranks of a host."""
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)


def test_other_ranks_of_a_host_time_out_waiting_for_first_rank(hub, monkeypatch):
    set_second_rank_of_three(monkeypatch)
    with pytest.raises(UsageError, match=r"first rank of this host .* for 0\.1 s; see the message"):
        require_downloaded(NAME, 0.1)
    assert hub.requests == [] and os.environ["RANK"] == "1"


def test_other_ranks_of_a_host_wait_while_the_first_one_downloads(hub, monkeypatch, tmp_path):
    set_second_rank_of_three(monkeypatch)
    lock = tmp_path / "hub" / ".locks" / "models--some-org--Some.Model_1" / "parallel_llama.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file, ThreadPoolExecutor() as pool:
        assert take_lock(file.fileno())
        waiting = pool.submit(require_downloaded, NAME, 0.1)
        assert not wait([waiting], timeout=1).done
        download_model(HubName(NAME), print)
        waiting.result(60)
    assert hub.fetched() == NEEDED
