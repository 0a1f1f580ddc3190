"""Random tiny models on disk, as HF folders and with the same weights as Meta folders.

Every parameter is random, including norms and biases, so that a weight which is missing, read twice
or swapped changes the logits. Sizes deliberately have no common divisors. The writers share no code
with the package.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class TinyModel:
    """The shape of one tiny model; `rope` are transformers' rope_parameters."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    dim: int
    ffn_dim: int = 89
    vocab_size: int = 211
    n_layers: int = 2
    max_seq_len: int = 512
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    family: str = "llama"  # transformers' model_type
    own: Mapping[str, Any] = field(default_factory=dict)  # the family's own keys
    old_config: bool = False  # rope_theta and rope_scaling as written before transformers 5
    rope: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )

    @property
    def tokens(self) -> list[int]:
        """A prompt of 24 tokens."""
        return [(7 * at + 3) % self.vocab_size for at in range(24)]

    @property
    def shape(self) -> str:
        """The sizes of the model, for a line about it."""
        return (
            f"{self.n_heads}/{self.n_kv_heads} heads of {self.head_dim}, dim {self.dim}, "
            f"ffn {self.ffn_dim}, {self.n_layers} layers, {self.vocab_size} tokens"
        )


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
META_SCALED_ROPE = {  # the values of Meta's use_scaled_rope
    **_LLAMA3,
    "rope_theta": 500000.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}

_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
_QWEN3_EXPERTS = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 18}

