"""Qwen 2, 2.5 and 3: Llama with biases on queries, keys and values (2), or with norms of every
head's queries and keys (3). The MoE models have many narrow experts; those of Qwen 2 also have a
shared expert.

Source: arXiv 2407.10671 and 2505.09388; Qwen2Config, Qwen2MoeConfig, Qwen3Config and Qwen3MoeConfig
of transformers 5.24; qwen2 and qwen2moe of llama.cpp. GGUF files have HF's order of rows.
"""

from collections.abc import Collection, Iterable
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import (
    HALF_IN_GGUF,
    Family,
    GGUFForm,
    every_layer_has_the_window,
    layer_types,
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

# Keys of GGUF files.
_EXPERT_CHANNELS = "expert_feed_forward_length"
_SHARED_CHANNELS = "expert_shared_feed_forward_length"


def _full_layers(fields: Fields, n_layers: int) -> Iterable[int]:
    """The layers below max_window_layers, which transformers sets to 28 by default."""
    return range(max(0, min(fields.integer("max_window_layers", 28), n_layers)))


def _writes_window(args: ModelArgs) -> dict[str, Any]:
    """The keys of config.json for the sliding window."""
    return {
        "use_sliding_window": args.sliding_window is not None,
        "max_window_layers": len(args.full_layers),
        **_written_layer_types(args),
    }


def _written_layer_types(args: ModelArgs) -> dict[str, Any]:
    """The value of layer_types, which has priority over max_window_layers in config.json."""
    return {} if args.sliding_window is None else {"layer_types": layer_types(args)}


def _qwen3_features(fields: Fields) -> dict[str, Any]:
    if not fields.flag("use_qk_norm", True):  # only the files of Qwen3-Coder have the key
        raise UsageError("use_qk_norm=False is not supported; Qwen 3 always has this norm")
    return {"qk_norm": True, "attention_bias": fields.flag("attention_bias", False)}


def _gguf_qwen3moe_features(fields: Fields, _: object) -> dict[str, Any]:
    # llama.cpp writes the width of shared experts, 0, if config.json has it, as for Qwen3-Coder.
    if width := fields.integer(key := f"qwen3moe.{_SHARED_CHANNELS}", 0):
        raise UsageError(f"{key}={width} is not supported; Qwen 3 has no shared experts")
    return {"qk_norm": True, "ffn_dim": fields.integer(f"qwen3moe.{_EXPERT_CHANNELS}")}


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """The layers without experts: listed in mlp_only_layers, or between sparse steps.

    Raises: UsageError for a step below 1, or if no layer has experts.
    """
    if (step := fields.integer("decoder_sparse_step", 1)) < 1:
        raise UsageError(f"decoder_sparse_step={step}: use 1 or more")
    n_layers, named = fields.integer("num_hidden_layers"), set(fields.integers("mlp_only_layers"))
    require_size("n_layers", n_layers)
    dense = tuple(layer for layer in range(n_layers) if layer in named or (layer + 1) % step)
    if len(dense) == n_layers:
        raise UsageError(
            f"mlp_only_layers={sorted(named)[:10]} and decoder_sparse_step={step} leave no layer "
            f"of {n_layers} with experts; use a model without experts instead"
        )
    return dense


def _moe_features(fields: Fields, n_experts: int, n_active: int) -> dict[str, Any]:
    """The features of layers with and without experts; `n_experts` and `n_active` are defaults."""
    dense = _dense_layers(fields)
    # transformers 5 writes num_local_experts, as for Mixtral; all others write num_experts.
    n_experts = fields.integer("num_experts", fields.integer("num_local_experts", n_experts))
    if n_experts < 1:
        raise UsageError(f"num_experts={n_experts}: use 1 or more")
    return {
        "n_experts": n_experts,
        "n_active_experts": fields.integer("num_experts_per_tok", n_active),
        "normed_experts": fields.flag("norm_topk_prob", False),
        "dense_layers": dense,
        "dense_ffn_dim": fields.integer("intermediate_size") if dense else 0,
    }


def _moe_writes(args: ModelArgs) -> dict[str, Any]:
    return {
        "use_sliding_window": args.sliding_window is not None,
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.n_active_experts,
        "norm_topk_prob": args.normed_experts,
        "mlp_only_layers": list(args.dense_layers),
        "decoder_sparse_step": 1,
        **({"intermediate_size": args.dense_ffn_dim} if args.dense_layers else {}),
    }


def _qwen2_moe_features(fields: Fields) -> dict[str, Any]:
    return {
        **_moe_features(fields, n_experts=60, n_active=4),
        "attention_bias": fields.flag("qkv_bias", True),
        "wo_bias": False,
        "shared_ffn_dim": fields.integer("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def _qwen2_moe_writes(args: ModelArgs) -> dict[str, Any]:
    return {
        **_moe_writes(args),
        "qkv_bias": args.attention_bias,
        "shared_expert_intermediate_size": args.shared_ffn_dim,
        **_written_layer_types(args),
    }


def _qwen2_moe_full_layers(fields: Fields, n_layers: int) -> Iterable[int]:
    """Every second layer, and the layers from max_window_layers on."""
    n_first = fields.integer("max_window_layers", 28)
    return (layer for layer in range(n_layers) if layer % 2 or layer >= n_first)


def _qwen2moe_features(fields: Fields, _: Collection[str]) -> dict[str, Any]:
    """The features of a GGUF file; the first files lack the sizes of experts."""
    width = fields.integer("qwen2moe.feed_forward_length", 0)
    n_active = fields.integer("qwen2moe.expert_used_count")
    return {
        "ffn_dim": fields.integer(
            f"qwen2moe.{_EXPERT_CHANNELS}", width // n_active if n_active > 0 else 0
        ),
        "shared_ffn_dim": fields.integer(f"qwen2moe.{_SHARED_CHANNELS}", width),
        "shared_gate": True,
        "normed_experts": False,
    }


QWEN2 = Family(
    name="qwen2",
    models="Qwen 2, 2.5",
    architecture="Qwen2ForCausalLM",
    base_architecture="Qwen2Model",
    reads=frozenset({"use_sliding_window", "max_window_layers"}),
    features=lambda _: {"attention_bias": True, "wo_bias": False},
    writes=_writes_window,
    full_layers=_full_layers,
    window_switch="use_sliding_window",
    defaults={"max_seq_len": 32768, "n_kv_heads": 32, "sliding_window": 4096},
    gguf=GGUFForm("qwen2", writes=lambda _: {}),
    rotary_order=HALF_IN_GGUF,
)

QWEN3 = Family(
    name="qwen3",
    models="Qwen 3",
    architecture="Qwen3ForCausalLM",
    base_architecture="Qwen3Model",
    reads=QWEN2.reads | {"attention_bias", "use_qk_norm"},
    features=_qwen3_features,
    writes=lambda args: {**_writes_window(args), "attention_bias": args.attention_bias},
    full_layers=QWEN2.full_layers,
    window_switch=QWEN2.window_switch,
    defaults={**QWEN2.defaults, "head_dim": 128},
    names=names_with(*QK_NORM_NAMES),
    gguf=GGUFForm("qwen3", lambda *_: {"qk_norm": True}, writes=lambda _: {}),
    rotary_order=QWEN2.rotary_order,
)

_EXPERT_KEYS = frozenset(
    {
        "decoder_sparse_step",
        "mlp_only_layers",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
    }
)
_EXPERT_NAMES = expert_names("mlp", "gate_proj", "down_proj", "up_proj")

QWEN2_MOE = Family(
    name="qwen2_moe",
    models="Qwen1.5-MoE, Qwen 2 with experts",
    architecture="Qwen2MoeForCausalLM",
    base_architecture="Qwen2MoeModel",
    keys={"ffn_dim": "moe_intermediate_size"},
    reads=QWEN2.reads | _EXPERT_KEYS | {"qkv_bias", "shared_expert_intermediate_size"},
    features=_qwen2_moe_features,
    writes=_qwen2_moe_writes,
    full_layers=_qwen2_moe_full_layers,
    window_switch=QWEN2.window_switch,
    defaults={**QWEN2.defaults, "n_kv_heads": 16},
    names=names_with(
        *_EXPERT_NAMES,
        *shared_expert_names("mlp.shared_expert"),
        *in_layers(
            (
                "feed_forward.shared_gate.weight",
                "mlp.shared_expert_gate.weight",
                "ffn_gate_inp_shexp.weight",
            )
        ),
    ),
    gguf=GGUFForm(
        "qwen2moe",
        _qwen2moe_features,
        frozenset({_EXPERT_CHANNELS, _SHARED_CHANNELS}),
        has_experts=True,
        writes=lambda args: {
            _EXPERT_CHANNELS: args.ffn_dim,
            _SHARED_CHANNELS: args.shared_ffn_dim,
        },
    ),
    rotary_order=QWEN2.rotary_order,
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    models="Qwen 3 with experts",
    architecture="Qwen3MoeForCausalLM",
    base_architecture="Qwen3MoeModel",
    keys={"ffn_dim": "moe_intermediate_size"},
    reads=QWEN3.reads | _EXPERT_KEYS,
    features=lambda fields: {
        **_qwen3_features(fields),
        **_moe_features(fields, n_experts=128, n_active=8),
    },
    writes=lambda args: {**_moe_writes(args), "attention_bias": args.attention_bias},
    full_layers=every_layer_has_the_window,  # transformers does not use max_window_layers here
    window_switch=QWEN3.window_switch,
    defaults={"max_seq_len": 32768, "sliding_window": 4096, "n_kv_heads": 4},
    names=names_with(*QK_NORM_NAMES, *_EXPERT_NAMES),
    gguf=GGUFForm(
        "qwen3moe",
        _gguf_qwen3moe_features,
        frozenset({_EXPERT_CHANNELS, _SHARED_CHANNELS}),
        has_experts=True,
        writes=lambda args: {_EXPERT_CHANNELS: args.ffn_dim},
    ),
    rotary_order=QWEN3.rotary_order,
)
