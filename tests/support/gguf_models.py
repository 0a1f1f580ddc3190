"""Tiny models of every family that llama.cpp writes, with settings that GGUF headers can state."""

from dataclasses import replace

from family_models import SMALL
from tiny_models import TINY_MODELS, TinyModel

_FULL = ["full_attention"] * 2
_GEMMA = {"query_pre_attn_scalar": 8, "layer_types": None}
_WINDOW = {"sliding_window": 9}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_TRAINED = "original_max_position_embeddings"
_SCALES = {  # exact in float32
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.375,
    "logits_scaling": 8.0,
}
_EXPERTS = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 18}

MODELS: dict[str, TinyModel] = {
    "llama": TINY_MODELS["9/3"],
    "llama, yarn": TINY_MODELS["12/4 yarn, wide heads"],
    "llama, yarn with an attention factor": replace(
        TINY_MODELS["12/4 yarn, wide heads"],
        rope={**TINY_MODELS["12/4 yarn, wide heads"].rope, "attention_factor": 1.25},
    ),
    "mistral": TINY_MODELS["8/2 mistral"],
    "mixtral": TINY_MODELS["8/2 mixtral"],
    "qwen2": TINY_MODELS["8/2 qwen2"],
    "qwen3": TINY_MODELS["8/2 qwen3"],
    "qwen2moe": TinyModel(
        8, 2, 6, 56, family="qwen2_moe", own={**_EXPERTS, "shared_expert_intermediate_size": 37}
    ),
    "qwen3moe": TinyModel(
        8, 2, 6, 56, family="qwen3_moe", own={**_EXPERTS, "norm_topk_prob": True}
    ),
    "glm4moe": TinyModel(
        5,
        1,
        8,
        34,
        n_layers=3,
        family="glm4_moe",
        own={
            "pad_token_id": 0,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 18,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt-oss": TinyModel(
        5,
        1,
        16,
        34,
        ffn_dim=19,
        n_layers=3,
        max_seq_len=64,
        family="gpt_oss",
        own={
            "pad_token_id": 0,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
        },
        rope={**TINY_MODELS["12/4 yarn, wide heads"].rope, "truncate": False},
    ),
    "gemma": TINY_MODELS["8/1 gemma"],
    "gemma2": TinyModel(
        8, 4, 8, 56, tied=True, n_layers=3, family="gemma2", own={**_GEMMA, **_CAPS, **_WINDOW}
    ),
    "gemma2, one layer": TinyModel(
        8, 4, 8, 56, tied=True, n_layers=1, family="gemma2", own={**_GEMMA, **_CAPS}
    ),
    "gemma3": TinyModel(
        8,
        2,
        8,
        56,
        tied=True,
        n_layers=7,
        family="gemma3_text",
        own={**_GEMMA, **_WINDOW},
        rope={
            "full_attention": {"rope_type": "linear", "rope_theta": 70000.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3 without a window": TinyModel(
        8, 2, 8, 56, tied=True, family="gemma3_text", own={**_GEMMA, "layer_types": _FULL}
    ),
    "falcon 7B": TINY_MODELS["7/1 falcon, tied"],
    "smollm3": TinyModel(5, 1, 6, 34, n_layers=5, family="smollm3", own={"pad_token_id": 0}),
    "granite": TinyModel(7, 1, 6, 42, family="granite", own=_SCALES),
    "granite 4": replace(SMALL["granite 4"], ffn_dim=29, own={**SMALL["granite 4"].own, **_SCALES}),
    "ministral3": SMALL["ministral3"],
    "phi3": TinyModel(
        5,
        1,
        8,
        40,
        family="phi3",
        own={"pad_token_id": 0, "partial_rotary_factor": 0.5, _TRAINED: 16},
        rope={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0, 1.25],
            "long_factor": [2.0, 3.5],
            "attention_factor": 1.25,
        },
    ),
    "phi3, window": TinyModel(
        9, 3, 6, 54, tied=True, family="phi3", own={"pad_token_id": 0, **_WINDOW}
    ),
    "seed_oss": TinyModel(5, 1, 6, 34, family="seed_oss", own={"pad_token_id": 0}),
    "arcee": TinyModel(5, 1, 6, 35, family="arcee", own={"mlp_bias": True}),
    "nemotron": TinyModel(5, 1, 8, 34, family="nemotron"),
    "stablelm": TinyModel(5, 1, 8, 40, family="stablelm", own={"use_qkv_bias": True}),
    "stablelm, parallel": TinyModel(
        5, 1, 8, 40, family="stablelm", own={"use_parallel_residual": True}
    ),
    "starcoder2": TinyModel(5, 1, 6, 34, family="starcoder2"),
    "exaone4": TinyModel(
        5, 1, 6, 34, n_layers=5, family="exaone4", own={**_WINDOW, "sliding_window_pattern": 4}
    ),
    "exaone4 without a window": TinyModel(
        5, 1, 6, 34, family="exaone4", own={"sliding_window": None, "layer_types": _FULL}
    ),
    "olmo2": TinyModel(9, 3, 6, 54, family="olmo2", own={"pad_token_id": 0}),
    "olmo3": SMALL["olmo3"],
    "olmo3 without a window": SMALL["olmo3 without a window"],
    "glm": TINY_MODELS["8/2 glm"],
    "glm4": TINY_MODELS["8/2 glm4"],
    "command-r": TinyModel(
        5,
        1,
        6,
        34,
        tied=True,
        family="cohere",
        own={"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.25},
    ),
    "cohere2": TinyModel(
        7, 1, 6, 42, n_layers=5, tied=True, family="cohere2", own={**_WINDOW, "logit_scale": 0.25}
    ),
    "cohere2, idle windows": TinyModel(
        5, 1, 6, 30, tied=True, family="cohere2", own={"logit_scale": 0.25}
    ),
    "llama4": TinyModel(
        5,
        1,
        6,
        34,
        ffn_dim=19,
        n_layers=5,
        family="llama4_text",
        own={
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 41,
            "num_local_experts": 5,
            "attention_bias": True,
        },
    ),
    "falcon 40B": TinyModel(8, 2, 6, 48, family="falcon", own={"new_decoder_architecture": True}),
}
