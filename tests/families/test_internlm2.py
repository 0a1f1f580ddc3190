"""InternLM 2: Llama with other names, and with wq, wk and wv in one tensor, by KV head."""

import json
from pathlib import Path

import converted_gguf
import pytest
import torch
from converted_gguf import convert, rounded
from parity_steps import logits_of_models
from reshard_samples import through_every_layout
from safetensors.torch import load_file, save_file
from thread_ranks import run_on_threads
from tiny_models import TinyModel, write_hf
from torch import Tensor
from transformers_oracle import reference_logits

from parallel_llama.config.layouts import load_model_args
from parallel_llama.files.model_files import find_model

_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
MODELS = {
    "biases": TinyModel(9, 3, 6, 54, attention_bias=True),
    "one KV head, tied": TinyModel(5, 1, 6, 30, tied=True),
    "dynamic": TinyModel(7, 7, 6, 42, max_seq_len=16, rope=_DYNAMIC),
}
TP_SIZES = {9: (2, 3), 5: (1, 5), 7: (1, 7)}
TOKENS = MODELS["biases"].tokens
RENAMED = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_internlm2(tiny: TinyModel, llama: Path, folder: Path) -> Path:
    """The weights of a Llama as InternLM's own files hold them."""
    folder.mkdir()
    config = json.loads((llama / "config.json").read_text())
    for key in ("attention_bias", "mlp_bias", "head_dim"):
        del config[key]
    config |= {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}
    config["bias"] = tiny.attention_bias
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(llama / "model.safetensors")
    own = {
        "model.tok_embeddings.weight": held["model.embed_tokens.weight"],
        "model.norm.weight": held["model.norm.weight"],
    }
    if not tiny.tied:
        own["output.weight"] = held["lm_head.weight"]
    kinds = ("weight", "bias") if tiny.attention_bias else ("weight",)
    for layer in range(tiny.n_layers):
        name = f"model.layers.{layer}"
        for old, new in RENAMED.items():
            for kind in kinds:
                if f"{name}.{old}.{kind}" in held:
                    own[f"{name}.{new}.{kind}"] = held[f"{name}.{old}.{kind}"]
        for kind in kinds:
            parts = [held[f"{name}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            own[f"{name}.attention.wqkv.{kind}"] = by_kv_head(tiny, parts)
    save_file(own, folder / "model.safetensors")
    return folder


def by_kv_head(tiny: TinyModel, parts: list[Tensor]) -> Tensor:
    """The queries, key and value of every KV head, one KV head after the other."""
    groups = [part.view(tiny.n_kv_heads, -1, *part.shape[1:]) for part in parts]
    return torch.cat(groups, 1).flatten(0, 1)


@pytest.mark.parametrize("name", MODELS)
def test_internlm2_matches_llama_and_survives_every_layout(name, tmp_path):
    tiny = MODELS[name]
    llama = write_hf(tiny, tmp_path / "llama", seed=3)
    folder = write_internlm2(tiny, llama, tmp_path / "internlm2")
    expected = reference_logits(llama, TOKENS)
    for tp_size in TP_SIZES[tiny.n_heads]:
        for (logits,) in run_on_threads(tp_size, logits_of_models, [(folder, TOKENS)]):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    through_every_layout(folder, tmp_path)


def test_internlm2_gguf_logits_match_llama(tmp_path, monkeypatch):
    """llama.cpp's converter writes both families alike, except for the architecture name."""
    monkeypatch.setitem(converted_gguf.ARCHITECTURES, "llama", "internlm2")
    llama = rounded(write_hf(MODELS["biases"], tmp_path / "llama", seed=2))
    path, expected = convert(llama, tmp_path / "tiny.gguf"), reference_logits(llama, TOKENS)
    assert load_model_args(find_model(str(path))).family == "internlm2"
    for (logits,) in run_on_threads(3, logits_of_models, [(path, TOKENS)]):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
