"""Granite 3 and 4, dense: Llama with factors on embeddings, residual additions, scores and logits.

Granite 4 has the model_type of hybrid models, w1 and w3 in one tensor, and perhaps no rotary
embeddings. Its models with state-space layers or experts are refused.

Source: GraniteConfig and GraniteMoeHybridConfig of transformers 5.24; maximal update
parametrisation, arXiv 2203.03466; llama.cpp's granite.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError, shown
from parallel_llama.families.family import BIASES, Family, GGUFForm, biases, written_biases
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import in_layers, names_with
from parallel_llama.files.fields import Fields

_EMBEDDING, _RESIDUAL = "embedding_multiplier", "residual_multiplier"
_ATTENTION, _LOGITS = "attention_multiplier", "logits_scaling"
_FACTORS = frozenset({_EMBEDDING, _RESIDUAL, _ATTENTION, _LOGITS})
# llama.cpp's converter writes these keys for dense models of Granite 4, too.
_UNUSED_IN_GGUF = (
    "expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size",
    "ssm.state_size", "ssm.time_step_rank",
)  # fmt: skip
_IN_GGUF = "embedding_scale", "residual_scale", "logit_scale", "attention.scale"


def _logit_scale(key: str, divisor: float) -> float:
    if divisor <= 0:
        raise UsageError(f"{key}={divisor:g} is a divisor of logits; use a number above 0")
    return 1 / divisor


def _factors(fields: Fields) -> dict[str, Any]:
    return {
        "embedding_scale": fields.number(_EMBEDDING, 1.0),
        "residual_scale": fields.number(_RESIDUAL, 1.0),
        "attention_scale": fields.number(_ATTENTION, 1.0),
        "logit_scale": _logit_scale(_LOGITS, fields.number(_LOGITS, 1.0)),
    }


def _gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    """llama.cpp divides by logit_scale and multiplies by the other scales; 0 means unset."""
    # llama.cpp takes this key for a switch of rotary embeddings.
    is_rotated = fields.flag("granite.rope.scaling.finetuned", True)
    embedding, residual, logits, attention = (
        fields.number(f"granite.{key}", 0.0) for key in _IN_GGUF
    )
    return {
        "embedding_scale": embedding or 1.0,
        "residual_scale": residual or 1.0,
        "logit_scale": _logit_scale("granite.logit_scale", logits or 1.0),
        "attention_scale": attention or None,
        "unrotated_layers": ()
        if is_rotated
        else tuple(range(fields.integer("granite.block_count"))),
    }


def _written_factors(args: ModelArgs) -> dict[str, Any]:
    scale = args.head_dim**-0.5 if args.attention_scale is None else args.attention_scale
    return {
        _EMBEDDING: args.embedding_scale,
        _RESIDUAL: args.residual_scale,
        _ATTENTION: scale,
        _LOGITS: 1 / args.logit_scale,
    }


GRANITE = Family(
    name="granite",
    models="Granite 3 (dense)",
    architecture="GraniteForCausalLM",
    base_architecture="GraniteModel",
    reads=BIASES | _FACTORS,
    features=lambda fields: {**biases(fields), **_factors(fields)},
    writes=lambda args: {**written_biases(args), **_written_factors(args)},
    gguf=GGUFForm("granite", _gguf_features, frozenset(_IN_GGUF).union(_UNUSED_IN_GGUF)),
)

# Keys of training, state-space layers and experts, which config.json of dense models has as well.
_UNUSED = frozenset(
    {
        "init_method", "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head",
        "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias",
        "normalization_function", "num_experts_per_tok", "time_step_limit",
    }
)  # fmt: skip
_EXPERTS, _POSITIONS, _LAYER_TYPES = "num_local_experts", "position_embedding_type", "layer_types"
_ATTENTION_TYPES = "attention", "full_attention"


def _dense_features(fields: Fields) -> dict[str, Any]:
    others = set(fields.strings(_LAYER_TYPES)).difference(_ATTENTION_TYPES)
    if others or not fields.has(_LAYER_TYPES):
        what = shown(min(others)) if others else "no layers with attention"
        raise UsageError(
            f"{_LAYER_TYPES} has {what}: state-space layers (SSM) are not implemented; use a model "
            "without them, such as granite-4.0-micro"
        )
    if n_experts := fields.integer(_EXPERTS, 8):
        raise UsageError(
            f"{_EXPERTS}={n_experts}: the experts of this model are not implemented; use a dense "
            "model, such as granite-4.0-micro"
        )
    is_rotated = fields.string(_POSITIONS, "") == "rope"
    return {
        **_factors(fields),
        "attention_bias": fields.flag("attention_bias", False),
        "unrotated_layers": () if is_rotated else tuple(range(fields.integer("num_hidden_layers"))),
    }


GRANITE4 = Family(
    name="granitemoehybrid",
    models="Granite 4 (dense)",
    architecture="GraniteMoeHybridForCausalLM",
    base_architecture="GraniteMoeHybridModel",
    keys={"ffn_dim": "shared_intermediate_size"},
    reads=_FACTORS | _UNUSED | {"attention_bias", "intermediate_size", _EXPERTS, _POSITIONS},
    features=_dense_features,
    writes=lambda args: {
        **_written_factors(args),
        "attention_bias": args.attention_bias,
        _EXPERTS: 0,
        "num_experts_per_tok": 0,
        _POSITIONS: "nope" if args.unrotated_layers else "rope",
        _LAYER_TYPES: ["attention"] * args.n_layers,
        "mamba_n_heads": 1,  # transformers checks that it divides twice the width
    },
    gguf=GRANITE.gguf,
    names=names_with(
        *in_layers(
            ("feed_forward.w1.*", "shared_mlp.input_linear.*", "ffn_gate.*"),
            ("feed_forward.w3.*", "shared_mlp.input_linear.*", "ffn_up.*"),
            ("feed_forward.w2.*", "shared_mlp.output_linear.*", "ffn_down.*"),
        )
    ),
)
