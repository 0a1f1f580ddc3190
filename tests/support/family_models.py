"""Tiny models of the families that have tests of their own.

With tiny_models.TINY_MODELS, they include every family that transformers implements.
"""

from typing import Any

from tiny_models import TINY_MODELS, TinyModel

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
PAD = {"pad_token_id": 0}  # else an id beyond this small vocabulary
_PATTERN = "sliding_window_pattern"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALL = {"partial_rotary_factor": 1.0}
_TRAINED = "original_max_position_embeddings"
_BY_LAYER = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}
_GRANITE4 = {
    **_SCALES,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "rope",
    "mamba_n_heads": 1,  # transformers checks that it divides twice the width
}
_MINISTRAL = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.125}
_QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "shared_expert_intermediate_size": 37,
}
_GLM_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "routed_scaling_factor": 1.75,  # exact in float32, as in a GGUF file
    "pad_token_id": 0,  # else an id beyond this small vocabulary
}
# As in Llama 4 Scout: no frequencies between those that are kept and those that are divided.
_STEP = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
GPT_OSS_OWN = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "pad_token_id": 0,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "truncate": False,
    "original_max_position_embeddings": 16,
}


def longrope(n_pairs: int) -> dict[str, Any]:
    """rope_parameters with other factors for each of `n_pairs` rotated pairs."""
    return {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0 + 0.3 * pair for pair in range(n_pairs)],
        "long_factor": [2.0 + 1.7 * pair for pair in range(n_pairs)],
    }


