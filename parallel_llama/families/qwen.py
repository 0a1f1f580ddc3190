"""Qwen 2, 2.5 and 3: Llama with biases on queries, keys and values (2), or with norms of every
head's queries and keys (3), or with those norms and many narrow experts (3 MoE).

config.json of a Qwen 3 MoE can name layers without experts. No released model has such layers, and
they are refused.

Source: arXiv 2505.09388; Qwen2Config, Qwen3Config and Qwen3MoeConfig of transformers 5.23;
llama.cpp's qwen2, whose files keep HF's order of rows.
"""

from collections.abc import Iterable
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import (
    HALF_IN_GGUF,
    Family,
    GGUFForm,
    every_layer_has_the_window,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import QK_NORM_NAMES, expert_names, names_with
from parallel_llama.files.fields import Fields


def _full_layers(fields: Fields, n_layers: int) -> Iterable[int]:
    """The layers below max_window_layers, which transformers sets to 28 by default."""
    return range(max(0, min(fields.integer("max_window_layers", 28), n_layers)))


def _writes_window(args: ModelArgs) -> dict[str, Any]:
    """The keys of config.json for the sliding window."""
    n_full = len(args.full_layers)
    return {"use_sliding_window": args.sliding_window is not None, "max_window_layers": n_full}


def _qwen3_features(fields: Fields) -> dict[str, Any]:
    return {"qk_norm": True, "attention_bias": fields.flag("attention_bias", False)}


def _moe_features(fields: Fields) -> dict[str, Any]:
    if (step := fields.integer("decoder_sparse_step", 1)) != 1:
        raise UsageError(f"decoder_sparse_step={step}: only 1 is supported, experts in every layer")
    if fields.has("mlp_only_layers") and (dense := fields.values["mlp_only_layers"]) != []:
        raise UsageError(
            f"mlp_only_layers={str(dense)[:80]}: only [] is supported, experts in every layer"
        )
    # transformers 5 writes num_local_experts, as for Mixtral; all others write num_experts.
    n_experts = fields.integer("num_experts", fields.integer("num_local_experts", 128))
    return {
        **_qwen3_features(fields),
        "n_experts": n_experts,
        "n_active_experts": fields.integer("num_experts_per_tok", 8),
        "normed_experts": fields.flag("norm_topk_prob", False),
    }


def _moe_writes(args: ModelArgs) -> dict[str, Any]:
    return {
        "attention_bias": args.attention_bias,
        "use_sliding_window": args.sliding_window is not None,
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.n_active_experts,
        "norm_topk_prob": args.normed_experts,
    }


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    base_architecture="Qwen2Model",
    reads=frozenset({"use_sliding_window", "max_window_layers"}),
    features=lambda _: {"attention_bias": True, "wo_bias": False},
    writes=_writes_window,
    full_layers=_full_layers,
    window_switch="use_sliding_window",
    defaults={"max_seq_len": 32768, "sliding_window": 4096},
    gguf=GGUFForm("qwen2", writes=lambda _: {}),
    rotary_order=HALF_IN_GGUF,
)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    base_architecture="Qwen3Model",
    reads=QWEN2.reads | {"attention_bias"},
    features=_qwen3_features,
    writes=lambda args: {**_writes_window(args), "attention_bias": args.attention_bias},
    full_layers=QWEN2.full_layers,
    window_switch=QWEN2.window_switch,
    defaults={**QWEN2.defaults, "head_dim": 128},
    names=names_with(*QK_NORM_NAMES),
    gguf=GGUFForm("qwen3", lambda *_: {"qk_norm": True}, writes=lambda _: {}),
    rotary_order=QWEN2.rotary_order,
)

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
    features=_moe_features,
    writes=_moe_writes,
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
        writes=lambda args: {"expert_feed_forward_length": args.ffn_dim},
    ),
    rotary_order=QWEN3.rotary_order,
)
