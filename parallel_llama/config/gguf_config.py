"""The llama.* fields of a GGUF header, and the one tensor that belongs to the configuration."""

import math
import struct
from pathlib import Path

from parallel_llama.config.model_args import MAX_SIZES, ModelArgs, RopeScaling, head_size
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.fields import Fields
from parallel_llama.gguf_header import GGUFHeader

_GGUF_KEYS = {
    "llama.vocab_size", "llama.context_length", "llama.embedding_length", "llama.block_count",
    "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.head_count_kv",
    "llama.attention.key_length", "llama.attention.value_length",
    "llama.attention.layer_norm_rms_epsilon", "llama.rope.dimension_count",
    "llama.rope.freq_base", "llama.rope.scale_linear", "llama.rope.scaling.type",
    "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.finetuned", "llama.rope.scaling.attn_factor",
    "llama.rope.scaling.yarn_attn_factor", "llama.rope.scaling.yarn_beta_fast",
    "llama.rope.scaling.yarn_beta_slow", "llama.tensor_data_layout", "llama.expert_count",
    "llama.expert_used_count",
}  # fmt: skip


def args_from_gguf(header: GGUFHeader, path: Path) -> ModelArgs:
    """The arguments that a GGUF header states.

    Raises: UsageError as in `load_model_args`; CheckpointError if rope_freqs.weight is damaged.
    Source: ggml's docs/gguf.md; defaults as in llama.cpp.
    """
    fields = Fields(header.fields)
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise UsageError(
            f"the architecture {architecture[:80]!r} is not supported; supported: 'llama'"
        )
    if (n_parts := fields.integer("split.count", 1)) > 1:
        raise UsageError(f"one of {n_parts} parts; join them with llama-gguf-split --merge")
    own = Fields({key: value for key, value in header.fields.items() if key.startswith("llama.")})
    own.require_known(_GGUF_KEYS)
    if (n_experts := own.integer("llama.expert_count", 0)) > 0:
        raise UsageError(f"a mixture of {n_experts} experts, which is not supported")
    dim, n_heads = own.integer("llama.embedding_length"), own.integer("llama.attention.head_count")
    if own.has("llama.attention.key_length"):
        head_dim = own.integer("llama.attention.key_length")
    else:
        head_dim = head_size("llama.embedding_length", dim, "llama.attention.head_count", n_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (size := own.integer(key, head_dim)) != head_dim:
            raise UsageError(f"{key}={size} and heads of {head_dim}: they must be equal")
    tensors = header.tensors
    max_seq_len = own.integer("llama.context_length")
    return ModelArgs(
        dim=dim,
        n_layers=own.integer("llama.block_count"),
        n_heads=n_heads,
        n_kv_heads=own.integer("llama.attention.head_count_kv", n_heads),
        head_dim=head_dim,
        ffn_dim=own.integer("llama.feed_forward_length"),
        vocab_size=_gguf_vocab_size(fields),
        norm_eps=own.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=own.number("llama.rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope(own, header, path, max_seq_len),
        max_seq_len=max_seq_len,
        tied_embeddings="output.weight" not in tensors,
        attention_bias=any(
            f"blk.0.attn_{part}.bias" in tensors for part in ("q", "k", "v", "output")
        ),
        mlp_bias=any(f"blk.0.ffn_{part}.bias" in tensors for part in ("gate", "up", "down")),
        dtype=_gguf_dtype(header),
    )


def _gguf_vocab_size(fields: Fields) -> int:
    tokens = fields.values.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, list) else None
    return fields.integer("llama.vocab_size", n_tokens)


def _gguf_dtype(header: GGUFHeader) -> str:
    """The type of all matrices where they share one that is not quantised, else float32."""
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    stored = {tensor.type_name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return plain.get(stored.pop(), "float32") if len(stored) == 1 else "float32"


def _gguf_rope(own: Fields, header: GGUFHeader, path: Path, max_seq_len: int) -> RopeScaling | None:
    factor = own.number("llama.rope.scaling.factor", own.number("llama.rope.scale_linear", 0.0))
    # A factor alone is linear scaling, and a factor of 0 none, as llama.cpp reads them.
    kind = own.text("llama.rope.scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UsageError(
            f"llama.rope.scaling.type={kind[:80]!r} is not supported; supported: none, linear, yarn"
        )
    scales = kind != "none" and factor not in (0.0, 1.0)
    attention_factor = own.number("llama.rope.scaling.attn_factor", 1.0) * own.number(
        "llama.rope.scaling.yarn_attn_factor", 1.0
    )
    if attention_factor != 1 and not (scales and kind == "yarn"):
        raise UsageError(f"a rotary attn_factor of {attention_factor} is supported with yarn only")
    if "rope_freqs.weight" in header.tensors:
        if scales:
            raise UsageError(
                f"has rope_freqs.weight and {kind} rope scaling; one of them is supported"
            )
        return RopeScaling("factors", factors=_rope_factors(header, path))
    if not scales:
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    return RopeScaling(
        "yarn",
        factor,
        own.integer("llama.rope.scaling.original_context_length", max_seq_len),
        beta_fast=own.number("llama.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=own.number("llama.rope.scaling.yarn_beta_slow", 1.0),
        # llama.cpp multiplies its own temperature by the file's factor
        attention_factor=attention_factor * (1 + 0.1 * math.log(max(factor, 1.0))),
    )


def _rope_factors(header: GGUFHeader, path: Path) -> tuple[float, ...]:
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.type_name != "F32" or len(tensor.shape) != 1:
        raise UsageError(
            f"rope_freqs.weight is {tensor.type_name} of shape {list(tensor.shape)}; "
            "one row of F32 can be read"
        )
    if tensor.shape[0] > MAX_SIZES["head_dim"]:
        raise UsageError(f"rope_freqs.weight has {tensor.shape[0]} values, more than any head")
    with path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.n_bytes)
    if len(data) != tensor.n_bytes:
        raise CheckpointError(f"{path}: the file ends inside rope_freqs.weight")
    return struct.unpack(f"<{tensor.shape[0]}f", data)
