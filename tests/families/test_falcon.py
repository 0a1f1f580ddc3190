"""Falcon in all its forms against transformers, and configurations that are refused."""

import json
from typing import Any

import pytest
import torch
from parity_steps import logits_of_models
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from transformers_oracle import loaded_logits, reference_logits

from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.reshard.reshard import reshard

pytestmark = pytest.mark.slow

NEW = {"new_decoder_architecture": True}

SEVEN = TinyModel(71, 1, 2, 142, tied=True, family="falcon")  # the 7B's heads
FORMS = {
    "7B": SEVEN,
    "40B": TinyModel(16, 8, 4, 64, n_layers=3, family="falcon", own=NEW),
    "11B": TinyModel(8, 2, 4, 32, family="falcon", own={**NEW, "num_ln_in_parallel_attn": 1}),
    "new, one KV head": TinyModel(9, 1, 4, 36, family="falcon", own=NEW),
    "a KV head a head": TinyModel(
        8, 8, 4, 32, family="falcon", own={"multi_query": False, "bias": True}
    ),
    "one after the other": TinyModel(
        8, 1, 4, 32, family="falcon", own={"parallel_attn": False, "bias": True}
    ),
    "heads, one after the other": TinyModel(
        8, 8, 4, 32, family="falcon", own={"parallel_attn": False, "multi_query": False}
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_matches_transformers_at_every_tp_size(form, tmp_path):
    tiny = FORMS[form]
    folder, tokens = write_hf(tiny, tmp_path / "falcon", seed=3), tiny.tokens
    expected = reference_logits(folder, tokens)
    for tp_size in range(1, 9):
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(folder, tokens)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_reshard_through_every_layout_preserves_every_form(form, tmp_path):
    tiny = FORMS[form]
    folder = source = write_hf(tiny, tmp_path / "falcon", seed=3)
    manifests = []
    for layout, n_parts in (("native", 2), ("meta", 3), ("hf", 2)):
        reshard(
            find_model(str(folder)), target := tmp_path / layout, layout=layout, n_parts=n_parts
        )
        manifests.append(json.loads((target / "manifest.json").read_text())["tensors"])
        folder = target
    assert manifests[0] == manifests[1] == manifests[2]
    stored = load_file(source / "model.safetensors")
    back = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], weight) for name, weight in stored.items())
    tokens = tiny.tokens
    assert torch.equal(loaded_logits(folder, tokens), reference_logits(source, tokens))
    args = load_model_args(find_model(str(source)))
    assert load_model_args(find_model(str(folder))) == args


def test_published_configs_give_expected_shapes(tmp_path):
    """config.json as on the hub, where the models have different sets of keys."""
    common: dict[str, Any] = {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "modeling_falcon.FalconModel"},
        "bias": False,
        "hidden_dropout": 0.0,
        "layer_norm_epsilon": 1e-05,
        "model_type": "falcon",
        "parallel_attn": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 65024,
    }
    published = {
        "7b": {"multi_query": True, "new_decoder_architecture": False, "hidden_size": 4544},
        "40b": {"new_decoder_architecture": True, "hidden_size": 8192, "num_kv_heads": 8},
        "11b": {"hidden_size": 4096, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1, **NEW},
    }
    published["7b"] |= {"num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71}
    published["40b"] |= {"num_attention_heads": 128, "num_hidden_layers": 60}
    published["11b"] |= {"num_attention_heads": 32, "num_hidden_layers": 60, "ff_factor": 4}
    published["11b"] |= {"max_position_embeddings": 8192, "rope_theta": 500042.0}
    shapes = {}
    for name, own in published.items():
        path = tmp_path / f"falcon-{name}.json"
        path.write_text(json.dumps({**common, **own}))
        args = load_model_args(find_model(str(path)))
        shapes[name] = (args.n_kv_heads, args.head_dim, args.ffn_dim, args.shared_norm)
        assert args.tied_embeddings and args.parallel_block and not args.gated
        assert (args.activation, args.norm, args.norm_bias) == ("gelu", "layer", True)
    assert shapes["7b"] == (1, 64, 18176, True)
    assert shapes["40b"] == (8, 64, 32768, False)
    assert shapes["11b"] == (8, 128, 16384, True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"alibi": True}, "ALiBi"),
        ({**NEW, "parallel_attn": False}, "always parallel"),
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2: use 1 to 1"),
        ({**NEW, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn=3: use 1 to 2"),
        ({**NEW, "num_kv_heads": 3}, "use a divisor of n_heads"),
        ({"activation": "relu"}, "activation='relu' is not supported"),
        ({"model_type": "RefinedWebModel"}, "use the newer config.json"),
        ({"num_kv_head": 2}, "did you mean 'num_kv_heads'"),
    ],
)
def test_invalid_or_unsupported_config_is_refused(values, expected, tmp_path):
    folder = write_hf(FORMS["a KV head a head"], tmp_path / "falcon")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(UsageError, match=expected):
        load_model_args(find_model(str(folder)))


def test_base_model_names_load_but_mismatched_qkv_shape_is_refused(tmp_path):
    folder = write_hf(SEVEN, tmp_path / "falcon")
    expected = reference_logits(folder, SEVEN.tokens)
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    save_file(bare, folder / "model.safetensors")
    (logits,) = run_on_threads(1, logits_of_models, [(folder, SEVEN.tokens)])[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "multi_query": False}))
    with pytest.raises(CheckpointError, match=r"query_key_value.weight is \[146, 142\], exp.*426"):
        run_on_threads(1, logits_of_models, [(folder, SEVEN.tokens)])
