"""Phi-3, Phi-3.5 and Phi-4 (also mini): Llama with fused weights, and LongRoPE for long contexts.

Phi-4-mini rotates three quarters of each head.

Source: Phi3Config of transformers 5.24; arXiv 2404.14219; LongRoPE, arXiv 2402.13753; llama.cpp's
phi3, which ignores the window that its files state.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import (
    HALF_IN_GGUF,
    ROTARY_PART,
    Family,
    GGUFForm,
    every_layer_has_the_window,
    rope_fields,
    rotary_dim_of,
    written_rotary_part,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import in_layers, names_with
from parallel_llama.files.fields import Fields

_WINDOW_IN_GGUF = "attention.sliding_window"
_TRAINED = "original_max_position_embeddings"


def _features(fields: Fields) -> dict[str, Any]:
    rope = rope_fields(fields)
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind not in ("default", "longrope", "su"):
        raise UsageError(
            f"rope_type={kind[:80]!r} is not supported in 'phi3', only 'default' and 'longrope'"
        )
    return {"rotary_dim": rotary_dim_of(fields, 1.0)}


def _gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    window = fields.integer(f"phi3.{_WINDOW_IN_GGUF}", 0)
    is_used = 0 < window < fields.integer("phi3.context_length")
    return {"sliding_window": window} if is_used else {}


def _writes(args: ModelArgs) -> dict[str, Any]:
    scaling = args.rope_scaling
    trained = args.max_seq_len if scaling is None else scaling.original_max_seq_len
    return {**written_rotary_part(args), _TRAINED: trained}


PHI3 = Family(
    name="phi3",
    models="Phi-3, 3.5, 4, and Phi-4-mini",
    architecture="Phi3ForCausalLM",
    base_architecture="Phi3Model",
    reads=frozenset({ROTARY_PART}),
    features=_features,
    writes=_writes,
    full_layers=every_layer_has_the_window,
    defaults={
        "max_seq_len": 4096,
        "original_max_seq_len": 4096,
        "norm_eps": 1e-5,
        "sliding_window": None,
    },
    names=names_with(
        *in_layers(
            ("attention.wq.*", "self_attn.qkv_proj.*", "attn_qkv.*"),
            ("attention.wk.*", "self_attn.qkv_proj.*", "attn_qkv.*"),
            ("attention.wv.*", "self_attn.qkv_proj.*", "attn_qkv.*"),
            ("feed_forward.w1.*", "mlp.gate_up_proj.*", "ffn_up.*"),
            ("feed_forward.w3.*", "mlp.gate_up_proj.*", "ffn_up.*"),
        )
    ),
    gguf=GGUFForm("phi3", _gguf_features, frozenset({_WINDOW_IN_GGUF}), rotates_part=True),
    rotary_order=HALF_IN_GGUF,
)
