"""EXAONE 4: norms of queries and keys, and of the outputs of attention and feed-forward.

Inputs of attention and feed-forward are not normalised. If some layers have a sliding window, the
others have no rotary embeddings.

Source: Exaone4Config of transformers 5.24; arXiv 2507.11407; llama.cpp's exaone4.
"""

from collections.abc import Collection
from typing import Any

from parallel_llama.errors import UsageError, shown
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

_PATTERN, _WINDOW, _DEFAULT_WINDOW = "sliding_window_pattern", "sliding_window", 4096
_WINDOW_IN_GGUF, _PATTERN_IN_GGUF = f"attention.{_WINDOW}", f"attention.{_PATTERN}"
_NORMS = {"qk_norm": True, "pre_norms": False, "post_norms": True}


def _full_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """The layers without a window: every n-th, by default the fourth, or the Gs of a pattern LLLG.

    With a pattern of letters, the last layer never has a window.
    """
    pattern = fields.values.get(_PATTERN, 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        full = {layer for layer in range(n_layers) if pattern[layer % len(pattern)] == "G"}
        return tuple(sorted(full | {n_layers - 1}))
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return tuple(range(pattern - 1, n_layers, pattern))
    raise UsageError(f"{_PATTERN}={shown(pattern)}: use a number above 0, or letters L and G")


def _unrotated_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """The layers that attend to all keys if the model has a window, else none."""
    if fields.values.get(_WINDOW, _DEFAULT_WINDOW) is None:
        return ()
    if kinds := fields.strings("layer_types"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return _full_layers(fields, n_layers)


def _gguf_features(fields: Fields, _names: Collection[str]) -> dict[str, Any]:
    n_layers = fields.integer("exaone4.block_count")
    window = fields.integer(f"exaone4.{_WINDOW_IN_GGUF}", _DEFAULT_WINDOW if n_layers == 64 else 0)
    if not window:
        return _NORMS
    layers = gguf_full_layers(fields, "exaone4", n_layers)
    windows = {} if len(layers) == n_layers else {_WINDOW: window, "full_layers": layers}
    return {**_NORMS, **windows, "unrotated_layers": layers}


def _writes(args: ModelArgs) -> dict[str, Any]:
    # transformers rotates full layers only if sliding_window is null. So a window is written even
    # if no layer uses it.
    window = args.max_seq_len if args.unrotated_layers else None
    return {_WINDOW: args.sliding_window or window, "layer_types": layer_types(args)}


EXAONE4 = Family(
    name="exaone4",
    models="EXAONE 4",
    architecture="Exaone4ForCausalLM",
    base_architecture="Exaone4Model",
    reads=frozenset({_PATTERN}),
    features=lambda fields: {
        **_NORMS,
        "unrotated_layers": _unrotated_layers(fields, fields.integer("num_hidden_layers")),
    },
    writes=_writes,
    full_layers=_full_layers,
    defaults={"norm_eps": 1e-5, "n_kv_heads": 32, _WINDOW: _DEFAULT_WINDOW},
    names=names_with(*POST_NORM_NAMES, *QK_NORM_NAMES),
    gguf=GGUFForm("exaone4", _gguf_features, frozenset({_WINDOW_IN_GGUF, _PATTERN_IN_GGUF})),
    rotary_order=HALF_IN_GGUF,
)
