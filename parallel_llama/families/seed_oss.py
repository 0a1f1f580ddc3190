"""Seed-OSS: Llama with biases on queries, keys and values.

Source: SeedOssConfig of transformers 5.24; llama.cpp's seed_oss, which keeps HF's order of rows.
"""

from typing import Any

from parallel_llama.families.family import HALF_IN_GGUF, Family, GGUFForm
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import in_layers, names_with
from parallel_llama.files.fields import Fields


def _features(fields: Fields) -> dict[str, Any]:
    return {
        "attention_bias": fields.flag("attention_bias", True),
        "wo_bias": fields.flag("attention_out_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {
        "attention_bias": args.attention_bias,
        "attention_out_bias": args.has_wo_bias,
        "mlp_bias": args.mlp_bias,
    }


SEED_OSS = Family(
    name="seed_oss",
    models="Seed-OSS",
    architecture="SeedOssForCausalLM",
    base_architecture="SeedOssModel",
    reads=frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
    features=_features,
    writes=_writes,
    defaults={"head_dim": 128, "max_seq_len": 524288, "n_kv_heads": 8},
    names=names_with(
        *in_layers(
            (
                "ffn_norm.weight",
                "post_attention_layernorm.weight",
                "post_attention_norm.weight",
            ),
        )
    ),
    gguf=GGUFForm("seed_oss"),
    rotary_order=HALF_IN_GGUF,
)
