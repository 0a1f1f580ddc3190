"""Command R, R+ and Aya (cohere), Command R7B and A (cohere2): parallel blocks with one LayerNorm.

The norms have no biases, logits are scaled, and embeddings are tied. In Command R+ each head
has its own LayerNorm weights for query and key. Cohere 2 has a sliding window in three of
four layers; the other layers have no rotary embeddings.

Source: CohereConfig and Cohere2Config of transformers 5.24; command-r and cohere2 of llama.cpp. All
files have Meta's order of rows.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import INTERLEAVED, Family, GGUFForm, every_nth, layer_types
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import QK_NORM_NAMES, names_with
from parallel_llama.files.fields import Fields

_BIAS, _SCALE, _NORM, _LENGTH = "attention_bias", "logit_scale", "use_qk_norm", "model_max_length"
_POSITIONS, _SUPPORTED_POSITIONS = "position_embedding_type", "rope_gptj"
_PATTERN, _WINDOW, _DEFAULT_WINDOW = "sliding_window_pattern", "sliding_window", 4096
_WINDOW_IN_GGUF, _PATTERN_IN_GGUF = f"attention.{_WINDOW}", f"attention.{_PATTERN}"
_BLOCK = {"norm": "layer", "parallel_block": True, "shared_norm": True}


def _qk_norms(has_norms: bool) -> dict[str, Any]:
    return {"qk_norm": has_norms, "qk_layer_norm": has_norms}


def _shared_features(fields: Fields) -> dict[str, Any]:
    return {
        **_BLOCK,
        "attention_bias": fields.flag(_BIAS, False),
        "logit_scale": fields.number(_SCALE, 0.0625),
    }


def _features(fields: Fields) -> dict[str, Any]:
    """The features of Cohere 1; model_max_length overrides max_position_embeddings."""
    default = fields.integer("max_position_embeddings", 8192)
    return {
        **_shared_features(fields),
        **_qk_norms(fields.flag(_NORM, False)),
        "max_seq_len": fields.integer(_LENGTH, default),
    }


def _full_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    return every_nth(fields.integer(_PATTERN, 4), _PATTERN, n_layers)


def _unrotated_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """The layers that attend to all keys."""
    if fields.values.get(_WINDOW, _DEFAULT_WINDOW) is None:
        return tuple(range(n_layers))
    if kinds := fields.strings("layer_types"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return _full_layers(fields, n_layers)


def _cohere2_features(fields: Fields) -> dict[str, Any]:
    n_layers = fields.integer("num_hidden_layers")
    if (positions := fields.string(_POSITIONS, _SUPPORTED_POSITIONS)) != _SUPPORTED_POSITIONS:
        raise UsageError(
            f"{_POSITIONS}={positions[:80]!r}: only {_SUPPORTED_POSITIONS!r} is supported"
        )
    return {**_shared_features(fields), "unrotated_layers": _unrotated_layers(fields, n_layers)}


def _gguf_features(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    return {
        **_BLOCK,
        # llama.cpp does not scale for a missing key or 0.
        "logit_scale": fields.number("command-r.logit_scale", 0.0) or 1.0,
        **_qk_norms("blk.0.attn_q_norm.weight" in names),
    }


def _cohere2_gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    n_layers, window = (fields.integer(f"cohere2.{k}") for k in ("block_count", _WINDOW_IN_GGUF))
    key = f"cohere2.{_PATTERN_IN_GGUF}"
    full = every_nth(fields.integer(key, 4), key, n_layers)
    hides_nothing = not full and window >= fields.integer("cohere2.context_length")
    windows = (
        {} if hides_nothing or len(full) == n_layers else {_WINDOW: window, "full_layers": full}
    )
    return {
        **_BLOCK,
        "logit_scale": fields.number("cohere2.logit_scale", 0.0) or 1.0,
        "unrotated_layers": full,
        **windows,
    }


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {_BIAS: args.attention_bias, _SCALE: args.logit_scale, _NORM: args.qk_norm}


def _cohere2_writes(args: ModelArgs) -> dict[str, Any]:
    # transformers rotates only layers with a window. So a window that hides no key is written too.
    is_full = args.sliding_window is None and not args.unrotated_layers
    kinds = ["sliding_attention"] * args.n_layers if is_full else layer_types(args)
    return {
        _BIAS: args.attention_bias,
        _SCALE: args.logit_scale,
        _WINDOW: args.sliding_window or args.max_seq_len,
        "layer_types": kinds,
    }


def _gguf_writes(args: ModelArgs) -> dict[str, Any]:
    kind = {} if args.rope_scaling else {"rope.scaling.type": "none"}
    return {_SCALE: float(args.logit_scale), **kind}


COHERE = Family(
    name="cohere",
    models="Command R, R+, and Aya 23 and Expanse",
    architecture="CohereForCausalLM",
    base_architecture="CohereModel",
    reads=frozenset({_BIAS, _SCALE, _NORM, _LENGTH}),
    features=_features,
    writes=_writes,
    keys={"norm_eps": "layer_norm_eps"},
    defaults={
        "max_seq_len": 8192,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tied_embeddings": True,
    },
    names=names_with(*QK_NORM_NAMES),
    gguf=GGUFForm(
        "command-r",
        _gguf_features,
        frozenset({_SCALE}),
        has_layer_norm=True,
        writes=_gguf_writes,
    ),
    rotary_order=INTERLEAVED,
)

COHERE2 = Family(
    name="cohere2",
    models="Command R7B and A, and Tiny Aya",
    architecture="Cohere2ForCausalLM",
    base_architecture="Cohere2Model",
    # use_parallel_embedding is a setting of Cohere's own program.
    reads=frozenset({_BIAS, _SCALE, _PATTERN, _POSITIONS, "use_parallel_embedding"}),
    features=_cohere2_features,
    writes=_cohere2_writes,
    keys={"norm_eps": "layer_norm_eps", "head_dim": ""},
    full_layers=_full_layers,
    defaults={
        "max_seq_len": 8192,
        "norm_eps": 1e-5,
        "tied_embeddings": True,
        _WINDOW: _DEFAULT_WINDOW,
    },
    gguf=GGUFForm(
        "cohere2",
        _cohere2_gguf_features,
        frozenset({_SCALE, _WINDOW_IN_GGUF, _PATTERN_IN_GGUF}),
        has_layer_norm=True,
        writes=lambda args: {
            **_gguf_writes(args),
            _WINDOW_IN_GGUF: args.sliding_window or args.max_seq_len,
        },
    ),
    rotary_order=INTERLEAVED,
)
