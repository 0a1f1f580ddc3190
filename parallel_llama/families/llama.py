"""Llama 1 to 3, and the families with its layers: Mistral (sliding window) and Mixtral (experts).

Source: LlamaConfig, MistralConfig and MixtralConfig of transformers 5.23; ggml's docs/gguf.md;
Mistral 7B, arXiv 2310.06825; Mixtral, arXiv 2401.04088. GGUF files call all three llama.
"""

from typing import Any

from parallel_llama.families.family import (
    BIASES,
    Family,
    GGUFForm,
    biases,
    every_layer_has_the_window,
    written_biases,
)
from parallel_llama.families.names import expert_names, names_with
from parallel_llama.files.fields import Fields


def _mixtral_features(fields: Fields) -> dict[str, Any]:
    return {
        "n_experts": fields.integer("num_local_experts", 8),
        "n_active_experts": fields.integer("num_experts_per_tok", 2),
    }


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
    models="Mistral 7B",
    architecture="MistralForCausalLM",
    base_architecture="MistralModel",
    full_layers=every_layer_has_the_window,
    defaults={"max_seq_len": 131072, "n_kv_heads": 8, "sliding_window": 4096},
    params="mistral",
    gguf=LLAMA.gguf,
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
