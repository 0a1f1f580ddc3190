"""OLMo 2 and 3: norms after attention and feed-forward only, and of queries and keys across heads.

OLMo 3 has a sliding window in three of four layers; rope scaling applies to the other layers only.

Source: Olmo2Config and Olmo3Config of transformers 5.24; arXiv 2501.00656; llama.cpp's olmo2.
"""

from collections.abc import Collection, Iterable
from typing import Any

from parallel_llama.families.family import (
    HALF_IN_GGUF,
    Family,
    GGUFForm,
    gguf_full_layers,
    layer_types,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import POST_NORM_NAMES, QK_NORM_NAMES, names_with
from parallel_llama.files.fields import Fields

_NORMS = {
    "qk_norm": True,
    "qk_norm_across_heads": True,
    "pre_norms": False,
    "post_norms": True,
}
_THETA = 500000.0
# llama.cpp has one architecture for both, and OLMo 3 has these keys.
_ARCHITECTURE, _WINDOW = "olmo2", "attention.sliding_window"
_PATTERN, _LOCAL_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"


def _features(fields: Fields) -> dict[str, Any]:
    return {**_NORMS, "attention_bias": fields.flag("attention_bias", False)}


def _olmo3_features(fields: Fields) -> dict[str, Any]:
    # As in transformers, the key rope_theta applies to the layers without a window only.
    local = Fields(Fields(fields.mapping("rope_parameters")).mapping("sliding_attention"))
    return {**_features(fields), "local_rope_theta": local.number("rope_theta", _THETA)}


def _every_fourth(_fields: Fields, n_layers: int) -> Iterable[int]:
    return range(3, n_layers, 4)


def _olmo3_gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    n_layers = fields.integer(f"{_ARCHITECTURE}.block_count")
    theta = fields.number(f"{_ARCHITECTURE}.rope.freq_base", 10000.0)
    full = gguf_full_layers(fields, _ARCHITECTURE, n_layers)
    window = fields.integer(f"{_ARCHITECTURE}.{_WINDOW}")
    if window < 1 or len(full) == n_layers:
        return _NORMS
    local = fields.number(f"{_ARCHITECTURE}.{_LOCAL_THETA}", theta)
    return {**_NORMS, "local_rope_theta": local, "sliding_window": window, "full_layers": full}


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias}


def _olmo3_writes(args: ModelArgs) -> dict[str, Any]:
    local = args.rope_theta if args.local_rope_theta is None else args.local_rope_theta
    return {
        **_writes(args),
        "layer_types": layer_types(args),
        # transformers needs a number even if no layer has a window.
        "sliding_window": args.sliding_window or args.max_seq_len,
        # transformers adds the key rope_scaling to the object full_attention.
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": args.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


OLMO2 = Family(
    name="olmo2",
    models="OLMo 2",
    architecture="Olmo2ForCausalLM",
    base_architecture="Olmo2Model",
    reads=frozenset({"attention_bias"}),
    features=_features,
    writes=_writes,
    defaults={"norm_eps": 1e-5},
    names=names_with(*POST_NORM_NAMES, *QK_NORM_NAMES),
    gguf=GGUFForm(_ARCHITECTURE, lambda *_: _NORMS),
    rotary_order=HALF_IN_GGUF,
)

OLMO3 = Family(
    name="olmo3",
    models="OLMo 3",
    architecture="Olmo3ForCausalLM",
    base_architecture="Olmo3Model",
    reads=OLMO2.reads,
    features=_olmo3_features,
    writes=_olmo3_writes,
    full_layers=_every_fourth,
    has_local_rope=True,
    defaults={"norm_eps": 1e-5, "rope_theta": _THETA, "sliding_window": 4096},
    names=OLMO2.names,
    gguf=GGUFForm(
        _ARCHITECTURE,
        _olmo3_gguf_features,
        reads=frozenset({_WINDOW, _PATTERN, _LOCAL_THETA}),
        needs=_WINDOW,
    ),
    rotary_order=HALF_IN_GGUF,
)
