"""Llama 4 (text): most layers are rotated and attend within chunks.

The other layers attend to all keys without rotary embeddings, and scale queries by their positions.
The experts of a token are those with the largest scores, and the sigmoids of these scores scale the
inputs of the experts; every token also goes to a shared expert. A model may have no experts. The
published checkpoints are models of text and images; only their text part is loaded.

Source: Llama4TextConfig and modeling_llama4.py of transformers 5.24; llama.cpp's llama4, which
hard-codes the size of chunks and the scale of queries. All files have Meta's order of rows.
"""

from collections.abc import Collection, Iterable
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import (
    INTERLEAVED,
    ROTATED,
    ROTATED_INTERVAL,
    Family,
    GGUFForm,
    layer_types,
    unrotated_layers,
    written_rotated,
)
from parallel_llama.families.model_args import ModelArgs, require_size
from parallel_llama.families.names import in_layers, names_with, shared_expert_names
from parallel_llama.files.fields import Fields

_CHUNK, _TUNING, _STEP = "attention_chunk_size", "attn_temperature_tuning", "floor_scale"
_EXPERTS, _EXPERT_STEP = "moe_layers", "interleave_moe_layer_step"
_CHUNKED = "chunked_attention"
_DEFAULT_SIZE = 8192  # of chunks, and of the steps of the scale of queries
_WINDOW_IN_GGUF, _CHANNELS_IN_GGUF = "attention.sliding_window", "expert_feed_forward_length"
_ARITHMETIC = {
    "normed_experts": False,
    "sigmoid_router": True,
    "router_bias": False,
    "scaled_inputs": True,
}


def _expert_layers(fields: Fields, n_layers: int) -> Iterable[int]:
    if fields.has(_EXPERTS):
        return fields.integers(_EXPERTS)
    step = fields.integer(_EXPERT_STEP, 1)
    return range(step - 1, n_layers, step) if step > 0 else ()


def _feed_forward(fields: Fields, n_layers: int) -> dict[str, Any]:
    with_experts = set(_expert_layers(fields, n_layers))
    dense = tuple(layer for layer in range(n_layers) if layer not in with_experts)
    channels = fields.integer("intermediate_size_mlp", 16384)
    if len(dense) == n_layers:
        return {"ffn_dim": channels}
    return {
        **_ARITHMETIC,
        "n_experts": fields.integer("num_local_experts", 16),
        "n_active_experts": fields.integer("num_experts_per_tok", 1),
        "shared_ffn_dim": fields.integer("intermediate_size", 8192),
        "dense_layers": dense,
        "dense_ffn_dim": channels if dense else 0,
    }


