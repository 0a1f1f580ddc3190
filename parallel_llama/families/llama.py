"""Llama 1 to 3, and whoever trained another model of their shape.

Source: LlamaConfig of transformers 5.23; ggml's docs/gguf.md.
"""

from typing import Any

from parallel_llama.families.family import Family, GGUFForm
from parallel_llama.files.fields import Fields


def _features(fields: Fields) -> dict[str, Any]:
    return {
        "attention_bias": fields.flag("attention_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    base_architecture="LlamaModel",
    reads=frozenset({"attention_bias", "mlp_bias"}),
    features=_features,
    gguf=GGUFForm("llama"),
    writes=lambda args: {"attention_bias": args.attention_bias, "mlp_bias": args.mlp_bias},
)
