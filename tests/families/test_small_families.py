"""Families close to Llama, compared with transformers, in three configurations each."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import PAD, SMALL, YARN, longrope
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

_PATTERN, _TRAINED = "sliding_window_pattern", "original_max_position_embeddings"
# By the number of heads: each family has models with 5, 7 and 9.
_TP_SIZES = {5: (1, 5), 7: (2, 7), 9: (2, 3)}
_OF_FAMILIES = {tiny.family: name for name, tiny in SMALL.items()}


@pytest.mark.parametrize("name", SMALL)
def test_logits_match_transformers_at_each_tp_size(name, tmp_path):
    tiny = SMALL[name]
    folder, tokens = write_hf(tiny, tmp_path / "hf", seed=3), tiny.tokens
    assert_parity(folder, tokens, reference_logits(folder, tokens), _TP_SIZES[tiny.n_heads])


def test_phi3_uses_short_factors_up_to_trained_context_length(tmp_path):
    """transformers uses the short factors for sequences of at most the trained length."""
    tiny = replace(SMALL["phi3"], own={**SMALL["phi3"].own, _TRAINED: 40})
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
FEATURES = "smollm3", "granite", "ministral3", "phi3", "arcee", "exaone4", "olmo2"


@pytest.mark.parametrize("name", FEATURES)
def test_exact_sums_give_the_same_bits_on_any_number_of_ranks(name, tmp_path):
    folder, tokens = write_hf(SMALL[name], tmp_path / "hf", seed=3), SMALL[name].tokens
    assert_equal_bits(folder, tokens, (3,))


@pytest.mark.parametrize("name", ["smollm3", "olmo2"])
def test_logits_match_transformers_with_kv_cache_sharded_by_token(name, tmp_path):
    """Every rank holds the only KV head, so its sum of squares must be counted once."""
    folder, tokens = write_hf(SMALL[name], tmp_path / "hf", seed=3), SMALL[name].tokens
    expected = reference_logits(folder, tokens)
    for logits in run_on_threads(5, cut_logits, folder, tokens, {"kv_split": "sequence"}):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def all_reduces_of_a_forward(comm: ThreadComm, folder: Path, tokens: Sequence[int]) -> int:
    runner = load_runner(comm, folder, len(tokens))
    runner.forward([Chunk(tokens, 0, [[0]], len(tokens))])
    return comm.counts["all_reduce"]


@pytest.mark.parametrize(("name", "per_layer"), [("granite", 2), ("olmo2", 3)])
def test_norm_across_heads_costs_one_more_all_reduce_per_layer(name, per_layer, tmp_path):
    tiny = SMALL[name]
    folder = write_hf(tiny, tmp_path / "hf")
    counts = run_on_threads(3, all_reduces_of_a_forward, folder, tiny.tokens)
    assert counts == [per_layer * tiny.n_layers + 1] * 3


# One or two of each family, with its options.
RESHARDED = (
    "smollm3, window",
    "granite, biases, tied",
    "granite 4, biases, tied",
    "granite 4 without rotation",
    "ministral3, window, tied",
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
    source = write_hf(SMALL[name], tmp_path / "source", seed=4)
    folder = through_every_layout(source, tmp_path)
    path, tokens = folder / "config.json", SMALL[name].tokens
    # transformers has a padding id of its own for a family, beyond this small vocabulary.
    path.write_text(json.dumps({**json.loads(path.read_text()), **PAD}))
    logits, expected = loaded_logits(folder, tokens), reference_logits(source, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


# As in the config.json of ibm-granite/granite-4.0-micro, in other sizes.
GRANITE4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "bos_token_id": 5,
    "embedding_multiplier": 12,
    "eos_token_id": 5,
    "hidden_act": "silu",
    "hidden_size": 64,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 96,
    "layer_types": ["attention", "attention"],
    "logits_scaling": 10,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 8,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "output_router_logits": False,
    "pad_token_id": 4,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 96,
    "tie_word_embeddings": True,
    "vocab_size": 100,
}


def test_published_config_of_granite_4_is_read_without_a_warning(caplog):
    args = args_from_hf(GRANITE4)
    assert (args.ffn_dim, args.embedding_scale, args.unrotated_layers) == (96, 12, ())
    assert not caplog.records


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"layer_types": ["mamba", "attention"]}, "layer_types has 'mamba': state-space layers"),
        ({"layer_types": None}, "layer_types has no layers with attention: state-space layers"),
        ({"num_local_experts": 62}, "num_local_experts=62: the experts of this model are not"),
    ],
)
def test_granite_4_with_other_layers_is_refused(values, expected):
    with pytest.raises(UsageError, match=expected):
        args_from_hf({**GRANITE4, **values})


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "interval=0: use 1"),
        ("phi3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "only 'default' and"),
        ("phi3", {_TRAINED: 1}, "trained context of 1 token"),
        (
            "phi3",
            {"rope_scaling": {**longrope(2), "rope_type": "su"}},
            "2 factors .* the 3 rotary",
        ),
        ("phi3", {"rope_scaling": {"rope_type": "longrope", "factor": 0.0}}, r"factor=0.0: use a"),
        (
            "exaone4",
            {"sliding_window": 9, _PATTERN: "LXG", "layer_types": None},
            "'LXG': use",
        ),
        (
            "exaone4",
            {"sliding_window": 9, _PATTERN: 0, "layer_types": None},
            "=0: use",
        ),
        ("seed_oss", {"hidden_act": "relu2"}, "activation='relu2' and gated"),
        ("arcee", {"hidden_act": "silu"}, "activation='silu' needs gated"),
        ("stablelm", {"head_dim": 10}, r"head_dim=10 must equal .* = \d+ in 'stablelm'"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            "'sliding_attention' and use_sliding_window is false; set it to true, or remove",
        ),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True is not supported"),
        ("nemotron", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary_dim=3 .*even"),
        ("olmo3", {"rope_parameters": YARN}, "'rope_type' for all layers"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": YARN}},
            "rope_type='yarn' for 'sliding_attention'",
        ),
        ("olmo3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'type', which transf"),
        ("olmo3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate=False is not"),
        ("granite", {"rope_scaling": {**YARN, "beta_slow": 1e308}}, r"beta_slow=1e\+308: use a"),
        ("granite", {"rope_scaling": {**YARN, "beta_fast": 1e-308}}, "beta_fast=1e-308: use a"),
        ("granite", {"rope_scaling": {"type": "dynamic", "factor": 1e19}}, r"factor=1e\+19: use a"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling=0 is a divisor .*above 0"),
        ("granite", {"residual_multiplier": -1.0}, "residual_scale=-1.0: use"),
        ("granite", {"residual_multiplier": 1e-200}, "residual_scale=1e-200: use"),
        ("stablelm", {"rope_parameters": {"partial_rotary_factor": 1e308}}, "at most 1"),
    ],
)
def test_invalid_or_unsupported_config_is_refused(family, values, expected, tmp_path):
    folder = write_hf(SMALL[_OF_FAMILIES[family]], tmp_path / "hf")
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
