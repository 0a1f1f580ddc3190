"""HF's config.json of a Llama, in the form of transformers 5 or the one before it."""

import logging
from collections.abc import Mapping
from typing import Any

from parallel_llama.config.hf_keys import SILU, check_keys
from parallel_llama.config.model_args import ModelArgs, RopeScaling, head_size
from parallel_llama.errors import UsageError
from parallel_llama.fields import Fields, did_you_mean

logger = logging.getLogger(__name__)

_ARCHITECTURE = "LlamaForCausalLM"
_BASE_ARCHITECTURE = "LlamaModel"  # all but the head
_FULL = "full_attention"

# What each type of rope scaling reads beside _ROPE_COMMON.
_ROPE_TYPES = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    },
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_ROPE_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# In the configs of the first YaRN models; it says how they were trained.
_ROPE_IGNORED = {"finetuned"}


def args_from_hf(values: Mapping[str, Any]) -> ModelArgs:
    """The arguments that HF's config.json states, with transformers' defaults for what it omits.

    The shape itself has no defaults: a config.json without it is not of any model.

    Raises: UsageError as in `load_model_args`.
    Source: LlamaConfig of transformers 5.23.
    """
    fields = Fields(values)
    tied = fields.flag("tie_word_embeddings", False)
    _require_llama(fields, tied)
    _require_plain_weights(fields)
    check_keys(fields)
    if fields.has("auto_map"):
        logger.warning("config.json names code of its own (auto_map), which is never run")
    if (activation := fields.text("hidden_act", "silu")) not in SILU:
        raise UsageError(f"hidden_act={activation[:80]!r}: only 'silu' is supported")
    dim, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    n_layers = fields.integer("num_hidden_layers")
    max_seq_len = fields.integer("max_position_embeddings", 2048)
    _require_full_attention(fields, n_layers, max_seq_len)
    rope_theta, rope_scaling = _hf_rope(fields, max_seq_len)
    return ModelArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", n_heads),
        head_dim=fields.integer("head_dim")
        if fields.has("head_dim")
        else head_size("hidden_size", dim, "num_attention_heads", n_heads),
        ffn_dim=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_seq_len=max_seq_len,
        tied_embeddings=tied,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")),
    )


def _require_llama(fields: Fields, tied: bool) -> None:
    architectures = fields.texts("architectures")
    if not fields.has("model_type") and not architectures:
        raise UsageError(
            f"says neither its model_type nor its architectures; supported: {_ARCHITECTURE}"
        )
    for architecture in architectures:
        if architecture not in (_ARCHITECTURE, _BASE_ARCHITECTURE):
            raise UsageError(
                f"the architecture {architecture[:80]!r} is not supported; "
                f"supported: {_ARCHITECTURE}"
            )
    if architectures == [_BASE_ARCHITECTURE] and not tied:
        raise UsageError(
            f"the architecture {_BASE_ARCHITECTURE!r} is a base model without a head, and its "
            f"embeddings are not tied to serve as one; fetch or save it as {_ARCHITECTURE}"
        )
    if (model_type := fields.text("model_type", "llama")) != "llama":
        raise UsageError(f"model_type={model_type[:80]!r} is not supported; supported: 'llama'")


def _require_plain_weights(fields: Fields) -> None:
    """Refuse quantised checkpoints; what transformers read from a GGUF file it saves as floats."""
    quantization = Fields(fields.mapping("quantization_config"))
    if quantization.values and quantization.text("quant_method", "unknown") != "gguf":
        raise UsageError(
            "has 'quantization_config': a quantised checkpoint, which is not supported; use the "
            "unquantised model, or a GGUF file of it"
        )


def _require_full_attention(fields: Fields, n_layers: int, max_seq_len: int) -> None:
    """Refuse a window over the keys that is shorter than the context.

    transformers' Llama attends to all keys whatever is stated, and yet caches no more than the
    window: what it answers then depends on how it was asked.
    """
    layer_types = fields.texts("layer_types")
    for layer_type in layer_types:
        if layer_type != _FULL:
            raise UsageError(f"layer_types has {layer_type[:80]!r}; only {_FULL!r} is supported")
    if layer_types and len(layer_types) != n_layers:
        raise UsageError(
            f"layer_types is of {len(layer_types)} layers and num_hidden_layers={n_layers}; "
            "use the config.json that belongs to the weights"
        )
    window = fields.integer("sliding_window", max_seq_len)
    if window < max_seq_len and not layer_types:
        raise UsageError(
            f"sliding_window={window} is not supported below max_position_embeddings="
            f"{max_seq_len}; if the weights were trained without it, remove it"
        )


def _require_rope_keys(rope: Fields, kind: str) -> None:
    """Refuse keys that no type has, and say which are of another type: they change nothing."""
    try:
        rope.require_known(_ROPE_COMMON.union(_ROPE_IGNORED, *_ROPE_TYPES.values()))
    except UsageError as error:
        raise UsageError(f"among the rope settings: {error}") from error
    read = _ROPE_COMMON | _ROPE_IGNORED | _ROPE_TYPES[kind]
    if unread := [key for key in rope.values if key not in read]:
        logger.warning("rope scaling %r does not use %s", kind, ", ".join(unread))


def _hf_rope(fields: Fields, max_seq_len: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling from the form of transformers 5 (rope_parameters) or the one before it.

    Where several places state a value, the order is that of transformers.
    Source: transformers 5.23, modeling_rope_utils.py.
    """
    values = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    rope = Fields(values)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _ROPE_TYPES:
        raise UsageError(
            f"rope_type={kind[:80]!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
            f"{did_you_mean(kind, _ROPE_TYPES)}"
        )
    _require_rope_keys(rope, kind)
    for place in (rope, fields):
        if (rotary := place.number("partial_rotary_factor", 1.0)) != 1:
            raise UsageError(f"partial_rotary_factor={rotary}: only whole heads are rotated, 1")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", rope.number("factor"))
    if kind == "dynamic":
        return theta, RopeScaling("dynamic", rope.number("factor"), max_seq_len)
    trained = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_seq_len),
    )
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            rope.number("factor"),
            trained,
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
        )
    if trained < 1:
        raise UsageError(f"original_max_position_embeddings={trained}: use 1 or more")
    return theta, RopeScaling(
        "yarn",
        rope.number("factor", max_seq_len / trained),
        trained,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,  # 0 means the default, too
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),  # a null here is false to transformers
    )