SMALL: dict[str, TinyModel] = {
    "smollm3": TinyModel(
        5, 1, 6, 34, n_layers=5, family="smollm3", own={**PAD, "no_rope_layer_interval": 2}
    ),
    "smollm3, biases, tied": TinyModel(
        9,
        3,
        6,
        54,
        n_layers=3,
        tied=True,
        family="smollm3",
        own={**PAD, "no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True},
        rope=YARN,
    ),
    "smollm3, window": TinyModel(
        7,
        7,
        6,
        42,
        n_layers=3,
        family="smollm3",
        own={**PAD, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7},
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
    "granite without factors": TinyModel(5, 1, 6, 34, family="granite", rope=YARN),
    "granite 4": TinyModel(
        7,
        7,
        6,
        42,
        family="granitemoehybrid",
        own={**_GRANITE4, "layer_types": ["attention"] * 2, "shared_intermediate_size": 29},
    ),
    "granite 4, biases, tied": TinyModel(
        9,
        3,
        6,
        54,
        n_layers=3,
        tied=True,
        family="granitemoehybrid",
        own={
            **_GRANITE4,
            "layer_types": [_FULL] * 3,
            "shared_intermediate_size": 41,
            "attention_bias": True,
        },
        rope=YARN,
    ),
    "granite 4 without rotation": TinyModel(
        5,
        1,
        6,
        30,
        family="granitemoehybrid",
        own={
            **_GRANITE4,
            "layer_types": ["attention"] * 2,
            "shared_intermediate_size": 3,  # fewer than heads
            "position_embedding_type": "nope",
        },
    ),
    "ministral3": TinyModel(5, 1, 6, 34, family="ministral3", own=PAD, rope=_MINISTRAL),
    "ministral3, window, tied": TinyModel(
        9,
        3,
        8,
        54,
        n_layers=3,
        tied=True,
        family="ministral3",
        own={**PAD, "sliding_window": 7},
        rope={**_MINISTRAL, "original_max_position_embeddings": 5, "mscale_all_dim": 0.5},
    ),
    "ministral3 without scaled queries": TinyModel(
        7, 7, 6, 42, family="ministral3", own=PAD, rope={**_MINISTRAL, "llama_4_scaling_beta": 0.0}
    ),
    "phi3": TinyModel(
        5,
        1,
        6,
        30,
        family="phi3",
        own={**PAD, "partial_rotary_factor": 0.75, _TRAINED: 16},
        rope=longrope(2),
    ),
    "phi3, window, tied": TinyModel(
        9, 3, 6, 54, tied=True, family="phi3", own={**PAD, "sliding_window": 7}
    ),
    "phi3, attention factor": TinyModel(
        7,
        7,
        6,
        42,
        family="phi3",
        own={**PAD, _TRAINED: 8},
        rope={**longrope(3), "attention_factor": 1.3},
        old_config=True,
    ),
    "seed_oss": TinyModel(5, 1, 6, 34, family="seed_oss", own=PAD),
    "seed_oss, biases, tied": TinyModel(
        9,
        3,
        6,
        54,
        tied=True,
        family="seed_oss",
        own={**PAD, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "seed_oss, all biases": TinyModel(
        7, 7, 6, 42, family="seed_oss", own={**PAD, "attention_out_bias": True}, rope=YARN
    ),
    "arcee": TinyModel(5, 1, 6, 35, family="arcee"),
    "arcee, biases, tied": TinyModel(
        9, 3, 6, 54, tied=True, family="arcee", own={"attention_bias": True, "mlp_bias": True}
    ),
    "arcee, yarn": TinyModel(7, 7, 6, 42, family="arcee", rope=YARN),
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
        7, 7, 12, 42, family="nemotron", own={"hidden_act": "gelu"}, rope=YARN
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
    "glm4, yarn": TinyModel(5, 1, 12, 34, family="glm4", own=PAD, rope=YARN),
    "glm4, llama3": TinyModel(7, 7, 16, 42, family="glm4", own=PAD, rope=_LLAMA3),
    "glm4, dynamic": TinyModel(
        9,
        3,
        12,
        54,
        max_seq_len=12,
        family="glm4",
        own=PAD,
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
        7, 7, 6, 42, family="starcoder2", own={"use_bias": False}, rope=YARN
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
        rope=YARN,
    ),
    "exaone4 without a window": TinyModel(
        7, 7, 6, 42, family="exaone4", own={"sliding_window": None, "layer_types": [_FULL] * 2}
    ),
    "olmo2": TinyModel(5, 1, 6, 34, family="olmo2", own=PAD),
    "olmo2, biases, tied": TinyModel(
        9, 3, 6, 54, tied=True, family="olmo2", own={**PAD, "attention_bias": True}
    ),
    "olmo2, yarn": TinyModel(7, 7, 6, 42, family="olmo2", own=PAD, rope=YARN),
    "olmo3": TinyModel(
        5, 1, 6, 34, n_layers=5, family="olmo3", own={**PAD, "sliding_window": 7}, rope=_BY_LAYER
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
            **PAD,
            _TRAINED: 64,  # which transformers ignores beside rope_parameters by layer
            "attention_bias": True,
            "sliding_window": 5,
            "layer_types": [_FULL, "sliding_attention", _FULL],
        },
        rope=_BY_LAYER,
    ),
    "olmo3, idle windows": TinyModel(
        7, 7, 6, 42, family="olmo3", own={**PAD, "sliding_window": 512}, rope=_BY_LAYER
    ),
    "olmo3 without a window": TinyModel(
        7,
        7,
        6,
        42,
        family="olmo3",
        own={**PAD, "layer_types": [_FULL] * 2},
        rope={**_BY_LAYER, "sliding_attention": None},
    ),
}

COHERE: dict[str, TinyModel] = {
    "cohere": TinyModel(7, 1, 6, 34, tied=True, family="cohere", own={"use_qk_norm": True}),
    "cohere, biases, not tied": TinyModel(
        9, 3, 6, 54, family="cohere", own={"attention_bias": True, "logit_scale": 0.3}
    ),
    "cohere, norms, biases, yarn": TinyModel(
        7,
        7,
        6,
        40,
        tied=True,
        family="cohere",
        own={"use_qk_norm": True, "attention_bias": True, "logit_scale": 1.3},
        rope=YARN,
    ),
    "cohere2": TinyModel(
        7,
        1,
        6,
        42,
        n_layers=5,
        tied=True,
        family="cohere2",
        own={"sliding_window": 7, "sliding_window_pattern": 3},
    ),
    "cohere2, layer types, biases, not tied": TinyModel(
        9,
        3,
        6,
        54,
        n_layers=3,
        family="cohere2",
        own={
            "attention_bias": True,
            "logit_scale": 0.25,
            "sliding_window": 5,
            "layer_types": [_FULL, _SLIDING, _FULL],
        },
        rope=YARN,
    ),
    "cohere2 without a window": TinyModel(
        7,
        7,
        6,
        42,
        tied=True,
        family="cohere2",
        own={"layer_types": [_FULL] * 2},
    ),
    "cohere2, idle windows": TinyModel(
        7, 7, 6, 42, family="cohere2", own={"layer_types": [_SLIDING] * 2}
    ),
}

SHARED_EXPERTS: dict[str, TinyModel] = {
    "qwen2_moe": TinyModel(7, 1, 8, 56, family="qwen2_moe", own=_QWEN2_MOE),
    "qwen2_moe, dense layers, tied": TinyModel(
        9,
        3,
        6,
        54,
        n_layers=4,
        tied=True,
        family="qwen2_moe",
        own={
            **_QWEN2_MOE,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "qkv_bias": False,
            "shared_expert_intermediate_size": 5,  # fewer than heads
        },
        rope=YARN,
    ),
    "qwen2_moe, windows": TinyModel(
        7,
        7,
        6,
        42,
        n_layers=4,
        family="qwen2_moe",
        own={
            **_QWEN2_MOE,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,  # the others see all keys, as every second layer does
            "mlp_only_layers": [0],
        },
    ),
    "glm4_moe": TinyModel(7, 1, 8, 56, n_layers=3, family="glm4_moe", own=_GLM_MOE),
    "glm4_moe, groups, biases, tied": TinyModel(
        9,
        3,
        8,
        54,
        tied=True,
        family="glm4_moe",
        own={
            **_GLM_MOE,
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe, two shared experts": TinyModel(
        7,
        7,
        12,
        42,
        n_layers=3,
        family="glm4_moe",
        own={
            **_GLM_MOE,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "use_qk_norm": True,
        },
        rope={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    ),
    "qwen3_moe, dense layers": TinyModel(
        7,
        1,
        6,
        42,
        n_layers=3,
        family="qwen3_moe",
        own={
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 18,
            "decoder_sparse_step": 2,
        },
    ),
}

LLAMA4: dict[str, TinyModel] = {
    "llama4": TinyModel(
        7,
        1,
        6,
        34,
        ffn_dim=19,
        n_layers=5,
        family="llama4_text",
        own={
            "attention_chunk_size": 7,
            "attn_scale": 0.3,
            "floor_scale": 5,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 41,
            "num_local_experts": 5,
        },
        rope=_STEP,
    ),
    "llama4, two experts, biases, tied": TinyModel(
        9,
        3,
        6,
        54,
        ffn_dim=23,
        n_layers=3,
        tied=True,
        family="llama4_text",
        own={
            "attention_bias": True,
            "attention_chunk_size": 5,
            "attn_temperature_tuning": False,
            "intermediate_size_mlp": 30,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "num_experts_per_tok": 2,
            "num_local_experts": 6,
            "use_qk_norm": False,
        },
    ),
    "llama4 without experts or chunks": TinyModel(
        7,
        7,
        6,
        42,
        family="llama4_text",
        own={
            "attention_chunk_size": 64,
            "floor_scale": 4,
            "intermediate_size_mlp": 33,
            "layer_types": ["full_attention"] * 2,
            "moe_layers": [],
            "no_rope_layer_interval": 2,
        },
    ),
    "llama4, chunks in all layers": TinyModel(
        7,
        7,
        6,
        42,
        ffn_dim=18,
        family="llama4_text",
        own={
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "layer_types": ["chunked_attention"] * 2,
            "no_rope_layers": [0, 1],
            "num_local_experts": 3,
        },
    ),
}

GPT_OSS: dict[str, TinyModel] = {
    "7/1": TinyModel(
        7, 1, 8, 44, ffn_dim=35, n_layers=3, family="gpt_oss", own=GPT_OSS_OWN, rope=GPT_OSS_YARN
    ),
    "9/3 low limit, tied": TinyModel(
        9,
        3,
        16,
        54,
        ffn_dim=21,
        n_layers=2,
        tied=True,
        family="gpt_oss",
        own={
            **GPT_OSS_OWN,
            "num_local_experts": 11,
            "num_experts_per_tok": 11,
            "swiglu_limit": 0.5,  # which most channels reach
            "swiglu_alpha": 0.75,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        rope=GPT_OSS_YARN,
    ),
    "7/7 no window, no bias": TinyModel(
        7,
        7,
        6,
        42,
        ffn_dim=5,  # fewer than heads
        family="gpt_oss",
        own={**GPT_OSS_OWN, "layer_types": ["full_attention"] * 2, "attention_bias": False},
    ),
}


def of_families() -> dict[str, dict[str, TinyModel]]:
    """All tiny models by family, transformers' model_type, and name."""
    found: dict[str, dict[str, TinyModel]] = {}
    for models in (TINY_MODELS, SMALL, COHERE, SHARED_EXPERTS, LLAMA4, GPT_OSS):
        for name, tiny in models.items():
            found.setdefault(tiny.family, {})[name] = tiny
    return found
