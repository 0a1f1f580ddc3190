"""gpt-oss: experts with biases and a clamped SwiGLU, and a sink logit for each head.

Every second layer has a sliding window. HF folders store the experts of a layer in one tensor for
w1 and w3 and one for w2, as plain values or in MXFP4.

Source: arXiv 2508.10925; GptOssConfig and modeling_gpt_oss.py of transformers 5.24; gpt-oss of
llama.cpp. GGUF files have HF's order of rows.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import HALF_IN_GGUF, Family, GGUFForm, every_second, layer_types
from parallel_llama.families.model_args import ModelArgs, RopeScaling
from parallel_llama.families.names import in_layers, names_with
from parallel_llama.files.fields import Fields

# The window of GGUF files that do not state it.
_WINDOW = 128
_CHANNELS_IN_GGUF, _WINDOW_IN_GGUF = "expert_feed_forward_length", "attention.sliding_window"

# Keys of OpenAI that are not read, because its files have the values under transformers' keys too.
_DOUBLE = frozenset({"experts_per_token", "initial_context_length"})

_ARITHMETIC = {
    "activation": "clamped_swiglu",
    "sink_logits": True,
    "expert_bias": True,
}


def _n_experts(fields: Fields) -> int:
    n_experts = fields.integer("num_local_experts", fields.integer("num_experts", 128))
    if n_experts < 1:
        raise UsageError(f"num_local_experts={n_experts}: use 1 or more")
    return n_experts


def _features(fields: Fields) -> dict[str, Any]:
    if (activation := fields.string("hidden_act", "silu")) != "silu":
        raise UsageError(f"hidden_act={activation[:80]!r} is not supported in 'gpt_oss'; silu is")
    return {
        **_ARITHMETIC,
        "attention_bias": fields.flag("attention_bias", True),
        "n_experts": _n_experts(fields),
        "n_active_experts": fields.integer("num_experts_per_tok", 4),
        "swiglu_alpha": fields.number("swiglu_alpha", 1.702),
        "swiglu_limit": fields.number("swiglu_limit", 7.0),
        **_usual_scaling(fields),
    }


def _usual_scaling(fields: Fields) -> dict[str, Any]:
    """The rotary scaling of a config.json without rope settings, as in transformers."""
    if fields.has("rope_scaling") or fields.has("rope_parameters"):
        return {}
    return {"rope_scaling": RopeScaling("yarn", 32.0, 4096, truncate=False)}


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {
        "attention_bias": args.attention_bias,
        "num_local_experts": args.n_experts,
        "num_experts_per_tok": args.n_active_experts,
        "swiglu_alpha": args.swiglu_alpha,
        "swiglu_limit": args.swiglu_limit,
        "hidden_act": "silu",
        "layer_types": layer_types(args),
        # transformers needs a number even if no layer has a window.
        "sliding_window": args.sliding_window or args.max_seq_len,
        **({} if args.rope_scaling else {"rope_scaling": {"rope_type": "default"}}),
    }


def _gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    n_layers = fields.integer("gpt-oss.block_count")
    return {
        **_ARITHMETIC,
        "ffn_dim": fields.integer(
            f"gpt-oss.{_CHANNELS_IN_GGUF}", fields.integer("gpt-oss.feed_forward_length", 0)
        ),
        "sliding_window": fields.integer(f"gpt-oss.{_WINDOW_IN_GGUF}", _WINDOW),
        "full_layers": tuple(every_second(fields, n_layers)),
    }


def _gguf_writes(args: ModelArgs) -> dict[str, Any]:
    window = {} if args.sliding_window is None else {_WINDOW_IN_GGUF: args.sliding_window}
    return {_CHANNELS_IN_GGUF: args.ffn_dim, **window}


GPT_OSS = Family(
    name="gpt_oss",
    models="gpt-oss",
    architecture="GptOssForCausalLM",
    base_architecture="GptOssModel",
    keys={"activation": ""},
    reads=frozenset(
        {
            "attention_bias",
            "hidden_act",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "swiglu_alpha",
            "swiglu_limit",
        }
    )
    | _DOUBLE,
    features=_features,
    writes=_writes,
    full_layers=every_second,
    defaults={
        "dtype": "bfloat16",  # which holds all values of MXFP4
        "head_dim": 64,
        "max_seq_len": 131072,
        "n_kv_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
    names=names_with(
        *in_layers(
            ("attention.sinks", "self_attn.sinks", "attn_sinks.weight"),
            ("ffn_norm.weight", "post_attention_layernorm.weight", "post_attention_norm.weight"),
            ("feed_forward.gate.*", "mlp.router.*", "ffn_gate_inp.*"),
            (
                "feed_forward.experts.*.w1.weight",
                "mlp.experts.gate_up_proj",
                "ffn_gate_exps.weight",
            ),
            ("feed_forward.experts.*.w3.weight", "mlp.experts.gate_up_proj", "ffn_up_exps.weight"),
            ("feed_forward.experts.*.w2.weight", "mlp.experts.down_proj", "ffn_down_exps.weight"),
            (
                "feed_forward.experts.*.w1.bias",
                "mlp.experts.gate_up_proj_bias",
                "ffn_gate_exps.bias",
            ),
            ("feed_forward.experts.*.w3.bias", "mlp.experts.gate_up_proj_bias", "ffn_up_exps.bias"),
            ("feed_forward.w2_bias", "mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
        )
    ),
    interleaved_experts=frozenset({"hf"}),
    gguf=GGUFForm(
        "gpt-oss",
        _gguf_features,
        frozenset({_CHANNELS_IN_GGUF, _WINDOW_IN_GGUF}),
        has_experts=True,
        truncates_yarn=False,
        writes=_gguf_writes,
    ),
    rotary_order=HALF_IN_GGUF,
)
