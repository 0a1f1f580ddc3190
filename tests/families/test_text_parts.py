"""Mistral Small 3.1, Ministral 3 and Gemma 3: published as models of text and images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_models import SMALL
from gguf_models import MODELS as GGUF_MODELS
from parity_steps import cut_logits
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, write_hf
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)
from transformers_oracle import reference_logits

from parallel_llama.config.hf import args_from_hf
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import why_unrecorded
from parallel_llama.reshard.reshard import reshard

TEXTS = {
    "mistral": replace(TINY_MODELS["8/2 mistral"], own={"sliding_window": None}),
    "mistral, tied": replace(TINY_MODELS["8/2 mistral"], tied=True, own={"sliding_window": None}),
    "ministral3": SMALL["ministral3"],
    "ministral3, tied": SMALL["ministral3, window, tied"],
    "gemma3": GGUF_MODELS["gemma3"],
}
VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}


def write_whole(text: Path, folder: Path) -> Path:
    """Saves a model of text and images with this text part, as transformers does.

    Whether it is tied stands beside text_config; the key within text_config has no effect.
    """
    own = AutoConfig.from_pretrained(text)
    part = {**own.to_dict(), "tie_word_embeddings": not own.tie_word_embeddings}
    shared = {"text_config": part, "tie_word_embeddings": own.tie_word_embeddings}
    if own.model_type == "gemma3_text":
        vision = {**VISION, "model_type": "siglip_vision_model"}
        config = Gemma3Config(**shared, vision_config=vision, mm_tokens_per_image=1)
        whole = Gemma3ForConditionalGeneration(config).double()
    else:
        config = Mistral3Config(**shared, vision_config={**VISION, "model_type": "pixtral"})
        whole = Mistral3ForConditionalGeneration(config).double()
    weights = load_file(text / "model.safetensors")
    body = {n.removeprefix("model."): w for n, w in weights.items() if n != "lm_head.weight"}
    whole.model.language_model.load_state_dict(body)
    if not own.tie_word_embeddings:
        whole.lm_head.load_state_dict({"weight": weights["lm_head.weight"]})
    whole.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", TEXTS)
def test_text_part_has_the_logits_and_weights_of_the_text_model(name, tmp_path):
    text, tokens = write_hf(TEXTS[name], tmp_path / "text", seed=3), TEXTS[name].tokens
    whole = write_whole(text, tmp_path / "whole")
    stored = load_file(whole / "model.safetensors")
    assert {key.split(".")[0] for key in stored} == {
        "language_model", "vision_tower", "multi_modal_projector",
    }  # fmt: skip
    for logits in run_on_threads(3, cut_logits, whole, tokens, {}):
        torch.testing.assert_close(logits, reference_logits(text, tokens), rtol=0, atol=1e-10)
    reshard(find_model(str(whole)), tmp_path / "back", layout="hf", n_parts=1)
    back, weights = (load_file(at / "model.safetensors") for at in (tmp_path / "back", text))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], weight) for key, weight in weights.items())


def test_names_without_the_old_prefix_are_read(tmp_path):
    """transformers 5 names the text part model.language_model, and the output lm_head."""
    name = "ministral3"
    text = write_hf(TEXTS[name], tmp_path / "text", seed=3)
    whole = write_whole(text, tmp_path / "whole")
    renamed = {}
    for key, weight in load_file(whole / "model.safetensors").items():
        own = key.replace("language_model.lm_head", "lm_head")
        own = own.replace("language_model.model.", "language_model.")
        renamed[own if own.startswith("lm_head") else f"model.{own}"] = weight
    save_file(renamed, whole / "model.safetensors")
    tokens = TEXTS[name].tokens
    (logits,) = run_on_threads(1, cut_logits, whole, tokens, {})
    torch.testing.assert_close(logits, reference_logits(text, tokens), rtol=0, atol=1e-10)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
# As in the config.json of mistralai/Ministral-3-8B-Instruct-2512.
ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def published(text: dict) -> dict:
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {**SIZES, **text},
        "vision_config": VISION,
    }


def test_published_config_of_ministral_3_is_read(caplog):
    args = args_from_hf(published({"model_type": "ministral3", "rope_parameters": ROPE}))
    assert (args.query_scale, args.query_scale_step, args.scales_all_queries) == (0.1, 16384, True)
    assert args.first_scaled_position == 16384
    assert [record.getMessage() for record in caplog.records] == [
        "only the text part of 'mistral3' is loaded; images cannot be read"
    ]
    assert "from position 16384 on" in why_unrecorded(args, 1, "cpu")


def test_missing_keys_have_the_defaults_of_transformers():
    stated = AutoConfig.for_model("ministral3", **SIZES).to_dict()
    args = args_from_hf({"model_type": "ministral3", **SIZES})
    assert args == args_from_hf({**stated, "dtype": "float32"})
    assert (args.rope_theta, args.rope_scaling.factor, args.query_scale) == (1e6, 16.0, 0.1)


def test_published_config_of_gemma_3_4b_is_read():
    """It has no key for the number of heads and the size of the vocabulary."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    args = args_from_hf({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"})
    stated = AutoConfig.for_model(**text)
    assert (args.n_heads, args.n_kv_heads, args.head_dim, args.vocab_size) == (
        stated.num_attention_heads,
        stated.num_key_value_heads,
        stated.head_dim,
        stated.vocab_size,
    )
    assert (args.rope_scaling.factor, args.rope_theta, args.local_rope_theta) == (8.0, 1e6, 1e4)
    assert args.full_layers == (5, 11, 17, 23, 29) and args.tied_embeddings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"model_type": "mistral4"}, "text_config has model_type='mistral4', which is not"),
        ({"model_type": "mistral", "rope_parameters": ROPE}, "among the rope settings: unknown"),
    ],
)
def test_unsupported_text_config_is_refused(text, expected):
    with pytest.raises(UsageError, match=expected):
        args_from_hf(published(text))
