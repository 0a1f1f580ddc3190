"""Gemma 1, 2 and 3 (text): GEGLU, norms with weight + 1, scaled embeddings.

Gemma 2 alternates layers with and without a sliding window, caps scores and logits, and normalises
the outputs of attention and feed-forward. Gemma 3 replaces the caps by norms of queries and keys,
and has a separate rotary base in layers with a window.

Source: arXiv 2403.08295, 2408.00118 and 2503.19786; the configurations of transformers 5.23.
"""

from collections.abc import Collection, Iterable
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import (
    HALF_IN_GGUF,
    LLAVA_PARTS,
    Family,
    GGUFForm,
    every_second,
    layer_types,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import POST_NORM_NAMES, QK_NORM_NAMES, names_with
from parallel_llama.files.fields import Fields

_READS = frozenset({"attention_bias"})
_SCALAR, _ATTENTION_CAP = "query_pre_attn_scalar", "attn_logit_softcapping"
_LOGIT_CAP, _LOCAL_THETA = "final_logit_softcapping", "rope_local_base_freq"
_WINDOW_IN_GGUF = "attention.sliding_window"
_LOCAL_THETA_IN_GGUF = "rope.freq_base_swa"
_CAPS_IN_GGUF = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
# The activation of GGUF files, and of config.json by default.
_TANH = {"activation": "gelu_tanh"}


def _arithmetic(dim: int) -> dict[str, Any]:
    return {"norm_offset": 1.0, "embedding_scale": dim**0.5}


def _features(fields: Fields) -> dict[str, Any]:
    return {
        **_arithmetic(fields.integer("hidden_size")),
        "attention_bias": fields.flag("attention_bias", False),
    }


def _gemma_features(fields: Fields) -> dict[str, Any]:
    # As in transformers, gelu means gelu_pytorch_tanh, which the first files meant.
    is_tanh = fields.string("hidden_act", "gelu") == "gelu"
    return {**_features(fields), **(_TANH if is_tanh else {})}


def _scale(fields: Fields) -> float:
    scalar = fields.number(_SCALAR, 256)
    if scalar <= 0:
        raise UsageError(f"{_SCALAR}={scalar:g}: use a number above 0, such as 256")
    return float(scalar**-0.5)


def _shared_features(fields: Fields) -> dict[str, Any]:
    return {
        **_features(fields),
        **({} if fields.has("hidden_activation") else _TANH),
        "post_norms": True,
        "attention_scale": _scale(fields),
    }


def _gemma2_features(fields: Fields) -> dict[str, Any]:
    def cap(key: str, default: float) -> float | None:
        return fields.number(key, default) if fields.values.get(key, default) else None

    return {
        **_shared_features(fields),
        "attention_soft_cap": cap(_ATTENTION_CAP, 50.0),
        "logit_soft_cap": cap(_LOGIT_CAP, 30.0),
    }


def _gemma3_features(fields: Fields) -> dict[str, Any]:
    # transformers 5 stores the rotary bases of both kinds of layers under rope_parameters.
    local = Fields(Fields(fields.mapping("rope_parameters")).mapping("sliding_attention"))
    return {
        **_shared_features(fields),
        "qk_norm": True,
        "logit_soft_cap": fields.optional_number(_LOGIT_CAP),
        "local_rope_theta": local.number("rope_theta", fields.number(_LOCAL_THETA, 10000.0)),
    }


def _every_sixth(fields: Fields, n_layers: int) -> Iterable[int]:
    step = fields.integer("sliding_window_pattern", 6)
    return range(step - 1, n_layers, step) if step > 0 else range(n_layers)


def _gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    return {**_TANH, **_arithmetic(fields.integer("gemma.embedding_length"))}


def _shared_gguf_features(fields: Fields, arch: str, n_layers_27b: int) -> dict[str, Any]:
    """Features of Gemma 2 and 3. Only the 27B models do not scale by the head size."""
    dim, n_heads = (
        fields.integer(f"{arch}.{key}") for key in ("embedding_length", "attention.head_count")
    )
    is_27b = fields.integer(f"{arch}.block_count") == n_layers_27b
    head_dim = fields.integer(f"{arch}.attention.key_length", dim // max(1, n_heads))
    if is_27b or head_dim < 1:
        head_dim = max(1, dim // max(1, n_heads))
    return {**_TANH, **_arithmetic(dim), "post_norms": True, "attention_scale": head_dim**-0.5}


def _gemma2_gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    n_layers = fields.integer("gemma2.block_count")
    return {
        **_shared_gguf_features(fields, "gemma2", 46),
        "attention_soft_cap": fields.number("gemma2.attn_logit_softcapping", 50.0) or None,
        "logit_soft_cap": fields.number("gemma2.final_logit_softcapping", 30.0) or None,
        **_gguf_window(fields, "gemma2", 4096, every_second(Fields({}), n_layers)),
    }


def _gemma3_gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    n_layers = fields.integer("gemma3.block_count")
    window = _gguf_window(fields, "gemma3", 0, _every_sixth(Fields({}), n_layers))
    if window:
        window["local_rope_theta"] = fields.number(f"gemma3.{_LOCAL_THETA_IN_GGUF}", 10000.0)
    return {
        **_shared_gguf_features(fields, "gemma3", 62),
        "qk_norm": True,
        "logit_soft_cap": fields.number("gemma3.final_logit_softcapping", 0.0) or None,
        **window,
    }


def _gguf_window(fields: Fields, arch: str, default: int, full: Iterable[int]) -> dict[str, Any]:
    """The window and the layers without it; empty if the window is the context in all layers."""
    window, full_layers = fields.integer(f"{arch}.{_WINDOW_IN_GGUF}", default), tuple(full)
    if not window or (not full_layers and window >= fields.integer(f"{arch}.context_length")):
        return {}
    return {"sliding_window": window, "full_layers": full_layers}


def _shared_gguf_writes(args: ModelArgs) -> dict[str, Any]:
    return {
        "final_logit_softcapping": args.logit_soft_cap or 0.0,
        _WINDOW_IN_GGUF: args.sliding_window or 0,
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias}


def _shared_writes(args: ModelArgs) -> dict[str, Any]:
    assert args.attention_scale is not None
    scalar = round(args.attention_scale**-2, 6)
    return {
        **_writes(args),
        _SCALAR: int(scalar) if scalar.is_integer() else scalar,
        _ATTENTION_CAP: args.attention_soft_cap,
        _LOGIT_CAP: args.logit_soft_cap,
        "layer_types": layer_types(args),
        # transformers needs a number even if no layer has a window.
        "sliding_window": args.sliding_window or args.max_seq_len,
    }


GEMMA = Family(
    name="gemma",
    models="Gemma",
    architecture="GemmaForCausalLM",
    base_architecture="GemmaModel",
    reads=_READS | {"hidden_activation"},
    features=_gemma_features,
    writes=_writes,
    defaults={"max_seq_len": 8192, "head_dim": 256, "n_kv_heads": 16, "tied_embeddings": True},
    gguf=GGUFForm("gemma", _gguf_features, writes=lambda _: {}),
    rotary_order=HALF_IN_GGUF,
)

GEMMA2 = Family(
    name="gemma2",
    models="Gemma 2",
    architecture="Gemma2ForCausalLM",
    base_architecture="Gemma2Model",
    reads=_READS | {"hidden_activation", _SCALAR, _ATTENTION_CAP, _LOGIT_CAP},
    features=_gemma2_features,
    writes=_shared_writes,
    keys={"activation": "hidden_activation"},
    full_layers=every_second,
    defaults={**GEMMA.defaults, "n_kv_heads": 4, "sliding_window": 4096},
    names=names_with(*POST_NORM_NAMES),
    gguf=GGUFForm(
        "gemma2",
        _gemma2_gguf_features,
        _CAPS_IN_GGUF | {_WINDOW_IN_GGUF},
        writes=lambda args: {
            "attn_logit_softcapping": args.attention_soft_cap or 0.0,
            **_shared_gguf_writes(args),
        },
    ),
    rotary_order=GEMMA.rotary_order,
)

GEMMA3 = Family(
    name="gemma3_text",
    models="Gemma 3 (text)",
    architecture="Gemma3ForCausalLM",
    base_architecture="Gemma3TextModel",
    # transformers ignores attn_logit_softcapping for Gemma 3, so it is refused if set.
    reads=GEMMA2.reads - {_ATTENTION_CAP} | {_LOCAL_THETA, "sliding_window_pattern"},
    features=_gemma3_features,
    writes=lambda args: {**_shared_writes(args), _LOCAL_THETA: args.local_rope_theta},
    keys=GEMMA2.keys,
    full_layers=_every_sixth,
    has_local_rope=True,
    # The published 4B has no key for the first two.
    defaults={
        **GEMMA2.defaults,
        "n_heads": 8,
        "vocab_size": 262208,
        "max_seq_len": 131072,
        "rope_theta": 1000000.0,
    },
    multimodal="gemma3",
    **LLAVA_PARTS,
    names=names_with(*POST_NORM_NAMES, *QK_NORM_NAMES),
    gguf=GGUFForm(
        "gemma3",
        _gemma3_gguf_features,
        frozenset({"final_logit_softcapping", _WINDOW_IN_GGUF, _LOCAL_THETA_IN_GGUF}),
        writes=lambda args: {
            _LOCAL_THETA_IN_GGUF: args.local_rope_theta or args.rope_theta,
            **_shared_gguf_writes(args),
        },
    ),
    rotary_order=GEMMA.rotary_order,
)
