"""HF folders as users have them give the weights that transformers loads from them.

In float64, like test_parity. Each folder is a tiny random model with one peculiarity.
"""

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from converted_gguf import convert
from model_folders import add_manifest
from parity_steps import logits_of_models
from reshard_samples import moved
from safetensors.torch import load_file, save_file, save_model
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, write_hf
from torch_archives import assert_not_run
from transformers import AutoModelForCausalLM
from transformers_oracle import loaded_logits

from parallel_llama.checkpoint.verify import verify
from parallel_llama.cli.main import main
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.files.model_files import find_model

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
TOKENS = [number * 37 % 211 for number in range(40)]
TP_SIZES = (1, 2, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(TINY_MODELS["9/3"], tmp_path / "model")


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def assert_loads_as_in_transformers(folder: Path) -> None:
    expected = loaded_logits(folder, TOKENS)
    for tp_size in TP_SIZES:
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(folder, TOKENS)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_act": "swish"},
        {"rms_norm_eps": 0.0},
        {"rms_norm_eps": 1.0},
        {"rms_norm_eps": 2.5},
        {"layer_types": ["full_attention", "full_attention"]},
        {"layer_types": ["full_attention", "full_attention"], "sliding_window": 4},
        {"sliding_window": 512},
        {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 1},
        {"_name_or_path": "a/b", "_model_name_or_path": "a", "model_max_length": 9},
        {"num_experts": 0, "qk_norm": False, "clip_qkv": None, "residual_multiplier": 1.0},
        {"mm_vision_tower": "x", "tokenizer_model_max_length": 9, "pooler": {"a": [1]}},
    ],
    ids=str,
)
def test_config_setting_gives_the_logits_of_transformers(folder, settings):
    edit_config(folder, **settings)
    assert_loads_as_in_transformers(folder)


@pytest.mark.parametrize("window", [{"sliding_window": 4}, {"attention_chunk_size": 4}], ids=str)
def test_window_that_transformers_applies_inconsistently_is_refused(folder, window):
    """transformers attends to all keys without a cache, and its cache drops some keys."""
    whole = AutoModelForCausalLM.from_pretrained(folder)
    edit_config(folder, **window)
    windowed = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([TOKENS])
    assert torch.equal(whole(ids).logits, windowed(ids).logits)
    answers = [
        model.generate(ids, max_new_tokens=20, eos_token_id=None).tolist()
        for model in (whole, windowed)
    ]
    assert answers[0] != answers[1]
    with pytest.raises(UsageError, match=r"config\.json: \w+=4"):
        load_model_args(find_model(str(folder)))


@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForCausalLM"])
def test_a_base_model_with_tied_embeddings_is_read(tmp_path, architecture):
    """LlamaModel saves its weights without the `model.` before each name."""
    whole = write_hf(TINY_MODELS["9/3 tied"], tmp_path / "whole")
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float64).model.save_pretrained(base)
    assert json.loads((base / "config.json").read_text())["architectures"] == ["LlamaModel"]
    edit_config(base, architectures=[architecture])
    assert_loads_as_in_transformers(base)
    torch.testing.assert_close(loaded_logits(base, TOKENS), loaded_logits(whole, TOKENS))


