"""Meta's params.json, written from ModelArgs: the way back of `params_json`.

Its keys cannot say everything that ModelArgs can; `beyond_meta` lists what they leave out, and
config.json beside it says it.
"""

from typing import Any

from parallel_llama.config.hf_writing import llama3_from_factors
from parallel_llama.config.model_args import ModelArgs
from parallel_llama.config.params_json import (
    MAX_FFN_DIM_MULTIPLIER,
    meta_ffn_dim,
    meta_rope_scaling,
)
from parallel_llama.errors import UsageError


def meta_params(args: ModelArgs) -> dict[str, Any]:
    """The content of params.json, in the keys that Meta's own program takes.

    The context is not among them: Meta's program is told it when it starts.

    Raises: UsageError for a width of the feed-forward that Meta's formula cannot give.
    """
    return {
        "dim": args.dim,
        "n_layers": args.n_layers,
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_kv_heads,
        "vocab_size": args.vocab_size,
        "multiple_of": 1,
        "ffn_dim_multiplier": _ffn_dim_multiplier(args),
        "norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "use_scaled_rope": _is_meta_rope(args) and args.rope_scaling is not None,
    }


def beyond_meta(args: ModelArgs) -> list[str]:
    """What of a model params.json cannot say and Meta's own program cannot compute."""
    scaling = args.rope_scaling
    told = {
        f"head_dim={args.head_dim} where dim / n_heads is {args.dim / args.n_heads:g}": (
            args.head_dim * args.n_heads != args.dim
        ),
        "biases of the attention": args.attention_bias,
        "biases of the feed-forward": args.mlp_bias,
        f"{scaling.kind if scaling else 'no'} rope scaling": not _is_meta_rope(args),
    }
    return [what for what, is_so in told.items() if is_so]


def _ffn_dim_multiplier(args: ModelArgs) -> float:
    """A multiplier from which Meta's formula, with a multiple of 1, gives exactly `ffn_dim`."""
    base = meta_ffn_dim(args.dim, 1, None)
    # The plain ratio reads best; rounded down it may miss by one, and a half more cannot.
    for multiplier in (args.ffn_dim / base, (args.ffn_dim + 0.5) / base):
        if (
            multiplier <= MAX_FFN_DIM_MULTIPLIER
            and meta_ffn_dim(args.dim, 1, multiplier) == args.ffn_dim
        ):
            return multiplier
    raise UsageError(
        f"ffn_dim={args.ffn_dim} and dim={args.dim}: params.json states it as a multiple of "
        f"{base} of at most {MAX_FFN_DIM_MULTIPLIER}; use --format hf or native"
    )


def _is_meta_rope(args: ModelArgs) -> bool:
    """Whether params.json can say the rope scaling: none, or the one in Meta's own program."""
    scaling = args.rope_scaling
    if scaling is None:
        return True
    if scaling.kind == "factors":
        scaling = llama3_from_factors(args, scaling.factors)
    return scaling == meta_rope_scaling(args.dim, args.n_layers)
