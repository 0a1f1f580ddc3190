"""Llama 1 to 3, and the families with its layers: Mistral and Mixtral.

Mistral may have a sliding window, Mixtral has experts, and Ministral 3 scales queries by their
positions. Mistral Small 3.1 and Ministral 3 are published as models of text and images; only their
text part is loaded.

Source: LlamaConfig, MistralConfig, Ministral3Config and MixtralConfig of transformers 5.24; ggml's
docs/gguf.md; llama.cpp's mistral3; Mistral 7B, arXiv 2310.06825; Mixtral, arXiv 2401.04088. GGUF
files call Llama, Mistral and Mixtral llama.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.families.family import (
    BIASES,
    LLAVA_PARTS,
    QUERY_SCALE,
    Family,
    GGUFForm,
    biases,
    every_layer_has_the_window,
    rope_fields,
    written_biases,
)
from parallel_llama.families.model_args import RopeScaling
from parallel_llama.families.names import expert_names, names_with
from parallel_llama.files.fields import Fields


def _mixtral_features(fields: Fields) -> dict[str, Any]:
    return {
        "n_experts": fields.integer("num_local_experts", 8),
        "n_active_experts": fields.integer("num_experts_per_tok", 2),
    }


# Models of text and images with a text part of Mistral or Ministral 3.
_IN_MISTRAL3: dict[str, Any] = {"multimodal": "mistral3", **LLAVA_PARTS}

LLAMA = Family(
    name="llama",
    models="Llama 1, 2, 3.x",
    architecture="LlamaForCausalLM",
    base_architecture="LlamaModel",
    reads=BIASES,
    features=biases,
    params="meta",
    gguf=GGUFForm("llama", writes=lambda _: {}),
    writes=written_biases,
)

MISTRAL = Family(
    name="mistral",
    models="Mistral 7B, Mistral Small 3",
    architecture="MistralForCausalLM",
    base_architecture="MistralModel",
    full_layers=every_layer_has_the_window,
    defaults={"max_seq_len": 131072, "n_kv_heads": 8, "sliding_window": 4096},
    params="mistral",
    gguf=GGUFForm("llama", also_read="mistral3", writes=lambda _: {}),
    **_IN_MISTRAL3,
)

_DEFAULT_TRAINED = 16384
_TRAINED = "original_max_position_embeddings"
_SCALE_IN_GGUF = "attention.temperature_scale"


def _scaled_queries(scale: float, trained: int) -> dict[str, Any]:
    return {"query_scale": scale, "query_scale_step": trained, "scales_all_queries": scale > 0}


def _ministral_features(fields: Fields) -> dict[str, Any]:
    rope = rope_fields(fields)
    if rope.values:
        return _scaled_queries(rope.number(QUERY_SCALE), rope.integer(_TRAINED))
    scaling = RopeScaling("yarn", 16.0, _DEFAULT_TRAINED, mscale=1.0, mscale_all_dim=1.0)
    return {"rope_scaling": scaling, "rope_theta": 1e6, **_scaled_queries(0.1, _DEFAULT_TRAINED)}


def _ministral_gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    return _scaled_queries(
        fields.number(f"mistral3.{_SCALE_IN_GGUF}"),
        fields.integer("mistral3.rope.scaling.original_context_length"),
    )


MINISTRAL3 = Family(
    name="ministral3",
    models="Ministral 3",
    architecture="Ministral3ForCausalLM",
    base_architecture="Ministral3Model",
    reads=frozenset({QUERY_SCALE}),
    features=_ministral_features,
    full_layers=every_layer_has_the_window,
    defaults={
        "head_dim": 128,
        "max_seq_len": 262144,
        "n_kv_heads": 8,
        "norm_eps": 1e-5,
        "sliding_window": None,
    },
    gguf=GGUFForm(
        "mistral3", _ministral_gguf_features, frozenset({_SCALE_IN_GGUF}), needs=_SCALE_IN_GGUF
    ),
    **_IN_MISTRAL3,
)

MIXTRAL = Family(
    name="mixtral",
    models="Mixtral",
    architecture="MixtralForCausalLM",
    base_architecture="MixtralModel",
    reads=frozenset({"num_local_experts", "num_experts_per_tok"}),
    full_layers=every_layer_has_the_window,
    defaults={
        "max_seq_len": 131072,
        "norm_eps": 1e-5,
        "n_kv_heads": 8,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    features=_mixtral_features,
    params="mistral",
    gguf=GGUFForm("llama", has_experts=True, writes=lambda _: {}),
    writes=lambda args: {
        "num_local_experts": args.n_experts,
        "num_experts_per_tok": args.n_active_experts,
    },
    names=names_with(*expert_names("block_sparse_moe", "w1", "w2", "w3")),
)
