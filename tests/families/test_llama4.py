"""Llama 4 (text), compared with transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from family_models import LLAMA4
from mixes import OF_FAMILIES
from parity_steps import (
    assert_equal_bits,
    assert_parity,
    cut_logits,
    logits_alone_and_together,
)
from reshard_samples import through_every_layout
from safetensors.torch import load_file, save_file
from scaled_folders import write_scaled
from thread_ranks import run_on_threads
from tiny_models import write_hf
from transformers import AutoConfig, Llama4Config, Llama4ForConditionalGeneration
from transformers_oracle import loaded_logits, reference_logits

from parallel_llama.config.hf import args_from_hf
from parallel_llama.config.layouts import input_formats, load_model_args
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import why_unrecorded
from parallel_llama.reshard.reshard import reshard


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_hf(tiny, tmp_path_factory.mktemp("hf"), seed=3) for name, tiny in LLAMA4.items()
    }


@pytest.mark.parametrize("name", LLAMA4)
def test_logits_match_transformers_at_each_tp_size(name, folders):
    folder, tokens = folders[name], LLAMA4[name].tokens
    assert_parity(folder, tokens, reference_logits(folder, tokens), (1, 2, 3, 5, 7))


@pytest.mark.parametrize("name", LLAMA4)
def test_exact_sums_give_the_same_bits_on_any_number_of_ranks(name, folders):
    folder, tokens = folders[name], LLAMA4[name].tokens
    assert_equal_bits(folder, tokens, (3, 5))


@pytest.mark.parametrize("cut", [{"kv_split": "sequence"}, {"ranks_per_expert": 1}])
def test_logits_match_transformers_for_other_splits(cut, folders):
    """Ranks hold parts of an attention chunk, or whole experts."""
    name = "llama4"
    folder, tokens = folders[name], LLAMA4[name].tokens
    expected = reference_logits(folder, tokens)
    for logits in run_on_threads(5, cut_logits, folder, tokens, cut):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_batched_sequences_do_not_attend_to_each_others_chunks(folders):
    """KV cache blocks have 4 slots, so chunks of 7 positions begin inside blocks."""
    tokens = LLAMA4["llama4"].tokens
    prompts = [tokens, tokens[3:20], tokens[5:11]]
    expected = [reference_logits(folders["llama4"], prompt) for prompt in prompts]
    for alone, together in run_on_threads(2, logits_alone_and_together, folders["llama4"], prompts):
        for logits in (alone, together):
            for own, reference in zip(logits, expected, strict=True):
                torch.testing.assert_close(own, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LLAMA4)
def test_reshard_through_every_layout_keeps_transformers_logits(name, folders, tmp_path):
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if "without" in name and version < (5, 21):
        pytest.skip("older versions of transformers read no Llama 4 without chunks")
    folder, tokens = through_every_layout(folders[name], tmp_path), LLAMA4[name].tokens
    logits, expected = loaded_logits(folder, tokens), reference_logits(folders[name], tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_text_part_of_multimodal_model_is_loaded(folders, tmp_path):
    """Only multimodal models are published; config.json has the text part in text_config."""
    source, tokens = folders["llama4"], LLAMA4["llama4"].tokens
    vision = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vision_output_dim": 8,
        "image_size": 28,
        "patch_size": 14,
        "projector_input_dim": 8,
        "projector_output_dim": 8,
    }
    text = AutoConfig.from_pretrained(source).to_dict()
    whole = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision))
    weights = load_file(source / "model.safetensors")
    whole.language_model.double().load_state_dict(weights)
    whole.save_pretrained(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert {name.split(".")[0] for name in stored} == {
        "language_model",
        "vision_model",
        "multi_modal_projector",
    }
    (logits,) = run_on_threads(1, cut_logits, tmp_path / "whole", tokens, {})
    torch.testing.assert_close(logits, reference_logits(source, tokens), rtol=0, atol=1e-10)
    reshard(find_model(str(tmp_path / "whole")), tmp_path / "text", layout="hf", n_parts=1)
    back = load_file(tmp_path / "text" / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weight) for key, weight in weights.items())


def test_quantised_matrices_of_a_text_part_are_found(folders, tmp_path):
    """Their names begin with the name of the text part."""
    own = tmp_path / "own"
    write_scaled(folders["llama4"], own, "fp8", lambda name: ".self_attn." in name)
    files = find_model(str(own))
    expected = input_formats(files, load_model_args(files))
    assert expected
    tensors = load_file(own / "model.safetensors")
    save_file({f"language_model.{name}": each for name, each in tensors.items()}, files.weights[0])
    config = json.loads((own / "config.json").read_text())
    whole = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
    whole["quantization_config"] = config.pop("quantization_config")
    (own / "config.json").write_text(json.dumps({**whole, "text_config": config}))
    files = find_model(str(own))
    assert input_formats(files, load_model_args(files)) == expected


def test_text_part_is_loaded_if_index_lists_vision_weights(folders, tmp_path):
    tokens, folder = LLAMA4["llama4"].tokens, shutil.copytree(folders["llama4"], tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    others = {"vision_model.layernorm_pre.weight": torch.ones(3)}
    parts = {f"language_model.{name}": weight for name, weight in weights.items()}
    save_file(parts, folder / "model-1.safetensors")
    save_file(others, folder / "model-2.safetensors")
    listing = dict.fromkeys(parts, "model-1.safetensors")
    listing |= dict.fromkeys(others, "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listing}))
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": config}))
    (logits,) = run_on_threads(1, cut_logits, folder, tokens, {})
    expected = reference_logits(folders["llama4"], tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 100,
}


def test_missing_keys_have_the_defaults_of_transformers():
    """Published files have an empty no_rope_layers, and a number for attn_temperature_tuning."""
    released = {"no_rope_layers": [], "attn_temperature_tuning": 4}
    args = args_from_hf({**_SIZES, **released, "model_type": "llama4_text"})
    config = AutoConfig.for_model("llama4_text", **_SIZES)
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert [*args.full_layers] == [*args.unrotated_layers] == full
    assert args.sliding_window == config.attention_chunk_size and args.window_chunks
    assert args.query_scale == config.attn_scale and args.query_scale_step == config.floor_scale
    assert args.qk_unit_norm == config.use_qk_norm
    assert args.ffn_dim == args.shared_ffn_dim == config.intermediate_size
    assert (args.n_experts, args.n_active_experts) == (16, 1) and not args.dense_layers
    assert args.rope_theta == config.rope_parameters["rope_theta"]
    assert (args.head_dim, args.n_kv_heads) == (config.head_dim, config.num_key_value_heads)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"attn_scale": -0.1}, "query_scale=-0.1: use a finite number from 0"),
        ({"floor_scale": 0}, "query_scale_step=0: use a whole number from 1"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ({"num_experts_per_tok": 17}, "n_active_experts=17 and n_experts=16"),
        ({"layer_types": ["sliding_attention"] * 8}, "'sliding_attention'; 'full_attention' and"),
        (
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 8},
            "'chunked_attention' without a value of attention_chunk_size",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "qk_unit_norm and a factor of rope scaling",
        ),
        ({"model_type": "llama4"}, "model_type='llama4' needs text_config"),
    ],
)
def test_invalid_or_unsupported_config_is_refused(values, expected):
    with pytest.raises(UsageError, match=expected):
        args_from_hf({**_SIZES, "model_type": "llama4_text", **values})


@pytest.mark.parametrize(
    ("changed", "device", "reason"),
    [
        ({}, "cpu", "scaled inputs of experts and norms without weights"),
        ({}, "cuda", "scales queries by their positions"),
        ({"query_scale": 0.0}, "cuda", "attention within chunks"),
    ],
)
def test_why_unrecorded_names_the_unsupported_feature(changed, device, reason):
    """tests/model/test_recorded_steps.py shows which steps are recorded on a CPU."""
    args = replace(OF_FAMILIES["llama4"], **changed)
    assert reason in (why_unrecorded(args, 1, device) or "")
