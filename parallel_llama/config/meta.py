"""Reads Meta's and Mistral's params.json; writes Meta's, and the config.json beside it.

Meta's params.json cannot express tied embeddings, biases, the context, most rope scalings or the
head size, so `reshard` writes a config.json beside it. That file is HF's config.json with one more
key, which says that `reshard` wrote it: another config.json might not belong to the weights.

Mistral's params.json, which belongs to consolidated.safetensors, has mostly Meta's keys. It is
recognised by the key hidden_dim: Meta's file states the feed-forward width as a multiplier.
Source: TransformerArgs of mistral-inference.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from parallel_llama.config.hf import args_from_hf, hf_config, llama3_from_factors
from parallel_llama.errors import UsageError
from parallel_llama.families.llama import MISTRAL, MIXTRAL
from parallel_llama.families.model_args import ModelArgs, RopeScaling, features_of, head_size
from parallel_llama.files.fields import Fields

META_CONFIG_FORMAT = "parallel_llama meta 1"

_OWN_KEY = "parallel_llama"
_SHARED = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")

# Keys of params.json that configure Meta's or Mistral's program and do not change the model.
_PARAMS_IGNORED = {"max_batch_size"}
_PARAMS_KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier",
    "norm_eps", "rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor",
    "max_seq_len",
}  # fmt: skip
_PARAMS_REFUSED = {
    "quantization_args": "a quantised checkpoint; use the bfloat16 one",
    "lora_args": "LoRA weights beside a quantised checkpoint; use the bfloat16 one",
    "moe_args": "a mixture of experts, which is not a Llama 1 to 3 model",
    "vision_model": "an image model; only text is supported",
    "vision_args": "an image model; only text is supported",
    "vision_chunk_size": "an image model; only text is supported",
}

MAX_FFN_DIM_MULTIPLIER = 1000

# Features that `beyond_meta` skips: `family` has no effect, and biases have their own entry.
_UNLISTED = ("family", "wo_bias")

# (dim, n_layers) of Llama 3.2 1B and 3B. Their params.json looks like that of Llama 3.1, but they
# were trained with a factor of 32 (config.json of the same models at HF; with 8 they fail beyond
# 80k tokens, meta-llama/llama-models issues 166 and 241).
_LLAMA_3_2 = {(2048, 16), (3072, 28)}


def args_from_params(
    values: Mapping[str, Any], count_vocab: Callable[[], int] | None = None
) -> ModelArgs:
    """The arguments of Meta's params.json.

    Embeddings are never tied: Meta's folders of every Llama up to 3.2 store output.weight.

    Raises: UsageError as in `load_model_args`, and for vocab_size=-1 without `count_vocab`.
    """
    fields = Fields(values)
    fields.refuse(_PARAMS_REFUSED)
    fields.require_known(_PARAMS_KEYS | _PARAMS_IGNORED)
    dim, n_heads = fields.integer("dim"), fields.integer("n_heads")
    vocab_size = fields.integer("vocab_size", -1)
    if vocab_size == -1:
        if count_vocab is None:
            raise UsageError(
                "vocab_size=-1 is a placeholder; replace it with the number of rows of "
                "tok_embeddings.weight, 32000 for Llama 1 and 2"
            )
        vocab_size = count_vocab()
    return ModelArgs(
        dim=dim,
        n_layers=fields.integer("n_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.integer("n_kv_heads", n_heads),
        head_dim=head_size("dim", dim, "n_heads", n_heads),
        ffn_dim=meta_ffn_dim(
            dim, fields.integer("multiple_of", 256), fields.optional_number("ffn_dim_multiplier")
        ),
        vocab_size=vocab_size,
        norm_eps=fields.number("norm_eps", 1e-5),
        rope_theta=fields.number("rope_theta", 10000.0),
        rope_scaling=_meta_rope(fields, dim),
        max_seq_len=fields.integer("max_seq_len", _meta_context(fields)),
    )


def meta_ffn_dim(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """The feed-forward width of Meta's formula, which rounds down twice and then up.

    >>> meta_ffn_dim(4096, 256, None), meta_ffn_dim(4096, 1024, 1.3)
    (11008, 14336)
    """
    if multiple_of < 1:
        raise UsageError(f"multiple_of={multiple_of}: use 1 or more")
    hidden = int(2 * 4 * dim / 3)
    if multiplier is not None:
        if not 0 < multiplier <= MAX_FFN_DIM_MULTIPLIER:
            raise UsageError(
                f"ffn_dim_multiplier={multiplier}: use a number above 0, up to "
                f"{MAX_FFN_DIM_MULTIPLIER}"
            )
        hidden = int(multiplier * hidden)
    return -(-hidden // multiple_of) * multiple_of


def _meta_rope(fields: Fields, dim: int) -> RopeScaling | None:
    if not fields.flag("use_scaled_rope", False):
        return None
    default = meta_rope_scaling(dim, fields.integer("n_layers"))
    return replace(
        default,
        factor=fields.number("rope_scaling_factor", default.factor),
        high_freq_factor=fields.number("rope_high_freq_factor", default.high_freq_factor),
    )


def meta_rope_scaling(dim: int, n_layers: int) -> RopeScaling:
    """The scaling of use_scaled_rope; its numbers are constants in Meta's program."""
    factor = 32.0 if (dim, n_layers) in _LLAMA_3_2 else 8.0
    return RopeScaling("llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def _meta_context(fields: Fields) -> int:
    """The trained context, inferred from other keys because params.json does not state it.

    Llama 1 65B has the same keys as Llama 2; set max_seq_len in its params.json.
    """
    rope_theta = fields.number("rope_theta", 10000.0)
    if fields.flag("use_scaled_rope", False):
        return 131072  # Llama 3.1 and later
    if rope_theta == 500000:
        return 8192  # Llama 3
    if rope_theta == 1000000:
        return 16384  # Code Llama
    if fields.number("norm_eps", 1e-5) == 1e-6:
        return 2048  # Llama 1
    return 4096


def meta_params(args: ModelArgs) -> dict[str, Any]:
    """The content of params.json, with the keys that Meta's program accepts.

    There is no key for the context, which is an argument of Meta's program.

    Raises: UsageError for a feed-forward width that Meta's formula cannot express.
    """
    return {
        **{key: getattr(args, key) for key in _SHARED},
        "multiple_of": 1,
        "ffn_dim_multiplier": _ffn_dim_multiplier(args),
        "norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "use_scaled_rope": _is_meta_rope(args) and args.rope_scaling is not None,
    }


def beyond_meta(args: ModelArgs) -> list[str]:
    """The features of a model that params.json cannot express and Meta's program cannot compute."""
    scaling = args.rope_scaling
    others = {
        f"head_dim={args.head_dim} where dim / n_heads is {args.dim / args.n_heads:g}": (
            args.head_dim * args.n_heads != args.dim
        ),
        "biases of the attention": args.attention_bias or args.has_wo_bias,
        "biases of the feed-forward": args.mlp_bias,
        "a mixture of experts": args.n_experts > 0,
        f"{scaling.kind if scaling else 'no'} rope scaling": not _is_meta_rope(args),
    }
    features = {name: value for name, value in features_of(args).items() if name not in _UNLISTED}
    return [
        *(what for what, applies in others.items() if applies),
        *(f"{name}={value}" for name, value in features.items()),
    ]


def _ffn_dim_multiplier(args: ModelArgs) -> float:
    """A multiplier for which Meta's formula, with multiple_of=1, gives exactly `ffn_dim`."""
    base = meta_ffn_dim(args.dim, 1, None)
    # The plain ratio is easier to read, but rounding down may lose 1; adding a half avoids that.
    for multiplier in (args.ffn_dim / base, (args.ffn_dim + 0.5) / base):
        if (
            multiplier <= MAX_FFN_DIM_MULTIPLIER
            and meta_ffn_dim(args.dim, 1, multiplier) == args.ffn_dim
        ):
            return multiplier
    raise UsageError(
        f"ffn_dim={args.ffn_dim} and dim={args.dim}: params.json can state a width of at most "
        f"{MAX_FFN_DIM_MULTIPLIER} times {base}; use --format hf or native"
    )


def _is_meta_rope(args: ModelArgs) -> bool:
    """Whether params.json can express the rope scaling: none, or the one of Meta's program."""
    scaling = args.rope_scaling
    if scaling is None:
        return True
    if scaling.kind == "factors":
        scaling = llama3_from_factors(args, scaling.factors)
    return scaling == meta_rope_scaling(args.dim, args.n_layers)


def meta_config(args: ModelArgs) -> dict[str, Any]:
    """The content of config.json in a Meta folder.

    Raises: UsageError for a rope scaling that config.json cannot express.
    """
    origin = {"format": META_CONFIG_FORMAT, "beyond_params_json": beyond_meta(args)}
    return {**hf_config(args), _OWN_KEY: origin}


def is_meta_config(values: Mapping[str, Any]) -> bool:
    """Whether `reshard` wrote a config.json for the params.json beside it."""
    return isinstance(values.get(_OWN_KEY), dict)


def args_from_meta_config(values: Mapping[str, Any], params: Mapping[str, Any]) -> ModelArgs:
    """The arguments of config.json, checked against those of params.json.

    Raises: UsageError as in `args_from_hf`, for another format, or if the two files disagree.
    """
    version = Fields(Fields(values).mapping(_OWN_KEY)).string("format")
    if version != META_CONFIG_FORMAT:
        raise UsageError(f"the format {version[:80]!r} is not supported; {META_CONFIG_FORMAT!r} is")
    args = args_from_hf({key: value for key, value in values.items() if key != _OWN_KEY})
    for key in _SHARED:
        if (stated := params.get(key)) != getattr(args, key):
            raise UsageError(
                f"has {key}={getattr(args, key)}, but params.json has {str(stated)[:80]}; "
                "use the two files that were written together"
            )
    return args


_MISTRAL_KEYS = {
    "dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "norm_eps", "vocab_size",
    "rope_theta", "sliding_window", "moe", "use_biases", "tied_embeddings", "max_seq_len",
    "max_position_embeddings", "model_type",
}  # fmt: skip
_MISTRAL_REFUSED = {
    "lora": "LoRA weights beside the model's; use the merged model",
    "quantization": "a quantised checkpoint; use the unquantised model, or a GGUF file of it",
    "vision_encoder": "an image model; only text is supported",
    "multimodal": "an image or audio model; only text is supported",
}

# The context if params.json does not state one: that of 7B 0.1 to 0.3 and Mixtral 8x7B.
_MISTRAL_CONTEXT = 32768


def is_mistral_params(values: Mapping[str, Any]) -> bool:
    """Whether a params.json is Mistral's and not Meta's."""
    return "hidden_dim" in values


def args_from_mistral_params(values: Mapping[str, Any]) -> ModelArgs:
    """The arguments of Mistral's params.json.

    Raises: UsageError as in `load_model_args`.
    """
    fields = Fields(values)
    fields.refuse(_MISTRAL_REFUSED)
    fields.require_known(_MISTRAL_KEYS | _PARAMS_IGNORED)
    if fields.flag("use_biases", False):
        raise UsageError("use_biases=true is not supported; no Mistral model has biases")
    if (kind := fields.string("model_type", "transformer")) != "transformer":
        raise UsageError(f"model_type={kind[:80]!r} is not supported; only 'transformer' is")
    dim, n_heads = fields.integer("dim"), fields.integer("n_heads")
    head_dim = fields.optional_integer("head_dim")
    context = fields.integer("max_position_embeddings", _MISTRAL_CONTEXT)
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
        # 7B 0.1, which has a window, was the last with base 1e4.
        rope_theta=fields.number("rope_theta", 1e6 if window is None else 1e4),
        max_seq_len=max_seq_len,
        tied_embeddings=fields.flag("tied_embeddings", False),
        # A window at least as long as the context has no effect.
        sliding_window=None if window is None or window >= max_seq_len else window,
        n_experts=experts.integer("num_experts") if experts.values else 0,
        n_active_experts=experts.integer("num_experts_per_tok") if experts.values else 0,
        family=(MIXTRAL if experts.values else MISTRAL).name,
    )