def test_a_base_model_without_a_head_is_refused_with_that_reason(folder, tmp_path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(folder).model.save_pretrained(base)
    with pytest.raises(UsageError, match=r"config\.json: .*LlamaModel.* without a head"):
        load_model_args(find_model(str(base)))


def test_weight_stored_under_two_names_is_refused(folder):
    """The names with and without `model.` are ambiguous."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "norm.weight": torch.ones(72)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        run_on_threads(1, logits_of_models, [(folder, TOKENS)])


@pytest.mark.slow
def test_folder_that_transformers_converted_from_gguf_is_read(folder, tmp_path):
    """config.json names a GGUF file as the source, and the weights are plain floats."""
    source = convert(folder, tmp_path / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=source.name)
    model.hf_quantizer = None  # transformers 5 refuses to save a model that has one
    made = tmp_path / "made"
    model.save_pretrained(made)
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gguf"
    assert_loads_as_in_transformers(made)


# Tied embeddings and the files' own output

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return write_hf(TINY_MODELS["9/3 tied"], tmp_path / "tied")


def add_head(folder: Path) -> torch.Tensor:
    """Adds an output to a tied folder, as merge_and_unload of peft does. Returns: its values."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors[EMBEDDINGS].flip(0).contiguous()
    tensors[HEAD] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return head


def test_tied_folder_with_another_head_gives_the_logits_of_transformers(tied, caplog):
    head = add_head(tied)
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float64)
    assert torch.equal(model.lm_head.weight, head)
    for _ in range(2):
        assert not load_model_args(find_model(str(tied))).tied_embeddings
    (record,) = (r for r in caplog.records if r.name == "parallel_llama.config.tied")
    text = record.getMessage()
    assert f"{tied}: config.json ties {HEAD} to {EMBEDDINGS}" in text
    assert text.endswith("set tie_word_embeddings to false")
    assert_loads_as_in_transformers(tied)


def test_reshard_writes_both_tensors_of_a_tied_folder_with_another_head(tied, tmp_path):
    head = add_head(tied)
    target = moved(tied, tmp_path / "new", "hf")
    assert torch.equal(load_file(target / "model.safetensors")[HEAD], head)
    assert not json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    assert verify(str(target), against=str(tied)).ok


def test_tied_folder_with_only_the_head_gives_the_logits_of_transformers(tied, tmp_path):
    """save_model keeps the first name of tensors that share memory."""
    expected = loaded_logits(tied, TOKENS)
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float64)
    save_model(model, str(tied / "model.safetensors"), metadata={"format": "pt"})
    names = load_file(tied / "model.safetensors").keys()
    assert HEAD in names and EMBEDDINGS not in names
    assert torch.equal(loaded_logits(tied, TOKENS), expected)
    assert_loads_as_in_transformers(tied)
    target = moved(tied, tmp_path / "new", "hf")
    assert EMBEDDINGS in load_file(target / "model.safetensors")


# pytorch_model.bin


