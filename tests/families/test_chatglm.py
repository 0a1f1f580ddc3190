"""ChatGLM: the arithmetic of transformers' GLM under other names, three weights in one tensor."""

import json
from pathlib import Path

import pytest
import torch
from converted_gguf import convert, rounded
from parity_steps import logits_of_models
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, write_hf
from transformers_oracle import reference_logits

from parallel_llama.config.layouts import load_model_args
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.reshard.reshard import reshard

TINY = TINY_MODELS["8/2 glm"]
TOKENS = [(7 * at + 3) % TINY.vocab_size for at in range(30)]

# As in config.json of THUDM/chatglm2-6b, in the sizes of the tiny model.
CONFIG = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": TINY.ffn_dim,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": TINY.dim,
    "kv_channels": TINY.head_dim,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": TINY.n_kv_heads,
    "num_attention_heads": TINY.n_heads,
    "num_layers": TINY.n_layers,
    "original_rope": True,
    "padded_vocab_size": TINY.vocab_size,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": TINY.max_seq_len,
    "use_cache": True,
    "torch_dtype": "float64",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
RENAMED = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    return write_hf(TINY, tmp_path / "glm", seed=3)


@pytest.fixture
def chatglm(glm: Path, tmp_path: Path) -> Path:
    """The same weights as ChatGLM's own files hold them."""
    folder = tmp_path / "chatglm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    held = load_file(glm / "model.safetensors")
    own = {
        "transformer.embedding.word_embeddings.weight": held["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": held["model.norm.weight"],
        "transformer.output_layer.weight": held["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.ones(3),
    }
    for layer in range(TINY.n_layers):
        theirs, ours = f"model.layers.{layer}", f"transformer.encoder.layers.{layer}"
        for old, new in RENAMED.items():
            own[f"{ours}.{new}.weight"] = held[f"{theirs}.{old}.weight"]
        for kind in ("weight", "bias"):
            parts = [held[f"{theirs}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            own[f"{ours}.self_attention.query_key_value.{kind}"] = torch.cat(parts)
    save_file(own, folder / "model.safetensors")
    return folder


def test_config_that_transformers_has_saved_is_read(chatglm):
    """Saving writes the class with the output layer, and the key of ChatGLM's own quantisation."""
    expected = load_model_args(find_model(str(chatglm)))
    saved = {"architectures": ["ChatGLMForConditionalGeneration"], "quantization_bit": 0}
    (chatglm / "config.json").write_text(json.dumps({**CONFIG, **saved}))
    assert load_model_args(find_model(str(chatglm))) == expected
    (chatglm / "config.json").write_text(json.dumps({**CONFIG, "quantization_bit": 4}))
    with pytest.raises(UsageError, match="quantization_bit=4 is not supported"):
        load_model_args(find_model(str(chatglm)))


def test_rope_ratio_multiplies_the_base_except_in_chatglm2(chatglm):
    """ChatGLM2-32k divides positions by it."""
    newer = {"_name_or_path": "THUDM/chatglm3-6b-32k", "rope_ratio": 50}
    (chatglm / "config.json").write_text(json.dumps({**CONFIG, **newer}))
    assert load_model_args(find_model(str(chatglm))).rope_theta == 500_000
    older = {"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 50}
    (chatglm / "config.json").write_text(json.dumps({**CONFIG, **older}))
    with pytest.raises(UsageError, match="rope_ratio=50 of ChatGLM2"):
        load_model_args(find_model(str(chatglm)))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_that_chatglm_code_ignores_is_refused(chatglm, key):
    scaling = {"rope_type": "linear", "factor": 2.0}
    (chatglm / "config.json").write_text(json.dumps({**CONFIG, key: scaling}))
    with pytest.raises(UsageError, match="rope_type='linear' is not supported in 'chatglm'"):
        load_model_args(find_model(str(chatglm)))


def test_logits_match_glm_at_every_tp_size(glm, chatglm):
    expected = reference_logits(glm, TOKENS)
    for tp_size in range(1, TINY.n_heads + 1):
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(chatglm, TOKENS)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_gguf_file_with_merged_weights_gives_the_logits_of_glm(glm, chatglm, tmp_path):
    expected = reference_logits(rounded(glm), TOKENS)
    # The gguf package knows the tensors of ChatGLM by these names, and the header has GLM's values.
    stripped = {
        name.removeprefix("transformer."): weight
        for name, weight in load_file(rounded(chatglm) / "model.safetensors").items()
        if "inv_freq" not in name
    }
    save_file(stripped, chatglm / "model.safetensors")
    config = json.loads((glm / "config.json").read_text())
    (chatglm / "config.json").write_text(json.dumps({**config, "model_type": "chatglm"}))
    file = convert(chatglm, tmp_path / "chatglm.gguf")
    assert load_model_args(find_model(str(file))).family == "chatglm"
    for tp_size in (1, 2, 3, 5, 7):
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(file, TOKENS)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_reshard_through_every_layout_restores_weights(chatglm, tmp_path):
    folder = chatglm
    for layout, n_parts in (("native", 2), ("meta", 3), ("hf", 2)):
        reshard(find_model(str(folder)), tmp_path / layout, layout=layout, n_parts=n_parts)
        folder = tmp_path / layout
        assert load_model_args(find_model(str(folder))) == load_model_args(find_model(str(chatglm)))
    back = {}
    for path in sorted(folder.glob("*.safetensors")):
        back |= load_file(path)
    for name, weight in load_file(chatglm / "model.safetensors").items():
        if "inv_freq" not in name:
            assert torch.equal(back.pop(name), weight), name
    assert not back


@pytest.mark.parametrize("key", ["rmsnorm", "multi_query_attention", "original_rope"])
def test_unsupported_chatglm_options_are_refused(chatglm, key):
    (chatglm / "config.json").write_text(json.dumps({**CONFIG, key: False}))
    with pytest.raises(UsageError, match=f"{key}=False is not supported"):
        load_model_args(find_model(str(chatglm)))
