"""Reads Mistral's params.json, which belongs to consolidated.safetensors.

Most keys are Meta's. The key hidden_dim marks it as Mistral's, because Meta's states the
feed-forward width as a multiplier.

Source: TransformerArgs of mistral-inference.
"""

from collections.abc import Mapping
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.llama import MISTRAL, MIXTRAL
from parallel_llama.families.model_args import ModelArgs, head_size
from parallel_llama.files.fields import Fields

_KEYS = {
    "dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "norm_eps", "vocab_size",
    "rope_theta", "sliding_window", "moe", "use_biases", "tied_embeddings", "max_seq_len",
    "max_position_embeddings", "model_type",
}  # fmt: skip
_IGNORED = {"max_batch_size"}
_REFUSED = {
    "lora": "LoRA weights beside the model's; use the merged model",
    "quantization": "a quantised checkpoint; use the unquantised model, or a GGUF file of it",
    "vision_encoder": "an image model; only text is supported",
    "multimodal": "an image or audio model; only text is supported",
}

# The trained context where params.json has none: that of 7B 0.1 to 0.3 and Mixtral 8x7B.
_CONTEXT = 32768


def is_mistral_params(values: Mapping[str, Any]) -> bool:
    """Whether a params.json is Mistral's and not Meta's."""
    return "hidden_dim" in values


def args_from_mistral_params(values: Mapping[str, Any]) -> ModelArgs:
    """The arguments of Mistral's params.json.

    Raises: UsageError as in `load_model_args`.
    """
    fields = Fields(values)
    fields.refuse(_REFUSED)
    fields.require_known(_KEYS | _IGNORED)
    if fields.flag("use_biases", False):
        raise UsageError("use_biases=true is not supported; no Mistral model has biases")
    if (kind := fields.string("model_type", "transformer")) != "transformer":
        raise UsageError(f"model_type={kind[:80]!r} is not supported; only 'transformer' is")
    dim, n_heads = fields.integer("dim"), fields.integer("n_heads")
    head_dim = fields.optional_integer("head_dim")
    context = fields.integer("max_position_embeddings", _CONTEXT)
    max_seq_len = fields.integer("max_seq_len", context)
    window = fields.optional_integer("sliding_window")
    experts = Fields(fields.mapping("moe"))
    experts.require_known({"num_experts", "num_experts_per_tok"})
    return ModelArgs(
        dim=dim,
        n_layers=fields.integer("n_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.integer("n_kv_heads", n_heads),
        head_dim=head_size("dim", dim, "n_heads", n_heads) if head_dim is None else head_dim,
        ffn_dim=fields.integer("hidden_dim"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("norm_eps", 1e-5),
        # 7B 0.1, the only model with a window, was the last with base 1e4.
        rope_theta=fields.number("rope_theta", 1e6 if window is None else 1e4),
        max_seq_len=max_seq_len,
        tied_embeddings=fields.flag("tied_embeddings", False),
        # A window at least as long as the context has no effect.
        sliding_window=None if window is None or window >= max_seq_len else window,
        n_experts=experts.integer("num_experts") if experts.values else 0,
        n_active_experts=experts.integer("num_experts_per_tok") if experts.values else 0,
        family=(MIXTRAL if experts.values else MISTRAL).name,
    )
