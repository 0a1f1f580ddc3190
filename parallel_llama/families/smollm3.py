"""SmolLM3: Llama without rotary embeddings in every fourth layer.

config.json may also give a sliding window to the layers without rotary embeddings.

Source: SmolLM3Config of transformers 5.24; NoPE, arXiv 2305.19466; llama.cpp's smollm3, in which
every fourth layer has none.
"""

from collections.abc import Iterable
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families.family import (
    BIASES,
    Family,
    GGUFForm,
    biases,
    layer_types,
    written_biases,
)
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.files.fields import Fields

_ROTATED, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def _unrotated_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """The layers with 0 in no_rope_layers; despite the key's name, 1 means a rotated layer."""
    if not fields.has(_ROTATED):
        if (interval := fields.integer(_INTERVAL, 4)) < 1:
            raise UsageError(f"{_INTERVAL}={interval}: use 1 or more")
        return tuple(range(interval - 1, n_layers, interval))
    rotated = fields.integers(_ROTATED)
    if len(rotated) < n_layers:
        raise UsageError(
            f"{_ROTATED} has {len(rotated)} entries and num_hidden_layers={n_layers}; "
            "use the config.json that belongs to the weights"
        )
    return tuple(layer for layer in range(n_layers) if not rotated[layer])


def _features(fields: Fields) -> dict[str, Any]:
    return {
        **biases(fields),
        "unrotated_layers": _unrotated_layers(fields, fields.integer("num_hidden_layers")),
    }


def _full_layers(fields: Fields, n_layers: int) -> Iterable[int]:
    return sorted(set(range(n_layers)) - set(_unrotated_layers(fields, n_layers)))


def _writes(args: ModelArgs) -> dict[str, Any]:
    return {
        **written_biases(args),
        _ROTATED: [int(layer not in args.unrotated_layers) for layer in range(args.n_layers)],
        "use_sliding_window": args.sliding_window is not None,
        "layer_types": layer_types(args),
    }


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    base_architecture="SmolLM3Model",
    reads=BIASES | {_ROTATED, _INTERVAL, "use_sliding_window"},
    features=_features,
    writes=_writes,
    full_layers=_full_layers,
    window_switch="use_sliding_window",
    defaults={
        "max_seq_len": 32768,
        "n_kv_heads": 4,
        "rope_theta": 2e6,
        "sliding_window": None,
        "tied_embeddings": True,
    },
    gguf=GGUFForm(
        "smollm3",
        lambda fields, _: {
            "unrotated_layers": tuple(range(3, fields.integer("smollm3.block_count"), 4))
        },
    ),
)
