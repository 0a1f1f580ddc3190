"""The config.json of Qwen models; for their logits see test_parity and test_families_gguf."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TINY_MODELS, TinyModel, write_hf

from parallel_llama.config.hf import args_from_hf, hf_config
from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.model_files import find_model


@pytest.fixture
def dense(tmp_path):
    return write_hf(TINY_MODELS["8/2 qwen2"], tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A Qwen 3 with experts."""
    return write_hf(TINY_MODELS["8/2 qwen3_moe"], tmp_path)


def args_with(folder: Path, **values: Any) -> ModelArgs:
    """The arguments from config.json with these values; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    return load_model_args(find_model(str(folder)))


def test_sliding_window_applies_only_if_enabled(dense):
    window = {"sliding_window": 16, "layer_types": None}
    assert args_with(dense, **window).sliding_window is None
    args = args_with(dense, use_sliding_window=True, max_window_layers=1)
    assert (args.sliding_window, args.full_layers) == (16, (0,))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_alternating_layer_types_are_written_to_config_json(family, tmp_path):
    """Regression: reshard to Hugging Face's and Meta's layouts refused the model."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    own = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    folder = write_hf(TinyModel(4, 2, 8, 32, n_layers=3, family=family, own=own), tmp_path)
    args = load_model_args(find_model(str(folder)))
    assert (args.sliding_window, args.full_layers) == (8, (1,))
    config = hf_config(args)
    assert config["layer_types"] == kinds and args_from_hf(config) == args


def test_mismatched_architecture_and_model_type_are_refused(dense):
    with pytest.raises(UsageError, match=r"Qwen2ForCausalLM.*model_type='llama'"):
        args_with(dense, model_type="llama")


def test_moe_config_sets_expert_width_and_counts(folder):
    args = args_with(folder)
    assert (args.ffn_dim, args.n_experts, args.n_active_experts) == (18, 11, 3)
    assert args.normed_experts and args.qk_norm


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_number_of_experts_is_read_under_either_key(folder, key):
    """Qwen's own files have the first, and transformers 5 writes the second."""
    stated = {"num_experts": None, "num_local_experts": None, key: 11}
    assert args_with(folder, **stated).n_experts == 11


def test_routing_weights_are_not_normalised_by_default(folder):
    assert not args_with(folder, norm_topk_prob=None).normed_experts


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"decoder_sparse_step": 2}, (0,)),
        ({"mlp_only_layers": [1, 7]}, (1,)),
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, ()),
    ],
)
def test_config_keys_select_dense_layers(folder, values, expected):
    args = args_with(folder, **values)
    assert args.dense_layers == expected
    assert args.dense_ffn_dim == (TINY_MODELS["8/2 qwen3_moe"].ffn_dim if expected else 0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0: use 1"),
        ({"mlp_only_layers": [0, 1]}, "leave no layer of 2 with experts"),
        ({"decoder_sparse_step": 3}, "leave no layer of 2 with experts"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers='0' is not a whole number"),
        ({"num_experts": 0}, "num_experts=0: use 1"),
    ],
)
def test_invalid_expert_layers_and_counts_are_refused(folder, values, expected):
    with pytest.raises(UsageError, match=expected):
        args_with(folder, **values)
