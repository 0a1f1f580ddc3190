"""PaLM: one block for attention and feed-forward, multi-query attention, and no biases anywhere.

There is no official form of its weights: config.json and the names are Llama's, and its own keys
are none, since every PaLM is alike but for its sizes.

Source: arXiv 2204.02311, section 2; section 5 for the scale of the logits.
"""

from typing import Any

from parallel_llama.families.family import Family
from parallel_llama.files.fields import Fields


def _features(fields: Fields) -> dict[str, Any]:
    return {
        "norm": "layer",
        "parallel_block": True,
        "shared_norm": True,
        "logit_scale": fields.integer("hidden_size") ** -0.5,
    }


PALM = Family(
    name="palm",
    architecture="PaLMForCausalLM",
    base_architecture="PaLMModel",
    features=_features,
    keys={"norm_eps": "layer_norm_eps"},
    defaults={"tied_embeddings": True, "n_kv_heads": 1},
)
