"""Decides which unknown keys of config.json are ignored and which are refused.

A key that transformers' model of the family does not read cannot change its tokens. So a key that
is neither in READ nor read by the family is ignored, with a warning unless it is in IGNORED or
begins with an underscore. But two kinds of keys are refused if they have a value other than null:

* a key in OFF with a value that does not turn it off, because other architectures compute something
  else with it and the weights were probably trained with it;
* a key spelt almost like a key in READ or OFF, because it is probably a misspelling, unless the
  file has that key too, with the same value.

Features with tensors of their own (experts, norms of q and k) are also refused later, when the
tensors are compared with the model.
"""

import logging
from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError, listed
from parallel_llama.files.fields import Fields, nearest, shown

logger = logging.getLogger(__name__)

READ = {
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "max_position_embeddings", "original_max_position_embeddings", "tie_word_embeddings",
    "hidden_act", "dtype", "torch_dtype", "layer_types", "sliding_window", "quantization_config",
}  # fmt: skip

_SWITCHES_AND_SIZES = (
    "add_cross_attention", "alibi", "apply_residual_connection_post_layernorm",
    "attention_chunk_size", "attention_multiplier", "attn_logit_softcapping",
    "attn_temperature_tuning", "clip_qkv", "compression_config", "dim_model_base",
    "final_logit_softcapping", "fusion_config", "is_encoder_decoder", "kv_sharing_modes",
    "n_routed_experts", "no_rope_layer_interval", "no_rope_layers", "num_experts",
    "num_kv_shared_layers", "num_local_experts", "parallel_attn", "parallel_residual",
    "per_layer_config", "pruned_heads", "qk_layernorm", "qk_norm", "quantization",
    "query_pre_attn_scalar", "rope_interleave", "rope_interleaved", "rotary_dim", "scale_depth",
    "scale_embedding", "sliding_window_pattern", "softmax_scale", "text_config",
    "transformers_weights", "use_alibi", "use_bidirectional_attention", "use_parallel_residual",
    "use_post_norm", "use_qk_norm", "use_sliding_window",
)  # fmt: skip
_FACTORS = (
    "embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier", "rotary_pct",
    "scale_emb",
)  # fmt: skip
_ACTIVATIONS = ("activation_function", "hidden_activation")

# The values other than null that turn a key off.
OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES_AND_SIZES, (0, [], {})),  # 0 also equals False
    **dict.fromkeys(_FACTORS, (1,)),
    **dict.fromkeys(_ACTIVATIONS, ("silu", "swish")),
    "is_causal": (True,),
    "mlp_type": ("default",),  # StarCoder2
    "quantization_bit": (0,),  # ChatGLM
}

# Keys of training, saving and sampling, and switches of transformers itself.
IGNORED = {
    "add_bos_token", "add_eos_token", "attention_dropout", "attn_implementation", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "embd_pdrop", "embedding_dropout", "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "hidden_dropout", "id2label", "initializer_range", "is_decoder",
    "is_llama_config", "label2id", "length_penalty", "max_length", "max_sequence_length",
    "min_length", "model_max_length", "neftune_alpha", "neftune_noise_alpha",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "resid_pdrop", "residual_dropout", "return_dict",
    "return_dict_in_generate", "router_aux_loss_coef",
    "router_jitter_noise", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tie_last_hidden_states", "tokenizer_class", "top_k",
    "top_p", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
}  # fmt: skip

MAX_KEYS = 1000  # limited because comparing spellings is slow

# Minimum similarity of a misspelling (difflib's ratio); `num_kv_heads` and `num_key_value_heads`
# have 0.77.
_NEARLY = 0.75


def check_keys(fields: Fields, reads: Collection[str]) -> None:
    """Apply the rules above to config.json, with one warning for all ignored keys.

    Args:
        reads: keys that the family reads in addition to READ.

    Raises: UsageError for a refused key, or too many keys.
    """
    if len(fields.values) > MAX_KEYS:
        raise UsageError(f"has {len(fields.values)} keys; at most {MAX_KEYS} are read")
    keys = [key for key in fields.values if fields.has(key) and not key.startswith("_")]
    for key in keys:
        if key not in reads and key in OFF and fields.values[key] not in OFF[key]:
            raise UsageError(
                f"{key}={shown(fields.values[key])} is not supported; if the weights were trained "
                "without it, remove it"
            )
    read = READ.union(reads)
    known = read | OFF.keys() | IGNORED
    ignored = []
    for key in keys:
        if key in known:
            continue
        near = nearest(key, known, _NEARLY)
        is_repeated = near is not None and fields.values.get(near) == fields.values[key]
        if (near in read or near in OFF) and not is_repeated:
            raise UsageError(
                f"unknown key {shown(key)}; did you mean {near!r}? If not, and it does not change "
                "the model, remove it"
            )
        ignored.append(shown(key) + (f" (near {near!r})" if near else ""))
    if ignored:
        logger.warning("config.json has unknown keys, which are ignored: %s", listed(ignored, 5))
