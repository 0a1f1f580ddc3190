"""Command R (cohere) and Command R7B (cohere2), compared with transformers."""

import json
from pathlib import Path

import pytest
import torch
from family_models import COHERE
from parity_steps import assert_equal_bits, assert_parity
from reshard_samples import through_every_layout
from tiny_models import write_hf
from transformers import AutoConfig
from transformers_oracle import loaded_logits, reference_logits

from parallel_llama.config.hf import args_from_hf
from parallel_llama.errors import UsageError
from parallel_llama.plan import why_unrecorded


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_hf(tiny, tmp_path_factory.mktemp("hf"), seed=3) for name, tiny in COHERE.items()
    }


@pytest.mark.parametrize("name", COHERE)
def test_logits_match_transformers_at_each_tp_size(name, folders):
    folder, tokens = folders[name], COHERE[name].tokens
    assert_parity(folder, tokens, reference_logits(folder, tokens), (1, 2, 3, 5, 7))


@pytest.mark.parametrize("name", ["cohere", "cohere, norms, biases, yarn", "cohere2"])
def test_exact_sums_give_the_same_bits_on_any_number_of_ranks(name, folders):
    folder, tokens = folders[name], COHERE[name].tokens
    assert_equal_bits(folder, tokens, (3, 5))


@pytest.mark.parametrize("name", COHERE)
def test_reshard_through_every_layout_keeps_transformers_logits(name, folders, tmp_path):
    """Per-head norm weights are matrices in HF folders, and vectors in the other layouts."""
    folder, tokens = through_every_layout(folders[name], tmp_path), COHERE[name].tokens
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": 0}))
    logits, expected = loaded_logits(folder, tokens), reference_logits(folders[name], tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "vocab_size": 100,
}


@pytest.mark.parametrize("family", ["cohere", "cohere2"])
def test_missing_keys_have_the_defaults_of_transformers(family):
    args = args_from_hf({**_SIZES, "model_type": family})
    config = AutoConfig.for_model(family, **_SIZES)
    assert args.rope_theta == config.rope_parameters["rope_theta"]
    assert args.logit_scale == config.logit_scale
    assert args.norm_eps == config.layer_norm_eps
    assert args.max_seq_len == config.max_position_embeddings
    assert args.tied_embeddings == config.tie_word_embeddings
    if family == "cohere2":
        full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
        assert [*args.full_layers] == [*args.unrotated_layers] == full
        assert args.sliding_window == config.sliding_window


def test_keys_of_released_models_that_transformers_ignores_are_accepted():
    """max_position_embeddings is 8192 in models with a trained context of model_max_length."""
    first = {"max_position_embeddings": 8192, "model_max_length": 131072}
    assert args_from_hf({**_SIZES, **first, "model_type": "cohere"}).max_seq_len == 131072
    second = {
        "cache_implementation": "hybrid",
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
        "use_qk_norm": False,
    }
    assert args_from_hf({**_SIZES, **second, "model_type": "cohere2"}).full_layers == (3, 7)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0: use 1 or more"),
        ({"position_embedding_type": "alibi"}, "'alibi': only 'rope_gptj' is supported"),
        ({"use_qk_norm": True}, "use_qk_norm=True is not supported"),
        ({"head_dim": 10}, "head_dim=10 must equal .* = 16 in 'cohere2'"),
        ({"logit_scale": 0.0}, "logit_scale=0.0: use a finite number above 0"),
    ],
)
def test_invalid_or_unsupported_config_is_refused(values, expected):
    with pytest.raises(UsageError, match=expected):
        args_from_hf({**_SIZES, **values, "model_type": "cohere2"})


def test_layer_norm_leaves_steps_unrecorded_on_cpu_only():
    args = args_from_hf({**_SIZES, "model_type": "cohere", "use_qk_norm": True})
    assert "LayerNorm has no kernel" in (why_unrecorded(args, 1, "cpu") or "")
    assert why_unrecorded(args, 1, "cuda") is None
