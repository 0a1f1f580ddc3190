"""Qwen 3 with experts: Qwen 3 with many narrow feed-forwards in the place of one.

Its config.json can name layers without experts. No released model has them, and they are refused.

Source: arXiv 2505.09388; Qwen3MoeConfig of transformers 5.23.
"""

from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import Family, GGUFForm, every_layer_has_the_window
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import QK_NORM_NAMES, expert_names, names_with
from parallel_llama.families.qwen3 import QWEN3
from parallel_llama.files.fields import Fields


def _features(fields: Fields) -> dict[str, Any]:
    if (step := fields.integer("decoder_sparse_step", 1)) != 1:
        raise UsageError(f"decoder_sparse_step={step}: only 1 is supported, experts in every layer")
    if fields.has("mlp_only_layers") and (dense := fields.values["mlp_only_layers"]) != []:
        raise UsageError(
            f"mlp_only_layers={str(dense)[:80]}: only [] is supported, experts in every layer"
        )
    # transformers 5 writes the second, which is Mixtral's; everybody else the first.
    n_experts = fields.integer("num_experts", fields.integer("num_local_experts", 128))
    return {
        **QWEN3.features(fields),
        "n_experts": n_experts,
        "n_active_experts": fields.integer("num_experts_per_tok", 8),
        "normed_experts": fields.flag("norm_topk_prob", False),
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {
        "attention_bias": args.attention_bias,
        "use_sliding_window": args.sliding_window is not None,
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.n_active_experts,
        "norm_topk_prob": args.normed_experts,
    }


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    base_architecture="Qwen3MoeModel",
    keys={"ffn_dim": "moe_intermediate_size"},
    reads=QWEN3.reads
    | {
        "decoder_sparse_step",
        "mlp_only_layers",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
    },
    features=_features,
    writes=_writes,
    full_layers=every_layer_has_the_window,  # transformers does not use max_window_layers here
    window_switch=QWEN3.window_switch,
    defaults={"max_seq_len": 32768, "sliding_window": 4096, "n_kv_heads": 4},
    names=names_with(*QK_NORM_NAMES, *expert_names("mlp", "gate_proj", "down_proj", "up_proj")),
    gguf=GGUFForm(
        "qwen3moe",
        lambda fields, _: {
            "qk_norm": True,
            "ffn_dim": fields.integer("qwen3moe.expert_feed_forward_length"),
        },
        frozenset({"expert_feed_forward_length"}),
        has_experts=True,
    ),
    rotary_order=QWEN3.rotary_order,
)
