"""Granite 3, dense: Llama with factors on embeddings, residual additions, scores and logits.

Source: GraniteConfig of transformers 5.24; maximal update parametrisation, arXiv 2203.03466;
llama.cpp's granite.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import BIASES, Family, GGUFForm, biases, written_biases
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.fields import Fields

_EMBEDDING, _RESIDUAL = "embedding_multiplier", "residual_multiplier"
_ATTENTION, _LOGITS = "attention_multiplier", "logits_scaling"
_IN_GGUF = "embedding_scale", "residual_scale", "logit_scale", "attention.scale"


def _logit_scale(key: str, divisor: float) -> float:
    if divisor <= 0:
        raise UsageError(f"{key}={divisor:g} is a divisor of logits; use a number above 0")
    return 1 / divisor


def _features(fields: Fields) -> dict[str, Any]:
    return {
        **biases(fields),
        "embedding_scale": fields.number(_EMBEDDING, 1.0),
        "residual_scale": fields.number(_RESIDUAL, 1.0),
        "attention_scale": fields.number(_ATTENTION, 1.0),
        "logit_scale": _logit_scale(_LOGITS, fields.number(_LOGITS, 1.0)),
    }


def _gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    """llama.cpp divides by logit_scale and multiplies by the other scales; 0 means unset."""
    embedding, residual, logits, attention = (
        fields.number(f"granite.{key}", 0.0) for key in _IN_GGUF
    )
    return {
        "embedding_scale": embedding or 1.0,
        "residual_scale": residual or 1.0,
        "logit_scale": _logit_scale("granite.logit_scale", logits or 1.0),
        "attention_scale": attention or None,
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    scale = args.head_dim**-0.5 if args.attention_scale is None else args.attention_scale
    return {
        **written_biases(args),
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
    reads=BIASES | {_EMBEDDING, _RESIDUAL, _ATTENTION, _LOGITS},
    features=_features,
    writes=_writes,
    gguf=GGUFForm("granite", _gguf_features, frozenset(_IN_GGUF)),
)
