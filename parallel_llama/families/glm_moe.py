"""GLM-4.5 and 4.6: GLM 4's partial rotation, and experts chosen by sigmoids with a bias.

Every token also goes to the shared experts, which are one expert of their combined width here. The
first layers have no experts. Files also hold layers that predict further tokens (MTP), after the
last layer; they are not loaded.

Source: arXiv 2508.06471; Glm4MoeConfig of transformers 5.24; glm4moe of llama.cpp. GGUF files have
HF's order of rows.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import (
    HALF_IN_GGUF,
    ROTARY_PART,
    Family,
    GGUFForm,
    rotary_dim_of,
    written_rotary_part,
)
from parallel_llama.families.model_args import ModelArgs, require_size
from parallel_llama.families.names import (
    QK_NORM_NAMES,
    expert_names,
    in_layers,
    names_with,
    shared_expert_names,
)
from parallel_llama.files.fields import Fields

_SIGMOID = 2  # llama.cpp's number of the gating function


def _experts(key: str, n_experts: int, channels: int, n_shared: int) -> dict[str, Any]:
    """The arguments for experts; `key` is the key of `n_shared`, the number of shared experts."""
    for name, value in (("the number of experts", n_experts), (key, n_shared)):
        if value < 1:
            raise UsageError(f"{name} is {value}: use 1 or more")
    return {
        "n_experts": n_experts,
        "ffn_dim": channels,
        "shared_ffn_dim": channels * n_shared,
        "sigmoid_router": True,
    }


def _dense(key: str, n_dense: int, n_layers: int, channels: int) -> dict[str, Any]:
    """The arguments for the first layers, which have no experts."""
    if not 0 <= n_dense < require_size("n_layers", n_layers):
        raise UsageError(
            f"{key}={n_dense} of {n_layers} layers: use 0 to {n_layers - 1}, because a layer must "
            "have experts"
        )
    return {"dense_layers": tuple(range(n_dense)), "dense_ffn_dim": channels if n_dense else 0}


def _features(fields: Fields) -> dict[str, Any]:
    n_layers, key = fields.integer("num_hidden_layers"), "first_k_dense_replace"
    return {
        **_experts(
            "n_shared_experts",
            fields.integer("n_routed_experts", fields.integer("num_local_experts", 128)),
            fields.integer("moe_intermediate_size"),
            fields.integer("n_shared_experts", 1),
        ),
        **_dense(key, fields.integer(key, 1), n_layers, fields.integer("intermediate_size")),
        "n_active_experts": fields.integer("num_experts_per_tok", 8),
        "normed_experts": fields.flag("norm_topk_prob", True),
        "routed_scale": fields.number("routed_scaling_factor", 1.0),
        "n_expert_groups": fields.integer("n_group", 1),
        "n_active_groups": fields.integer("topk_group", 1),
        "attention_bias": fields.flag("attention_bias", False),
        "wo_bias": False,
        "qk_norm": fields.flag("use_qk_norm", False),
        "rotary_dim": rotary_dim_of(fields, 0.5),
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {
        "n_routed_experts": args.n_experts,
        "n_shared_experts": args.shared_ffn_dim // args.ffn_dim,
        "num_experts_per_tok": args.n_active_experts,
        "norm_topk_prob": args.normed_experts,
        "routed_scaling_factor": args.routed_scale,
        "n_group": args.n_expert_groups,
        "topk_group": args.n_active_groups,
        "first_k_dense_replace": len(args.dense_layers),
        "intermediate_size": args.dense_ffn_dim or args.ffn_dim,
        "num_nextn_predict_layers": 0,
        "attention_bias": args.attention_bias,
        "use_qk_norm": args.qk_norm,
        **written_rotary_part(args),
    }


_GGUF_KEYS = frozenset(
    {
        "expert_feed_forward_length",
        "expert_shared_count",
        "leading_dense_block_count",
        "expert_gating_func",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_group_count",
        "expert_group_used_count",
        "nextn_predict_layers",
    }
)


def _gguf_features(fields: Fields, tensors: Collection[str]) -> dict[str, Any]:
    """The features of a GGUF file. Its number of layers counts the MTP layers too."""

    def integer(key: str, default: int | None = None) -> int:
        return fields.integer(f"glm4moe.{key}", default)

    if (gating := integer("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise UsageError(f"glm4moe.expert_gating_func={gating}: only {_SIGMOID} is supported")
    n_layers, n_extra = integer("block_count"), integer("nextn_predict_layers", 0)
    if not 0 <= n_extra < n_layers:
        raise UsageError(f"glm4moe.nextn_predict_layers={n_extra} of {n_layers} layers: use fewer")
    channels, n_dense = (
        integer("expert_feed_forward_length"),
        integer("leading_dense_block_count", 0),
    )
    return {
        **_experts(
            "glm4moe.expert_shared_count",
            integer("expert_count"),
            channels,
            integer("expert_shared_count", 1),
        ),
        **_dense(
            "glm4moe.leading_dense_block_count",
            n_dense,
            n_layers - n_extra,
            integer("feed_forward_length") if n_dense else 0,
        ),
        "n_layers": n_layers - n_extra,
        "normed_experts": fields.flag("glm4moe.expert_weights_norm", False),
        # llama.cpp does not scale for a missing key or 0.
        "routed_scale": fields.number("glm4moe.expert_weights_scale", 0.0) or 1.0,
        "n_expert_groups": integer("expert_group_count", 1),
        "n_active_groups": integer("expert_group_used_count", 1),
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }


GLM4_MOE = Family(
    name="glm4_moe",
    models="GLM-4.5 and 4.6",
    architecture="Glm4MoeForCausalLM",
    base_architecture="Glm4MoeModel",
    keys={"ffn_dim": "moe_intermediate_size"},
    reads=frozenset(
        {
            "attention_bias",
            "first_k_dense_replace",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "num_local_experts",
            "num_mtp_layers",
            "num_nextn_predict_layers",
            "routed_scaling_factor",
            "topk_group",
            "use_qk_norm",
            ROTARY_PART,
        }
    ),
    features=_features,
    writes=_writes,
    has_extra_layers=True,
    defaults={"max_seq_len": 131072, "norm_eps": 1e-5, "n_kv_heads": 8},
    names=names_with(
        *QK_NORM_NAMES,
        *expert_names("mlp", "gate_proj", "down_proj", "up_proj"),
        *shared_expert_names("mlp.shared_experts"),
        *in_layers(
            (
                "feed_forward.gate.bias",
                "mlp.gate.e_score_correction_bias",
                "exp_probs_b.bias",
            ),
            (
                "ffn_norm.weight",
                "post_attention_layernorm.weight",
                "post_attention_norm.weight",
            ),
        ),
    ),
    gguf=GGUFForm("glm4moe", _gguf_features, _GGUF_KEYS, has_experts=True, rotates_part=True),
    rotary_order=HALF_IN_GGUF,
)