def as_bin(folder: Path, n_files: int = 1) -> dict[str, torch.Tensor]:
    """Replaces the folder's safetensors by pytorch_model.bin files. Returns: the state dict."""
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    if n_files == 1:
        torch.save(state, folder / BIN)
        return dict(state)
    files = [f"pytorch_model-{n + 1:05}-of-{n_files:05}.bin" for n in range(n_files)]
    for number, file in enumerate(files):
        torch.save({name: state[name] for name in list(state)[number::n_files]}, folder / file)
    weight_map = {name: files[at % n_files] for at, name in enumerate(state)}
    (folder / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("name", ["9/3", "9/3 tied", "10/2 all biases, tied"])
def test_pytorch_bin_files_give_the_logits_of_transformers(tmp_path, name, n_files):
    """A tied head shares the storage of the embeddings, and the files have both names."""
    folder = write_hf(TINY_MODELS[name], tmp_path)
    state = as_bin(folder, n_files)
    assert "lm_head.weight" in state
    assert_loads_as_in_transformers(folder)


def test_tied_pytorch_bin_with_another_head_is_refused_with_the_remedy(tied):
    state = as_bin(tied)
    torch.save({**state, HEAD: state[EMBEDDINGS].clone()}, tied / BIN)
    run_on_threads(1, logits_of_models, [(tied, TOKENS)])  # equal values are not refused
    torch.save({**state, HEAD: state[EMBEDDINGS] + 1}, tied / BIN)
    text = refusal(tied)
    assert f"ties {HEAD} to {EMBEDDINGS}" in text
    assert "set tie_word_embeddings to false in config.json to use both, or remove" in text


def as_one_vector(folder: Path) -> None:
    """Writes all tensors as views into one long vector, as some training programs do."""
    state = as_bin(folder)
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    pieces = flat.split([tensor.numel() for tensor in state.values()])
    pairs = zip(state.items(), pieces, strict=True)
    torch.save({name: piece.view(old.shape) for (name, old), piece in pairs}, folder / BIN)


def test_a_tensor_may_be_a_part_of_a_longer_storage(folder):
    as_one_vector(folder)
    assert_loads_as_in_transformers(folder)


def test_safetensors_are_preferred_to_pytorch_bin(folder):
    torch.save({"model.norm.weight": torch.zeros(72)}, folder / BIN)
    assert [file.name for file in find_model(str(folder)).weights] == ["model.safetensors"]
    assert_loads_as_in_transformers(folder)


def test_ranks_read_only_their_own_bytes_of_pytorch_bin_files(folder, monkeypatch):
    as_bin(folder, 2)
    counts: list[int] = []
    whole_read = os.preadv

    def counted(fd: int, buffers: list[Any], offset: int) -> int:
        counts.append(whole_read(fd, buffers, offset))
        return counts[-1]

    monkeypatch.setattr("os.preadv", counted)
    run_on_threads(3, logits_of_models, [(folder, TOKENS)])
    total = sum(file.stat().st_size for file in folder.glob("*.bin"))
    norms = 5 * 72 * 8  # which every rank holds
    assert 0.9 * total < sum(counts) < total + 2 * norms


def test_code_in_pytorch_bin_is_refused_and_not_run(folder, tmp_path):
    as_bin(folder)

    def refused() -> None:
        assert "cannot be read as plain weights" in refusal(folder)

    assert_not_run(folder / BIN, tmp_path / "trace", refused)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        run_on_threads(1, logits_of_models, [(folder, TOKENS)])
    return str(caught.value)


def test_pytorch_bin_from_before_torch_1_6_is_refused(folder):
    state = as_bin(folder)
    torch.save(state, folder / BIN, _use_new_zipfile_serialization=False)
    assert "before torch 1.6" in refusal(folder)


def test_non_contiguous_tensor_is_refused_by_name(folder):
    state = as_bin(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    torch.save({**state, name: state[name].t().contiguous().t()}, folder / BIN)
    assert f"{name!r} is not contiguous" in refusal(folder)


def test_big_endian_pytorch_bin_is_refused(folder):
    """torch.load swaps the bytes; bytes read straight from the file would be other numbers."""
    as_bin(folder)
    with zipfile.ZipFile(folder / BIN) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    records["pytorch_model/byteorder"] = b"big"
    with zipfile.ZipFile(folder / BIN, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    assert "byte order" in refusal(folder)


@pytest.mark.slow
@pytest.mark.parametrize("n_files", [1, 2])
def test_pytorch_bin_files_can_be_verified_and_resharded(folder, tmp_path, capsys, n_files):
    before = write_hf(TINY_MODELS["9/3"], tmp_path / "before")
    as_bin(folder, n_files)
    assert main(["plan", "--model", str(folder), "--nproc", "3"]) == 0
    assert main(["verify", str(folder), "--against", str(before)]) == 0
    assert main(["reshard", str(folder), str(tmp_path / "new"), "--tp", "2", "--format=hf"]) == 0
    assert main(["verify", str(tmp_path / "new"), "--against", str(folder)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "write", [as_bin, lambda folder: as_bin(folder, 2), as_one_vector], ids=["one", "two", "vector"]
)
def test_damage_in_pytorch_bin_is_reported_with_tensor_and_bytes(folder, write):
    write(folder)
    add_manifest(folder)
    path = sorted(folder.glob("*.bin"))[0]
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at] ^= 1
    path.write_bytes(data)
    (line,) = verify(str(folder)).problems
    match = re.fullmatch(rf"{path.name}: damaged in \S+\.weight, bytes (\d+) to (\d+)", line)
    assert match is not None, line
    assert int(match[1]) <= at < int(match[2]) <= len(data)


def test_incomplete_set_of_pytorch_bin_files_is_refused(folder):
    as_bin(folder, 3)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(UsageError, match=r"1 of the 3 files.*pytorch_model-00002-of-00003\.bin"):
        find_model(str(folder))
    (folder / BIN_INDEX).unlink()
    with pytest.raises(UsageError, match=r"has pytorch_model-00001-of-00003\.bin.*no index"):
        find_model(str(folder))