def _features(fields: Fields) -> dict[str, Any]:
    n_layers = require_size("n_layers", fields.integer("num_hidden_layers"))
    # Published files have a number here, which counts as true.
    is_tuned = bool(fields.values.get(_TUNING, True))
    return {
        **_feed_forward(fields, n_layers),
        "attention_bias": fields.flag("attention_bias", False),
        "window_chunks": True,
        "unrotated_layers": unrotated_layers(fields, n_layers),
        "qk_unit_norm": fields.flag("use_qk_norm", True),
        "query_scale": fields.number("attn_scale", 0.1) if is_tuned else 0.0,
        "query_scale_step": fields.integer(_STEP, _DEFAULT_SIZE),
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    experts: dict[str, Any] = {_EXPERTS: []}
    if args.n_experts:
        experts = {
            "num_local_experts": args.n_experts,
            "num_experts_per_tok": args.n_active_experts,
            _EXPERTS: [layer for layer in range(args.n_layers) if layer not in args.dense_layers],
        }
    return {
        **written_rotated(args),
        **experts,
        "intermediate_size_mlp": args.dense_ffn_dim or args.ffn_dim,
        "attention_bias": args.attention_bias,
        "use_qk_norm": args.qk_unit_norm,
        _TUNING: args.query_scale > 0,
        **({"attn_scale": args.query_scale} if args.query_scale else {}),
        _STEP: args.query_scale_step,
        "layer_types": layer_types(args, _CHUNKED),
    }


def _gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    if fields.has(key := f"llama4.{_WINDOW_IN_GGUF}") and not fields.integer(key):
        raise UsageError(f"{key}=0: attention without chunks is not supported in GGUF files")
    n_layers = require_size("n_layers", fields.integer("llama4.block_count"))
    step, full = fields.integer(f"llama4.{_EXPERT_STEP}"), tuple(range(3, n_layers, 4))
    dense = tuple(layer for layer in range(n_layers) if step < 1 or (layer + 1) % step)
    has_window = full or fields.integer("llama4.context_length") > _DEFAULT_SIZE
    window = {"sliding_window": _DEFAULT_SIZE, "window_chunks": True, "full_layers": full}
    channels = fields.integer(f"llama4.{_CHANNELS_IN_GGUF}")
    return {
        **_ARITHMETIC,
        **(window if has_window else {}),
        "ffn_dim": channels,
        "shared_ffn_dim": channels,
        "dense_layers": dense,
        "dense_ffn_dim": fields.integer("llama4.feed_forward_length") if dense else 0,
        "unrotated_layers": full,
        "qk_unit_norm": fields.integer("llama4.expert_count") != 128,
        "query_scale": 0.1,
        "query_scale_step": _DEFAULT_SIZE,
    }


def _gguf_writes(args: ModelArgs) -> dict[str, Any]:
    with_experts = (layer for layer in range(args.n_layers) if layer not in args.dense_layers)
    return {
        "feed_forward_length": args.dense_ffn_dim or args.ffn_dim,
        _CHANNELS_IN_GGUF: args.ffn_dim,
        _EXPERT_STEP: next(with_experts) + 1,
    }


LLAMA4 = Family(
    name="llama4_text",
    models="Llama 4 (text)",
    architecture="Llama4ForCausalLM",
    base_architecture="Llama4TextModel",
    keys={"sliding_window": _CHUNK},
    reads=frozenset(
        {
            "attention_bias",
            "attn_scale",
            "intermediate_size_mlp",
            "num_experts_per_tok",
            "num_local_experts",
            "use_qk_norm",
            ROTATED,
            ROTATED_INTERVAL,
            _EXPERTS,
            _STEP,
            _EXPERT_STEP,
            _TUNING,
        }
    ),
    features=_features,
    writes=_writes,
    full_layers=unrotated_layers,
    window_type=_CHUNKED,
    defaults={
        "ffn_dim": 8192,
        "head_dim": 128,
        "max_seq_len": 131072,
        "n_kv_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": _DEFAULT_SIZE,
    },
    names=names_with(
        *in_layers(
            ("feed_forward.gate.weight", "feed_forward.router.weight", "ffn_gate_inp.weight"),
            ("feed_forward.w1.*", "feed_forward.gate_proj.*", "ffn_gate.*"),
            ("feed_forward.w2.*", "feed_forward.down_proj.*", "ffn_down.*"),
            ("feed_forward.w3.*", "feed_forward.up_proj.*", "ffn_up.*"),
            *(
                (
                    f"feed_forward.experts.*.{meta}.weight",
                    f"feed_forward.experts.{hf}",
                    f"ffn_{gguf}_exps.weight",
                )
                for meta, hf, gguf in (
                    ("w1", "gate_up_proj", "gate"),
                    ("w2", "down_proj", "down"),
                    ("w3", "gate_up_proj", "up"),
                )
            ),
        ),
        *shared_expert_names("feed_forward.shared_expert"),
    ),
    transposed_experts=frozenset({"hf"}),
    gguf=GGUFForm(
        "llama4",
        _gguf_features,
        frozenset({_CHANNELS_IN_GGUF, _EXPERT_STEP, _WINDOW_IN_GGUF}),
        has_experts=True,
        writes=_gguf_writes,
    ),
    rotary_order=INTERLEAVED,
    multimodal="llama4",
    text_prefix="language_model.",
    other_parts=("vision_model.", "multi_modal_projector."),
)
