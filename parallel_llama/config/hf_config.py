"""HF's config.json of a Llama, in the form of transformers 5 or the one before it."""

import logging
from collections.abc import Mapping
from typing import Any

from parallel_llama.config.model_args import ModelArgs, RopeScaling, head_size
from parallel_llama.errors import UsageError
from parallel_llama.fields import Fields, did_you_mean

logger = logging.getLogger(__name__)

# Keys of config.json that say nothing about the model's arithmetic: how it was trained, saved or
# should be sampled, and switches of transformers itself.
_HF_IGNORED = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "_flash_attn_2_enabled", "_from_model_config", "_name_or_path", "add_bos_token",
    "add_eos_token", "attention_dropout", "attn_implementation", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "id2label", "initializer_range", "is_decoder", "is_llama_config",
    "label2id", "length_penalty", "max_length", "max_sequence_length", "min_length",
    "neftune_alpha", "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_labels", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tie_last_hidden_states",
    "tokenizer_class", "top_k", "top_p", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
}  # fmt: skip
_HF_KEYS = {
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "max_position_embeddings", "original_max_position_embeddings", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "hidden_act", "dtype", "torch_dtype",
}  # fmt: skip
# Keys that change the model unless they hold one of these values.
_HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
}
_HF_REFUSED = {
    "quantization_config": "a quantised checkpoint, which is not supported; use the unquantised "
    "model, or a GGUF file of it",
}
_HF_ARCHITECTURE = "LlamaForCausalLM"

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
    _require_llama(fields)
    fields.refuse(_HF_REFUSED)
    for key, neutral in _HF_NEUTRAL.items():
        if fields.has(key) and fields.values[key] not in neutral:
            raise UsageError(f"{key}={str(fields.values[key])[:80]} is not supported")
    fields.require_known(_HF_KEYS | _HF_IGNORED | _HF_NEUTRAL.keys() | _HF_REFUSED.keys())
    if fields.has("auto_map"):
        logger.warning("config.json names code of its own (auto_map), which is never run")
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise UsageError(f"hidden_act={activation!r}: only 'silu' is supported")
    dim, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_seq_len = fields.integer("max_position_embeddings", 2048)
    rope_theta, rope_scaling = _hf_rope(fields, max_seq_len)
    return ModelArgs(
        dim=dim,
        n_layers=fields.integer("num_hidden_layers"),
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
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32")),
    )


def _require_llama(fields: Fields) -> None:
    if not fields.has("model_type") and not fields.texts("architectures"):
        raise UsageError(
            f"says neither its model_type nor its architectures; supported: {_HF_ARCHITECTURE}"
        )
    for architecture in fields.texts("architectures"):
        if architecture != _HF_ARCHITECTURE:
            raise UsageError(
                f"the architecture {architecture[:80]!r} is not supported; "
                f"supported: {_HF_ARCHITECTURE}"
            )
    if (model_type := fields.text("model_type", "llama")) != "llama":
        raise UsageError(f"model_type={model_type[:80]!r} is not supported; supported: 'llama'")


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
