"""Families close to Llama, compared with transformers, in three configurations each."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_steps import (
    assert_equal_bits,
    assert_parity,
    cut_logits,
    load_runner,
    logits_in_pieces,
)
from reshard_samples import through_every_layout
from thread_ranks import ThreadComm, run_on_threads
from tiny_models import TinyModel, write_hf
from transformers import AutoConfig
from transformers_oracle import loaded_logits, reference_logits

from parallel_llama.config.hf import args_from_hf
from parallel_llama.config.layouts import load_model_args
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.parallel.collectives import Solo

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LLAMA3 = {
    **_YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_PAD = {"pad_token_id": 0}  # else an id beyond this small vocabulary
_PATTERN, _FULL = "sliding_window_pattern", "full_attention"
_ALL = {"partial_rotary_factor": 1.0}
_TRAINED = "original_max_position_embeddings"
_BY_LAYER = {
    "full_attention": _YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}


def _longrope(n_pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0 + 0.3 * pair for pair in range(n_pairs)],
        "long_factor": [2.0 + 1.7 * pair for pair in range(n_pairs)],
    }


MODELS: dict[str, TinyModel] = {
    "smollm3": TinyModel(
        5, 1, 6, 34, n_layers=5, family="smollm3", own={**_PAD, "no_rope_layer_interval": 2}
    ),
    "smollm3, biases, tied": TinyModel(
        9,
        3,
        6,
        54,
        n_layers=3,
        tied=True,
        family="smollm3",
        own={**_PAD, "no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True},
        rope=_YARN,
    ),
    "smollm3, window": TinyModel(
        7,
        7,
        6,
        42,
        n_layers=3,
        family="smollm3",
        own={**_PAD, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7},
    ),
    "granite": TinyModel(7, 7, 6, 42, family="granite", own=_SCALES),
    "granite, biases, tied": TinyModel(
        9,
        3,
        6,
        54,
        tied=True,
        family="granite",
        own={**_SCALES, "attention_bias": True, "mlp_bias": True},
    ),
    "granite without factors": TinyModel(5, 1, 6, 34, family="granite", rope=_YARN),
    "phi3": TinyModel(
        5,
        1,
        6,
        30,
        family="phi3",
        own={**_PAD, "partial_rotary_factor": 0.75, _TRAINED: 16},
        rope=_longrope(2),
    ),
    "phi3, window, tied": TinyModel(
        9, 3, 6, 54, tied=True, family="phi3", own={**_PAD, "sliding_window": 7}
    ),
    "phi3, attention factor": TinyModel(
        7,
        7,
        6,
        42,
        family="phi3",
        own={**_PAD, _TRAINED: 8},
        rope={**_longrope(3), "attention_factor": 1.3},
        old_config=True,
    ),
    "seed_oss": TinyModel(5, 1, 6, 34, family="seed_oss", own=_PAD),
    "seed_oss, biases, tied": TinyModel(
        9,
        3,
        6,
        54,
        tied=True,
        family="seed_oss",
        own={**_PAD, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "seed_oss, all biases": TinyModel(
        7, 7, 6, 42, family="seed_oss", own={**_PAD, "attention_out_bias": True}, rope=_YARN
    ),
    "arcee": TinyModel(5, 1, 6, 35, family="arcee"),
    "arcee, biases, tied": TinyModel(
        9, 3, 6, 54, tied=True, family="arcee", own={"attention_bias": True, "mlp_bias": True}
    ),
    "arcee, yarn": TinyModel(7, 7, 6, 42, family="arcee", rope=_YARN),
    "nemotron": TinyModel(5, 1, 8, 34, family="nemotron"),
    "nemotron, biases, tied": TinyModel(
        9,
        3,
        6,
        54,
        tied=True,
        family="nemotron",
        own={**_ALL, "attention_bias": True, "mlp_bias": True},
    ),
    "nemotron, GELU": TinyModel(
        7, 7, 12, 42, family="nemotron", own={"hidden_act": "gelu"}, rope=_YARN
    ),
    "stablelm": TinyModel(5, 1, 8, 40, family="stablelm"),
    "stablelm, biases, tied": TinyModel(
        9, 3, 6, 54, tied=True, family="stablelm", own={**_ALL, "use_qkv_bias": True}
    ),
    "stablelm, parallel": TinyModel(
        7,
        7,
        8,
        56,
        family="stablelm",
        own={"use_parallel_residual": True},
        rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    ),
    "glm4, yarn": TinyModel(5, 1, 12, 34, family="glm4", own=_PAD, rope=_YARN),
    "glm4, llama3": TinyModel(7, 7, 16, 42, family="glm4", own=_PAD, rope=_LLAMA3),
    "glm4, dynamic": TinyModel(
        9,
        3,
        12,
        54,
        max_seq_len=12,
        family="glm4",
        own=_PAD,
        rope={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5},
    ),
    "starcoder2": TinyModel(5, 1, 6, 34, family="starcoder2"),
    "starcoder2, window, tied": TinyModel(
        9, 3, 6, 54, tied=True, family="starcoder2", own={"sliding_window": 7, "hidden_act": "gelu"}
    ),
    "starcoder2, window of an extended context": TinyModel(
        7,
        7,
        6,
        42,
        max_seq_len=12,
        family="starcoder2",
        own={"sliding_window": 14},
        rope={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5},
    ),
    "starcoder2 without biases": TinyModel(
        7, 7, 6, 42, family="starcoder2", own={"use_bias": False}, rope=_YARN
    ),
    "exaone4": TinyModel(
        5, 1, 6, 34, n_layers=5, family="exaone4", own={"sliding_window": 7, _PATTERN: 2}
    ),
    "exaone4, layer types, tied": TinyModel(
        9,
        3,
        6,
        54,
        n_layers=3,
        tied=True,
        family="exaone4",
        own={
            "sliding_window": 5,
            _PATTERN: None,
            "layer_types": [_FULL, "sliding_attention", _FULL],
        },
        rope=_YARN,
    ),
    "exaone4 without a window": TinyModel(
        7, 7, 6, 42, family="exaone4", own={"sliding_window": None, "layer_types": [_FULL] * 2}
    ),
    "olmo2": TinyModel(5, 1, 6, 34, family="olmo2", own=_PAD),
    "olmo2, biases, tied": TinyModel(
        9, 3, 6, 54, tied=True, family="olmo2", own={**_PAD, "attention_bias": True}
    ),
    "olmo2, yarn": TinyModel(7, 7, 6, 42, family="olmo2", own=_PAD, rope=_YARN),
    "olmo3": TinyModel(
        5, 1, 6, 34, n_layers=5, family="olmo3", own={**_PAD, "sliding_window": 7}, rope=_BY_LAYER
    ),
    "olmo3, layer types, tied": TinyModel(
        9,
        3,
        6,
        54,
        n_layers=3,
        tied=True,
        family="olmo3",
        own={
            **_PAD,
            _TRAINED: 64,  # which transformers ignores beside rope_parameters by layer
            "attention_bias": True,
            "sliding_window": 5,
            "layer_types": [_FULL, "sliding_attention", _FULL],
        },
        rope=_BY_LAYER,
    ),
    "olmo3, idle windows": TinyModel(
        7, 7, 6, 42, family="olmo3", own={**_PAD, "sliding_window": 512}, rope=_BY_LAYER
    ),
    "olmo3 without a window": TinyModel(
        7,
        7,
        6,
        42,
        family="olmo3",
        own={**_PAD, "layer_types": [_FULL] * 2},
        rope={**_BY_LAYER, "sliding_attention": None},
    ),
}
# By the number of heads: each family has models with 5, 7 and 9.
_TP_SIZES = {5: (1, 5), 7: (2, 7), 9: (2, 3)}
_OF_FAMILIES = {tiny.family: name for name, tiny in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers_at_each_tp_size(name, tmp_path):
    tiny = MODELS[name]
    folder, tokens = write_hf(tiny, tmp_path / "hf", seed=3), tiny.tokens
    assert_parity(folder, tokens, reference_logits(folder, tokens), _TP_SIZES[tiny.n_heads])


def test_phi3_uses_short_factors_up_to_trained_context_length(tmp_path):
    """transformers uses the short factors for sequences of at most the trained length."""
    tiny = replace(MODELS["phi3"], own={**MODELS["phi3"].own, _TRAINED: 40})
    folder, tokens = write_hf(tiny, tmp_path / "hf", seed=3), tiny.tokens
    args = load_model_args(find_model(str(folder)))
    inputs = [InputProcessor(find_model(str(folder)), args, max_seq_len=n) for n in (40, 41)]
    short, long = (
        logits_in_pieces(
            load_runner(Solo(), folder, len(tokens), max_seq_len=each.args.max_seq_len), tokens
        )
        for each in inputs
    )
    expected = reference_logits(folder, tokens)
    torch.testing.assert_close(short, expected, rtol=0, atol=1e-10)
    assert (long - expected).abs().max() > 1e-3


# One model for each feature of the model code that these families need.
FEATURES = "smollm3", "granite", "phi3", "arcee", "exaone4", "olmo2"


@pytest.mark.parametrize("name", FEATURES)
def test_exact_sums_give_the_same_bits_on_any_number_of_ranks(name, tmp_path):
    folder, tokens = write_hf(MODELS[name], tmp_path / "hf", seed=3), MODELS[name].tokens
    assert_equal_bits(folder, tokens, (3,))


@pytest.mark.parametrize("name", ["smollm3", "olmo2"])
def test_logits_match_transformers_with_kv_cache_sharded_by_token(name, tmp_path):
    """Every rank holds the only KV head, so its sum of squares must be counted once."""
    folder, tokens = write_hf(MODELS[name], tmp_path / "hf", seed=3), MODELS[name].tokens
    expected = reference_logits(folder, tokens)
    for logits in run_on_threads(5, cut_logits, folder, tokens, {"kv_split": "sequence"}):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def all_reduces_of_a_forward(comm: ThreadComm, folder: Path, tokens: Sequence[int]) -> int:
    runner = load_runner(comm, folder, len(tokens))
    runner.forward([Chunk(tokens, 0, [[0]], len(tokens))])
    return comm.counts["all_reduce"]


@pytest.mark.parametrize(("name", "per_layer"), [("granite", 2), ("olmo2", 3)])
def test_norm_across_heads_costs_one_more_all_reduce_per_layer(name, per_layer, tmp_path):
    tiny = MODELS[name]
    folder = write_hf(tiny, tmp_path / "hf")
    counts = run_on_threads(3, all_reduces_of_a_forward, folder, tiny.tokens)
    assert counts == [per_layer * tiny.n_layers + 1] * 3


# One or two of each family, with its options.
RESHARDED = (
    "smollm3, window",
    "granite, biases, tied",
    "phi3",
    "phi3, attention factor",
    "seed_oss, biases, tied",
    "arcee, biases, tied",
    "nemotron",
    "stablelm, parallel",
    "glm4, yarn",
    "starcoder2, window, tied",
    "exaone4",
    "exaone4, layer types, tied",
    "olmo2, biases, tied",
    "olmo3, layer types, tied",
    "olmo3, idle windows",
    "olmo3 without a window",
)


@pytest.mark.parametrize("name", RESHARDED)
def test_reshard_through_every_layout_keeps_transformers_logits(name, tmp_path):
    source = write_hf(MODELS[name], tmp_path / "source", seed=4)
    folder = through_every_layout(source, tmp_path)
    path, tokens = folder / "config.json", MODELS[name].tokens
    # transformers has a padding id of its own for a family, beyond this small vocabulary.
    path.write_text(json.dumps({**json.loads(path.read_text()), **_PAD}))
    logits, expected = loaded_logits(folder, tokens), reference_logits(source, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "interval=0: use 1"),
        ("phi3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "only 'default' and"),
        ("phi3", {"original_max_position_embeddings": 1}, "trained context of 1 token"),
        (
            "phi3",
            {"rope_scaling": {**_longrope(2), "rope_type": "su"}},
            "2 factors .* the 3 rotary",
        ),
        ("phi3", {"rope_scaling": {"rope_type": "longrope", "factor": 0.0}}, r"factor=0.0: use a"),
        ("exaone4", {"sliding_window": 9, _PATTERN: "LXG", "layer_types": None}, "'LXG': use"),
        ("exaone4", {"sliding_window": 9, _PATTERN: 0, "layer_types": None}, "=0: use"),
        ("seed_oss", {"hidden_act": "relu2"}, "activation='relu2' and gated"),
        ("arcee", {"hidden_act": "silu"}, "activation='silu' needs gated"),
        ("stablelm", {"head_dim": 10}, r"head_dim=10 must equal .* = \d+ in 'stablelm'"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            "'sliding_attention' and use_sliding_window is false; set it to true, or remove",
        ),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True is not supported"),
        ("nemotron", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotary_dim=3 .*even"),
        ("olmo3", {"rope_parameters": _YARN}, "'rope_type' for all layers"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": _YARN}},
            "rope_type='yarn' for 'sliding_attention'",
        ),
        ("olmo3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'type', which transf"),
        ("olmo3", {"rope_scaling": {**_YARN, "truncate": False}}, "truncate=False is not"),
        ("granite", {"rope_scaling": {**_YARN, "beta_slow": 1e308}}, r"beta_slow=1e\+308: use a"),
        ("granite", {"rope_scaling": {**_YARN, "beta_fast": 1e-308}}, "beta_fast=1e-308: use a"),
        ("granite", {"rope_scaling": {"type": "dynamic", "factor": 1e19}}, r"factor=1e\+19: use a"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling=0 is a divisor .*above 0"),
        ("granite", {"residual_multiplier": -1.0}, "residual_scale=-1.0: use"),
        ("granite", {"residual_multiplier": 1e-200}, "residual_scale=1e-200: use"),
        ("stablelm", {"rope_parameters": {"partial_rotary_factor": 1e308}}, "at most 1"),
    ],
)
def test_invalid_or_unsupported_config_is_refused(family, values, expected, tmp_path):
    folder = write_hf(MODELS[_OF_FAMILIES[family]], tmp_path / "hf")
    with pytest.raises(UsageError, match=expected):
        args_with(folder, values)


@pytest.mark.parametrize("family", ["smollm3", "seed_oss"])
def test_null_head_keys_match_transformers_not_family_defaults(family):
    """Where config.json lacks these keys, the families have 4 or 8 KV heads and head_dim 128."""
    nulls = {"num_key_value_heads": None, "head_dim": None}
    values = {"hidden_size": 60, "num_attention_heads": 10, "num_hidden_layers": 2, **nulls}
    args = args_from_hf({**values, "model_type": family, "intermediate_size": 8, "vocab_size": 9})
    config = AutoConfig.for_model(family, **values)
    assert args.n_kv_heads == config.num_key_value_heads
    assert args.head_dim == (config.head_dim or config.hidden_size // config.num_attention_heads)


def args_with(folder: Path, values: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    load_model_args(find_model(str(folder)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("no_rope_layers", [1, 0]),
        ("residual_multiplier", 0.5),
        ("embedding_multiplier", 2.0),
        ("logits_scaling", 2.0),
        ("attention_multiplier", 0.5),
    ],
)
def test_keys_of_these_families_are_refused_in_llama(key, value, tmp_path):
    """Llama would ignore these keys, though the weights were probably trained with them."""
    folder = write_hf(TinyModel(2, 1, 4, 8, ffn_dim=5, n_layers=1), tmp_path / "hf")
    with pytest.raises(UsageError, match=f"{key}=.* is not supported"):
        args_with(folder, {key: value})
