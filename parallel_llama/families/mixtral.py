"""Mixtral: Mistral with experts in the place of the feed-forward.

Source: MixtralConfig of transformers 5.23; Mixtral, arXiv 2401.04088.
"""

from typing import Any

from parallel_llama.families.family import Family, GGUFForm, every_layer_has_the_window
from parallel_llama.families.names import expert_names, names_with
from parallel_llama.files.fields import Fields


def _features(fields: Fields) -> dict[str, Any]:
    return {
        "n_experts": fields.integer("num_local_experts", 8),
        "n_active_experts": fields.integer("num_experts_per_tok", 2),
    }


MIXTRAL = Family(
    name="mixtral",
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
    features=_features,
    gguf=GGUFForm("llama", has_experts=True),
    writes=lambda args: {
        "num_local_experts": args.n_experts,
        "num_experts_per_tok": args.n_active_experts,
    },
    names=names_with(*expert_names("block_sparse_moe", "w1", "w2", "w3")),
)
