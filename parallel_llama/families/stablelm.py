"""StableLM: Llama with LayerNorm, and with a quarter of each head rotated.

Blocks may compute attention and feed-forward in parallel, after one norm. StableLM 2 12B, which has
norms of queries and keys, is not supported.

Source: StableLmConfig of transformers 5.24; arXiv 2402.17834; llama.cpp's stablelm.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.families.family import (
    HALF_IN_GGUF,
    ROTARY_PART,
    Family,
    GGUFForm,
    rotary_dim_of,
    written_rotary_part,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import NORM_BIAS_NAMES, names_with
from parallel_llama.files.fields import Fields

_BIAS, _PARALLEL = "use_qkv_bias", "use_parallel_residual"
_NORM = {"norm": "layer", "norm_bias": True}


def _features(fields: Fields) -> dict[str, Any]:
    is_parallel = fields.flag(_PARALLEL, False)
    return {
        **_NORM,
        "attention_bias": fields.flag(_BIAS, False),
        "wo_bias": False,
        "parallel_block": is_parallel,
        "shared_norm": is_parallel,
        "rotary_dim": rotary_dim_of(fields, 0.25),
    }


def _gguf_features(_fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """As in llama.cpp, blocks are parallel if the second norm is missing.

    llama.cpp does not read use_parallel_residual.
    """
    is_parallel = "blk.0.ffn_norm.weight" not in names
    return {
        **_NORM,
        "parallel_block": is_parallel,
        "shared_norm": is_parallel,
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {
        _BIAS: args.attention_bias,
        _PARALLEL: args.parallel_block,
        **written_rotary_part(args),
    }


STABLELM = Family(
    name="stablelm",
    models="StableLM 1 and 2",
    architecture="StableLmForCausalLM",
    base_architecture="StableLmModel",
    reads=frozenset({ROTARY_PART, _BIAS, _PARALLEL}),
    features=_features,
    writes=_writes,
    keys={"norm_eps": "layer_norm_eps", "head_dim": ""},
    defaults={"max_seq_len": 4096, "norm_eps": 1e-5, "n_kv_heads": 32},
    names=names_with(*NORM_BIAS_NAMES),
    gguf=GGUFForm(
        "stablelm",
        _gguf_features,
        frozenset({_PARALLEL}),
        has_layer_norm=True,
        rotates_part=True,
    ),
    rotary_order=HALF_IN_GGUF,
)