# A sequence of 40 tokens exceeds every trained length below, and the wide heads have rotary pairs
# inside and on both sides of each ramp.
TINY_MODELS: dict[str, TinyModel] = {
    "9/3": TinyModel(9, 3, 8, 72),
    "9/3 tied": TinyModel(9, 3, 8, 72, tied=True),
    "9/3 attention bias": TinyModel(9, 3, 8, 72, attention_bias=True, old_config=True),
    "9/3 llama3, wide heads": TinyModel(9, 3, 16, 54, rope=_LLAMA3),
    "10/2 all biases, tied": TinyModel(10, 2, 6, 60, tied=True, attention_bias=True, mlp_bias=True),
    "10/2 linear": TinyModel(
        10, 2, 8, 60, rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
    ),
    "12/4 mlp bias, narrow heads": TinyModel(12, 4, 4, 60, mlp_bias=True),
    "12/4 yarn, wide heads": TinyModel(12, 4, 16, 60, max_seq_len=64, rope=_YARN),
    "12/4 yarn, mscale": TinyModel(
        12,
        4,
        16,
        60,
        max_seq_len=64,
        rope={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
        old_config=True,
    ),
    "40/10": TinyModel(40, 10, 4, 80),
    "7/1": TinyModel(7, 1, 8, 56, attention_bias=True),
    "7/1 llama3": TinyModel(7, 1, 8, 56, rope=_LLAMA3, old_config=True),
    "6/6": TinyModel(6, 6, 8, 48, mlp_bias=True),
    "8/2 qwen2": TinyModel(8, 2, 8, 64, family="qwen2"),
    "8/4 qwen2, tied, yarn": TinyModel(
        8, 4, 8, 64, max_seq_len=64, tied=True, family="qwen2", rope=_YARN
    ),
    "6/6 dynamic": TinyModel(
        6,
        6,
        8,
        48,
        max_seq_len=12,
        rope={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5},
    ),
    "8/2 mistral": TinyModel(8, 2, 8, 48, family="mistral", own={"sliding_window": None}),
    "8/2 qwen3": TinyModel(8, 2, 8, 48, family="qwen3"),
    "8/4 qwen3, bias, tied": TinyModel(
        8, 4, 6, 64, tied=True, family="qwen3", own={"attention_bias": True}
    ),
    "8/2 glm": TinyModel(
        8, 2, 12, 48, family="glm", own={"partial_rotary_factor": 0.5, "pad_token_id": 0}
    ),
    "8/2 glm4": TinyModel(
        8, 2, 12, 48, family="glm4", own={"partial_rotary_factor": 0.5, "pad_token_id": 0}
    ),
    "8/1 gemma": TinyModel(8, 1, 10, 56, tied=True, family="gemma"),
    "8/4 gemma2": TinyModel(
        8,
        4,
        8,
        56,
        tied=True,
        n_layers=3,
        family="gemma2",
        own={
            "query_pre_attn_scalar": 13,
            "layer_types": ["full_attention"] * 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "8/2 gemma3": TinyModel(
        8,
        2,
        8,
        56,
        tied=True,
        n_layers=3,
        family="gemma3_text",
        own={
            "query_pre_attn_scalar": 13,
            "layer_types": ["full_attention"] * 3,
            "final_logit_softcapping": 3.0,
        },
    ),
    "8/2 mixtral": TinyModel(8, 2, 8, 56, family="mixtral", own=_EXPERTS),
    "7/1 mixtral, tied": TinyModel(
        7,
        1,
        8,
        56,
        ffn_dim=51,
        tied=True,
        family="mixtral",
        own={**_EXPERTS, "num_local_experts": 3},
    ),
    "8/2 qwen3_moe": TinyModel(
        8, 2, 6, 56, family="qwen3_moe", own={**_QWEN3_EXPERTS, "norm_topk_prob": True}
    ),
    "8/4 qwen3_moe, tied": TinyModel(
        8, 4, 8, 56, tied=True, family="qwen3_moe", own={**_QWEN3_EXPERTS, "attention_bias": True}
    ),
    "7/1 falcon, tied": TinyModel(7, 1, 8, 56, tied=True, family="falcon"),
    "8/2 falcon, two norms, biases": TinyModel(
        8, 2, 6, 48, family="falcon", own={"new_decoder_architecture": True, "bias": True}
    ),
    # Windows shorter than 40 tokens, in all layers and in some.
    "8/2 mistral, window": TinyModel(8, 2, 8, 48, family="mistral", own={"sliding_window": 7}),
    "8/2 qwen2, window": TinyModel(
        8,
        2,
        8,
        64,
        n_layers=3,
        family="qwen2",
        own={"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "8/4 gemma2, window": TinyModel(
        8,
        4,
        8,
        56,
        tied=True,
        n_layers=3,
        family="gemma2",
        own={
            "query_pre_attn_scalar": 13,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.0,
            "hidden_activation": "gelu",
        },
    ),
    "8/2 gemma3, window": TinyModel(
        8,
        2,
        8,
        56,
        tied=True,
        n_layers=7,
        family="gemma3_text",
        own={"query_pre_attn_scalar": 13, "sliding_window": 5, "hidden_activation": "silu"},
    ),
    "8/2 qwen3_moe, window": TinyModel(
        8,
        2,
        6,
        56,
        family="qwen3_moe",
        own={
            **_QWEN3_EXPERTS,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,  # which transformers does not use
        },
    ),
    # Fewer channels and vocabulary rows than heads, so some ranks hold none.
    "6/2 ranks without rows": TinyModel(6, 2, 4, 24, ffn_dim=3, vocab_size=5, mlp_bias=True),
}


# The families that compute the head size as dim / n_heads.
HEAD_DIM_FROM_DIM = frozenset({"qwen2", "falcon", "stablelm", "cohere2", "granitemoehybrid"})

# The key of the epsilon of norms, where it is not that of Llama.
_NORM_EPS = {
    "nemotron": "norm_eps",
    "stablelm": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
}


def write_hf(tiny: TinyModel, folder: Path, seed: int = 0) -> Path:
    """Writes a model as an HF folder of float64 safetensors with random weights.

    Linear weights and tied embeddings have std 1 / sqrt(in_features), which keeps the scale of
    activations; norms are 1 +- 0.1.
    """
    own = dict(tiny.own)
    if tiny.family == "falcon":
        own |= {"num_kv_heads": tiny.n_kv_heads, "ffn_hidden_size": tiny.ffn_dim}
    else:
        own |= {"num_key_value_heads": tiny.n_kv_heads, "intermediate_size": tiny.ffn_dim}
        own[_NORM_EPS.get(tiny.family, "rms_norm_eps")] = 1e-5
    if tiny.family not in HEAD_DIM_FROM_DIM:
        own["head_dim"] = tiny.head_dim
    if tiny.family == "llama":
        own |= {"attention_bias": tiny.attention_bias, "mlp_bias": tiny.mlp_bias}
    config = AutoConfig.for_model(
        tiny.family,
        hidden_size=tiny.dim,
        num_hidden_layers=tiny.n_layers,
        num_attention_heads=tiny.n_heads,
        vocab_size=tiny.vocab_size,
        max_position_embeddings=tiny.max_seq_len,
        tie_word_embeddings=tiny.tied,
        rope_parameters=dict(tiny.rope),
        dtype=torch.float64,
        **own,
    )
    model = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
        for name, weight in [*model.named_parameters(), *biases]:
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "norm" in name or ".ln_" in name:
                weight.copy_(1 + 0.1 * noise)
            elif "embed" in name:
                weight.copy_(noise / (weight.shape[1] ** 0.5 if tiny.tied else 1))
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    if tiny.old_config:
        _write_old_rope_keys(folder / "config.json")
    return folder


def write_meta(
    tiny: TinyModel, hf_folder: Path, folder: Path, n_files: int, embeddings_dim: int = 0
) -> Path:
    """Writes an HF folder's weights as a Meta folder of `n_files` model-parallel files.

    Every size must divide by `n_files`, as in Meta's own files. `embeddings_dim` is the dimension
    along which the token embeddings are cut: 0 as in Llama 3, 1 as in Llama 1 and 2.
    """
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps(_meta_params(tiny), indent=2))
    whole = meta_weights(tiny, hf_folder)
    for index in range(n_files):
        part = {
            name: _part(weight, _cut_dim(name, embeddings_dim), index, n_files)
            for name, weight in whole.items()
        }
        torch.save(part, folder / f"consolidated.{index:02d}.pth")
    return folder


def meta_weights(tiny: TinyModel, hf_folder: Path) -> dict[str, Tensor]:
    """An HF folder's whole weights with Meta's names, and q and k rows in interleaved order."""
    hf = load_file(hf_folder / "model.safetensors")
    weights = {
        "tok_embeddings.weight": hf["model.embed_tokens.weight"],
        "norm.weight": hf["model.norm.weight"],
        "output.weight": hf["model.embed_tokens.weight" if tiny.tied else "lm_head.weight"],
    }
    for layer in range(tiny.n_layers):
        here, there = f"model.layers.{layer}", f"layers.{layer}"
        for hf_name, meta_name in _LAYER_NAMES.items():
            weight = hf[f"{here}.{hf_name}.weight"]
            if meta_name in ("attention.wq", "attention.wk"):
                weight = interleaved(weight, tiny.head_dim)
            weights[f"{there}.{meta_name}.weight"] = weight
    return weights


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from half-split order to pairs: row i and row i + D/2 become neighbours.

    >>> interleaved(torch.arange(6)[:, None], head_dim=6).flatten().tolist()
    [0, 3, 1, 4, 2, 5]
    """
    order = [i + half for i in range(head_dim // 2) for half in (0, head_dim // 2)]
    n_heads = len(weight) // head_dim
    rows = [head * head_dim + row for head in range(n_heads) for row in order]
    return weight[rows]


_LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def _write_old_rope_keys(config_file: Path) -> None:
    config = json.loads(config_file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config_file.write_text(json.dumps(config, indent=2))


def _meta_params(tiny: TinyModel) -> dict[str, Any]:
    """The multiplier of 8/3 dim, rounded up to `multiple_of`, that gives the ffn width."""
    assert tiny.dim == tiny.n_heads * tiny.head_dim
    multiplier = (tiny.ffn_dim - 0.5) / int(8 * tiny.dim / 3)
    return {
        "dim": tiny.dim,
        "n_layers": tiny.n_layers,
        "n_heads": tiny.n_heads,
        "n_kv_heads": tiny.n_kv_heads,
        "vocab_size": tiny.vocab_size,
        "multiple_of": 4,
        "ffn_dim_multiplier": multiplier,
        "norm_eps": 1e-5,
        "rope_theta": tiny.rope["rope_theta"],
        "use_scaled_rope": tiny.rope["rope_type"] == "llama3",
    }


def _cut_dim(name: str, embeddings_dim: int) -> int | None:
    if "norm" in name:
        return None
    if name.startswith("tok_embeddings"):
        return embeddings_dim
    return 1 if name.endswith(("wo.weight", "w2.weight")) else 0


def _part(weight: Tensor, dim: int | None, index: int, n_files: int) -> Tensor:
    if dim is None:
        return weight.clone()
    size, rest = divmod(weight.shape[dim], n_files)
    assert rest == 0
    return weight.narrow(dim, index * size, size).clone(memory_format=torch.contiguous_format)
