"""Reads `ModelArgs` from the fields of a GGUF header and its tensors of rotary factors."""

import logging
import math
import struct

from parallel_llama.dtypes import STORED
from parallel_llama.errors import CheckpointError, UsageError, shown
from parallel_llama.families import FAMILIES, Family
from parallel_llama.families.family import GGUFForm
from parallel_llama.families.model_args import (
    MAX_SIZES,
    ModelArgs,
    RopeScaling,
    head_size,
    require_size,
)
from parallel_llama.files.bounded_files import open_file
from parallel_llama.files.fields import Fields
from parallel_llama.files.gguf_header import GGUFHeader

logger = logging.getLogger(__name__)

_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_RMS_EPS, _LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
_RELATIVE_FACTOR, _ABSOLUTE_FACTOR = "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"

# Known keys, after the prefix of the architecture, as in llama.block_count.
_KEYS = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", _RMS_EPS, "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", _RELATIVE_FACTOR,
    _ABSOLUTE_FACTOR, "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    _LOG_MULTIPLIER, "tensor_data_layout", "expert_count", "expert_used_count",
}  # fmt: skip


def args_from_gguf(header: GGUFHeader) -> ModelArgs:
    """The arguments of a GGUF header.

    Raises: UsageError as in `load_model_args`; CheckpointError if rotary factors are damaged.
    Source: ggml's docs/gguf.md; defaults as in llama.cpp.
    """
    fields = Fields(header.fields)
    arch = fields.string("general.architecture")
    n_experts = fields.integer(f"{arch}.expert_count", 0)
    family, form = _family(header, arch, has_experts=n_experts > 0)
    prefix = f"{arch}."
    arch_fields = Fields(
        {key: value for key, value in header.fields.items() if key.startswith(prefix)}
    )
    eps_key = _LAYER_NORM_EPS if form.has_layer_norm else _RMS_EPS
    arch_fields.require_known({prefix + key for key in _KEYS | form.reads | {eps_key}})
    max_seq_len = arch_fields.integer(f"{arch}.context_length")
    tokens, tensors = header.fields.get("tokenizer.ggml.tokens"), header.tensors
    arguments = {
        **_sizes(arch_fields, arch, rotates_part=form.rotates_part),
        "vocab_size": fields.integer(
            f"{arch}.vocab_size", len(tokens) if isinstance(tokens, list) else None
        ),
        "max_seq_len": max_seq_len,
        "norm_eps": arch_fields.number(prefix + eps_key),
        "rope_theta": arch_fields.number(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _gguf_rope(arch_fields, arch, form, header, max_seq_len),
        "tied_embeddings": "output.weight" not in tensors,
        "attention_bias": any(f"blk.0.attn_{p}.bias" in tensors for p in ("q", "k", "v", "qkv")),
        "wo_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": any(f"blk.0.ffn_{part}.bias" in tensors for part in ("gate", "up", "down")),
        "n_experts": n_experts,
        "n_active_experts": arch_fields.integer(f"{arch}.expert_used_count") if n_experts else 0,
        **form.features(arch_fields, tensors),
    }
    if "ffn_dim" not in arguments:
        arguments["ffn_dim"] = arch_fields.integer(f"{arch}.feed_forward_length")
    return ModelArgs(dtype=_gguf_dtype(header), family=family.name, **arguments)


def _family(header: GGUFHeader, arch: str, *, has_experts: bool) -> tuple[Family, GGUFForm]:
    """The family of an architecture; llama has one with experts and one without."""
    fields = Fields(header.fields)
    forms = [(family, family.gguf) for family in FAMILIES.values() if family.gguf is not None]
    for family, form in sorted(forms, key=lambda each: each[1].needs is None):
        names = form.architecture, form.also_read
        if arch not in names or form.has_experts != has_experts:
            continue
        if form.needs is None or form.needs in header.tensors or fields.has(f"{arch}.{form.needs}"):
            return family, form
    known = sorted(
        {name for _, form in forms for name in (form.architecture, form.also_read) if name}
    )
    what = f"the architecture {arch[:80]!r}"
    if arch in known:
        what += " with experts" if has_experts else " without experts"
    raise UsageError(f"{what} is not supported; supported: {', '.join(map(repr, known))}")


def _sizes(arch_fields: Fields, arch: str, *, rotates_part: bool) -> dict[str, int]:
    """Number and sizes of layers and heads; `rotary_dim` if only a part of a head is rotated."""
    dim_key, heads_key = f"{arch}.embedding_length", f"{arch}.attention.head_count"
    dim, n_heads = arch_fields.integer(dim_key), arch_fields.integer(heads_key)
    head_dim = arch_fields.optional_integer(f"{arch}.attention.key_length")
    if head_dim is None:
        head_dim = head_size(dim_key, dim, heads_key, n_heads)
    rotary_key = f"{arch}.rope.dimension_count"
    rotary_dim = arch_fields.integer(rotary_key, head_dim)
    value_key = f"{arch}.attention.value_length"
    for key in (value_key,) if rotates_part else (value_key, rotary_key):
        if (size := arch_fields.integer(key, head_dim)) != head_dim:
            raise UsageError(f"{key}={size} must equal the head size of {head_dim}")
    return {
        **({} if rotary_dim == head_dim else {"rotary_dim": rotary_dim}),
        "dim": dim,
        "n_layers": require_size("n_layers", arch_fields.integer(f"{arch}.block_count")),
        "n_heads": n_heads,
        "n_kv_heads": _kv_heads(arch_fields, arch, n_heads),
        "head_dim": head_dim,
    }


def _kv_heads(arch_fields: Fields, arch: str, default: int) -> int:
    """The number of KV heads, of all layers or listed by layer. Raises: UsageError if unequal."""
    key = f"{arch}.attention.head_count_kv"
    listed = arch_fields.values.get(key)
    if not isinstance(listed, list):
        return arch_fields.integer(key, default)
    numbers = set(arch_fields.integers(key))
    if len(numbers) != 1:
        raise UsageError(f"{key}={shown(listed)}: layers with different numbers are not supported")
    return numbers.pop()


def _gguf_dtype(header: GGUFHeader) -> str:
    """The dtype of all matrices if they have one unquantised dtype, else float32."""
    stored = {tensor.dtype for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return STORED.get(stored.pop(), "float32") if len(stored) == 1 else "float32"


def _gguf_rope(
    arch_fields: Fields, arch: str, form: GGUFForm, header: GGUFHeader, max_seq_len: int
) -> RopeScaling | None:
    if _SHORT in header.tensors or _LONG in header.tensors:
        return _longrope(arch_fields, arch, header, max_seq_len)
    factor = arch_fields.number(
        f"{arch}.rope.scaling.factor", arch_fields.number(f"{arch}.rope.scale_linear", 0.0)
    )
    # As in llama.cpp, a factor without a type means linear scaling, and a factor of 0 no scaling.
    kind = arch_fields.string(f"{arch}.rope.scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UsageError(
            f"{arch}.rope.scaling.type={kind[:80]!r} is not supported; "
            "supported: none, linear, yarn"
        )
    scales = kind != "none" and factor not in (0.0, 1.0)
    for key in (_RELATIVE_FACTOR, _ABSOLUTE_FACTOR):
        if (attn_factor := arch_fields.number(f"{arch}.{key}", 1.0)) != 1 and not (
            scales and kind == "yarn"
        ):
            raise UsageError(
                f"a rotary attn_factor of {attn_factor} is supported only with yarn or longrope "
                "scaling"
            )
    if "rope_freqs.weight" in header.tensors:
        if scales:
            raise UsageError(
                f"has rope_freqs.weight and {kind} rope scaling, which cannot be combined"
            )
        return RopeScaling("factors", factors=_rope_factors(header, "rope_freqs.weight"))
    if not scales:
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    multiplier = arch_fields.number(f"{arch}.{_LOG_MULTIPLIER}", 0.0)
    return RopeScaling(
        "yarn",
        factor,
        arch_fields.integer(f"{arch}.rope.scaling.original_context_length", max_seq_len),
        beta_fast=arch_fields.number(f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=arch_fields.number(f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(arch_fields, arch, factor),
        mscale=1.0 if multiplier else None,  # as llama.cpp assumes
        mscale_all_dim=multiplier or None,
        truncate=form.truncates_yarn,
    )


def _longrope(arch_fields: Fields, arch: str, header: GGUFHeader, max_seq_len: int) -> RopeScaling:
    """LongRoPE: two tensors hold the sets of factors; attn_factor is the paper's attention scale.

    Raises: UsageError for one set without the other, or with another kind of scaling.
    """
    kind = arch_fields.string(f"{arch}.rope.scaling.type", "longrope")
    has_both = _SHORT in header.tensors and _LONG in header.tensors
    if not has_both or kind not in ("longrope", "none"):
        raise UsageError(
            f"{arch}.rope.scaling.type={kind[:80]!r} with the factors of LongRoPE: only both "
            f"{_SHORT} and {_LONG}, with the type longrope or none, are supported"
        )
    trained = arch_fields.integer(f"{arch}.rope.scaling.original_context_length", max_seq_len)
    return RopeScaling(
        "longrope",
        max_seq_len / max(1, trained),
        trained,
        attention_factor=arch_fields.number(f"{arch}.{_RELATIVE_FACTOR}", 1.0),
        factors=_rope_factors(header, _SHORT),
        long_factors=_rope_factors(header, _LONG),
    )


def _yarn_attention_factor(arch_fields: Fields, arch: str, factor: float) -> float | None:
    """The scale of queries and keys under YaRN; None stands for YaRN's 1 + 0.1 ln(factor).

    The converter stores attention_factor, beta_fast and beta_slow of config.json under yarn_ keys
    with their meaning in transformers. llama.cpp does not read these keys for the architectures
    supported here, so its logits differ from transformers' for such files. The key attn_factor is
    relative: llama.cpp multiplies it by YaRN's own factor. The converter also stores attn_factor of
    config.json, which transformers ignores, under the key of attention_factor. A value below 1 is
    taken for such an attn_factor and ignored, because attention_factor is at least 1.

    Raises: UsageError if both keys are stated.
    """
    absolute = arch_fields.optional_number(f"{arch}.{_ABSOLUTE_FACTOR}")
    relative = arch_fields.number(f"{arch}.{_RELATIVE_FACTOR}", 1.0)
    if absolute is not None and absolute < 1 < factor:
        logger.warning("%s=%s is ignored, as in transformers", _ABSOLUTE_FACTOR, absolute)
        absolute = None
    if relative == 1:
        return absolute
    if absolute is not None:
        raise UsageError(
            f"{_RELATIVE_FACTOR}={relative} and {_ABSOLUTE_FACTOR}={absolute} cannot be combined; "
            "drop one"
        )
    return relative * (1 + 0.1 * math.log(max(factor, 1.0)))


def _rope_factors(header: GGUFHeader, name: str) -> tuple[float, ...]:
    tensor, path = header.tensors[name], header.files[name]
    if tensor.dtype != "F32" or len(tensor.shape) != 1:
        raise UsageError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; "
            "only one row of F32 is supported"
        )
    if tensor.shape[0] > MAX_SIZES["head_dim"]:
        raise UsageError(f"{name} has {tensor.shape[0]} values; at most {MAX_SIZES['head_dim']}")
    with open_file(path) as file:
        file.seek(tensor.offset)
        data = file.read(tensor.n_bytes)
    if len(data) != tensor.n_bytes:
        raise CheckpointError(f"{path}: the file ends inside {name}")
    return struct.unpack(f"<{tensor.shape[0]}f", data)
