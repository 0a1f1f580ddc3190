"""config.json of a Llama, written from ModelArgs: the way back of `hf_config`."""

import math
from typing import Any

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.model_args import ModelArgs, RopeScaling
from parallel_llama.errors import UsageError

# Trained contexts that llama3 scaling is looked for with; Llama 3.1 to 3.3 were trained on 8192.
_TRAINED_CONTEXTS = tuple(1 << power for power in range(13, 4, -1)) + tuple(
    1 << power for power in range(14, 21)
)
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0

# GGUF files carry factors computed in float32; those of another trained context are far from them.
_SAME_FACTOR = 1e-4


def hf_config(args: ModelArgs, ids: GenerationDefaults | None = None) -> dict[str, Any]:
    """The content of config.json, in the form that transformers 4 and 5 both read.

    Raises: UsageError for a rope scaling that config.json has no words for.
    """
    ids = ids or GenerationDefaults()
    eos = list(ids.eos_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "intermediate_size": args.ffn_dim,
        "vocab_size": args.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": _rope_scaling(args),
        "max_position_embeddings": args.max_seq_len,
        "tie_word_embeddings": args.tied_embeddings,
        "attention_bias": args.attention_bias,
        "mlp_bias": args.mlp_bias,
        "bos_token_id": ids.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": args.dtype,
    }


def llama3_from_factors(args: ModelArgs, factors: tuple[float, ...]) -> RopeScaling:
    """The llama3 scaling that gives these factors, which GGUF files carry in its place.

    Raises: UsageError if there is none.
    """
    for trained in _TRAINED_CONTEXTS:
        scaling = RopeScaling("llama3", factors[-1], trained, _LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR)
        expected = _llama3_factors(args, scaling)
        if all(
            math.isclose(factor, other, rel_tol=_SAME_FACTOR)
            for factor, other in zip(factors, expected, strict=True)
        ):
            return scaling
    raise UsageError(
        f"its {len(factors)} rotary factors (rope_freqs.weight) are not those of llama3 scaling, "
        "and config.json has no words for others; use --format native"
    )


def _rope_scaling(args: ModelArgs) -> dict[str, Any] | None:
    scaling = args.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        scaling = llama3_from_factors(args, scaling.factors)
    if scaling is None:
        return None
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "dynamic" and scaling.original_max_seq_len != args.max_seq_len:
        raise UsageError(
            f"dynamic rope scaling from a context of {scaling.original_max_seq_len} in a model of "
            f"{args.max_seq_len}: config.json has no words for it; use --format native"
        )
    if scaling.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        rope["low_freq_factor"] = scaling.low_freq_factor
        rope["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        rope["beta_fast"], rope["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        rope["truncate"] = scaling.truncate
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if (value := getattr(scaling, key)) is not None:
                rope[key] = value
    return rope


def _llama3_factors(args: ModelArgs, scaling: RopeScaling) -> list[float]:
    """By what each rotary frequency is divided, as Meta's program computes it."""
    assert scaling.original_max_seq_len is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    factors = []
    for pair in range(args.head_dim // 2):
        wavelength = 2 * math.pi * args.rope_theta ** (2 * pair / args.head_dim)
        turns = scaling.original_max_seq_len / wavelength
        share = min(1.0, max(0.0, (turns - low) / (high - low)))  # of the frequency left as it is
        factors.append(1 / ((1 - share) / scaling.factor + share))
    return factors
